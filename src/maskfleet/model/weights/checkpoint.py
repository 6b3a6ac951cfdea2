"""Reading the checkpoints of a run.

A checkpoint is one safetensors file, `step-000001200.safetensors`, with JSON state in its header, and a manifest of the
same name, `.json`, which is written last and holds size and SHA-256. A file without a manifest is not a checkpoint.
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
_REMEDY = "an older checkpoint is used if there is one"


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
        """Steps with a finished checkpoint, oldest first."""
        names = (_MANIFEST_NAME.fullmatch(path.name) for path in self.folder.glob("step-*.json"))
        return sorted(int(match[1]) for match in names if match)

    def path(self, step: int) -> Path:
        """File of the checkpoint at `step`."""
        return self.folder / f"step-{step:09d}.safetensors"

    def newest(self) -> Snapshot | None:
        """The newest intact checkpoint; damaged ones are skipped with a warning."""
        damaged = []
        for step in reversed(self.steps()):
            try:
                snapshot = read_checkpoint(self.path(step))
            except TrainingError as error:
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
        """Step of the best checkpoint so far."""
        marked = [step for step in self.steps() if _manifest(self.path(step)).get("best")]
        return marked[-1] if marked else None


def read_checkpoint(path: Path) -> Snapshot:
    """The checkpoint at `path`; an error if its size or checksum differ from the manifest's."""
    manifest = _manifest(path)
    try:
        if path.stat().st_size != manifest["size"] or sha256(path) != manifest["sha256"]:
            raise TrainingError(f"checkpoint {path} is damaged: its checksum differs from its manifest", remedy=_REMEDY)
        with safe_open(path, framework="pt") as file:
            header = file.metadata()
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
    except (OSError, SafetensorError, KeyError) as error:
        raise TrainingError(f"checkpoint {path} cannot be read: {error}", remedy=_REMEDY) from error
    if int(header["format"]) > FORMAT:
        raise TrainingError(
            f"checkpoint {path} was written by a newer maskfleet",
            remedy="use that version, or a newer one, to continue",
        )
    return Snapshot(int(header["step"]), tensors, json.loads(header["numbers"]))


def weights_of(snapshot: Snapshot) -> dict[str, Tensor]:
    """The weights to detect with: the moving averages if the run kept them, otherwise the trained weights."""
    return snapshot.under("model/") | snapshot.under("ema/")


def _manifest(path: Path) -> dict[str, Any]:
    try:
        loaded = json.loads(path.with_suffix(".json").read_text())
    except (OSError, ValueError) as error:
        raise TrainingError(f"checkpoint {path} has no readable manifest: {error}", remedy=_REMEDY) from error
    return dict(loaded)
