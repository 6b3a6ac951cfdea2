"""Small COCO-format trees for the tests."""

from __future__ import annotations

import math
from typing import Any


def square(left: float, top: float, side: float) -> list[float]:
    """A square polygon as flat numbers."""
    return [left, top, left + side, top, left + side, top + side, left, top + side]


def rectangle(box: list[float]) -> list[float]:
    """The polygon of a box [x, y, width, height] as flat numbers."""
    left, top, width, height = box
    return [left, top, left + width, top, left + width, top + height, left, top + height]


def _has_area(box: Any) -> bool:
    return isinstance(box, list) and len(box) == 4 and all(map(math.isfinite, box)) and min(box[2:]) > 0


def annotation(identity: int, image_id: int = 1, **changes: Any) -> dict[str, Any]:
    """A sound annotation of a square of 20 at (10, 10), with `changes`; None takes a key away.

    The polygon follows a box that has an area, unless it is changed too.
    """
    record: dict[str, Any] = {
        "id": identity,
        "image_id": image_id,
        "category_id": 7,
        "bbox": [10, 10, 20, 20],
        "area": 400,
        "iscrowd": 0,
        "segmentation": [square(10, 10, 20)],
    }
    record.update(changes)
    if "bbox" in changes and "segmentation" not in changes and _has_area(record["bbox"]):
        record["segmentation"] = [rectangle(record["bbox"])]
    return {key: value for key, value in record.items() if value is not None}


def coco_tree(*annotations: dict[str, Any], images: int = 2, **changes: Any) -> dict[str, Any]:
    """A COCO tree of images 1, 2, ... of 64 x 48 named 1.jpg, 2.jpg, ..., categories 3 and 7."""
    tree = {
        "images": [{"id": n, "file_name": f"{n}.jpg", "width": 64, "height": 48} for n in range(1, images + 1)],
        "annotations": list(annotations),
        "categories": [{"id": 7, "name": "seven"}, {"id": 3, "name": "three"}],
    }
    return tree | changes
