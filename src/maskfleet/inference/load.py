"""A detector from a run directory or a weights file."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import torch

from maskfleet.config.base import replaced
from maskfleet.config.load import CHECKPOINTS, RUN_FILE
from maskfleet.config.load import load as load_run_file
from maskfleet.config.run import RunConfig
from maskfleet.errors import WeightsError
from maskfleet.inference.detections import Categories
from maskfleet.inference.detector import Detector
from maskfleet.inference.device import chosen_device
from maskfleet.log import logger
from maskfleet.model.build import mask_rcnn_with
from maskfleet.model.mask_rcnn import MaskRCNN
from maskfleet.model.weights import file_config, fit, read_file
from maskfleet.model.weights.checkpoint import (
    CheckpointFolder,
    DamagedCheckpointError,
    Snapshot,
    read_checkpoint,
    weights_of,
)

Checkpoint = Literal["best", "last"] | int | None
"""Which checkpoint of a run: the best (an error if none is marked), the newest, that of a step, or, None, the best or
else the newest."""


def load(source: str | Path, device: str | torch.device | None = None, *, checkpoint: Checkpoint = None) -> Detector:
    """The detector of a run directory (its best checkpoint, otherwise its newest) or of a weights file.

    It runs on `device`; None is the first GPU, or the CPU if there is none. `checkpoint` chooses another one of the
    run: "best", "last", or a step.

        detector = maskfleet.load("runs/mine")
        detector = maskfleet.load("model.safetensors", device="cpu")
    """
    path = Path(source).expanduser()
    if not path.exists():
        raise WeightsError(
            f"there is no {path}", remedy="give a run directory or a weights file; `maskfleet runs FOLDER` lists runs"
        )
    chosen = chosen_device(device)
    if checkpoint is not None and not path.is_dir():
        raise WeightsError(f"{path} is a file, which has no checkpoints", remedy="give a run directory, or no step")
    model, run, categories, origin, step = _from_run(path, checkpoint) if path.is_dir() else _from_file(path)
    model = model.to(chosen).eval()
    if chosen.type == "cuda":
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return Detector(model, run, categories, origin, chosen, step)


def weights_in(folder: Path, step: int | None) -> Path:
    """What to load from the model folder of a training job: the run, or its weights if it has no checkpoints."""
    weights = folder / "model.safetensors"
    has_checkpoints = bool(CheckpointFolder(folder / CHECKPOINTS).steps())
    return weights if step is None and not has_checkpoints and weights.is_file() else folder


def _from_run(run_dir: Path, checkpoint: Checkpoint) -> tuple[MaskRCNN, RunConfig, Categories, str, int | None]:
    if not (run_dir / RUN_FILE).exists():
        raise WeightsError(
            f"{run_dir} is not a run: it has no {RUN_FILE}", remedy="give a folder made by `maskfleet train`"
        )
    run = load_run_file(run_dir / RUN_FILE)
    snapshot, kind = _chosen(CheckpointFolder(run_dir / CHECKPOINTS), checkpoint)
    if snapshot is None:
        raise WeightsError(f"{run_dir} has no checkpoint yet", remedy="wait for the first one, or continue training")
    categories = tuple((int(item["id"]), str(item["name"])) for item in snapshot.numbers["categories"])
    run = replaced(run, {"model.num_categories": len(categories)})
    model = mask_rcnn_with(run.model, weights_of(snapshot))
    return model, run, categories, f"{kind} checkpoint of {run_dir}, step {snapshot.step}", snapshot.step


def _chosen(saved: CheckpointFolder, checkpoint: Checkpoint) -> tuple[Snapshot | None, str]:
    """The checkpoint to use and what kind it is."""
    if isinstance(checkpoint, int):
        if checkpoint not in saved.steps():
            raise WeightsError(
                f"there is no checkpoint of step {checkpoint}",
                remedy=f"there are those of steps {', '.join(map(str, saved.steps())) or 'none yet'}",
            )
        return _requested(saved, checkpoint), "chosen"
    best = saved.best_step() if checkpoint != "last" else None
    if best is not None:
        try:
            return read_checkpoint(saved.path(best)), "best"
        except DamagedCheckpointError as error:
            if checkpoint == "best":
                raise _not_usable(error) from error
            logger.warning("%s; using the newest intact checkpoint instead of the best one", error.what)
    elif checkpoint == "best":
        raise WeightsError(
            "no checkpoint is marked as the best: the run was not evaluated yet, or checkpoint.keep_best is false",
            remedy="use the newest one (--last), or evaluate during training (eval.every_epochs)",
        )
    return saved.newest(), "newest"


def _requested(saved: CheckpointFolder, step: int) -> Snapshot:
    try:
        return read_checkpoint(saved.path(step))
    except DamagedCheckpointError as error:
        raise _not_usable(error) from error


def _not_usable(error: DamagedCheckpointError) -> WeightsError:
    """The error for a checkpoint that the user asked for: no other one may take its place."""
    return WeightsError(error.what, remedy="use the newest intact one (--last), or restore the file from a backup")


def _from_file(path: Path) -> tuple[MaskRCNN, RunConfig, Categories, str, int | None]:
    file = read_file(path)
    config = file_config(file)
    if config is None or config.num_categories is None:
        raise WeightsError(
            f"{path} does not hold a complete detector",
            remedy="`maskfleet weights inspect` shows what is in it; give a detector",
        )
    fitted = fit(file, config)  # before the model is built: the file decides its size
    model = mask_rcnn_with(config, fitted.tensors)
    numbers = range(1, config.num_categories + 1)
    names, ids = file.labels.names, file.labels.ids
    names = names if len(names) == len(numbers) else [str(number) for number in numbers]
    ids = ids if len(ids) == len(numbers) else numbers
    run = replaced(RunConfig(), {"model": config.model_dump(mode="python"), **file.labels.settings})
    return model, run, tuple(zip(ids, names, strict=True)), str(path), None
