"""Every known fault of a set, found before training begins and listed together.

Shapes: A annotations, P polygon parts, n points of a part.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from maskfleet.data.checks.images import IMAGE_KINDS, Progress, check_images
from maskfleet.data.checks.problems import Problem, Severity, bad_images, raise_for, summarise
from maskfleet.data.checks.self_intersection import MAX_TESTED_POINTS, self_crossing_parts
from maskfleet.data.store.annotations import MIN_POLYGON_NUMBERS, AnnotationStore, Floats
from maskfleet.data.store.coco import KIND_BROKEN, KIND_NONE, KIND_POLYGONS, KIND_RLE
from maskfleet.rle import RleError, check_runs, runs_from_text

__all__ = ["KINDS", "Problem", "bad_images", "check_annotations", "check_split", "raise_for", "summarise"]

OVERHANG_PX = 1.0  # tools round; COCO's own boxes stick out by fractions of a pixel

# kind: (severity, remedy)
ANNOTATION_KINDS: dict[str, tuple[Severity, str]] = {
    "no-images": ("error", "check that this is the right annotation file: its list of images is empty"),
    "no-annotations": ("error", "check that this is the right annotation file: there is nothing to learn from it"),
    "no-categories": ("error", "add the list of categories, each with an id and a name, to the annotation file"),
    "no-outline": ("warning", "nothing to do for boxes alone; with masks, the box stands in for the outline"),
    "duplicate-category": ("error", "give each category its own id; only the first of them counts"),
    "duplicate-image": ("error", "give each image its own id; all annotations of the id go to the first of them"),
    "duplicate-annotation": ("error", "give each annotation its own id; evaluation keeps only one of them"),
    "unknown-image": ("error", "add the image's record to the annotation file, or take the annotation out"),
    "unknown-category": ("error", "add the category to the annotation file, or correct the annotation"),
    "box-not-finite": ("error", "correct the box: it must be four finite numbers, [x, y, width, height]"),
    "box-negative": ("error", "write the box as [x, y, width, height]; two corners are a common mistake"),
    "box-empty": ("warning", "nothing to do: the annotation is left out of training; delete it to be rid of this"),
    "box-outside": ("error", "correct the box, or width and height of the image's record"),
    "box-overhang": ("warning", "nothing to do: the box is cut at the border of the image"),
    "polygon-short": ("warning", "nothing to do: parts of under three points are left out; delete them"),
    "polygon-none": ("error", "draw the outline again: none of its parts encloses anything"),
    "polygon-broken": ("error", "write each part as x, y, x, y, ... of finite numbers"),
    "polygon-crossing": (
        "warning",
        "draw the part again, or leave it: what it encloses twice counts as outside "
        f"(parts of over {MAX_TESTED_POINTS} points are not tested)",
    ),
    "segmentation-broken": ("error", "write the segmentation as a list of polygons or as {size, counts}"),
    "rle-broken": ("error", "encode the mask again at the size of its image"),
}
KINDS = ANNOTATION_KINDS | IMAGE_KINDS


def check_split(
    store: AnnotationStore, *, decode: bool = False, workers: int = 0, progress: Progress | None = None
) -> list[Problem]:
    """All faults of a set's annotations and image files; nothing raises.

    Files are judged by their headers; `decode` decodes each one too. `workers` read files at once, 0 in this thread.
    `progress` is told (images done, images in all).
    """
    return check_annotations(store) + check_images(store, decode=decode, workers=workers, progress=progress)


def check_annotations(store: AnnotationStore) -> list[Problem]:
    """All faults that the annotation file alone shows."""
    return [
        *_set_problems(store),
        *_identity_problems(store),
        *_box_problems(store),
        *_polygon_problems(store),
        *_rle_problems(store),
    ]


def _set_problems(store: AnnotationStore) -> Iterator[Problem]:
    name = store.split.annotations.name
    if not len(store):
        yield _of_set(store, "no-images", f"{name} lists no images")
    if not store.num_annotations:
        yield _of_set(store, "no-annotations", f"{name} lists no annotations")
    if not store.source_categories:
        yield _of_set(store, "no-categories", f"{name} lists no categories")
    without = int(np.count_nonzero((store.columns["ann_kind"] == KIND_NONE) & ~store.columns["ann_crowd"]))
    if without:
        yield _of_set(store, "no-outline", f"{without} of {store.num_annotations} annotations have no segmentation")
    seen: dict[int, str] = {}
    for identity, category in store.source_categories:
        if identity in seen:
            what = f"category id {identity} stands for {seen[identity]!r} and for {category!r}"
            yield _of_set(store, "duplicate-category", what)
        seen.setdefault(identity, category)


def _identity_problems(store: AnnotationStore) -> Iterator[Problem]:
    for index in _repeats(store.image_ids):
        identity, path = int(store.image_ids[index]), store.image(int(index)).path
        severity, remedy = KINDS["duplicate-image"]
        what = f"image id {identity} is used again for {path.name}"
        yield Problem("duplicate-image", severity, identity, None, path, what, remedy)
    for row in _repeats(store.columns["ann_id"]):
        yield _of_row(store, "duplicate-annotation", row, f"annotation id {store.columns['ann_id'][row]} is used again")
    for row in np.arange(int(store.num_instances.sum()), store.num_annotations):
        yield _of_row(store, "unknown-image", row, f"no image has the id {store.columns['ann_image_id'][row]}")
    for row in np.flatnonzero(store.columns["ann_label"] == 0):
        what = f"no category has the id {store.columns['ann_category_id'][row]}"
        yield _of_row(store, "unknown-category", row, what)


def _box_problems(store: AnnotationStore) -> Iterator[Problem]:
    boxes = store.columns["ann_box_xywh"]
    known = int(store.num_instances.sum())
    owner = np.repeat(np.arange(len(store)), store.num_instances)
    size = np.full((len(boxes), 2), np.inf)
    size[:known] = np.stack([store.widths, store.heights], axis=1)[owner]
    with np.errstate(invalid="ignore", over="ignore"):
        is_finite = np.isfinite(boxes).all(axis=1)
        is_negative = is_finite & (boxes[:, 2:] < 0).any(axis=1)
        is_empty = is_finite & ~is_negative & (boxes[:, 2:] == 0).any(axis=1)
        low, high = boxes[:, :2], boxes[:, :2] + boxes[:, 2:]
        has_area = is_finite & ~is_negative & ~is_empty
        is_outside = has_area & ((high <= 0) | (low >= size)).any(axis=1)
        overhang = np.maximum(-low, high - size).max(axis=1, initial=-np.inf)
        sticks_out = has_area & ~is_outside & (overhang > OVERHANG_PX)
    for kind, rows, says in (
        ("box-not-finite", ~is_finite, "is not four finite numbers"),
        ("box-negative", is_negative, "has a negative size"),
        ("box-empty", is_empty, "has no area"),
        ("box-outside", is_outside, "lies wholly outside the image"),
        ("box-overhang", sticks_out, "sticks out of the image"),
    ):
        for row in np.flatnonzero(rows):
            yield _of_row(store, kind, row, f"box {_numbers(boxes[row])} {says}{_image_size(size[row])}")


def _polygon_problems(store: AnnotationStore) -> Iterator[Problem]:
    columns = store.columns
    for row in np.flatnonzero(columns["ann_kind"] == KIND_BROKEN):
        yield _of_row(store, "segmentation-broken", row, "the segmentation is neither polygons nor a run-length mask")
    rows = np.flatnonzero(columns["ann_kind"] == KIND_POLYGONS)
    owner = np.repeat(rows, columns["ann_parts"][rows])  # [P] row of each part
    start = columns["part_start"]
    numbers = np.diff(start)
    not_finite = np.searchsorted(start, np.flatnonzero(~np.isfinite(columns["points"])), side="right") - 1
    is_broken = numbers % 2 == 1
    is_broken[not_finite] = True
    is_short = ~is_broken & (numbers < MIN_POLYGON_NUMBERS)
    for part in np.flatnonzero(is_broken):
        what = f"a polygon of {numbers[part]} numbers is not pairs of finite x, y"
        yield _of_row(store, "polygon-broken", owner[part], what)
    for part in np.flatnonzero(is_short):
        what = f"a polygon has {numbers[part] // 2} points, which enclose nothing"
        yield _of_row(store, "polygon-short", owner[part], what)
    sound = np.flatnonzero(~is_broken & ~is_short)
    for row in np.setdiff1d(rows, owner[sound]):
        yield _of_row(store, "polygon-none", row, "no polygon of the segmentation has three points")
    for part in self_crossing_parts(columns["points"], start, sound):
        what = f"a polygon of {numbers[part] // 2} points crosses itself"
        yield _of_row(store, "polygon-crossing", owner[part], what)


def _rle_problems(store: AnnotationStore) -> Iterator[Problem]:
    known = int(store.num_instances.sum())
    owner = np.repeat(np.arange(len(store)), store.num_instances)
    for row in np.flatnonzero(store.columns["ann_kind"] == KIND_RLE):
        mask = store.rle(int(row))
        height, width = mask["size"]
        try:
            check_runs(runs_from_text(mask["counts"]), height, width)
            if row < known and (height, width) != (store.heights[owner[row]], store.widths[owner[row]]):
                record = store.image(int(owner[row]))
                raise RleError(f"it is {height} high and {width} wide, its image {record.height} and {record.width}")
        except RleError as error:
            yield _of_row(store, "rle-broken", row, f"the run-length mask is broken: {error}")


def _of_set(store: AnnotationStore, kind: str, what: str) -> Problem:
    severity, remedy = KINDS[kind]
    return Problem(kind, severity, None, None, store.split.annotations, what, remedy)


def _of_row(store: AnnotationStore, kind: str, row: int | np.integer, what: str) -> Problem:
    severity, remedy = KINDS[kind]
    image_id, identity = int(store.columns["ann_image_id"][row]), int(store.columns["ann_id"][row])
    try:
        path = store.image(store.index_of(image_id)).path
    except KeyError:
        path = store.split.annotations
    return Problem(kind, severity, image_id, identity, path, what, remedy)


def _repeats(values: npt.NDArray[np.int64]) -> npt.NDArray[np.intp]:
    """Indices of the values that occurred before, ascending."""
    order = np.argsort(values, kind="stable")
    return np.sort(order[1:][values[order][1:] == values[order][:-1]])


def _numbers(values: Floats) -> str:
    return f"[{', '.join(f'{value:g}' for value in values)}]"


def _image_size(size: Floats) -> str:
    return f" of {size[0]:.0f} x {size[1]:.0f}" if np.isfinite(size).all() else ""
