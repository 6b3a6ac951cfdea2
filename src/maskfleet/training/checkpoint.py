"""Checkpoints: whole or not there, verified by checksum, written beside the training.

A checkpoint is one safetensors file, `step-000001200.safetensors`, with the numbers in its header, and a manifest of
the same name, `.json`, which is written last and holds size and SHA-256. What has no manifest is not a checkpoint.
"""

from __future__ import annotations

import errno
import json
import logging
import re
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from maskfleet.errors import TrainingError
from maskfleet.system.files import remove_temporaries, replacing_by_path, sha256, write_atomically

FORMAT = 1
_NAME = re.compile(r"step-(\d{9})\.json")
logger = logging.getLogger("maskfleet")


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything a run needs to go on: named tensors and plain numbers."""

    step: int  # steps done
    tensors: dict[str, Tensor]
    numbers: dict[str, Any]  # JSON


class CheckpointStore:
    """The checkpoints of one run, in RUN_DIR/checkpoints."""

    def __init__(self, folder: Path, *, keep_last: int) -> None:
        self.folder = folder
        self._keep_last = keep_last
        self._writer: threading.Thread | None = None
        self._failure: TrainingError | None = None
        self._copies = HostCopies()

    def reserve(self, tensors: dict[str, Tensor]) -> None:
        """Make room for copies of such tensors now, so that the first `save` need not."""
        self._copies.reserve(tensors)

    def save(self, snapshot: Snapshot, *, best: bool = False) -> None:
        """Copy `snapshot` and write the copy in the background; `best` marks it as worth keeping.

        The caller waits for the copy, and for the write before this one where that is not done yet.
        """
        self.wait()
        copied = Snapshot(snapshot.step, self._copies.of(snapshot.tensors), snapshot.numbers)
        self._writer = threading.Thread(target=self._write, args=(copied, best), name="checkpoint-writer")
        self._writer.start()

    def wait(self) -> None:
        """Until what was saved is on the disk; raises what went wrong."""
        if self._writer is not None:
            self._writer.join()
            self._writer = None
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def steps(self) -> list[int]:
        """Steps with a finished checkpoint, oldest first."""
        if not self.folder.is_dir():
            return []
        return sorted(int(match[1]) for path in self.folder.iterdir() if (match := _NAME.fullmatch(path.name)))

    def newest(self) -> Snapshot | None:
        """The newest checkpoint that is whole; damaged ones are named in the log and passed over."""
        damaged = []
        for step in reversed(self.steps()):
            try:
                snapshot = read_checkpoint(self._path(step))
            except TrainingError as error:
                logger.warning("%s", error.what)
                damaged.append(step)
                continue
            if damaged:
                logger.warning("going on from step %d, the newest checkpoint that is whole", step)
            return snapshot
        if damaged:
            raise TrainingError(
                f"all {len(damaged)} checkpoints in {self.folder} are damaged",
                remedy="restore one from a backup, or start again in another run directory",
            )
        return None

    def best_step(self) -> int | None:
        """Step of the best checkpoint so far."""
        marked = [step for step in self.steps() if _manifest(self._path(step)).get("best")]
        return marked[-1] if marked else None

    def path(self, step: int) -> Path:
        """File of the checkpoint at `step`."""
        return self._path(step)

    def _path(self, step: int) -> Path:
        return self.folder / f"step-{step:09d}.safetensors"

    def _write(self, snapshot: Snapshot, best: bool) -> None:
        try:
            remove_temporaries(self.folder)  # a killed run leaves one of a checkpoint's size
            write_checkpoint(self._path(snapshot.step), snapshot, best=best)
            self._prune()
        except OSError as error:
            self._failure = _disk_error(error, self.folder)
        except SafetensorError as error:  # the library's own word for a failed write
            self._failure = _disk_error(OSError(errno.EIO, str(error)), self.folder)

    def _prune(self) -> None:
        steps = self.steps()
        kept = {*steps[-self._keep_last :], self.best_step()}
        for step in steps:
            if step not in kept:
                path = self._path(step)
                path.with_suffix(".json").unlink()  # first: without it the rest is no checkpoint
                path.unlink(missing_ok=True)


def write_checkpoint(path: Path, snapshot: Snapshot, *, best: bool = False) -> None:
    """Write `snapshot` to `path` so that at any moment it is there whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    header = {"format": str(FORMAT), "step": str(snapshot.step), "numbers": json.dumps(snapshot.numbers)}
    with replacing_by_path(path) as temporary:
        save_file(snapshot.tensors, temporary, metadata=header)
        digest, size = sha256(temporary), temporary.stat().st_size
    manifest = {"format": FORMAT, "step": snapshot.step, "size": size, "sha256": digest, "best": best}
    write_atomically(path.with_suffix(".json"), json.dumps(manifest))


def read_checkpoint(path: Path) -> Snapshot:
    """The checkpoint at `path`, if it is what was written."""
    manifest = _manifest(path)
    remedy = "an older checkpoint is used if there is one"
    try:
        size = path.stat().st_size
        if size != manifest["size"] or sha256(path) != manifest["sha256"]:
            raise TrainingError(
                f"checkpoint {path} is damaged: its checksum is not the one that was written", remedy=remedy
            )
        with safe_open(path, framework="pt") as file:
            header = file.metadata()
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
    except (OSError, SafetensorError, KeyError) as error:
        raise TrainingError(f"checkpoint {path} cannot be read: {error}", remedy=remedy) from error
    if int(header["format"]) > FORMAT:
        raise TrainingError(
            f"checkpoint {path} was written by a newer maskfleet",
            remedy="use that version, or a newer one, to continue",
        )
    return Snapshot(int(header["step"]), tensors, json.loads(header["numbers"]))


class HostCopies:
    """Copies of tensors in host memory that is kept from one time to the next: getting it costs more than filling it.

    From a GPU the copies run on the training's own stream into pinned memory, so the host waits only for their end.
    """

    def __init__(self) -> None:
        self._room: dict[str, Tensor] = {}

    def reserve(self, tensors: dict[str, Tensor]) -> None:
        """Have room for `tensors`."""
        for name, tensor in tensors.items():
            room = self._room.get(name)
            if room is None or room.shape != tensor.shape or room.dtype != tensor.dtype:
                pinned = tensor.device.type == "cuda"
                self._room[name] = torch.zeros(tensor.shape, dtype=tensor.dtype, pin_memory=pinned)

    def of(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Copies of `tensors`, good until the next call."""
        self.reserve(tensors)
        for name, tensor in tensors.items():
            self._room[name].copy_(tensor.detach(), non_blocking=True)
        if any(tensor.device.type == "cuda" for tensor in tensors.values()):
            torch.cuda.current_stream().synchronize()
        return {name: self._room[name] for name in tensors}


def _manifest(path: Path) -> dict[str, Any]:
    try:
        loaded = json.loads(path.with_suffix(".json").read_text())
    except (OSError, ValueError) as error:
        raise TrainingError(
            f"checkpoint {path} has no readable manifest: {error}", remedy="an older checkpoint is used if there is one"
        ) from error
    return dict(loaded)


def _disk_error(error: OSError, folder: Path) -> TrainingError:
    if error.errno == errno.ENOSPC or "No space left" in str(error):
        return TrainingError(
            f"no room left on the disk for a checkpoint in {folder}; the older checkpoints are intact",
            remedy="free some room or lower checkpoint.keep_last, then start the same command again",
        )
    return TrainingError(
        f"a checkpoint could not be written to {folder}: {error}; the older checkpoints are intact",
        remedy="see to the disk, then start the same command again",
    )
