"""Where a source image appears on the canvas: resize, crop and flip of its pixels and its ground truth.

Shapes: I images, N boxes, V points; images are [h, w, 3] uint8 BGR, points (x, y), boxes xyxy, both float32 pixels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cv2
import numpy as np
import numpy.typing as npt

Pixels = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

MIN_CROPPED_SIDE_PX = 1.0  # of a box cut by a crop; a narrower one shows nothing to learn from


@dataclass(frozen=True, slots=True)
class Geometry:
    """How a source image gets onto the canvas: resized, then cropped, then flipped. All sizes are (height, width)."""

    source: tuple[int, int]
    resized: tuple[int, int]
    offset: tuple[int, int]  # (y, x) of the crop window inside the resized image
    size: tuple[int, int]  # of the crop window: what the canvas shows
    flip: bool

    @property
    def cropped(self) -> bool:
        return self.size != self.resized


def resize_geometry(source: tuple[int, int], *, short_edge_px: int, max_px: int, flip: bool = False) -> Geometry:
    """The whole image, resized by TensorPack's rule (see `resized_sizes`)."""
    height, width = resized_sizes(*source, short_edge_px=short_edge_px, max_px=max_px)[0].tolist()
    return Geometry(source, (height, width), (0, 0), (height, width), flip)


def resized_sizes(heights: Any, widths: Any, *, short_edge_px: int, max_px: int) -> Ints:
    """TensorPack's resize rule: short side to `short_edge_px` unless the long one would pass `max_px` -> [I, 2]."""
    heights, widths = np.atleast_1d(heights).astype(np.float64), np.atleast_1d(widths).astype(np.float64)
    scale = short_edge_px / np.minimum(heights, widths)
    landscape = heights < widths
    new_heights = np.where(landscape, short_edge_px, scale * heights)
    new_widths = np.where(landscape, scale * widths, short_edge_px)
    longest = np.maximum(new_heights, new_widths)
    shrink = np.where(longest > max_px, max_px / longest, 1.0)
    sizes = np.stack([new_heights * shrink, new_widths * shrink], axis=-1)
    return np.maximum((sizes + 0.5).astype(np.int64), 1)


def place_image(image: Pixels, geometry: Geometry, canvas: Pixels) -> None:
    """Resize, crop and flip `image` into the top left corner of `canvas` [H, W, 3]; the rest of it is not touched."""
    height, width = geometry.size
    corner = canvas[:height, :width]
    new_height, new_width = geometry.resized
    if geometry.cropped:
        top, left = geometry.offset
        resized = cv2.resize(image, (new_width, new_height), interpolation=cv2.INTER_LINEAR)
        corner[...] = resized[top : top + height, left : left + width]
    else:
        cv2.resize(image, (new_width, new_height), dst=corner, interpolation=cv2.INTER_LINEAR)
    if geometry.flip:
        cv2.flip(corner, 1, dst=corner)


def move_points(points: npt.NDArray[Any], geometry: Geometry) -> Floats:
    """Points [V, 2] of the source in pixels of the canvas; computed in float32, as in TensorPack."""
    moved = points.astype(np.float32)
    moved[:, 0] *= geometry.resized[1] / geometry.source[1]
    moved[:, 1] *= geometry.resized[0] / geometry.source[0]
    if geometry.cropped:
        moved -= np.array(geometry.offset[::-1], np.float32)
    if geometry.flip:
        moved[:, 0] = geometry.size[1] - moved[:, 0]
    return moved


def move_boxes(boxes: npt.NDArray[Any], geometry: Geometry) -> Floats:
    """Boxes [N, 4] of the source in pixels of the canvas; not clipped."""
    corners = move_points(boxes.reshape(-1, 2), geometry).reshape(-1, 2, 2)
    return np.concatenate([corners.min(axis=1), corners.max(axis=1)], axis=1)


def clip_boxes(boxes: Floats, size: tuple[int, int]) -> tuple[Floats, Bools]:
    """Boxes [N, 4] clipped to a window of `size`, and which of them are still large enough to keep [N]."""
    clipped = np.clip(boxes, 0, np.array([size[1], size[0]] * 2, np.float32))
    return clipped, np.all(clipped[:, 2:] - clipped[:, :2] >= MIN_CROPPED_SIDE_PX, axis=1)


def clip_polygon(points: npt.NDArray[Any], size: tuple[int, int]) -> npt.NDArray[Any]:
    """The part of a polygon [V, 2] inside a window of `size` (Sutherland and Hodgman) -> [V', 2], may be empty.

    A concave polygon that is cut into pieces keeps edges along the border between them: the bounds are right, the
    outline is not fit for drawing.
    """
    for axis, bound, sign in ((0, 0.0, 1.0), (0, size[1], -1.0), (1, 0.0, 1.0), (1, size[0], -1.0)):
        if not len(points):
            break
        after = np.roll(points, -1, axis=0)
        depth, depth_after = sign * (points[:, axis] - bound), sign * (after[:, axis] - bound)
        crosses = (depth >= 0) != (depth_after >= 0)
        share = depth / np.where(crosses, depth - depth_after, 1.0)
        crossing = points + share[:, None] * (after - points)
        both = np.stack([points, crossing], axis=1).reshape(-1, 2)
        points = both[np.stack([depth >= 0, crosses], axis=1).ravel()]
    return points
