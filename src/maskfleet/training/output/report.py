"""Pictures of predictions, and the final report of a run."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from maskfleet import __version__, viz
from maskfleet.config.load import dump
from maskfleet.config.run import RunConfig
from maskfleet.data.store.annotations import AnnotationStore, images_with_objects
from maskfleet.errors import MaskfleetError
from maskfleet.evaluation.report import write_report
from maskfleet.inference.detector import Detector
from maskfleet.inference.draw import drawn_truth
from maskfleet.log import duration_text
from maskfleet.model.mask_rcnn import MaskRCNN
from maskfleet.system.process import capture
from maskfleet.training.output.metrics import read_metrics
from maskfleet.training.state import Progress
from maskfleet.training.step.ema import Ema
from maskfleet.training.validate import Scores

REPORT_PICTURES, BOARD_PICTURES = 8, 4
TILE_PX = 420  # side of a picture in the report and in TensorBoard


def sample_pictures(
    model: MaskRCNN, ema: Ema | None, store: AnnotationStore, config: RunConfig, device: torch.device, *, count: int
) -> list[tuple[str, NDArray[np.uint8]]]:
    """Some images of `store`, the same ones in every call: annotations on the left, detections on the right."""
    chosen = images_with_objects(store)
    chosen = chosen[np.linspace(0, len(chosen) - 1, min(count, len(chosen))).astype(int)] if len(chosen) else chosen
    categories = tuple((category.id, category.name) for category in store.categories)
    detector = Detector(model, config, categories, "the model in training", device)
    was_training = model.training
    model.eval()
    pictures = []
    with ema.used_by(model) if ema is not None else nullcontext():
        for index in chosen.tolist():
            record = store.image(index)
            pair = [drawn_truth(store, index), detector.draw(record.path)[..., ::-1]]
            pictures.append(
                (f"{record.path.name}: annotated, found", viz.grid(pair, columns=2, tile=(TILE_PX, TILE_PX)))
            )
    model.train(was_training)
    return pictures


def write_run_report(
    run_dir: Path,
    config: RunConfig,
    progress: Progress,
    scores: Sequence[Scores],
    pictures: Sequence[tuple[str, NDArray[np.uint8]]],
    *,
    device: torch.device,
    images_per_step: int,
) -> Path:
    """Write RUN_DIR/report.html; returns its path."""
    return write_report(
        run_dir,
        metrics=read_metrics(run_dir),
        scores=scores[0] if scores else {},
        pictures=pictures,
        config_text=dump(config),
        facts={
            "training time": duration_text(progress.training_s),
            "steps": f"{progress.done} of {images_per_step} images",
            "best AP": f"{progress.best_ap:.4f} at step {progress.best_step}"
            if progress.best_ap is not None
            else "none",
            **_machine(device),
        },
        next_steps=_next_steps(run_dir, config),
    )


def _machine(device: torch.device) -> dict[str, str]:
    if device.type == "cuda":
        where = torch.cuda.get_device_name(device)
    else:
        where = f"{platform.machine()} CPU, threads: {torch.get_num_threads()}"
    facts = {"device": where, "torch": torch.__version__, "maskfleet": __version__, "python": platform.python_version()}
    commit = _commit()
    return facts | ({"commit": commit} if commit else {})


def _commit() -> str:
    """The commit this code was run from, if it was run from a repository."""
    here = Path(__file__).resolve().parent
    try:
        done = capture(["git", "-C", str(here), "describe", "--always", "--dirty"])
    except MaskfleetError:
        return ""
    return done.out.strip() if done.code == 0 else ""


def _next_steps(run_dir: Path, config: RunConfig) -> list[str]:
    some: Any = config.data.val[0] if config.data.val else config.data.train[0]
    folder = some if isinstance(some, str) else some.images
    return [
        f"See it on other images: `maskfleet predict {run_dir} {Path(config.data.root) / folder}/*.jpg`",
        f"Evaluate again, class by class: `maskfleet eval {run_dir}`",
        f"Look at the curves while training: `tensorboard --logdir {run_dir}/tensorboard`",
        "Check your own COCO-format data: `maskfleet data inspect DATA`",
        "Train on it: `maskfleet train runs/mine --data DATA`",
    ]
