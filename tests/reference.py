"""Slow, obvious versions of the box ops: one box, one pair at a time, in plain Python numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

Box = Sequence[float]


def area(box: Box) -> float:
    return max(0.0, box[2] - box[0]) * max(0.0, box[3] - box[1])


def overlap(a: Box, b: Box) -> float:
    return area([max(a[0], b[0]), max(a[1], b[1]), min(a[2], b[2]), min(a[3], b[3])])


def iou(a: Box, b: Box) -> float:
    common = overlap(a, b)
    return common / (area(a) + area(b) - common) if common > 0 else 0.0


def iou_matrix(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.array([[iou(p, q) for q in b.tolist()] for p in a.tolist()]).reshape(len(a), len(b))


def encode(box: Box, anchor: Box) -> list[float]:
    box_width, box_height = box[2] - box[0], box[3] - box[1]
    width, height = anchor[2] - anchor[0], anchor[3] - anchor[1]
    return [
        ((box[0] + box[2]) / 2 - (anchor[0] + anchor[2]) / 2) / width,
        ((box[1] + box[3]) / 2 - (anchor[1] + anchor[3]) / 2) / height,
        math.log(box_width / width),
        math.log(box_height / height),
    ]


def decode(delta: Box, anchor: Box, max_log_scale: float) -> list[float]:
    width, height = anchor[2] - anchor[0], anchor[3] - anchor[1]
    x = (anchor[0] + anchor[2]) / 2 + delta[0] * width
    y = (anchor[1] + anchor[3]) / 2 + delta[1] * height
    width *= math.exp(min(delta[2], max_log_scale))
    height *= math.exp(min(delta[3], max_log_scale))
    return [x - width / 2, y - height / 2, x + width / 2, y + height / 2]


def clip(box: Box, height: float, width: float) -> list[float]:
    return [min(max(side, 0.0), limit) for side, limit in zip(box, (width, height, width, height), strict=True)]


def rpn_labels(
    anchors: np.ndarray,
    boxes: np.ndarray,
    crowds: np.ndarray,
    *,
    height: float,
    width: float,
    positive_iou: float,
    negative_iou: float,
    crowd_overlap: float,
) -> tuple[list[int], list[int | None]]:
    """Labels of anchors [N, 4] of one image without padding, and their gt (None outside the image or without gt)."""
    labels = [-1] * len(anchors)
    matched: list[int | None] = [None] * len(anchors)
    inside = [i for i, a in enumerate(anchors.tolist()) if a[0] >= 0 and a[1] >= 0 and a[2] <= width and a[3] <= height]
    ious = iou_matrix(anchors[inside], boxes)
    best = ious.max(axis=1) if len(boxes) else np.full(len(inside), -1.0)
    for row, anchor in enumerate(inside):
        if any(ious[row, g] == ious[:, g].max() for g in range(len(boxes))):
            labels[anchor] = 1
        if best[row] >= positive_iou:
            labels[anchor] = 1
        if best[row] < negative_iou:
            labels[anchor] = 0
        if len(boxes):
            matched[anchor] = int(ious[row].argmax())
        box = anchors[anchor].tolist()
        if any(overlap(box, crowd) / area(box) > crowd_overlap for crowd in crowds.tolist()):
            labels[anchor] = -1
    return labels, matched


def nms(boxes: np.ndarray, threshold: float) -> list[int]:
    """Positions of the boxes [N, 4], by descending score, that greedy suppression keeps; float32 as in TensorFlow."""
    kept: list[int] = []
    for candidate in range(len(boxes)):
        if all(_iou_float32(boxes[k], boxes[candidate]) <= np.float32(threshold) for k in kept):
            kept.append(candidate)
    return kept


def detections(
    boxes: np.ndarray, scores: np.ndarray, *, score_threshold: float, iou_threshold: float, max_detections: int
) -> list[tuple[int, int]]:
    """(region, category) of the detections among boxes [R, C, 4] with scores [R, C], best first."""
    num_regions, num_categories = scores.shape
    kept: list[tuple[float, int, int]] = []
    for category in range(num_categories):
        above = [r for r in range(num_regions) if scores[r, category] > score_threshold]
        above.sort(key=lambda r: -scores[r, category])
        for position in nms(boxes[above, category].reshape(-1, 4), iou_threshold):
            kept.append((-scores[above[position], category], category, above[position]))
    return [(region, category) for _, category, region in sorted(kept)[:max_detections]]


def smooth_l1(difference: float, beta: float) -> float:
    size = abs(difference)
    return 0.5 * size * size / beta if size < beta else size - 0.5 * beta


def binary_cross_entropy(logit: float, target: float) -> float:
    return max(logit, 0.0) - logit * target + math.log1p(math.exp(-abs(logit)))


def cross_entropy(logits: Sequence[float], label: int) -> float:
    largest = max(logits)
    return largest + math.log(sum(math.exp(value - largest) for value in logits)) - logits[label]


def _iou_float32(a: np.ndarray, b: np.ndarray) -> np.float32:
    size = np.minimum(a[2:], b[2:]) - np.maximum(a[:2], b[:2])
    if (size <= 0).any():
        return np.float32(0)
    size_a, size_b = a[2:] - a[:2], b[2:] - b[:2]
    common = size[0] * size[1]
    return common / (size_a[0] * size_a[1] + size_b[0] * size_b[1] - common)
