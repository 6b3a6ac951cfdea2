"""Precision against recall, as COCO interpolates it, for any weights of the images.

The weight of an image is how often it is in a sample: all ones for the data set itself, counts of a draw with
replacement for a bootstrap sample.

Shapes: B samples, I images, K categories, T IoU thresholds, R recall levels, D detections of a class, P right ones.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from maskfleet.evaluation.analysis.matches import IOU_THRESHOLDS, Matches

Floats = NDArray[np.float64]
RECALL_LEVELS = np.linspace(0, 1, 101)  # R
NOT_MEASURED = -1.0  # of a class without objects


def precision_curves(matches: Matches) -> Floats:
    """Interpolated precision [T, R, K] of the data set; -1 for classes without objects."""
    weights = np.ones((1, len(matches.image_ids)))
    by_class = [class_precision(matches, index, weights)[0] for index in range(len(matches.category_ids))]
    if not by_class:
        return np.full((len(IOU_THRESHOLDS), len(RECALL_LEVELS), 0), NOT_MEASURED)
    return np.stack(by_class, axis=-1)


def class_precision(matches: Matches, category: int, weights: Floats) -> Floats:
    """Interpolated precision [B, T, R] of one class in samples of `weights` [B, I]; -1 where it has no objects."""
    own = matches.of_category(category)
    of_image = weights[:, matches.image[own]]  # [B, D]
    num_objects = weights[:, matches.object_image[matches.object_category == category]].sum(axis=1)  # [B]
    curves = np.empty((len(weights), len(IOU_THRESHOLDS), len(RECALL_LEVELS)))
    counted_at, counted_before = None, of_image
    for t in range(len(IOU_THRESHOLDS)):
        right = np.flatnonzero(matches.is_right[own, t])
        counts = ~matches.is_ignored[own, t]
        if counted_at is None or not np.array_equal(counts, counted_at):  # nearly always the same for all thresholds
            counted_at, counted_before = counts, np.cumsum(of_image * counts, axis=1)
        curves[:, t] = _interpolated(of_image[:, right], counted_before[:, right], num_objects)
    curves[num_objects == 0] = NOT_MEASURED
    return curves


def _interpolated(right: Floats, counted: Floats, num_objects: Floats) -> Floats:
    """Precision [B, R] from the weights [B, P] of right detections and of all counted ones up to each.

    Right detections alone decide: between two of them recall stays and precision falls.
    """
    true = np.cumsum(right, axis=1)  # [B, P]
    precision = true / (counted + np.spacing(1))
    precision = np.maximum.accumulate(precision[:, ::-1], axis=1)[:, ::-1]  # the best at this recall or a higher one
    recall = true / np.maximum(num_objects, 1)[:, None]
    curves = np.zeros((len(right), len(RECALL_LEVELS)))
    for curve, best, reached in zip(curves, precision, recall, strict=True):
        position = np.searchsorted(reached, RECALL_LEVELS, side="left")
        inside = position < len(reached)
        curve[inside] = best[position[inside]]
    return curves
