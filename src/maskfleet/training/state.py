"""The state of a run in memory, and its conversion to and from a snapshot."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from maskfleet.config.run import RunConfig
from maskfleet.data.pipeline.loader import TrainLoader
from maskfleet.errors import TrainingError
from maskfleet.model.mask_rcnn import MaskRCNN
from maskfleet.model.weights.checkpoint import Snapshot
from maskfleet.training.optim import load_optimizer_state, optimizer_state, state_shapes
from maskfleet.training.step.ema import Ema
from maskfleet.training.step.precision import Precision


@dataclass(slots=True)
class Progress:
    """How far the run has come."""

    step: int = 0  # position in the schedule, in steps of the current number of images
    shift: int = 0  # added to `step` gives `done`; not 0 once the number of images per step has changed
    best_ap: float | None = None
    best_step: int | None = None
    evaluation_due: bool = False  # the weights after `step` are to be evaluated before the next step
    reached_targets: bool = False  # the last evaluation did, so that the run is over
    evaluations_since_best: int = 0
    elapsed_s: float = 0.0  # training time of earlier processes
    started_at: float = field(default_factory=time.monotonic)

    @property
    def done(self) -> int:
        """Steps done since the run began; unlike `step` it never decreases when ranks join and steps get larger."""
        return self.step + self.shift

    @property
    def training_s(self) -> float:
        """Training time of all processes of this run, one after the other."""
        return self.elapsed_s + time.monotonic() - self.started_at


@dataclass(frozen=True, slots=True)
class Parts:
    """What changes while a run trains."""

    model: MaskRCNN
    optimizer: torch.optim.Optimizer
    precision: Precision
    ema: Ema | None
    loader: TrainLoader


def snapshot_of(
    parts: Parts,
    progress: Progress,
    *,
    config: RunConfig,
    categories: list[dict[str, Any]],
    metrics: list[dict[str, Any]],
    compiled: bool,
) -> Snapshot:
    """Everything needed to resume from `progress`; `metrics` are the sums that each rank has not yet written.

    `compiled` is how the last step was computed: a run that resumes does its first step in the same way.
    """
    tensors = {f"model/{name}": tensor for name, tensor in parts.model.state_dict().items()}
    tensors |= optimizer_state(parts.model, parts.optimizer)
    if parts.ema is not None:
        tensors |= {f"ema/{name}": tensor for name, tensor in parts.ema.averages.items()}
    tensors["rng/cpu"] = torch.get_rng_state()
    if parts.precision.device.type == "cuda":
        tensors["rng/cuda"] = torch.cuda.get_rng_state(parts.precision.device)
    numbers = {
        "position": progress.step,
        "loader": parts.loader.state(progress.step),
        "scaler": parts.precision.scaler.state_dict(),
        "metrics": metrics,
        "world_size": len(metrics),
        "images_per_step": parts.loader.images_per_step,
        "compiled": compiled,
        **numbers_after_evaluation(progress),
        "categories": categories,
        "config": config.model_dump(mode="json"),
    }
    return Snapshot(progress.done, tensors, numbers)


def numbers_after_evaluation(progress: Progress) -> dict[str, Any]:
    """The numbers of a snapshot that an evaluation of its weights changes."""
    return {
        "best_ap": progress.best_ap,
        "best_step": progress.best_step,
        "evaluation_due": progress.evaluation_due,
        "reached_targets": progress.reached_targets,
        "evaluations_since_best": progress.evaluations_since_best,
        "elapsed_s": progress.training_s,
    }


def tensors_to_save(parts: Parts) -> dict[str, Tensor]:
    """Tensors of the shapes of a later snapshot, before the optimizer has a state."""
    tensors = {f"model/{name}": tensor for name, tensor in parts.model.state_dict().items()}
    return tensors | state_shapes(parts.model, parts.optimizer)


def restore(parts: Parts, snapshot: Snapshot) -> Progress:
    """Load `snapshot` into `parts`, all but the loader, which was built from it."""
    _load_model(parts.model, snapshot.under("model/"))
    load_optimizer_state(parts.model, parts.optimizer, snapshot.tensors)
    averages = snapshot.under("ema/")
    if parts.ema is not None and averages:
        for name, tensor in averages.items():
            parts.ema.averages[name].copy_(tensor)
    if snapshot.numbers["scaler"]:
        parts.precision.scaler.load_state_dict(snapshot.numbers["scaler"])
    torch.set_rng_state(snapshot.tensors["rng/cpu"])
    if parts.precision.device.type == "cuda" and "rng/cuda" in snapshot.tensors:
        torch.cuda.set_rng_state(snapshot.tensors["rng/cuda"], parts.precision.device)
    position = position_of(snapshot)
    return Progress(
        step=position,
        shift=snapshot.step - position,
        best_ap=snapshot.numbers["best_ap"],
        best_step=snapshot.numbers["best_step"],
        evaluation_due=snapshot.numbers.get("evaluation_due", False),
        reached_targets=snapshot.numbers.get("reached_targets", False),
        evaluations_since_best=snapshot.numbers.get("evaluations_since_best", 0),
        elapsed_s=snapshot.numbers["elapsed_s"],
    )


def position_of(snapshot: Snapshot) -> int:
    """Position in the schedule, in steps of the snapshot's number of images."""
    return int(snapshot.numbers.get("position", snapshot.step))


def _load_model(model: MaskRCNN, weights: dict[str, Tensor]) -> None:
    expected = model.state_dict()
    different = [name for name in expected if name not in weights or weights[name].shape != expected[name].shape]
    if different or set(weights) != set(expected):
        raise TrainingError(
            f"the checkpoint belongs to another model: {len(different)} tensors differ, such as {different[:1]}",
            remedy="continue with the run's own run.yaml, or start a new run with train.weights",
        )
    model.load_state_dict(weights)
