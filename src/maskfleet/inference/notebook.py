"""For notebooks/try_model.ipynb: which run to load, which images to show, and how."""

from __future__ import annotations

import random
from pathlib import Path

import cv2
import numpy as np
from numpy.typing import NDArray

from maskfleet.config.load import RUN_FILE
from maskfleet.data.files.stored import ImagePath
from maskfleet.data.store.dataset import open_stores
from maskfleet.errors import DataError, TrainingError
from maskfleet.inference.detector import Detector

_DEPTH = 3  # a shared volume is too large to search completely


def newest_run(folder: Path) -> Path:
    """The run in `folder`, or `folder` itself, that saved a checkpoint last."""
    saved = [
        path
        for depth in range(_DEPTH + 1)
        for path in folder.glob("*/" * depth + "checkpoints/step-*.json")
        if (path.parent.parent / RUN_FILE).is_file()
    ]
    if not saved:
        raise TrainingError(
            f"no run in {folder} has a checkpoint yet",
            remedy=f"wait for the first one, or name another folder; the search is {_DEPTH} folders deep",
        )
    return max(saved, key=lambda path: path.stat().st_mtime_ns).parent.parent


def validation_images(detector: Detector, count: int, *, seed: int | None = None) -> list[ImagePath]:
    """Up to `count` random images of the run's first validation set."""
    splits = detector.run.data.val[:1]
    if not splits:
        raise DataError("the run has no validation images", remedy="list image files of your own")
    [store] = open_stores(detector.run.data, splits)
    chosen = random.Random(seed).sample(range(len(store)), min(count, len(store)))  # noqa: S311
    return [store.image(index).path for index in chosen]


def png(picture: NDArray[np.uint8]) -> bytes:
    """An RGB array as the bytes of a PNG file, which IPython displays."""
    written, data = cv2.imencode(".png", picture[..., ::-1])
    assert written
    return bytes(data)
