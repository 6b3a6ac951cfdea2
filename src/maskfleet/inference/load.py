"""A trained model, from a run directory or a weights file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from maskfleet.config.base import replaced
from maskfleet.config.load import RUN_FILE, load
from maskfleet.config.model import ModelConfig
from maskfleet.config.run import RunConfig
from maskfleet.errors import WeightsError
from maskfleet.model.build import build_mask_rcnn
from maskfleet.model.mask_rcnn import MaskRCNN
from maskfleet.model.weights import file_config, load_weights, read_file
from maskfleet.training.checkpoint import CheckpointStore, read_checkpoint
from maskfleet.training.state import weights_of


@dataclass(frozen=True, slots=True)
class Trained:
    """A model ready to detect, and what is known about it."""

    model: MaskRCNN
    run: RunConfig  # of its run; where there is none, the defaults with the model's own configuration
    categories: tuple[tuple[int, str], ...]  # (id, name) by label; empty if the file does not say
    source: str


def trained_model(path: Path, device: torch.device) -> Trained:
    """The model of a run directory (its best checkpoint, or else its newest) or of a weights file."""
    if not path.exists():
        raise WeightsError(f"there is no {path}", remedy="give a run directory or a weights file")
    trained = _from_run(path) if path.is_dir() else _from_file(path)
    trained.model.to(device).eval()
    return trained


def _from_run(run_dir: Path) -> Trained:
    if not (run_dir / RUN_FILE).exists():
        raise WeightsError(
            f"{run_dir} is not a run: it has no {RUN_FILE}", remedy="give a folder made by `maskfleet train`"
        )
    run = load(run_dir / RUN_FILE)
    store = CheckpointStore(run_dir / "checkpoints", keep_last=1)
    best = store.best_step()
    snapshot = read_checkpoint(store.path(best)) if best is not None else store.newest()
    if snapshot is None:
        raise WeightsError(f"{run_dir} has no checkpoint yet", remedy="wait for the first one, or train on")
    categories = tuple((int(item["id"]), str(item["name"])) for item in snapshot.numbers["categories"])
    run = replaced(run, {"model.num_categories": len(categories)})
    model = build_mask_rcnn(run.model)
    model.load_state_dict(weights_of(snapshot))
    kind = "best" if best is not None else "newest"
    return Trained(model, run, categories, f"{kind} checkpoint of {run_dir}, step {snapshot.step}")


def _from_file(path: Path) -> Trained:
    file = read_file(path)
    config = file_config(file)
    if config is None:
        raise WeightsError(
            f"{path} holds no whole detector", remedy="`maskfleet weights inspect` shows what is in it; give a detector"
        )
    model = build_mask_rcnn(config)
    load_weights(model, config, path)
    names = _names(file.categories, config)
    return Trained(model, _run_with(config), names, str(path))


def _names(names: tuple[str, ...], config: ModelConfig) -> tuple[tuple[int, str], ...]:
    """Categories numbered from 1, as far as the file names them."""
    if len(names) != config.num_categories:
        return ()
    return tuple(enumerate(names, 1))


def _run_with(config: ModelConfig) -> RunConfig:
    return replaced(RunConfig(), {"model": config.model_dump(mode="python")})
