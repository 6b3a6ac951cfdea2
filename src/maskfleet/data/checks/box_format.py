"""Boxes that are not [x, y, width, height] in pixels, and boxes that do not enclose their polygons.

Shapes: A annotations, P polygon parts.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from maskfleet.data.checks.problems import Problem, problem_of, row_problem
from maskfleet.data.store.annotations import MIN_POLYGON_NUMBERS, AnnotationStore, Bools, Floats
from maskfleet.data.store.coco import KIND_POLYGONS

TOLERANCE_PX = 2.0  # annotation tools round boxes and points differently
MIN_IOU = 0.8  # of a box with the bounds of its polygons; COCO's are equal
MIN_EVIDENCE = 3  # boxes beyond the image without which boxes alone never count as corners
MIN_BEYOND = 0.1  # share of boxes beyond the image; of correct files, well under a hundredth
PARTS_PER_BLOCK = 1 << 16
EXAMPLES = 5


def box_format_problems(store: AnnotationStore) -> Iterator[Problem]:
    """Problems of the format of boxes.

    A format that at least half of the boxes share is one problem of the split, because its images cannot be skipped;
    otherwise each annotation is a problem.
    """
    boxes = store.columns["ann_box_xywh"]
    has_area: Bools = np.isfinite(boxes).all(axis=1) & np.asarray((boxes[:, 2:] > 0).all(axis=1))
    boxes = np.where(has_area[:, None], boxes, np.nan)  # the others have their own problems
    size = _image_sizes(store)
    bounds = outline_bounds(store)
    is_normalised = has_area & _normalised(store, boxes, size, has_area)
    is_corners = has_area & ~is_normalised & _corners(boxes, size, bounds, has_area)
    yield from _one_or_each(
        store, "box-normalised", is_normalised, has_area, "is between 0 and 1: it seems to be a fraction of the image"
    )
    yield from _one_or_each(
        store, "box-corners", is_corners, has_area, "seems to be two corners, [left, top, right, bottom]"
    )
    is_inside = (boxes[:, :2] < size).all(axis=1) & (_corners_of(boxes)[:, 2:] > 0).all(axis=1)  # others are errors
    disagrees = is_inside & ~is_normalised & ~is_corners & _differs(_corners_of(boxes), bounds)
    for row in np.flatnonzero(disagrees):
        left, top, right, bottom = bounds[row]
        outline = f"[{left:g}, {top:g}, {right - left:g}, {bottom - top:g}]"
        what = f"box {_text(boxes[row])} does not match its polygons, which span {outline}"
        yield row_problem(store, "box-polygon", row, what)


def outline_bounds(store: AnnotationStore) -> Floats:
    """Smallest xyxy box around the polygons of each annotation -> [A, 4]; NaN without polygons that can be read."""
    columns = store.columns
    rows = np.flatnonzero(columns["ann_kind"] == KIND_POLYGONS)
    owner = np.repeat(rows, columns["ann_parts"][rows])  # [P]
    start = columns["part_start"]
    numbers = np.diff(start)
    parts = np.flatnonzero((numbers >= MIN_POLYGON_NUMBERS) & (numbers % 2 == 0))
    low, high = (np.full((store.num_annotations, 2), fill) for fill in (np.inf, -np.inf))
    for begin in range(0, len(parts), PARTS_PER_BLOCK):
        some = parts[begin : begin + PARTS_PER_BLOCK]
        counts = numbers[some]
        first = np.cumsum(counts) - counts
        index = np.repeat(start[some] - first, counts) + np.arange(int(counts.sum()))
        points = columns["points"][index].reshape(-1, 2)
        np.minimum.at(low, owner[some], np.minimum.reduceat(points, first // 2))
        np.maximum.at(high, owner[some], np.maximum.reduceat(points, first // 2))
    bounds = np.concatenate([low, high], axis=1)
    bounds[~np.isfinite(bounds).all(axis=1)] = np.nan
    return bounds


def _normalised(store: AnnotationStore, boxes: Floats, size: Floats, has_area: Bools) -> Bools:
    """Boxes of which all four numbers are from 0 to 1, if they are half of the split or all boxes of their image.

    One such box alone may be an object of a pixel in the corner of the image.
    """
    is_small = has_area & (boxes >= 0).all(axis=1) & (boxes <= 1).all(axis=1) & (size > TOLERANCE_PX).all(axis=1)
    is_fraction = is_small & (boxes % 1 != 0).any(axis=1)
    if is_fraction.any() and 2 * is_small.sum() >= has_area.sum():
        return np.asarray(is_small)
    owner = store.owner(np.arange(len(boxes)))
    bins = len(store) + 1
    num_boxes, num_small = np.bincount(owner[has_area], minlength=bins), np.bincount(owner[is_fraction], minlength=bins)
    return np.asarray(is_fraction & ((num_small == num_boxes) & (num_small > 1))[owner])


def _corners(boxes: Floats, size: Floats, bounds: Floats, has_area: Bools) -> Bools:
    """Boxes that match their polygons, or the images, only as [left, top, right, bottom]."""
    xyxy, has_outline = _corners_of(boxes), ~np.isnan(bounds[:, 0])
    is_box = (boxes[:, 2:] > boxes[:, :2]).all(axis=1)
    fits = is_box & (boxes >= -TOLERANCE_PX).all(axis=1) & (boxes[:, 2:] <= size + TOLERANCE_PX).all(axis=1)
    is_beyond = fits & (xyxy[:, 2:] > size + TOLERANCE_PX).any(axis=1)
    is_sound = has_outline & ~_differs(xyxy, bounds) & _differs(boxes, bounds)
    is_likely = (fits | ~has_area).all() and not is_sound.any()
    if is_likely and is_beyond.sum() >= max(MIN_EVIDENCE, MIN_BEYOND * has_area.sum()):
        return np.asarray(fits)
    return np.asarray(is_box & has_outline & ~_differs(boxes, bounds) & _differs(xyxy, bounds))


def _differs(boxes: Floats, bounds: Floats) -> Bools:
    """Whether boxes [A, 4] xyxy differ from `bounds` by more than rounding; False where there are no bounds."""
    with np.errstate(invalid="ignore", over="ignore"):
        low, high = np.maximum(boxes[:, :2], bounds[:, :2]), np.minimum(boxes[:, 2:], bounds[:, 2:])
        overlap = np.maximum(high - low, 0).prod(axis=1)
        union = _area(boxes) + _area(bounds) - overlap
        return np.asarray((overlap < MIN_IOU * union) & (np.abs(boxes - bounds).max(axis=1) > TOLERANCE_PX))


def _one_or_each(store: AnnotationStore, kind: str, is_wrong: Bools, has_area: Bools, text: str) -> Iterator[Problem]:
    rows = np.flatnonzero(is_wrong)
    total = int(has_area.sum())
    if len(rows) and 2 * len(rows) >= total:
        ids = ", ".join(str(identity) for identity in store.columns["ann_id"][rows[:EXAMPLES]])
        first = f"box {_text(store.columns['ann_box_xywh'][rows[0]])} {text}"
        what = (
            f"{len(rows)} of {total} boxes have the wrong format (annotations {ids}{', …' * (len(rows) > EXAMPLES)}): "
        )
        yield problem_of(kind, what + first, store.split.annotations)
        return
    for row in rows:
        yield row_problem(store, kind, row, f"box {_text(store.columns['ann_box_xywh'][row])} {text}")


def _image_sizes(store: AnnotationStore) -> Floats:
    """Width and height of the image of each annotation -> [A, 2]; infinite for an unknown image."""
    sizes = np.concatenate([np.stack([store.widths, store.heights], axis=1), [[np.inf, np.inf]]])
    return np.asarray(sizes[store.owner(np.arange(store.num_annotations))])


def _corners_of(boxes_xywh: Floats) -> Floats:
    with np.errstate(over="ignore"):
        return np.hstack([boxes_xywh[:, :2], boxes_xywh[:, :2] + boxes_xywh[:, 2:]])


def _area(boxes: Floats) -> Floats:
    return np.asarray((boxes[:, 2:] - boxes[:, :2]).prod(axis=1))


def _text(box: Floats) -> str:
    return f"[{', '.join(f'{value:g}' for value in box)}]"
