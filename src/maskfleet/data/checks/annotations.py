"""Everything that can be wrong with the annotations of a split, found before training starts.

Shapes: A annotations, P polygon parts, n points of a part.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from maskfleet.data.checks.box_format import box_format_problems
from maskfleet.data.checks.images import Progress, check_images
from maskfleet.data.checks.problems import Problem, problem_of, row_problem
from maskfleet.data.checks.self_intersection import self_crossing_parts
from maskfleet.data.store.annotations import MIN_POLYGON_NUMBERS, AnnotationStore
from maskfleet.data.store.coco import KIND_BROKEN, KIND_NONE, KIND_POLYGONS, KIND_RLE
from maskfleet.rle import RleError, check_runs, runs_from_text

OVERHANG_PX = 1.0  # annotation tools round; COCO's own boxes exceed the image by fractions of a pixel


def check_split(
    store: AnnotationStore,
    *,
    decode: bool = False,
    workers: int = 0,
    progress: Progress | None = None,
    listed: bool = False,
    thumbnails: list[bytes | None] | None = None,
) -> list[Problem]:
    """All problems of a split's annotations and image files; never raises.

    Reads the header of each image file; with `decode` also decodes it. `workers` files are read in parallel; 0 reads
    them in this thread. `progress` is called with (images done, images in total). With `listed`, images in S3 are not
    read: they must be listed and not empty. The thumbnails of decoded images are appended to `thumbnails`.
    `check_data` in together.py also compares the splits of a run.
    """
    images = check_images(
        store, decode=decode, workers=workers, progress=progress, listed=listed, thumbnails=thumbnails
    )
    return check_annotations(store) + images


def check_annotations(store: AnnotationStore) -> list[Problem]:
    """All problems that can be found without reading images."""
    return [
        *_split_problems(store),
        *_id_problems(store),
        *_box_problems(store),
        *box_format_problems(store),
        *_polygon_problems(store),
        *_rle_problems(store),
    ]


def _split_problems(store: AnnotationStore) -> Iterator[Problem]:
    file = store.split.annotations
    lists = {"images": len(store), "annotations": store.num_annotations, "categories": len(store.source_categories)}
    for name, count in lists.items():
        if not count:
            yield problem_of(f"no-{name}", f"{file.name} lists no {name}", file)
    without = int(np.count_nonzero((store.columns["ann_kind"] == KIND_NONE) & ~store.columns["ann_crowd"]))
    if without:
        what = f"{without} of {store.num_annotations} annotations have no segmentation"
        yield problem_of("no-outline", what, file)
    yield from _category_problems(store)


def _category_problems(store: AnnotationStore) -> Iterator[Problem]:
    file = store.split.annotations
    seen: dict[int, str] = {}
    for identity, category in store.source_categories:
        if identity in seen:
            what = f"category id {identity} is used for {seen[identity]!r} and for {category!r}"
            yield problem_of("duplicate-category", what, file)
        seen.setdefault(identity, category)
    of_name: dict[str, list[int]] = {}
    for identity, category in seen.items():
        of_name.setdefault(category.strip().casefold(), []).append(identity)
    for ids in of_name.values():
        if len(ids) > 1:
            what = f"categories {', '.join(map(str, ids))} have the same name, {seen[ids[0]]!r}"
            yield problem_of("category-name", what, file)


def _id_problems(store: AnnotationStore) -> Iterator[Problem]:
    for index in _repeats(store.image_ids):
        identity, path = int(store.image_ids[index]), store.image(int(index)).path
        what = f"image id {identity} is also used for {path.name}"
        yield problem_of("duplicate-image", what, path, identity)
    for row in _repeats(store.columns["ann_id"]):
        yield row_problem(
            store, "duplicate-annotation", row, f"annotation id {store.columns['ann_id'][row]} is used more than once"
        )
    for row in np.arange(int(store.num_instances.sum()), store.num_annotations):
        yield row_problem(store, "unknown-image", row, f"no image has the id {store.columns['ann_image_id'][row]}")
    for row in np.flatnonzero(store.columns["ann_label"] == 0):
        what = f"no category has the id {store.columns['ann_category_id'][row]}"
        yield row_problem(store, "unknown-category", row, what)
    for row in np.flatnonzero(store.columns["ann_crowd_unclear"]):
        meaning = "a crowd region" if store.columns["ann_crowd"][row] else "an object"
        yield row_problem(store, "crowd-value", row, f"iscrowd is neither 0 nor 1; it is read as {meaning}")


def _box_problems(store: AnnotationStore) -> Iterator[Problem]:
    boxes = store.columns["ann_box_xywh"]
    sizes = np.concatenate([np.stack([store.widths, store.heights], axis=1), [[np.inf, np.inf]]])  # of an unknown image
    size = sizes[store.owner(np.arange(len(boxes)))]
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
            box = ", ".join(f"{value:g}" for value in boxes[row])
            of_image = " (image size {:.0f} x {:.0f})".format(*size[row]) if np.isfinite(size[row]).all() else ""
            yield row_problem(store, kind, row, f"box [{box}] {text}{of_image}")


def _polygon_problems(store: AnnotationStore) -> Iterator[Problem]:
    columns = store.columns
    for row in np.flatnonzero(columns["ann_kind"] == KIND_BROKEN):
        yield row_problem(
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
        yield row_problem(store, "polygon-broken", owner[part], what)
    for part in np.flatnonzero(is_short):
        what = f"a polygon has {numbers[part] // 2} points; at least three are needed"
        yield row_problem(store, "polygon-short", owner[part], what)
    valid = np.flatnonzero(~is_broken & ~is_short)
    for row in np.setdiff1d(rows, owner[valid]):
        yield row_problem(store, "polygon-none", row, "no polygon of the segmentation has three points")
    for part in self_crossing_parts(columns["points"], start, valid):
        what = f"a polygon of {numbers[part] // 2} points crosses itself"
        yield row_problem(store, "polygon-crossing", owner[part], what)


def _rle_problems(store: AnnotationStore) -> Iterator[Problem]:
    for row in np.flatnonzero(store.columns["ann_kind"] == KIND_RLE):
        mask = store.rle(int(row))
        height, width = mask["size"]
        try:
            check_runs(runs_from_text(mask["counts"]), height, width)
            index = int(store.owner(row))
            if index < len(store) and (height, width) != (store.heights[index], store.widths[index]):
                size = f"{store.heights[index]} and {store.widths[index]}"
                raise RleError(f"its height and width are {height} and {width}, its image's {size}")
        except RleError as error:
            yield row_problem(store, "rle-broken", row, f"the run-length mask is broken: {error}")


def _repeats(values: npt.NDArray[np.int64]) -> npt.NDArray[np.intp]:
    """Indices, ascending, of values that occur earlier in the array too."""
    order = np.argsort(values, kind="stable")
    return np.sort(order[1:][values[order][1:] == values[order][:-1]])
