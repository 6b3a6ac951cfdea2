"""For the try_model notebook: which run to try, on which images, and what its model sees in one."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

import cv2
import torch

from maskfleet.data.store.dataset import open_stores
from maskfleet.errors import DataError, TrainingError
from maskfleet.evaluation.pictures import drawn_detections, read_picture
from maskfleet.inference.load import Trained, trained_model
from maskfleet.inference.single import detect_in
from maskfleet.training.distributed import Worker
from maskfleet.training.run import device_for

_DEPTH = 3  # a shared volume is too large to be searched whole


@dataclass(frozen=True, slots=True)
class Tryout:
    """A trained model and where it runs."""

    trained: Trained
    device: torch.device

    def png(self, image: Path, *, score: float | None = None) -> bytes:
        """`image` with what the model sees in it above `score`, or above what the run itself shows; drawn as PNG."""
        threshold = self.trained.run.eval.show_score_threshold if score is None else score
        picture = read_picture(image)
        results = detect_in(
            self.trained.model,
            picture,
            self.trained.run,
            self.device,
            image_id=0,
            categories=self.trained.categories,
        )
        shown = [result for result in results if result["score"] > threshold]
        written, data = cv2.imencode(".png", drawn_detections(picture, shown, self.trained.categories))
        assert written
        return bytes(data)

    def images(self, count: int, *, seed: int | None = None) -> list[Path]:
        """Up to `count` random images of the run's first validation set."""
        splits = self.trained.run.data.val[:1]
        if not splits:
            raise DataError("the run has no validation images", remedy="name files of your own in `images`")
        [store] = open_stores(self.trained.run.data, splits)
        chosen = random.Random(seed).sample(range(len(store)), min(count, len(store)))  # noqa: S311
        return [store.image(index).path for index in chosen]


def tryout(run_dir: Path) -> Tryout:
    """The model of a run, on a GPU if there is one."""
    device = device_for(Worker())
    return Tryout(trained_model(run_dir, device), device)


def newest_run(folder: Path) -> Path:
    """The run in `folder`, or `folder` itself, that saved a checkpoint last."""
    saved = [
        path
        for depth in range(_DEPTH + 1)
        for path in folder.glob("*/" * depth + "checkpoints/step-*.json")
        if (path.parent.parent / "run.yaml").is_file()
    ]
    if not saved:
        raise TrainingError(
            f"no run in {folder} has a checkpoint yet",
            remedy="wait for the first one, or name another folder; runs are looked for three folders deep",
        )
    return max(saved, key=lambda path: path.stat().st_mtime_ns).parent.parent
