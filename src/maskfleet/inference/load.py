"""A detector from a run directory or a weights file."""

from __future__ import annotations

from pathlib import Path

import torch

from maskfleet.config.base import replaced
from maskfleet.config.load import RUN_FILE
from maskfleet.config.load import load as load_run_file
from maskfleet.config.run import RunConfig
from maskfleet.errors import WeightsError
from maskfleet.inference.detections import Categories
from maskfleet.inference.detector import Detector
from maskfleet.inference.device import chosen_device
from maskfleet.model.build import build_mask_rcnn
from maskfleet.model.mask_rcnn import MaskRCNN
from maskfleet.model.weights import file_config, load_weights, read_file
from maskfleet.model.weights.checkpoint import CheckpointFolder, read_checkpoint, weights_of


def load(source: str | Path, device: str | torch.device | None = None) -> Detector:
    """The detector of a run directory (its best checkpoint, otherwise its newest) or of a weights file.

    It runs on `device`; None is the first GPU, or the CPU if there is none.

        detector = maskfleet.load("runs/mine")
        detector = maskfleet.load("model.safetensors", device="cpu")
    """
    path = Path(source).expanduser()
    if not path.exists():
        raise WeightsError(f"there is no {path}", remedy="give a run directory or a weights file")
    chosen = chosen_device(device)
    model, run, categories, origin = _from_run(path) if path.is_dir() else _from_file(path)
    return Detector(model.to(chosen).eval(), run, categories, origin, chosen)


def _from_run(run_dir: Path) -> tuple[MaskRCNN, RunConfig, Categories, str]:
    if not (run_dir / RUN_FILE).exists():
        raise WeightsError(
            f"{run_dir} is not a run: it has no {RUN_FILE}", remedy="give a folder made by `maskfleet train`"
        )
    run = load_run_file(run_dir / RUN_FILE)
    saved = CheckpointFolder(run_dir / "checkpoints")
    best = saved.best_step()
    snapshot = read_checkpoint(saved.path(best)) if best is not None else saved.newest()
    if snapshot is None:
        raise WeightsError(f"{run_dir} has no checkpoint yet", remedy="wait for the first one, or continue training")
    categories = tuple((int(item["id"]), str(item["name"])) for item in snapshot.numbers["categories"])
    run = replaced(run, {"model.num_categories": len(categories)})
    model = build_mask_rcnn(run.model)
    model.load_state_dict(weights_of(snapshot))
    kind = "best" if best is not None else "newest"
    return model, run, categories, f"{kind} checkpoint of {run_dir}, step {snapshot.step}"


def _from_file(path: Path) -> tuple[MaskRCNN, RunConfig, Categories, str]:
    file = read_file(path)
    config = file_config(file)
    if config is None or config.num_categories is None:
        raise WeightsError(
            f"{path} does not hold a complete detector",
            remedy="`maskfleet weights inspect` shows what is in it; give a detector",
        )
    model = build_mask_rcnn(config)
    load_weights(model, config, path)
    labels = range(1, config.num_categories + 1)
    names = file.categories if len(file.categories) == len(labels) else [str(label) for label in labels]
    run = replaced(RunConfig(), {"model": config.model_dump(mode="python")})
    return model, run, tuple(zip(labels, names, strict=True)), str(path)
