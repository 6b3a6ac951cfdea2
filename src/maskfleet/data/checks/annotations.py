"""Everything that can be wrong with the annotations of a split, found before training starts.

Shapes: A annotations, P polygon parts, n points of a part.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from maskfleet.data.checks.images import IMAGE_KINDS, Progress, check_images
from maskfleet.data.checks.problems import Problem, Severity
from maskfleet.data.checks.self_intersection import MAX_TESTED_POINTS, self_crossing_parts
from maskfleet.data.store.annotations import MIN_POLYGON_NUMBERS, AnnotationStore, Floats
from maskfleet.data.store.coco import KIND_BROKEN, KIND_NONE, KIND_POLYGONS, KIND_RLE
from maskfleet.rle import RleError, check_runs, runs_from_text

OVERHANG_PX = 1.0  # annotation tools round; COCO's own boxes exceed the image by fractions of a pixel

# kind: (severity, remedy)
ANNOTATION_KINDS: dict[str, tuple[Severity, str]] = {
    "no-images": ("error", "check that this is the right annotation file: its list of images is empty"),
    "no-annotations": ("error", "check that this is the right annotation file: there is nothing to learn from it"),
    "no-categories": ("error", "add the list of categories, each with an id and a name, to the annotation file"),
    "no-outline": ("warning", "nothing to do for boxes alone; with masks, the box is used as the outline"),
    "duplicate-category": ("error", "give each category its own id; only the first one is used"),
    "duplicate-image": (
        "error",
        "give each image its own id; all annotations with this id belong to the first one",
    ),
    "duplicate-annotation": ("error", "give each annotation its own id; evaluation keeps only one of them"),
    "unknown-image": ("error", "add the image to the annotation file, or remove the annotation"),
    "unknown-category": ("error", "add the category to the annotation file, or correct the annotation"),
    "box-not-finite": ("error", "correct the box: it must be four finite numbers, [x, y, width, height]"),
    "box-negative": ("error", "write the box as [x, y, width, height]; two corners are a common mistake"),
    "box-empty": ("warning", "nothing to do: the annotation is not used in training; delete it to remove this warning"),
    "box-outside": ("error", "correct the box, or the width and height of the image in the annotation file"),
    "box-overhang": ("warning", "nothing to do: the box is clipped to the image"),
    "polygon-short": ("warning", "nothing to do: parts with fewer than three points are ignored; delete them"),
    "polygon-none": ("error", "draw the outline again: none of its parts has an area"),
    "polygon-broken": ("error", "write each part as finite numbers x, y, x, y, ..."),
    "polygon-crossing": (
        "warning",
        "draw the part again, or keep it: areas that it encloses twice count as outside "
        f"(parts with more than {MAX_TESTED_POINTS} points are not tested)",
    ),
    "segmentation-broken": ("error", "write the segmentation as a list of polygons or as {size, counts}"),
    "rle-broken": ("error", "encode the mask again with the size of its image"),
}
KINDS = ANNOTATION_KINDS | IMAGE_KINDS


def check_split(
    store: AnnotationStore, *, decode: bool = False, workers: int = 0, progress: Progress | None = None
) -> list[Problem]:
    """All problems of a split's annotations and image files; never raises.

    Reads the header of each image file; with `decode` also decodes it. `workers` files are read in parallel; 0 reads
    them in this thread. `progress` is called with (images done, images in total).
    """
    return check_annotations(store) + check_images(store, decode=decode, workers=workers, progress=progress)


def check_annotations(store: AnnotationStore) -> list[Problem]:
    """All problems that can be found without reading images."""
    return [
        *_split_problems(store),
        *_id_problems(store),
        *_box_problems(store),
        *_polygon_problems(store),
        *_rle_problems(store),
    ]


def _split_problems(store: AnnotationStore) -> Iterator[Problem]:
    name = store.split.annotations.name
    if not len(store):
        yield _split_problem(store, "no-images", f"{name} lists no images")
    if not store.num_annotations:
        yield _split_problem(store, "no-annotations", f"{name} lists no annotations")
    if not store.source_categories:
        yield _split_problem(store, "no-categories", f"{name} lists no categories")
    without = int(np.count_nonzero((store.columns["ann_kind"] == KIND_NONE) & ~store.columns["ann_crowd"]))
    if without:
        yield _split_problem(
            store, "no-outline", f"{without} of {store.num_annotations} annotations have no segmentation"
        )
    seen: dict[int, str] = {}
    for identity, category in store.source_categories:
        if identity in seen:
            what = f"category id {identity} is used for {seen[identity]!r} and for {category!r}"
            yield _split_problem(store, "duplicate-category", what)
        seen.setdefault(identity, category)


def _id_problems(store: AnnotationStore) -> Iterator[Problem]:
    for index in _repeats(store.image_ids):
        identity, path = int(store.image_ids[index]), store.image(int(index)).path
        severity, remedy = KINDS["duplicate-image"]
        what = f"image id {identity} is also used for {path.name}"
        yield Problem("duplicate-image", severity, identity, None, path, what, remedy)
    for row in _repeats(store.columns["ann_id"]):
        yield _row_problem(
            store, "duplicate-annotation", row, f"annotation id {store.columns['ann_id'][row]} is used more than once"
        )
    for row in np.arange(int(store.num_instances.sum()), store.num_annotations):
        yield _row_problem(store, "unknown-image", row, f"no image has the id {store.columns['ann_image_id'][row]}")
    for row in np.flatnonzero(store.columns["ann_label"] == 0):
        what = f"no category has the id {store.columns['ann_category_id'][row]}"
        yield _row_problem(store, "unknown-category", row, what)


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
        overhangs = has_area & ~is_outside & (overhang > OVERHANG_PX)
    for kind, rows, text in (
        ("box-not-finite", ~is_finite, "is not four finite numbers"),
        ("box-negative", is_negative, "has a negative size"),
        ("box-empty", is_empty, "has no area"),
        ("box-outside", is_outside, "is entirely outside the image"),
        ("box-overhang", overhangs, "extends beyond the image"),
    ):
        for row in np.flatnonzero(rows):
            yield _row_problem(store, kind, row, f"box {_numbers(boxes[row])} {text}{_image_size(size[row])}")


def _polygon_problems(store: AnnotationStore) -> Iterator[Problem]:
    columns = store.columns
    for row in np.flatnonzero(columns["ann_kind"] == KIND_BROKEN):
        yield _row_problem(
            store, "segmentation-broken", row, "the segmentation is neither polygons nor a run-length mask"
        )
    rows = np.flatnonzero(columns["ann_kind"] == KIND_POLYGONS)
    owner = np.repeat(rows, columns["ann_parts"][rows])  # [P] row of each part
    start = columns["part_start"]
    numbers = np.diff(start)
    not_finite = np.searchsorted(start, np.flatnonzero(~np.isfinite(columns["points"])), side="right") - 1
    is_broken = numbers % 2 == 1
    is_broken[not_finite] = True
    is_short = ~is_broken & (numbers < MIN_POLYGON_NUMBERS)
    for part in np.flatnonzero(is_broken):
        what = f"a polygon of {numbers[part]} numbers does not consist of finite x, y pairs"
        yield _row_problem(store, "polygon-broken", owner[part], what)
    for part in np.flatnonzero(is_short):
        what = f"a polygon has {numbers[part] // 2} points; at least three are needed"
        yield _row_problem(store, "polygon-short", owner[part], what)
    valid = np.flatnonzero(~is_broken & ~is_short)
    for row in np.setdiff1d(rows, owner[valid]):
        yield _row_problem(store, "polygon-none", row, "no polygon of the segmentation has three points")
    for part in self_crossing_parts(columns["points"], start, valid):
        what = f"a polygon of {numbers[part] // 2} points crosses itself"
        yield _row_problem(store, "polygon-crossing", owner[part], what)


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
                raise RleError(
                    f"its height and width are {height} and {width}, its image's {record.height} and {record.width}"
                )
        except RleError as error:
            yield _row_problem(store, "rle-broken", row, f"the run-length mask is broken: {error}")


def _split_problem(store: AnnotationStore, kind: str, what: str) -> Problem:
    severity, remedy = KINDS[kind]
    return Problem(kind, severity, None, None, store.split.annotations, what, remedy)


def _row_problem(store: AnnotationStore, kind: str, row: int | np.integer, what: str) -> Problem:
    severity, remedy = KINDS[kind]
    image_id, identity = int(store.columns["ann_image_id"][row]), int(store.columns["ann_id"][row])
    try:
        path = store.image(store.index_of(image_id)).path
    except KeyError:
        path = store.split.annotations
    return Problem(kind, severity, image_id, identity, path, what, remedy)


def _repeats(values: npt.NDArray[np.int64]) -> npt.NDArray[np.intp]:
    """Indices, ascending, of values that occur earlier in the array too."""
    order = np.argsort(values, kind="stable")
    return np.sort(order[1:][values[order][1:] == values[order][:-1]])


def _numbers(values: Floats) -> str:
    return f"[{', '.join(f'{value:g}' for value in values)}]"


def _image_size(size: Floats) -> str:
    return f" (image size {size[0]:.0f} x {size[1]:.0f})" if np.isfinite(size).all() else ""
