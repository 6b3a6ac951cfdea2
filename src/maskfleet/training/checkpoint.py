"""Writing checkpoints in the background: complete or absent at any moment, verified by checksum.

The format is described where checkpoints are read, in `model/weights/checkpoint.py`.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from maskfleet.errors import TrainingError
from maskfleet.log import logger
from maskfleet.model.weights.checkpoint import FORMAT, CheckpointFolder, Snapshot, read_manifest
from maskfleet.system.files import remove_temporaries, replacing_by_path, sha256, write_atomically


class CheckpointStore:
    """Writes the checkpoints of one run to RUN_DIR/checkpoints, and deletes old ones; `saved` reads them."""

    def __init__(self, folder: Path, *, keep_last: int) -> None:
        self.saved = CheckpointFolder(folder)
        self._keep_last = keep_last
        self._writer: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._copies = HostCopies()

    def reserve(self, tensors: dict[str, Tensor]) -> None:
        """Allocate host memory for copies of such tensors now, so that the first `save` need not."""
        self._copies.reserve(tensors)

    def clean_up(self, resumed_step: int | None) -> None:
        """Delete what killed processes left, and what pruning would; only for the process that holds the run's lock.

        The checkpoint at `resumed_step` was read and is intact. None: there is no checkpoint, and only temporary files
        are deleted. A file without a manifest stays until a newer checkpoint exists: its manifest may have been lost.
        """
        with self._explained():
            remove_temporaries(self.saved.folder)
            if resumed_step is None:
                return
            for step in self.saved.orphan_steps():
                if step < resumed_step:
                    self.saved.path(step).unlink(missing_ok=True)
            self._prune(resumed_step)

    def save(self, snapshot: Snapshot) -> None:
        """Copy `snapshot` and write the copy in the background.

        Blocks until the copy is made and the previous write has finished.
        """
        self.wait()
        copied = Snapshot(snapshot.step, self._copies.of(snapshot.tensors), snapshot.numbers)
        self._writer = threading.Thread(target=self._write, args=(copied,), name="checkpoint-writer")
        self._writer.start()

    def update(self, step: int, numbers: dict[str, Any], *, best: bool) -> None:
        """Replace `numbers` of the checkpoint at `step`, the newest one; mark it if it is the best, to be kept."""
        self.wait()
        path = self.saved.path(step)
        with self._explained():
            manifest = read_manifest(path)
            _write_manifest(path, manifest | {"numbers": manifest["numbers"] | numbers, "best": best})
            self._prune(step)

    def wait(self) -> None:
        """Block until the last save is on the disk; raises its error if it failed."""
        if self._writer is not None:
            self._writer.join()
            self._writer = None
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def _write(self, snapshot: Snapshot) -> None:
        try:
            with self._explained():
                write_checkpoint(self.saved.path(snapshot.step), snapshot)
                self._prune(snapshot.step)
        except BaseException as error:  # whatever it is, `wait` raises it: the run must not continue as if it had saved
            self._failure = error

    def _prune(self, newest: int) -> None:
        """Keep the newest intact checkpoints, the best one, and those that cannot be read now; delete all others.

        `newest` is known to be intact. Those after it are damaged: the run would have resumed from them otherwise.
        """
        conditions = {step: self.saved.condition(step) for step in self.saved.steps()}
        intact = [step for step, condition in conditions.items() if condition == "intact" and step <= newest]
        best = [step for step in intact if read_manifest(self.saved.path(step)).get("best")]
        kept = {*intact[-self._keep_last :], *best[-1:]}
        for step, condition in conditions.items():
            path = self.saved.path(step)
            if condition == "unreadable":
                logger.warning("checkpoint %s cannot be read now; it is kept, since it may be intact", path)
            if step in kept or condition == "unreadable":
                continue
            if step not in intact:
                logger.warning("deleting checkpoint %s, which is damaged; step %d is intact", path, newest)
            path.with_suffix(".json").unlink(missing_ok=True)  # first: a file without a manifest is not a checkpoint
            path.unlink(missing_ok=True)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Turn errors of the disk and of memory into errors with a remedy."""
        try:
            yield
        except (OSError, SafetensorError, MemoryError) as error:  # safetensors raises its own when a write fails
            raise _not_written(error, self.saved) from error


def write_checkpoint(path: Path, snapshot: Snapshot, *, best: bool = False) -> None:
    """Write `snapshot` to `path` atomically: readers find all of it or none of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    header = {"format": str(FORMAT), "step": str(snapshot.step), "numbers": json.dumps(snapshot.numbers)}
    with replacing_by_path(path) as temporary:
        save_file(snapshot.tensors, temporary, metadata=header)
        digest, size = sha256(temporary), temporary.stat().st_size
    manifest = {"format": FORMAT, "step": snapshot.step, "size": size, "sha256": digest, "best": best}
    _write_manifest(path, manifest)


def _write_manifest(path: Path, manifest: dict[str, Any]) -> None:
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


def _not_written(error: Exception, saved: CheckpointFolder) -> TrainingError:
    older = "the older checkpoints are intact" if saved.intact_steps() else "there is no older checkpoint"
    if "No space left" in str(error):  # both as text of OSError and as text inside a SafetensorError
        return TrainingError(
            f"No space left on device for a checkpoint in {saved.folder}; {older}",
            remedy="free some space or lower checkpoint.keep_last, then run the same command again",
        )
    return TrainingError(
        f"a checkpoint could not be written to {saved.folder}: {str(error) or type(error).__name__}; {older}",
        remedy="check the disk and the free memory, then run the same command again",
    )
