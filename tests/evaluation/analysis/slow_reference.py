"""Slow, obvious versions of what the analysis computes, from COCO dictionaries of boxes.

The error breakdown follows tidecv's rules (Bolya et al., "TIDE", ECCV 2020) at IoU 0.5 and 0.1.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

Box = dict[str, Any]
RIGHT, BACKGROUND = 0.5, 0.1


def iou(found: Box, truth: Box) -> float:
    """IoU of two xywh boxes; of a crowd, the share of the detection inside it."""
    (ax, ay, aw, ah), (bx, by, bw, bh) = found["bbox"], truth["bbox"]
    width = min(ax + aw, bx + bw) - max(ax, bx)
    height = min(ay + ah, by + bh) - max(ay, by)
    if width <= 0 or height <= 0:
        return 0.0
    overlap = width * height
    return float(overlap / (aw * ah if truth["iscrowd"] else aw * ah + bw * bh - overlap))


def by_score(results: list[Box]) -> list[Box]:
    return sorted(results, key=lambda one: -one["score"])


def without_crowds(truth: dict[str, Any], results: list[Box]) -> tuple[dict[str, Any], list[Box]]:
    """Objects alone, and without the detections that COCO ignores: on a crowd of their class, and on no free object."""
    used: set[int] = set()
    ignored = []
    for one in by_score(results):
        same = [
            other
            for other in truth["annotations"]
            if other["image_id"] == one["image_id"] and other["category_id"] == one["category_id"]
        ]
        free = [other for other in same if not other["iscrowd"] and other["id"] not in used]
        best = max(free, key=lambda other: iou(one, other), default=None)
        if best is not None and iou(one, best) >= RIGHT:
            used.add(best["id"])
        elif any(iou(one, other) >= RIGHT for other in same if other["iscrowd"]):
            ignored.append(one)
    objects = [one for one in truth["annotations"] if not one["iscrowd"]]
    return {**truth, "annotations": objects}, [one for one in results if one not in ignored]


def confusion(truth: dict[str, Any], results: list[Box], min_score: float) -> np.ndarray:
    """[K + 1, K + 1]: objects by the class of their detection; detections compete for objects of any class."""
    truth, results = without_crowds(truth, results)
    ids = sorted(category["id"] for category in truth["categories"])
    counts = np.zeros((len(ids) + 1, len(ids) + 1), int)
    for image in truth["images"]:
        free = [one for one in truth["annotations"] if one["image_id"] == image["id"]]
        found = [one for one in results if one["image_id"] == image["id"] and one["score"] >= min_score]
        for one in by_score(found):
            best = max(free, key=lambda other: iou(one, other), default=None)
            if best is not None and iou(one, best) >= RIGHT:
                free.remove(best)
                counts[ids.index(best["category_id"]), ids.index(one["category_id"])] += 1
            else:
                counts[-1, ids.index(one["category_id"])] += 1
        for one in free:
            counts[ids.index(one["category_id"]), -1] += 1
    return counts


class Breakdown:
    """TIDE's kinds of errors of a set of boxes: how many, and the AP50 gained by correcting each kind alone."""

    def __init__(self, truth: dict[str, Any], results: list[Box]) -> None:
        self.truth, self.results = without_crowds(truth, results)
        self.kind: dict[int, str] = {}  # of each detection, by position; "" is right
        self.target: dict[int, Box] = {}  # the object that a class or location error would have found
        self.used: set[int] = set()  # ids of found objects
        for image in self.truth["images"]:
            self._assign(image["id"])
        corrected = {target["id"] for target in self.target.values()}
        self.missed = [
            one for one in self.truth["annotations"] if one["id"] not in self.used and one["id"] not in corrected
        ]
        # Several errors may be about one object: correcting makes the one with the highest score right.
        self.best: dict[int, int] = {}
        for place, target in self.target.items():
            rival = self.best.get(target["id"])
            if rival is None or self.results[place]["score"] > self.results[rival]["score"]:
                self.best[target["id"]] = place

    @property
    def counts(self) -> dict[str, int]:
        kinds = Counter(self.kind.values())
        return {name: kinds[name] for name in ("Cls", "Loc", "Both", "Dupe", "Bkg")} | {"Miss": len(self.missed)}

    @property
    def costs(self) -> dict[str, float]:
        base = self._ap50(None)
        return {name: self._ap50(name) - base for name in ("Cls", "Loc", "Both", "Dupe", "Bkg", "Miss")}

    def _assign(self, image_id: int) -> None:
        objects = [one for one in self.truth["annotations"] if one["image_id"] == image_id]
        own = [(place, one) for place, one in enumerate(self.results) if one["image_id"] == image_id]
        own.sort(key=lambda pair: -pair[1]["score"])
        for place, one in own:
            same = [other for other in objects if other["category_id"] == one["category_id"]]
            free = [other for other in same if other["id"] not in self.used]
            best = max(free, key=lambda other: iou(one, other), default=None)
            if best is not None and iou(one, best) >= RIGHT:
                self.used.add(best["id"])
                self.kind[place] = ""
        for place, one in own:
            if place not in self.kind:
                self.kind[place] = self._wrong(place, one, objects)

    def _wrong(self, place: int, one: Box, objects: list[Box]) -> str:
        same = [other for other in objects if other["category_id"] == one["category_id"]]
        others = [other for other in objects if other["category_id"] != one["category_id"]]
        near = max(same, key=lambda other: iou(one, other), default=None)
        if near is not None and BACKGROUND <= iou(one, near) < RIGHT:
            self.target[place] = near
            return "Loc"
        on = max(others, key=lambda other: iou(one, other), default=None)
        if on is not None and iou(one, on) >= RIGHT:
            self.target[place] = on
            return "Cls"
        if any(iou(one, other) >= RIGHT for other in same if other["id"] in self.used):
            return "Dupe"
        if all(iou(one, other) < BACKGROUND for other in objects):
            return "Bkg"
        return "Both"

    def _ap50(self, corrected: str | None) -> float:
        """Mean over classes of AP at IoU 0.5, with one kind of error corrected."""
        numbers = dict(Counter(one["category_id"] for one in self.truth["annotations"]))
        if corrected == "Miss":
            for one in self.missed:
                numbers[one["category_id"]] -= 1
        flags: dict[int, list[tuple[float, bool]]] = {}
        for place, kind in self.kind.items():
            one = self.results[place]
            category, is_right = one["category_id"], kind == ""
            if kind and kind == corrected:
                target = self.target.get(place)
                if target is None or target["id"] in self.used or self.best[target["id"]] != place:
                    continue  # it is removed
                category, is_right = target["category_id"], True
            flags.setdefault(category, []).append((one["score"], is_right))
        return float(np.mean([average_precision(flags.get(one, []), number) for one, number in numbers.items()]))


def average_precision(flags: list[tuple[float, bool]], num_objects: int) -> float:
    """COCO's AP from (score, right) of all detections of a class; 0 if no object is left."""
    if num_objects == 0:
        return 0.0
    points, right = [], 0
    for rank, (_, is_right) in enumerate(sorted(flags, key=lambda one: -one[0]), 1):
        right += is_right
        points.append((right / num_objects, right / rank))
    levels = [max((p for r, p in points if r >= level), default=0.0) for level in np.linspace(0, 1, 101)]
    return float(np.mean(levels))


def random_case(
    seed: int, *, images: int = 6, classes: int = 3, crowds: bool = False
) -> tuple[dict[str, Any], list[Box]]:
    """Annotations, and results with every kind of error and no equal scores."""
    rng = np.random.default_rng(seed)
    annotations: list[Box] = []
    results: list[Box] = []

    def found(image_id: int, category: int, box: np.ndarray) -> None:
        xywh = [float(value) for value in (*box[:2], *np.maximum(box[2:], 4))]
        results.append({"image_id": image_id, "category_id": category, "bbox": xywh, "score": float(rng.random())})

    for image_id in range(1, images + 1):
        for _ in range(int(rng.integers(0, 5))):
            box, category = (
                np.array([*rng.uniform(0, 60, 2), *rng.uniform(10, 40, 2)]),
                int(rng.integers(1, classes + 1)),
            )
            is_crowd = int(crowds and rng.random() < 0.2)
            annotations.append(
                {
                    **{"id": len(annotations) + 1, "image_id": image_id, "category_id": category, "iscrowd": is_crowd},
                    **{"bbox": box.tolist(), "area": float(box[2] * box[3])},
                }
            )
            for _ in range(int(rng.integers(0, 4))):
                other = category if rng.random() < 0.7 else int(rng.integers(1, classes + 1))
                found(image_id, other, box + rng.normal(0, rng.choice([1.0, 8.0]), 4))
        for _ in range(int(rng.integers(0, 3))):
            found(image_id, int(rng.integers(1, classes + 1)), rng.uniform(10, 60, 4))
    return {
        "images": [{"id": image_id, "height": 120, "width": 120} for image_id in range(1, images + 1)],
        "categories": [{"id": category, "name": f"class {category}"} for category in range(1, classes + 1)],
        "annotations": annotations,
    }, results
