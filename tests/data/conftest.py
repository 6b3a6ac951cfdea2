from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest

from maskfleet.data.store.splits import SplitPaths


@pytest.fixture
def write_split(tmp_path: Path) -> Callable[..., SplitPaths]:
    """Writes a tree, or text, as the annotation file of a split; its images too, unless told not to."""

    def write(content: dict[str, Any] | str, *, with_images: bool = True) -> SplitPaths:
        annotations = tmp_path / "annotations" / "instances_train.json"
        images = tmp_path / "train"
        annotations.parent.mkdir(exist_ok=True)
        images.mkdir(exist_ok=True)
        annotations.write_text(content if isinstance(content, str) else json.dumps(content))
        if with_images and isinstance(content, dict):
            for number, image in enumerate(content["images"]):
                pixels = np.random.default_rng(number).integers(0, 255, (48, 64, 3), np.uint8)
                assert cv2.imwrite(str(images / image["file_name"]), pixels)
        return SplitPaths("train", annotations, images)

    return write
