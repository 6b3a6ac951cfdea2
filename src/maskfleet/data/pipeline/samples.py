"""One image and its ground truth, ready to be put on a canvas.

Shapes: N objects, C crowd regions, E edges of an outline. Boxes are xyxy float32 pixels of what the canvas shows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from maskfleet.data.pipeline import augment
from maskfleet.data.pipeline.augment import Floats, Geometry, Ints, Pixels
from maskfleet.data.pipeline.decode import read_image
from maskfleet.data.store.annotations import AnnotationStore, ImageRecord, InstanceArrays, clean_instances
from maskfleet.errors import DataError
from maskfleet.ops.outlines import Edges, bitmap_edges, polygon_edges
from maskfleet.rle import RleError, check_runs, runs_from_text


@dataclass(frozen=True, slots=True)
class Preparation:
    """What is done to each training image, and which ground truth is wanted of it."""

    short_edge_px: tuple[int, int]
    max_px: int
    flip: float
    scale_jitter: tuple[float, float] | None
    color_jitter: float
    masks: bool
    crowds: bool


@dataclass(frozen=True, slots=True)
class Sample:
    """A decoded image, where it goes, and its ground truth already there."""

    image_id: int
    image: Pixels  # the source, not yet resized
    geometry: Geometry
    boxes: Floats  # [N, 4]
    labels: Ints  # [N]
    outlines: list[Edges]  # [N], or none at all where no masks are trained
    crowd_boxes: Floats  # [C, 4]
    seed: int


def train_sample(
    store: AnnotationStore, index: int, *, preparation: Preparation, canvas: tuple[int, int] | None, seed: int
) -> Sample:
    """Image `index` of `store`, augmented as `seed` decides; `canvas` is needed for large-scale jitter only."""
    record = store.image(index)
    image = read_image(record.path, image_id=record.id, size=(record.height, record.width))
    numbers = augment.draws(seed)
    if preparation.color_jitter:
        image = augment.jitter_colour(image, preparation.color_jitter, numbers)
    geometry = _geometry(record, preparation, canvas, numbers)
    found = clean_instances(record, store.instances(index))
    objects = found.objects
    outlines = [_outline(record, objects, number) for number in range(len(objects))] if preparation.masks else []
    boxes, crowd_boxes = augment.move_boxes(objects.boxes, geometry), np.zeros((0, 4), np.float32)
    if preparation.crowds:
        crowd_boxes = augment.move_boxes(found.crowds.boxes, geometry)
    labels, moved = objects.labels.astype(np.int64), [_moved(outline, geometry) for outline in outlines]
    if geometry.cropped:
        boxes, keep = _boxes_in_window(boxes, outlines, geometry)
        labels, moved = labels[keep], [moved[number] for number in keep] if moved else []
        clipped, still_there = augment.clip_boxes(crowd_boxes, geometry.size)
        crowd_boxes = clipped[still_there]
    edges = [_edges(outline) for outline in moved]
    return Sample(record.id, image, geometry, boxes, labels, edges, crowd_boxes, seed)


def evaluation_sample(store: AnnotationStore, index: int, *, short_edge_px: int, max_px: int) -> Sample:
    """Image `index` of `store` at the size of evaluation, without ground truth."""
    record = store.image(index)
    image = read_image(record.path, image_id=record.id, size=(record.height, record.width))
    geometry = augment.resize_geometry(
        (record.height, record.width), short_edge_px=(short_edge_px, short_edge_px), max_px=max_px
    )
    no_boxes = np.zeros((0, 4), np.float32)
    return Sample(record.id, image, geometry, no_boxes, np.zeros(0, np.int64), [], no_boxes, 0)


def _geometry(
    record: ImageRecord, preparation: Preparation, canvas: tuple[int, int] | None, numbers: npt.NDArray[np.float64]
) -> Geometry:
    source = (record.height, record.width)
    if preparation.scale_jitter is None:
        return augment.resize_geometry(
            source,
            short_edge_px=preparation.short_edge_px,
            max_px=preparation.max_px,
            numbers=numbers,
            flip=preparation.flip,
        )
    assert canvas is not None, "large-scale jitter cuts to a fixed canvas"
    return augment.jitter_geometry(
        source, canvas=canvas, scale=preparation.scale_jitter, numbers=numbers, flip=preparation.flip
    )


@dataclass(frozen=True, slots=True)
class _Outline:
    """An instance's mask in source pixels: as polygons, or as a bitmap and the edges that bound it."""

    polygons: list[npt.NDArray[Any]]
    bitmap: npt.NDArray[np.bool_] | None = None  # no larger than the mask
    corner: tuple[int, int] = (0, 0)  # (y, x) of the bitmap
    edges: Edges | None = None


def _outline(record: ImageRecord, objects: InstanceArrays, number: int) -> _Outline:
    """The mask of object `number`; its box stands in where the annotation has no outline of three points."""
    polygons = objects.polygons(number)
    if polygons:
        return _Outline(list(polygons))
    rle = objects.rle(number)
    if rle is not None:
        return _bitmap_outline(_runs(rle, record, int(objects.ids[number])), record.height)
    left, top, right, bottom = objects.boxes[number]
    return _Outline([np.array([[left, top], [right, top], [right, bottom], [left, bottom]])])


def _runs(rle: dict[str, Any], record: ImageRecord, annotation_id: int) -> Ints:
    """The runs that `rle` packs, which cover the image."""
    try:
        if tuple(rle["size"]) != (record.height, record.width):
            raise RleError(f"its size is {rle['size']}, but the image is {record.height} x {record.width}")
        runs = runs_from_text(rle["counts"])
        check_runs(runs, record.height, record.width)
    except RleError as error:
        raise DataError(
            f"the mask of annotation {annotation_id} of image {record.id}, {record.path}, is broken: {error}",
            remedy="mend the annotation, or set data.on_bad=skip to train without the image",
        ) from None
    return runs


def _bitmap_outline(runs: Ints, height: int) -> _Outline:
    """The outline of a run-length mask, whose runs go down the columns; only its own columns and rows are unpacked."""
    ends = np.cumsum(runs)
    inked = np.flatnonzero(runs[1::2])
    if not len(inked):
        return _Outline([], edges=bitmap_edges(np.zeros((1, 1), np.bool_)))
    left = int(ends[2 * inked[0]]) // height
    right = -(-int(ends[2 * inked[-1] + 1]) // height)
    is_ink = np.arange(len(runs)) % 2 == 1
    borders = np.clip(ends, left * height, right * height)
    kept = borders - np.concatenate([[left * height], borders[:-1]])
    columns = np.repeat(is_ink, kept).reshape(right - left, height)
    rows = np.flatnonzero(columns.any(axis=0))
    top, bottom = int(rows[0]), int(rows[-1]) + 1
    bitmap = columns[:, top:bottom].T
    edges, part = bitmap_edges(bitmap)
    return _Outline([], bitmap, (top, left), (edges + np.array([left, top, left, top], np.float32), part))


def _moved(outline: _Outline, geometry: Geometry) -> _Outline:
    if outline.edges is None:
        return _Outline([augment.move_points(polygon, geometry) for polygon in outline.polygons])
    edges, part = outline.edges
    return _Outline([], edges=(augment.move_points(edges.reshape(-1, 2), geometry).reshape(-1, 4), part))


def _edges(outline: _Outline) -> Edges:
    return polygon_edges(outline.polygons) if outline.edges is None else outline.edges


def _boxes_in_window(boxes: Floats, outlines: list[_Outline], geometry: Geometry) -> tuple[Floats, Ints]:
    """Boxes of what a cut leaves to be seen, and the numbers of the objects of which it leaves anything.

    A box is clipped to the window; one that the window cuts is also drawn in to the part of its outline inside, as
    the box of an object that reaches into the window by a finger is the finger's.
    """
    clipped, keep = augment.clip_boxes(boxes, geometry.size)
    is_cut = (clipped != boxes).any(axis=1)
    for number in np.flatnonzero(keep & is_cut).tolist() if outlines else []:
        seen = _seen_box(outlines[number], geometry)
        if seen is None:
            keep[number] = False
            continue
        clipped[number, :2] = np.maximum(clipped[number, :2], seen[:2])
        clipped[number, 2:] = np.minimum(clipped[number, 2:], seen[2:])
        keep[number] = bool((clipped[number, 2:] - clipped[number, :2] >= augment.MIN_CROPPED_SIDE_PX).all())
    return clipped[keep], np.flatnonzero(keep)


def _seen_box(outline: _Outline, geometry: Geometry) -> Floats | None:
    """Bounds, on the canvas, of the part of an outline inside the window; None if there is none."""
    if outline.edges is None:
        moved = [augment.move_points(polygon, geometry) for polygon in outline.polygons]
        inside = np.concatenate([augment.clip_polygon(polygon, geometry.size) for polygon in moved])
        return np.concatenate([inside.min(axis=0), inside.max(axis=0)]).astype(np.float32) if len(inside) else None
    if outline.bitmap is None:
        return None
    per_pixel = np.array(geometry.source) / np.array(geometry.resized)
    start = np.floor(np.array(geometry.offset) * per_pixel).astype(int) - outline.corner
    stop = np.ceil((np.array(geometry.offset) + geometry.size) * per_pixel).astype(int) - outline.corner
    start, stop = np.maximum(start, 0), np.maximum(stop, 0)
    rows, columns = np.nonzero(outline.bitmap[start[0] : stop[0], start[1] : stop[1]])
    if not len(rows):
        return None
    top, left = start + outline.corner
    corners = np.array([[columns.min() + left, rows.min() + top, columns.max() + left + 1, rows.max() + top + 1]])
    return np.asarray(augment.move_boxes(corners, geometry)[0], np.float32)
