"""Images for the inspection page: with the objects that training uses, or with their problems.

Shapes: H x W the drawn image (uint8 BGR), n points of a polygon, D instances. Positions are pixels of the drawn image
unless a docstring says that they are pixels of the annotation file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import cv2
import numpy as np
import numpy.typing as npt

from maskfleet.data.checks.images import captured_stderr
from maskfleet.data.checks.problems import Problem
from maskfleet.data.image_formats import ImageFileError
from maskfleet.data.pipeline.decode import decoded_file
from maskfleet.data.store.annotations import AnnotationStore, Floats, ImageRecord, InstanceArrays, clean_instances
from maskfleet.data.store.coco import KIND_POLYGONS
from maskfleet.rle import RleError, check_runs, rle_pixels, runs_from_text
from maskfleet.viz import Image, Mask, draw

LONG_SIDE_PX = 640
MAX_ZOOM = 3.0
MARGIN = 0.6  # shown around the image for boxes outside it, at most, as a share of its longer side
MAX_MARKED = 12  # annotations with problems that are marked in one image
TAG_SCALE = 0.7  # legible when the page shows the image at half its size
RED, WHITE, OUTSIDE = (48, 48, 224), (255, 255, 255), 200


@dataclass(frozen=True, slots=True)
class _View:
    """Maps positions of the annotation file to the drawn image."""

    scale: float
    left: float  # edge of the drawn image, in pixels of the annotation file
    top: float

    def points(self, points: npt.ArrayLike) -> Floats:
        """Points [..., 2] of the file in the drawn image."""
        return (np.asarray(points, np.float64) - [self.left, self.top]) * self.scale

    def boxes(self, boxes: Floats) -> Floats:
        """Boxes [D, 4] xyxy of the file in the drawn image."""
        return self.points(boxes.reshape(-1, 2)).reshape(-1, 4)


def draw_sample(store: AnnotationStore, index: int) -> Image | None:
    """Image `index` with the objects that training uses; None if the file cannot be decoded."""
    record = store.image(index)
    pixels = _pixels(record)
    if pixels is None:
        return None
    view = _View(_zoom(pixels.shape[0], pixels.shape[1]), 0, 0)
    canvas = _resized(pixels, view.scale)
    instances = clean_instances(store.instances(index))
    masks = [_mask(instances, number, view, canvas.shape[:2]) for number in range(len(instances))]
    names = [category.name for category in store.categories]
    labels = instances.labels + np.where(instances.crowd, len(names), 0)
    names += [f"{name} (crowd)" for name in names]
    return draw(canvas, view.boxes(instances.boxes), labels, masks=masks, names=names)


def draw_problem_sample(store: AnnotationStore, index: int, problems: Sequence[Problem]) -> Image | None:
    """Image `index` with the annotations of `problems` in red; None if the file cannot be decoded.

    A grey border is added where annotations lie outside the image.
    """
    record = store.image(index)
    pixels = _pixels(record)
    if pixels is None:
        return None
    instances = store.instances(index)
    named = {problem.annotation_id: problem.kind for problem in reversed(problems) if problem.annotation_id is not None}
    marked = [number for number, identity in enumerate(instances.ids.tolist()) if identity in named][:MAX_MARKED]
    boxes = [box for box in (_ordered_box(instances.boxes[number]) for number in marked) if box is not None]
    wrong_size = any(problem.kind == "image-size" for problem in problems)
    if wrong_size:
        boxes.append(np.array([0.0, 0.0, record.width, record.height]))
    canvas, view = _with_border(pixels, boxes)
    if wrong_size:
        whole = view.boxes(np.array([[0.0, 0.0, record.width, record.height]]))[0]
        _mark_box(canvas, whole, f"file says {record.width} x {record.height}")
    for number in marked:
        _mark_annotation(canvas, view, instances, number, named[int(instances.ids[number])])
    return canvas


def _pixels(record: ImageRecord) -> Image | None:
    """The decoded pixels; a truncated file gives the part that exists."""
    if record.is_outside:
        return None
    with captured_stderr():  # the checks report already what the decoder prints about a broken file
        try:
            return decoded_file(record.path, max_mpx=record.max_mpx, partly=True)
        except (ImageFileError, OSError):
            return None


def _zoom(height: float, width: float) -> float:
    return min(LONG_SIDE_PX / max(height, width), MAX_ZOOM)


def _resized(pixels: Image, scale: float) -> Image:
    size = (max(1, round(pixels.shape[1] * scale)), max(1, round(pixels.shape[0] * scale)))
    method = cv2.INTER_AREA if scale < 1 else cv2.INTER_CUBIC
    return np.asarray(cv2.resize(pixels, size, interpolation=method), np.uint8)


def _with_border(pixels: Image, boxes: Sequence[Floats]) -> tuple[Image, _View]:
    """The image on a grey canvas that also holds `boxes` of the file, within MARGIN -> (canvas, view)."""
    height, width = pixels.shape[:2]
    corners = np.array([[0.0, 0.0, width, height], *boxes])
    margin = MARGIN * max(height, width)
    left, top = np.clip(corners[:, :2].min(axis=0), -margin, 0).tolist()
    right, bottom = corners[:, 2].max().clip(width, width + margin), corners[:, 3].max().clip(height, height + margin)
    view = _View(_zoom(bottom - top, right - left), left, top)
    shown = _resized(pixels, view.scale)
    x, y = np.rint(view.points([0, 0])).astype(int).tolist()
    size = (
        max(round((bottom - top) * view.scale), y + shown.shape[0]),
        max(round((right - left) * view.scale), x + shown.shape[1]),
    )
    canvas = np.full((*size, 3), OUTSIDE, np.uint8)
    canvas[y : y + shown.shape[0], x : x + shown.shape[1]] = shown
    return canvas, view


def _mask(instances: InstanceArrays, number: int, view: _View, shape: tuple[int, ...]) -> Mask:
    """Mask of an instance in the drawn image; empty if it has none."""
    parts = [view.points(part) for part in instances.polygons(number) if np.isfinite(part).all()]
    if parts:
        return _filled(parts, shape)
    rle = instances.rle(number)
    if rle is None or not _is_valid(rle, instances.store.rules.max_mpx):
        return 0, 0, np.zeros((0, 0), np.bool_)
    decoded = rle_pixels(rle).astype(np.uint8)
    return np.asarray(cv2.resize(decoded, (shape[1], shape[0]), interpolation=cv2.INTER_NEAREST), np.bool_)


def _filled(parts: Sequence[Floats], shape: tuple[int, ...]) -> Mask:
    """The union of polygons [n, 2], rasterised in their bounding window."""
    corners = np.concatenate(parts)
    limit = np.array([shape[1], shape[0]])
    x0, y0 = np.clip(np.floor(corners.min(axis=0)), 0, limit).astype(int).tolist()
    x1, y1 = np.clip(np.ceil(corners.max(axis=0)) + 1, 0, limit).astype(int).tolist()
    window = np.zeros((max(y1 - y0, 0), max(x1 - x0, 0)), np.uint8)
    if window.size:
        for part in parts:
            # OpenCV's points are centres of pixels, COCO's are their corners; 4 bits of fraction
            points = np.rint((_clipped(part, shape) - [x0, y0] - 0.5) * 16).astype(np.int32)
            cv2.fillPoly(window, [points], 1, shift=4)
    return y0, x0, window.astype(np.bool_)


def _is_valid(rle: dict[str, Any], max_mpx: float) -> bool:
    """Whether the mask can be decoded, and is no larger than an image may be."""
    height, width = rle["size"]
    if height * width > max_mpx * 1e6:
        return False
    try:
        check_runs(runs_from_text(rle["counts"]), *rle["size"])
    except RleError:
        return False
    return True


def _ordered_box(box: Floats) -> Floats | None:
    """`box` [4] with its corners in order; None if it is not finite."""
    if not np.isfinite(box).all():
        return None
    return np.concatenate([np.minimum(box[:2], box[2:]), np.maximum(box[:2], box[2:])])


def _mark_annotation(canvas: Image, view: _View, instances: InstanceArrays, number: int, kind: str) -> None:
    box = _ordered_box(instances.boxes[number])
    if instances.kind[number] == KIND_POLYGONS and (kind.startswith("polygon") or box is None):
        for part in instances.store.polygons(int(instances.rows[number])):
            if np.isfinite(part).all():
                points = np.rint(_clipped(view.points(part), canvas.shape)).astype(np.int32)
                cv2.polylines(canvas, [points], True, WHITE, 4, cv2.LINE_AA)
                cv2.polylines(canvas, [points], True, RED, 2, cv2.LINE_AA)
    if box is not None:
        _mark_box(canvas, view.boxes(box[None])[0], kind)


def _mark_box(canvas: Image, box: Floats, text: str) -> None:
    x1, y1, x2, y2 = np.rint(_clipped(box.reshape(2, 2), canvas.shape)).astype(int).ravel().tolist()
    cv2.rectangle(canvas, (x1, y1), (x2, y2), WHITE, 4, cv2.LINE_AA)
    cv2.rectangle(canvas, (x1, y1), (x2, y2), RED, 2, cv2.LINE_AA)
    (width, height), descent = cv2.getTextSize(text, cv2.FONT_HERSHEY_SIMPLEX, TAG_SCALE, 1)
    left = min(max(x1, 0), max(canvas.shape[1] - width - 8, 0))
    bottom = min(max(y1, height + descent + 6), canvas.shape[0])
    cv2.rectangle(canvas, (left, bottom - height - descent - 6), (left + width + 8, bottom), RED, cv2.FILLED)
    origin = (left + 4, bottom - descent - 2)
    cv2.putText(canvas, text, origin, cv2.FONT_HERSHEY_SIMPLEX, TAG_SCALE, WHITE, 1, cv2.LINE_AA)


def _clipped(points: Floats, shape: tuple[int, ...]) -> Floats:
    """Points [..., 2] clipped to what OpenCV can draw: it overflows on coordinates of millions."""
    return np.clip(points, -2.0 * LONG_SIDE_PX, np.array([shape[1], shape[0]]) + 2.0 * LONG_SIDE_PX)
