"""Reading the checkpoints of a run.

A checkpoint is one safetensors file, `step-000001200.safetensors`, with JSON state in its header, and a manifest of the
same name, `.json`, which is written last and holds size and SHA-256. A file without a manifest is not a checkpoint.
What becomes known after the file was written, such as the scores of its evaluation, goes into the manifest as well:
`best`, and `numbers` that replace those of the file.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from maskfleet.errors import TrainingError
from maskfleet.log import logger
from maskfleet.system.files import sha256

FORMAT = 1
_MANIFEST_NAME = re.compile(r"step-(\d{9})\.json")
_TENSORS_NAME = re.compile(r"step-(\d{9})\.safetensors")


class DamagedCheckpointError(TrainingError):
    """A checkpoint is incomplete, or differs from its manifest."""

    def __init__(self, what: str) -> None:
        super().__init__(what, remedy="run the same command again: it uses an older checkpoint if there is one")


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
        """Those of `steps` that look intact: manifest readable, size right. Checksums are only compared on reading."""
        return [step for step in self.steps() if self._looks_intact(step)]

    def orphan_steps(self) -> list[int]:
        """Steps of files without a manifest: their writer was killed."""
        return sorted({*self._steps_of(_TENSORS_NAME)} - {*self.steps()})

    def path(self, step: int) -> Path:
        """File of the checkpoint at `step`."""
        return self.folder / f"step-{step:09d}.safetensors"

    def newest(self) -> Snapshot | None:
        """The newest intact checkpoint; damaged ones are skipped with a warning."""
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
        names = (name.fullmatch(path.name) for path in self.folder.glob("step-*"))
        return sorted(int(match[1]) for match in names if match)

    def _looks_intact(self, step: int) -> bool:
        path = self.path(step)
        try:
            return bool(path.stat().st_size == read_manifest(path)["size"])
        except (OSError, DamagedCheckpointError):
            return False


def read_checkpoint(path: Path) -> Snapshot:
    """The checkpoint at `path`; DamagedCheckpointError if its size or checksum differ from the manifest's."""
    manifest = read_manifest(path)
    try:
        if path.stat().st_size != manifest["size"] or sha256(path) != manifest["sha256"]:
            raise DamagedCheckpointError(f"checkpoint {path} is damaged: its checksum differs from its manifest")
        with safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
        written_by, step, numbers = int(header["format"]), int(header["step"]), json.loads(header["numbers"])
    except (OSError, SafetensorError, KeyError, ValueError) as error:
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
        manifest = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DamagedCheckpointError(f"checkpoint {path} has no readable manifest: {error}") from error
    kinds = {"size": int, "sha256": str, "numbers": dict}
    content = {"numbers": {}, **manifest} if isinstance(manifest, dict) else {}
    if not all(isinstance(content.get(name), kind) for name, kind in kinds.items()):
        raise DamagedCheckpointError(f"checkpoint {path} has no readable manifest: it holds no size and checksum")
    return content


def weights_of(snapshot: Snapshot) -> dict[str, Tensor]:
    """The weights to detect with: the moving averages if the run kept them, otherwise the trained weights."""
    return snapshot.under("model/") | snapshot.under("ema/")
