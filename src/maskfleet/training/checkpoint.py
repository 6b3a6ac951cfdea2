"""Writing checkpoints in the background: complete or absent at any moment, verified by checksum.

The format is described where checkpoints are read, in `model/weights/checkpoint.py`.
"""

from __future__ import annotations

import errno
import json
import threading
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from maskfleet.errors import TrainingError
from maskfleet.model.weights.checkpoint import FORMAT, CheckpointFolder, Snapshot
from maskfleet.system.files import remove_temporaries, replacing_by_path, sha256, write_atomically


class CheckpointStore:
    """Writes the checkpoints of one run to RUN_DIR/checkpoints, and deletes old ones; `saved` reads them."""

    def __init__(self, folder: Path, *, keep_last: int) -> None:
        self.saved = CheckpointFolder(folder)
        self._keep_last = keep_last
        self._writer: threading.Thread | None = None
        self._failure: TrainingError | None = None
        self._copies = HostCopies()

    def reserve(self, tensors: dict[str, Tensor]) -> None:
        """Allocate host memory for copies of such tensors now, so that the first `save` need not."""
        self._copies.reserve(tensors)

    def save(self, snapshot: Snapshot, *, best: bool = False) -> None:
        """Copy `snapshot` and write the copy in the background; pruning keeps the newest one marked `best`.

        Blocks until the copy is made and the previous write has finished.
        """
        self.wait()
        copied = Snapshot(snapshot.step, self._copies.of(snapshot.tensors), snapshot.numbers)
        self._writer = threading.Thread(target=self._write, args=(copied, best), name="checkpoint-writer")
        self._writer.start()

    def wait(self) -> None:
        """Block until the last save is on the disk; raises its error if it failed."""
        if self._writer is not None:
            self._writer.join()
            self._writer = None
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def _write(self, snapshot: Snapshot, best: bool) -> None:
        try:
            remove_temporaries(self.saved.folder)  # a killed run leaves one as large as a checkpoint
            write_checkpoint(self.saved.path(snapshot.step), snapshot, best=best)
            self._prune()
        except OSError as error:
            self._failure = _disk_error(error, self.saved.folder)
        except SafetensorError as error:  # safetensors raises this instead of OSError when a write fails
            self._failure = _disk_error(OSError(errno.EIO, str(error)), self.saved.folder)

    def _prune(self) -> None:
        steps = self.saved.steps()
        kept = {*steps[-self._keep_last :], self.saved.best_step()}
        for step in steps:
            if step not in kept:
                path = self.saved.path(step)
                path.with_suffix(".json").unlink()  # first: a file without a manifest is not a checkpoint
                path.unlink(missing_ok=True)


def write_checkpoint(path: Path, snapshot: Snapshot, *, best: bool = False) -> None:
    """Write `snapshot` to `path` atomically: readers find all of it or none of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    header = {"format": str(FORMAT), "step": str(snapshot.step), "numbers": json.dumps(snapshot.numbers)}
    with replacing_by_path(path) as temporary:
        save_file(snapshot.tensors, temporary, metadata=header)
        digest, size = sha256(temporary), temporary.stat().st_size
    manifest = {"format": FORMAT, "step": snapshot.step, "size": size, "sha256": digest, "best": best}
    write_atomically(path.with_suffix(".json"), json.dumps(manifest))


class HostCopies:
    """Copies of tensors in host memory that is allocated once: allocating costs more than copying.

    Copies from a GPU run on the current stream into pinned memory; the host waits for them to finish.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def reserve(self, tensors: dict[str, Tensor]) -> None:
        """Allocate buffers for `tensors`."""
        for name, tensor in tensors.items():
            buffer = self._buffers.get(name)
            if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
                pinned = tensor.device.type == "cuda"
                self._buffers[name] = torch.zeros(tensor.shape, dtype=tensor.dtype, pin_memory=pinned)

    def of(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Copies of `tensors`, valid until the next call."""
        self.reserve(tensors)
        for name, tensor in tensors.items():
            self._buffers[name].copy_(tensor.detach(), non_blocking=True)
        if any(tensor.device.type == "cuda" for tensor in tensors.values()):
            torch.cuda.current_stream().synchronize()
        return {name: self._buffers[name] for name in tensors}


def _disk_error(error: OSError, folder: Path) -> TrainingError:
    if error.errno == errno.ENOSPC or "No space left" in str(error):
        return TrainingError(
            f"No space left on device for a checkpoint in {folder}; the older checkpoints are intact",
            remedy="free some space or lower checkpoint.keep_last, then run the same command again",
        )
    return TrainingError(
        f"a checkpoint could not be written to {folder}: {error}; the older checkpoints are intact",
        remedy="check the disk, then run the same command again",
    )
