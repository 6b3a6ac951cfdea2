"""The kinds of problems of a data set, their summary, and whether training may start."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from maskfleet.data.checks.self_intersection import MAX_TESTED_POINTS
from maskfleet.data.files.stored import ImagePath
from maskfleet.data.store.annotations import AnnotationStore
from maskfleet.errors import DataError
from maskfleet.log import count_text

Severity = Literal["error", "warning"]

# kind: (severity, remedy)
KINDS: dict[str, tuple[Severity, str]] = {
    "no-images": ("error", "check that this is the right annotation file: its list of images is empty"),
    "no-annotations": ("error", "check that this is the right annotation file: there is nothing to learn from it"),
    "no-categories": ("error", "add the list of categories, each with an id and a name, to the annotation file"),
    "no-outline": ("warning", "nothing to do for boxes alone; with masks, the box is used as the outline"),
    "duplicate-category": ("error", "give each category its own id; only the first one is used"),
    "category-name": ("warning", "give each class its own name, or use one id for both if they are the same class"),
    "category-mismatch": (
        "error",
        "give all splits of a run the same categories: the same ids with the same names",
    ),
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
    "box-normalised": ("error", "multiply the boxes by the width and height of their image: COCO's are in pixels"),
    "box-corners": ("error", "write the box as [x, y, width, height], with width = right - left"),
    "box-polygon": (
        "warning",
        "correct the one that is wrong: boxes are learned from the box, masks from the polygons",
    ),
    "crowd-value": ("warning", "write iscrowd as 0 or 1; every value that is not 0 or empty marks a crowd region"),
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
    "image-missing": (
        "error",
        "copy the missing images, correct their file_name (a path below the image folder, with /), or remove them from "
        "the annotation file",
    ),
    "image-empty": ("error", "copy the file again; it is empty"),
    "image-corrupt": ("error", "copy or download the file again; compare checksums with the original"),
    "image-truncated": ("error", "copy or download the file again; its end is missing"),
    "image-too-large": ("error", "scale the image down, or raise the limit, data.max_image_mpx"),
    "image-outside": (
        "error",
        "write file_name relative to the image folder, or allow it with data.allow_outside=true",
    ),
    "image-size": ("error", "correct width and height in the annotation file, or restore the original image"),
    "file-repeated": ("warning", "keep one of the entries, and give it the annotations of both"),
    "image-repeated": (
        "warning",
        "keep one of the images; one that is also in the training split makes the validation look too good",
    ),
    "image-grey": ("warning", "nothing to do: its channel is copied to blue, green and red"),
    "image-cmyk": ("warning", "convert it to RGB if exact colours matter: the decoder's conversion is approximate"),
    "image-alpha": ("warning", "nothing to do: the alpha channel is dropped"),
    "image-16bit": ("warning", "nothing to do: only the upper 8 bits of each channel are used"),
    "image-rotated": (
        "warning",
        "nothing to do if the boxes were drawn on the stored pixels, as in COCO: the EXIF orientation is ignored; "
        "otherwise rotate the image file",
    ),
}


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem. An error makes its image unusable for training; a warning says how training handles it."""

    kind: str  # such as "image-missing"; a key of KINDS
    severity: Severity
    image_id: int | None  # None: a problem of the whole split
    annotation_id: int | None
    path: ImagePath | None
    what: str
    remedy: str


def problem_of(
    kind: str, what: str, path: ImagePath | None, image_id: int | None = None, annotation_id: int | None = None
) -> Problem:
    """A problem with the severity and remedy of its kind."""
    severity, remedy = KINDS[kind]
    return Problem(kind, severity, image_id, annotation_id, path, what, remedy)


def row_problem(store: AnnotationStore, kind: str, row: int | np.integer, what: str) -> Problem:
    """A problem of the annotation in `row` of a store."""
    image_id, identity = int(store.columns["ann_image_id"][row]), int(store.columns["ann_id"][row])
    index = int(store.owner(row))
    path = store.image(index).path if index < len(store) else store.split.annotations
    return problem_of(kind, what, path, image_id, identity)


def bad_images(problems: Iterable[Problem]) -> set[int]:
    """Ids of the images that `data.on_bad: skip` leaves out: those with an error."""
    return {problem.image_id for problem in problems if problem.severity == "error" and problem.image_id is not None}


def raise_for(problems: Sequence[Problem], on_bad: Literal["error", "skip"]) -> None:
    """Raise one DataError that lists every error; with `skip`, only errors of the whole split count."""
    errors = [problem for problem in problems if problem.severity == "error"]
    if on_bad == "skip":
        errors = [problem for problem in errors if problem.image_id is None]
    if not errors:
        return
    remedies = list(dict.fromkeys(problem.remedy for problem in errors))
    remedy = "; ".join(remedies[:3])
    if on_bad == "error" and any(problem.image_id is not None for problem in errors):
        remedy += "; or skip those images with data.on_bad=skip"
    raise DataError(summarise(errors), remedy=remedy)


def summarise(problems: Sequence[Problem], *, limit: int = 5) -> str:
    """Counts by kind, errors first, with at most `limit` examples of each."""
    if not problems:
        return "no problems found"
    num_errors = sum(problem.severity == "error" for problem in problems)
    lines = [f"{count_text(num_errors, 'error')} and {count_text(len(problems) - num_errors, 'warning')} in the data"]
    for severity, kind, count in kind_counts(problems):
        lines.append(f"{severity}: {kind}, {count} found")
        of_kind = [problem for problem in problems if problem.kind == kind]
        lines += [f"    {_location(problem)}{problem.what}" for problem in of_kind[:limit]]
        if count > limit:
            lines.append(f"    and {count - limit} more")
    return "\n".join(lines)


def kind_counts(problems: Iterable[Problem]) -> list[tuple[Severity, str, int]]:
    """(severity, kind, count), errors first, then by count."""
    counts = Counter((problem.severity, problem.kind) for problem in problems)
    return sorted(((*kind, count) for kind, count in counts.items()), key=lambda one: (one[0], -one[2], one[1]))


def _location(problem: Problem) -> str:
    parts = []
    if problem.image_id is not None:
        parts.append(f"image {problem.image_id}")
    if problem.annotation_id is not None:
        parts.append(f"annotation {problem.annotation_id}")
    return f"{', '.join(parts)}: " if parts else ""
