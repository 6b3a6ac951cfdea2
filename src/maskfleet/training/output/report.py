"""Pictures of predictions, and the final report of a run."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from maskfleet import __version__, viz
from maskfleet.config.base import replaced
from maskfleet.config.run import RunConfig
from maskfleet.data.store.annotations import AnnotationStore, images_with_objects
from maskfleet.errors import MaskfleetError
from maskfleet.evaluation.report.page import FILE, write_report
from maskfleet.evaluation.report.record import IMAGES_PER_GPU, Picture, score_text
from maskfleet.inference.detector import Detector
from maskfleet.inference.draw import drawn_truth
from maskfleet.log import duration_text
from maskfleet.model.mask_rcnn import MaskRCNN
from maskfleet.system.process import capture
from maskfleet.training.output.record import record_of, write_environment
from maskfleet.training.state import Progress
from maskfleet.training.step.ema import Ema

REPORT_PICTURES, BOARD_PICTURES = 8, 4
TILE_PX = 420  # side of a picture in the report and in TensorBoard


def sample_pictures(
    model: MaskRCNN, ema: Ema | None, store: AnnotationStore, config: RunConfig, device: torch.device, *, count: int
) -> list[tuple[str, NDArray[np.uint8]]]:
    """Some images of `store`, the same ones in every call: annotations on the left, detections on the right."""
    chosen = images_with_objects(store)
    chosen = chosen[np.linspace(0, len(chosen) - 1, min(count, len(chosen))).astype(int)] if len(chosen) else chosen
    categories = tuple((category.id, category.name) for category in store.categories)
    few = replaced(config, {"eval.compile": False})  # recording does not pay for a few images
    detector = Detector(model, few, categories, "the model in training", device)
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
    store: AnnotationStore | None,
    pictures: Sequence[Picture],
    *,
    device: torch.device,
    images_per_step: int,
) -> Path:
    """Write RUN_DIR/report.html and return its path; `store` is the validation set of the kept detections.

    `pictures` are of a model that was not evaluated.
    """
    best = "none"
    if progress.best_ap is not None:
        best = f"{score_text(progress.best_ap)} % at step {progress.best_step}"
    facts = {
        "training time": duration_text(progress.training_s),
        "steps": f"{progress.done} of {images_per_step} images",
        "best AP": best,
        **machine_facts(device),
        IMAGES_PER_GPU: str(config.train.batch_size),
    }
    write_environment(run_dir, facts)
    record = replace(record_of(run_dir, config=config, store=store, may_detect=False), pictures=pictures)
    return write_report(run_dir / FILE, [record], next_steps=_next_steps(run_dir, config))


def machine_facts(device: torch.device) -> dict[str, str]:
    """The device, and the versions of what computes on it."""
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
    images = Path(config.data.root) / folder
    shown = f"{images}/*.jpg" if images.expanduser().is_dir() else "IMAGE.jpg"  # in shards and in S3 there are no files
    return [
        f"See it on other images: `maskfleet predict {run_dir} {shown}`",
        f"Try it in the browser: `maskfleet serve {run_dir}`",
        f"Evaluate again, class by class: `maskfleet eval {run_dir}`",
        f"Look at the curves while training: `maskfleet board {run_dir}`",
        "Check your own COCO-format data: `maskfleet data inspect DATA`",
        "Train on it: `maskfleet train runs/mine --data DATA`",
    ]
