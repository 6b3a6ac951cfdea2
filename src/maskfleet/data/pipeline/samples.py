"""One image and its ground truth, ready for a batch.

Shapes: N objects, C crowd regions, E edges of an outline. Boxes are xyxy float32 pixels of the canvas.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from maskfleet.data.pipeline.augment import Augmentation, augmented
from maskfleet.data.pipeline.decode import read_image, reduction
from maskfleet.data.pipeline.geometry import (
    MIN_CROPPED_SIDE_PX,
    Floats,
    Geometry,
    Ints,
    Pixels,
    clip_boxes,
    clip_polygon,
    move_boxes,
    move_points,
    resize_geometry,
)
from maskfleet.data.store.annotations import AnnotationStore, ImageRecord, InstanceArrays, clean_instances
from maskfleet.errors import DataError
from maskfleet.ops.outlines import Edges, bitmap_edges, polygon_edges
from maskfleet.rle import RleError, check_runs, runs_from_text


@dataclass(frozen=True, slots=True)
class Preparation:
    """How training images are augmented, and which ground truth the model needs."""

    augmentations: tuple[Augmentation, ...]
    masks: bool
    crowds: bool
    largest_px: tuple[int, int] | None = None
    """Short edge and longest side of the largest that an image is resized to; None to decode all in full size."""


@dataclass(frozen=True, slots=True)
class Sample:
    """A decoded image, its geometry, and its ground truth in pixels of the canvas."""

    image_id: int
    image: Pixels  # the source, not yet resized; a large one is decoded smaller
    geometry: Geometry
    boxes: Floats  # [N, 4]
    labels: Ints  # [N]
    outlines: list[Edges]  # [N]; empty where no masks are trained
    crowd_boxes: Floats  # [C, 4]
    seed: int


def train_sample(
    store: AnnotationStore, index: int, *, preparation: Preparation, canvas: tuple[int, int] | None, seed: int
) -> Sample:
    """Image `index` of `store`, augmented with random numbers drawn from `seed`.

    `canvas` is None where each batch has a canvas of its own size.
    """
    record = store.image(index)
    size = (record.height, record.width)
    largest = preparation.largest_px
    resized = resize_geometry(size, short_edge_px=largest[0], max_px=largest[1]).resized if largest else size
    pixels = _pixels(record, resized)
    image = augmented(pixels, preparation.augmentations, canvas=canvas, seed=seed, size=size)
    geometry = image.geometry
    instances = clean_instances(store.instances(index))
    objects = instances.objects
    outlines = [_outline(record, objects, number) for number in range(len(objects))] if preparation.masks else []
    boxes, crowd_boxes = move_boxes(objects.boxes, geometry), np.zeros((0, 4), np.float32)
    if preparation.crowds:
        crowd_boxes = move_boxes(instances.crowds.boxes, geometry)
    labels, moved = objects.labels.astype(np.int64), [_moved(outline, geometry) for outline in outlines]
    if geometry.cropped:
        boxes, keep = _boxes_in_window(boxes, outlines, geometry)
        labels, moved = labels[keep], [moved[number] for number in keep] if moved else []
        clipped, is_visible = clip_boxes(crowd_boxes, geometry.size)
        crowd_boxes = clipped[is_visible]
    edges = [polygon_edges(outline.polygons) if outline.edges is None else outline.edges for outline in moved]
    return Sample(record.id, image.pixels, geometry, boxes, labels, edges, crowd_boxes, seed)


def evaluation_sample(store: AnnotationStore, index: int, *, short_edge_px: int, max_px: int) -> Sample:
    """Image `index` of `store`, resized as in evaluation, without ground truth."""
    record = store.image(index)
    geometry = resize_geometry((record.height, record.width), short_edge_px=short_edge_px, max_px=max_px)
    image = _pixels(record, geometry.resized)
    no_boxes = np.zeros((0, 4), np.float32)
    return Sample(record.id, image, geometry, no_boxes, np.zeros(0, np.int64), [], no_boxes, 0)


def _pixels(record: ImageRecord, resized: tuple[int, int]) -> Pixels:
    """The image, decoded smaller if it is far larger than what it will be resized to."""
    size = (record.height, record.width)
    reduced = reduction(size, resized)
    return read_image(record.path, image_id=record.id, size=size, max_mpx=record.max_mpx, reduced=reduced)


@dataclass(frozen=True, slots=True)
class _Outline:
    """The mask of one instance in source pixels: polygons, or a bitmap and the edges around it."""

    polygons: list[npt.NDArray[Any]]
    bitmap: npt.NDArray[np.bool_] | None = None  # no larger than the mask
    corner: tuple[int, int] = (0, 0)  # (y, x) of the bitmap
    edges: Edges | None = None


def _outline(record: ImageRecord, objects: InstanceArrays, number: int) -> _Outline:
    """The mask of object `number`; its box where the annotation has no outline of at least three points."""
    polygons = objects.polygons(number)
    if polygons:
        return _Outline(list(polygons))
    rle = objects.rle(number)
    if rle is not None:
        return _bitmap_outline(_runs(rle, record, int(objects.ids[number])), record.height)
    left, top, right, bottom = objects.boxes[number]
    return _Outline([np.array([[left, top], [right, top], [right, bottom], [left, bottom]])])


def _runs(rle: dict[str, Any], record: ImageRecord, annotation_id: int) -> Ints:
    """The run lengths of `rle`, checked against the size of the image."""
    try:
        if tuple(rle["size"]) != (record.height, record.width):
            raise RleError(f"its size is {rle['size']}, but the image is {record.height} x {record.width}")
        runs = runs_from_text(rle["counts"])
        check_runs(runs, record.height, record.width)
    except RleError as error:
        raise DataError(
            f"the mask of annotation {annotation_id} of image {record.id}, {record.path}, is broken: {error}",
            remedy="fix the annotation, or set data.on_bad=skip to train without the image",
        ) from None
    return runs


def _bitmap_outline(runs: Ints, height: int) -> _Outline:
    """The outline of a column-major run-length mask; only the columns and rows that it covers are decoded."""
    ends = np.cumsum(runs)
    foreground = np.flatnonzero(runs[1::2])
    if not len(foreground):
        return _Outline([], edges=bitmap_edges(np.zeros((1, 1), np.bool_)))
    left = int(ends[2 * foreground[0]]) // height
    right = -(-int(ends[2 * foreground[-1] + 1]) // height)
    is_foreground = np.arange(len(runs)) % 2 == 1
    borders = np.clip(ends, left * height, right * height)
    kept = borders - np.concatenate([[left * height], borders[:-1]])
    columns = np.repeat(is_foreground, kept).reshape(right - left, height)
    rows = np.flatnonzero(columns.any(axis=0))
    top, bottom = int(rows[0]), int(rows[-1]) + 1
    bitmap = columns[:, top:bottom].T
    edges, part = bitmap_edges(bitmap)
    return _Outline([], bitmap, (top, left), (edges + np.array([left, top, left, top], np.float32), part))


def _moved(outline: _Outline, geometry: Geometry) -> _Outline:
    if outline.edges is None:
        return _Outline([move_points(polygon, geometry) for polygon in outline.polygons])
    edges, part = outline.edges
    return _Outline([], edges=(move_points(edges.reshape(-1, 2), geometry).reshape(-1, 4), part))


def _boxes_in_window(boxes: Floats, outlines: list[_Outline], geometry: Geometry) -> tuple[Floats, Ints]:
    """Boxes of the visible parts of the objects after a crop, and the indices of the objects still visible.

    A box is clipped to the window; one that the window cuts also shrinks to the visible part of its outline: of a
    person who reaches into the window with one hand, it bounds the hand.
    """
    clipped, keep = clip_boxes(boxes, geometry.size)
    is_cut = (clipped != boxes).any(axis=1)
    for number in np.flatnonzero(keep & is_cut).tolist() if outlines else []:
        visible = _visible_box(outlines[number], geometry)
        if visible is None:
            keep[number] = False
            continue
        clipped[number, :2] = np.maximum(clipped[number, :2], visible[:2])
        clipped[number, 2:] = np.minimum(clipped[number, 2:], visible[2:])
        keep[number] = bool((clipped[number, 2:] - clipped[number, :2] >= MIN_CROPPED_SIDE_PX).all())
    return clipped[keep], np.flatnonzero(keep)


def _visible_box(outline: _Outline, geometry: Geometry) -> Floats | None:
    """Bounds, in pixels of the canvas, of the part of an outline inside the window; None if it is outside."""
    if outline.edges is None:
        moved = [move_points(polygon, geometry) for polygon in outline.polygons]
        inside = np.concatenate([clip_polygon(polygon, geometry.size) for polygon in moved])
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
    return np.asarray(move_boxes(corners, geometry)[0], np.float32)
