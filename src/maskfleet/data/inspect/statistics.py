"""Counts and distributions of a split, as plain numbers.

Shapes: I images, A annotations of known images, N of them usable, K classes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from maskfleet.data.pipeline.buckets import choose_buckets
from maskfleet.data.store.annotations import AnnotationStore, Floats, InstanceArrays, Ints, clean_instances
from maskfleet.data.store.coco import KIND_BROKEN, KIND_NONE, KIND_POLYGONS, KIND_RLE

SMALL_AREA, LARGE_AREA = 32.0**2, 96.0**2  # COCO's limits between small, medium and large
MAX_COUNT_BINS = 30
MAX_SIZES = 400
SIZE_STEP_PX = 32
BucketMode = Literal["orientation", "tight", "none"]


@dataclass(frozen=True, slots=True)
class Histogram:
    """Counts of values between neighbouring edges; the outermost bins include values beyond them."""

    edges: tuple[float, ...]  # one more than counts
    counts: tuple[int, ...]
    median: float | None


@dataclass(frozen=True, slots=True)
class ClassCount:
    """One class: its objects, its crowd regions, and the images with at least one object."""

    id: int
    name: str
    label: int
    objects: int
    crowds: int
    images: int


@dataclass(frozen=True, slots=True)
class SizeShares:
    """Objects by COCO's three area ranges."""

    small: int
    medium: int
    large: int


@dataclass(frozen=True, slots=True)
class ImageSize:
    """A size and its number of images; with `step_px` above 1, the centre of a grid cell of that size."""

    width: int
    height: int
    images: int


@dataclass(frozen=True, slots=True)
class ImageSizes:
    """The sizes of all images, most frequent first."""

    distinct: int
    step_px: int
    sizes: tuple[ImageSize, ...]


@dataclass(frozen=True, slots=True)
class CanvasUse:
    """A canvas in pixels and the number of images padded to it; None if each batch has its own size."""

    height: int | None
    width: int | None
    images: int


@dataclass(frozen=True, slots=True)
class BucketUse:
    """The canvases and padding of one setting of `data.buckets`, at the largest training size."""

    mode: BucketMode
    canvases: tuple[CanvasUse, ...]
    padding: float  # share of canvas pixels outside the images; for "none", with one image per batch
    saved: float  # share of the canvas pixels of "orientation", the default, that this setting saves


def object_table(store: AnnotationStore) -> InstanceArrays:
    """The annotations of all images that training uses, including crowds."""
    return clean_instances(store.annotations(0, int(store.num_instances.sum())))


def class_counts(store: AnnotationStore, table: InstanceArrays) -> tuple[ClassCount, ...]:
    """The classes in the order of their labels."""
    bins = len(store.categories) + 1
    objects = np.bincount(table.labels[~table.crowd], minlength=bins)
    crowds = np.bincount(table.labels[table.crowd], minlength=bins)
    seen = np.unique(table.owner[~table.crowd] * bins + table.labels[~table.crowd])
    images = np.bincount(seen % bins, minlength=bins)
    return tuple(
        ClassCount(c.id, c.name, c.label, int(objects[c.label]), int(crowds[c.label]), int(images[c.label]))
        for c in store.categories
    )


def outline_counts(store: AnnotationStore) -> dict[str, int]:
    """Annotations by the format of their outlines."""
    kinds = np.bincount(store.columns["ann_kind"], minlength=4)
    names = {KIND_POLYGONS: "polygons", KIND_RLE: "rle", KIND_NONE: "none", KIND_BROKEN: "broken"}
    return {name: int(kinds[kind]) for kind, name in names.items()}


def size_shares(objects: InstanceArrays) -> SizeShares:
    """Objects by COCO's ranges of the outline's area, as in its evaluation."""
    small, not_large = int((objects.area < SMALL_AREA).sum()), int((objects.area <= LARGE_AREA).sum())
    return SizeShares(small, not_large - small, len(objects.area) - not_large)


def box_size_histogram(objects: InstanceArrays) -> Histogram:
    """Square root of the box area in pixels, two bins per factor of two, from 1 px."""
    sides = objects.boxes[:, 2:] - objects.boxes[:, :2]
    return _log_histogram(np.sqrt(sides.prod(axis=1)), bins_per_octave=2, low=0, high=13)


def aspect_histogram(objects: InstanceArrays) -> Histogram:
    """Box width over height, three bins per factor of two, one of them centred on 1."""
    sides = objects.boxes[:, 2:] - objects.boxes[:, :2]
    return _log_histogram(sides[:, 0] / sides[:, 1], bins_per_octave=3, low=-6, high=6, shift=0.5)


def objects_per_image(objects: InstanceArrays, num_images: int) -> Histogram:
    """Objects per image, crowds not counted; an edge is the first number of its bin."""
    counts = np.bincount(objects.owner, minlength=num_images)
    if not num_images:
        return Histogram((0.0, 1.0), (0,), None)
    step = -(-(int(counts.max()) + 1) // MAX_COUNT_BINS)
    edges = np.arange(0, int(counts.max()) + step + 1, step)
    found, _ = np.histogram(counts, edges - 0.5)
    return Histogram(tuple(edges.astype(float).tolist()), tuple(found.tolist()), float(np.median(counts)))


def image_sizes(store: AnnotationStore) -> ImageSizes:
    """All image sizes of the annotation file; more than MAX_SIZES are grouped on a grid."""
    sizes, counts = _distinct_sizes(store.widths, store.heights)
    distinct, step = len(sizes), 1
    while len(sizes) > MAX_SIZES:
        step = SIZE_STEP_PX if step == 1 else step * 2
        middles = [side // step * step + step // 2 for side in (store.widths, store.heights)]
        sizes, counts = _distinct_sizes(*middles)
    order = np.argsort(-counts, kind="stable")
    rows = np.column_stack([sizes, counts])[order].tolist()
    return ImageSizes(distinct, step, tuple(ImageSize(*row) for row in rows))


def bucket_uses(store: AnnotationStore, *, short_edge_px: int, max_px: int, divisor: int) -> tuple[BucketUse, ...]:
    """The effect of each setting of `data.buckets`; images without a size are skipped."""
    known = (store.widths > 0) & (store.heights > 0)
    heights, widths = store.heights[known], store.widths[known]
    if not len(heights):
        return ()
    uses, default_pixels = [], 0
    for mode in get_args(BucketMode):  # the default is the first
        buckets = choose_buckets(mode, heights, widths, short_edge_px=short_edge_px, max_px=max_px, divisor=divisor)
        counts = np.bincount(buckets.of(heights, widths), minlength=len(buckets.canvases)).tolist()
        canvases = [
            CanvasUse(canvas[0], canvas[1], count) if canvas else CanvasUse(None, None, count)
            for canvas, count in zip(buckets.canvases, counts, strict=True)
        ]
        filled = int(buckets.resized(heights, widths).prod(axis=1).sum())
        pixels = buckets.padded_pixels(heights, widths)
        default_pixels = default_pixels or pixels
        uses.append(BucketUse(mode, tuple(canvases), 1 - filled / pixels, 1 - pixels / default_pixels))
    return tuple(uses)


def _log_histogram(values: Floats, *, bins_per_octave: int, low: int, high: int, shift: float = 0.0) -> Histogram:
    """Bins of equal ratio that cover the values, within 2**low and 2**high; edges are moved down by `shift` bins."""
    if not len(values):
        return Histogram((1.0, 2.0), (0,), None)
    bins = np.floor(np.log2(values) * bins_per_octave + shift)
    bins = np.clip(bins, low * bins_per_octave, high * bins_per_octave - 1).astype(np.int64)
    first, last = int(bins.min()), int(bins.max())
    edges = tuple(math.exp2((number - shift) / bins_per_octave) for number in range(first, last + 2))
    return Histogram(edges, tuple(np.bincount(bins - first).tolist()), float(np.median(values)))


def _distinct_sizes(widths: Ints, heights: Ints) -> tuple[Ints, Ints]:
    """Distinct (width, height) pairs and how often each occurs."""
    sizes, counts = np.unique(np.stack([widths, heights], axis=1), axis=0, return_counts=True)
    return np.asarray(sizes, np.int64), np.asarray(counts, np.int64)
