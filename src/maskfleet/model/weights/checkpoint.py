"""Reading the checkpoints of a run.

A checkpoint is one safetensors file, `step-000001200.safetensors`, with JSON state in its header, and a manifest of the
same name, `.json`, which is written last and holds size and SHA-256. A file without a manifest is not a checkpoint.
What becomes known after the file was written, such as the scores of its evaluation, goes into the manifest as well:
`best`, and `numbers` that replace those of the file.
"""

from __future__ import annotations

import errno
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from safetensors import SafetensorError, safe_open
from torch import Tensor

from maskfleet.errors import TrainingError
from maskfleet.log import logger
from maskfleet.system.files import sha256

FORMAT = 1
_MANIFEST_NAME = re.compile(r"step-(\d{9})\.json")
_TENSORS_NAME = re.compile(r"step-(\d{9})\.safetensors")
_NOT_ALLOWED = (errno.EACCES, errno.EPERM)

Condition = Literal["intact", "damaged", "unreadable"]


class DamagedCheckpointError(TrainingError):
    """A checkpoint is incomplete, or differs from its manifest."""

    def __init__(self, what: str) -> None:
        super().__init__(what, remedy="run the same command again: it uses an older checkpoint if there is one")


class UnreadableCheckpointError(TrainingError):
    """A checkpoint or its folder cannot be read now; it may well be intact, so no older one may take its place."""

    def __init__(self, path: Path, error: OSError) -> None:
        remedy = (
            "give this user the right to read it, or use the account that trained"
            if error.errno in _NOT_ALLOWED
            else "check the disk or the file server, then run the same command again; to do without a checkpoint that "
            "is lost, delete its two files: an older one is used then"
        )
        super().__init__(f"{path} cannot be read: {error.strerror or error}", remedy=remedy)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything a run needs to resume: named tensors and plain numbers."""

    step: int  # steps done
    tensors: dict[str, Tensor]
    numbers: dict[str, Any]  # JSON

    def under(self, prefix: str) -> dict[str, Tensor]:
        """The tensors whose names start with `prefix`, without it."""
        return {name.removeprefix(prefix): value for name, value in self.tensors.items() if name.startswith(prefix)}


@dataclass(frozen=True, slots=True)
class CheckpointFolder:
    """The finished checkpoints in RUN_DIR/checkpoints."""

    folder: Path

    def steps(self) -> list[int]:
        """Steps with a finished checkpoint, oldest first; it may have been damaged since."""
        return self._steps_of(_MANIFEST_NAME)

    def intact_steps(self) -> list[int]:
        """Those of `steps` that look intact."""
        return [step for step in self.steps() if self.condition(step) == "intact"]

    def condition(self, step: int) -> Condition:
        """Whether the checkpoint at `step` has a manifest and its size; checksums are only compared on reading."""
        path = self.path(step)
        try:
            size = read_manifest(path)["size"]
            with _reading(path):
                return "intact" if path.stat().st_size == size else "damaged"
        except DamagedCheckpointError:
            return "damaged"
        except UnreadableCheckpointError:
            return "unreadable"

    def orphan_steps(self) -> list[int]:
        """Steps of files without a manifest: their writer was killed."""
        return sorted({*self._steps_of(_TENSORS_NAME)} - {*self.steps()})

    def path(self, step: int) -> Path:
        """File of the checkpoint at `step`."""
        return self.folder / f"step-{step:09d}.safetensors"

    def newest(self) -> Snapshot | None:
        """The newest intact checkpoint; damaged ones are skipped with a warning, unreadable ones are an error."""
        damaged = []
        for step in reversed(self.steps()):
            try:
                snapshot = read_checkpoint(self.path(step))
            except DamagedCheckpointError as error:
                logger.warning("%s", error.what)
                damaged.append(step)
                continue
            if damaged:
                logger.warning("using step %d, the newest intact checkpoint", step)
            return snapshot
        if damaged:
            raise TrainingError(
                f"all {len(damaged)} checkpoints in {self.folder} are damaged",
                remedy="restore one from a backup, or start again in another run directory",
            )
        return None

    def best_step(self) -> int | None:
        """Step of the best checkpoint so far; one whose manifest cannot be read may have been it, says a warning."""
        best = None
        for step in self.steps():
            try:
                if read_manifest(self.path(step)).get("best"):
                    best = step
            except DamagedCheckpointError as error:
                logger.warning("%s; if it was the best, that is unknown now", error.what)
        return best

    def _steps_of(self, name: re.Pattern[str]) -> list[int]:
        try:
            found = [path.name for path in self.folder.iterdir()]  # glob takes one that may not be read for empty
        except FileNotFoundError:
            return []
        except OSError as error:
            raise UnreadableCheckpointError(self.folder, error) from error
        return sorted(int(match[1]) for match in map(name.fullmatch, found) if match)


def read_checkpoint(path: Path) -> Snapshot:
    """The checkpoint at `path`; DamagedCheckpointError if its size or checksum differ from the manifest's."""
    manifest = read_manifest(path)
    try:
        with _reading(path):
            if path.stat().st_size != manifest["size"] or sha256(path) != manifest["sha256"]:
                raise DamagedCheckpointError(f"checkpoint {path} is damaged: its checksum differs from its manifest")
            with safe_open(path, framework="pt") as file:
                header = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
        written_by, step, numbers = int(header["format"]), int(header["step"]), json.loads(header["numbers"])
    except (SafetensorError, KeyError, ValueError) as error:
        raise DamagedCheckpointError(f"checkpoint {path} cannot be read: {error}") from error
    if written_by > FORMAT:
        raise TrainingError(
            f"checkpoint {path} was written by a newer maskfleet",
            remedy="use that version, or a newer one, to continue",
        )
    return Snapshot(step, tensors, numbers | manifest["numbers"])


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of the checkpoint at `path`: its size and checksum, whether it is the best, later numbers."""
    try:
        with _reading(path.with_suffix(".json")):
            manifest = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise DamagedCheckpointError(f"checkpoint {path} has no readable manifest: {error}") from error
    kinds = {"size": int, "sha256": str, "numbers": dict}
    content = {"numbers": {}, **manifest} if isinstance(manifest, dict) else {}
    if not all(isinstance(content.get(name), kind) for name, kind in kinds.items()):
        raise DamagedCheckpointError(f"checkpoint {path} has no readable manifest: it holds no size and checksum")
    return content


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """A file that is not there is damage; other errors of the file system do not tell what the file holds."""
    try:
        yield
    except (FileNotFoundError, IsADirectoryError) as error:
        raise DamagedCheckpointError(f"checkpoint {path} is damaged: {error.strerror or error}") from error
    except OSError as error:
        raise UnreadableCheckpointError(path, error) from error


def weights_of(snapshot: Snapshot) -> dict[str, Tensor]:
    """The weights to detect with: the moving averages if the run kept them, otherwise the trained weights."""
    return snapshot.under("model/") | snapshot.under("ema/")
