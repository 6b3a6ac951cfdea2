"""The images that a model does best and worst on.

Shapes: I images, D detections, G objects, T IoU thresholds.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from maskfleet.evaluation.analysis.matches import AT_50, Matches


@dataclass(frozen=True, slots=True)
class Example:
    """An image, and how many detections and objects of it are right, wrong and missed at IoU 0.5."""

    image_id: int
    right: int
    wrong: int
    missed: int

    @property
    def f1(self) -> float:
        """The F1 score: 1 if every object was found, and nothing else."""
        return 2 * self.right / max(2 * self.right + self.wrong + self.missed, 1)


def counted_images(matches: Matches, *, min_score: float) -> list[Example]:
    """Every image, by id, with the detections that score `min_score` or more."""
    num_images = len(matches.image_ids)
    shown = (matches.score >= min_score) & ~matches.is_ignored[:, AT_50]
    is_right = matches.is_right[:, AT_50]
    right = np.bincount(matches.image[shown & is_right], minlength=num_images)
    wrong = np.bincount(matches.image[shown & ~is_right], minlength=num_images)
    missed = np.bincount(matches.object_image, minlength=num_images) - right
    rows = zip(matches.image_ids.tolist(), right.tolist(), wrong.tolist(), missed.tolist(), strict=True)
    return [Example(*row) for row in rows]


def best_and_worst(examples: list[Example], *, best: int, worst: int) -> tuple[list[Example], list[Example]]:
    """The images with the highest F1, those with many objects first, and the ones with the lowest, by errors.

    No image is in both lists, and none without an object and a detection in either.
    """
    known = [one for one in examples if one.right + one.wrong + one.missed]
    by_quality = sorted(known, key=lambda one: (-one.f1, -one.right, one.image_id))
    good = [one for one in by_quality[:best] if one.right]
    left = {one.image_id for one in good}
    by_errors = sorted(known, key=lambda one: (one.f1, -(one.wrong + one.missed), one.image_id))
    bad = [one for one in by_errors if one.image_id not in left and one.wrong + one.missed]
    return good, bad[:worst]
