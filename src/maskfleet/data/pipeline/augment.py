"""How a training image is moved and coloured: TensorPack's resize and flip, large-scale jitter, colour jitter.

Everything follows from eight numbers drawn once an image, so that one switch never changes what another draws.
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

SIZE, FLIP, SCALE, CROP_Y, CROP_X, BRIGHTNESS, CONTRAST, SATURATION = range(8)
MIN_CROPPED_SIDE_PX = 1.0  # of a box cut by a crop; what is narrower shows nothing to learn


@dataclass(frozen=True, slots=True)
class Geometry:
    """From a source image to its place on the canvas: resize, then cut out, then mirror. All (height, width)."""

    source: tuple[int, int]
    resized: tuple[int, int]
    offset: tuple[int, int]  # (y, x) of the cut-out inside the resized image
    size: tuple[int, int]  # of the cut-out: what the canvas shows
    flip: bool

    @property
    def cropped(self) -> bool:
        return self.size != self.resized


def draws(seed: int) -> npt.NDArray[np.float64]:
    """The eight numbers in [0, 1) that decide how the image with this seed is augmented."""
    return np.random.default_rng(seed).random(8)


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


def resize_geometry(
    source: tuple[int, int], *, short_edge_px: tuple[int, int], max_px: int, numbers: Any = None, flip: float = 0.0
) -> Geometry:
    """Resize to a short side drawn from the inclusive range, mirrored with probability `flip`.

    `numbers` are `draws`; None takes the smallest short side and mirrors nothing, as evaluation does.
    """
    low, high = short_edge_px
    short = low if numbers is None else low + int(numbers[SIZE] * (high - low + 1))
    height, width = resized_sizes(*source, short_edge_px=short, max_px=max_px)[0].tolist()
    flipped = numbers is not None and bool(numbers[FLIP] < flip)
    return Geometry(source, (height, width), (0, 0), (height, width), flipped)


def jitter_geometry(
    source: tuple[int, int], *, canvas: tuple[int, int], scale: tuple[float, float], numbers: Any, flip: float
) -> Geometry:
    """Large-scale jitter: fit the image into the canvas, times a factor, then cut a random canvas-sized window.

    An image smaller than the canvas stays whole in its top left corner (Ghiasi et al., Simple Copy-Paste, section 3).
    """
    factor = scale[0] + numbers[SCALE] * (scale[1] - scale[0])
    ratio = factor * min(canvas[0] / source[0], canvas[1] / source[1])
    resized = [max(1, int(side * ratio + 0.5)) for side in source]
    size = [min(side, room) for side, room in zip(resized, canvas, strict=True)]
    spare = [side - kept for side, kept in zip(resized, size, strict=True)]
    offset = [int(number * (room + 1)) for number, room in zip(numbers[[CROP_Y, CROP_X]], spare, strict=True)]
    flipped = bool(numbers[FLIP] < flip)
    return Geometry(source, (resized[0], resized[1]), (offset[0], offset[1]), (size[0], size[1]), flipped)


def place_image(image: Pixels, geometry: Geometry, canvas: Pixels) -> None:
    """Write the moved `image` into the top left corner of `canvas` [H, W, 3]; the rest is left as it is."""
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
    """Points [V, 2] of the source where the canvas shows them; float32 throughout, as TensorPack's are."""
    moved = points.astype(np.float32)
    moved[:, 0] *= geometry.resized[1] / geometry.source[1]
    moved[:, 1] *= geometry.resized[0] / geometry.source[0]
    if geometry.cropped:
        moved -= np.array(geometry.offset[::-1], np.float32)
    if geometry.flip:
        moved[:, 0] = geometry.size[1] - moved[:, 0]
    return moved


def move_boxes(boxes: npt.NDArray[Any], geometry: Geometry) -> Floats:
    """Boxes [N, 4] of the source where the canvas shows them; not clipped."""
    corners = move_points(boxes.reshape(-1, 2), geometry).reshape(-1, 2, 2)
    return np.concatenate([corners.min(axis=1), corners.max(axis=1)], axis=1)


def clip_boxes(
    boxes: Floats, size: tuple[int, int], *, min_side_px: float = MIN_CROPPED_SIDE_PX
) -> tuple[Floats, Bools]:
    """Boxes [N, 4] inside a window of `size`, and which of them are still worth keeping [N]."""
    clipped = np.clip(boxes, 0, np.array([size[1], size[0]] * 2, np.float32))
    return clipped, np.all(clipped[:, 2:] - clipped[:, :2] >= min_side_px, axis=1)


def clip_polygon(points: npt.NDArray[Any], size: tuple[int, int]) -> npt.NDArray[Any]:
    """The part of a polygon [V, 2] inside a window of `size` (Sutherland and Hodgman) -> [V', 2], perhaps empty.

    A concave polygon cut in pieces keeps them joined by lines on the border: right for bounds, not for drawing.
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


def jitter_colour(image: Pixels, strength: float, numbers: Any) -> Pixels:
    """Brightness, contrast and saturation, each by a factor in 1 - strength .. 1 + strength, in this order."""
    brightness, contrast, saturation = 1 + strength * (2 * numbers[[BRIGHTNESS, CONTRAST, SATURATION]] - 1)
    mean = cv2.mean(cv2.cvtColor(image, cv2.COLOR_BGR2GRAY))[0] * brightness
    levels = (np.arange(256) * brightness - mean) * contrast + mean
    table = np.clip(np.rint(levels), 0, 255).astype(np.uint8)
    changed = cv2.LUT(image, table)
    grey = cv2.cvtColor(cv2.cvtColor(changed, cv2.COLOR_BGR2GRAY), cv2.COLOR_GRAY2BGR)
    return np.asarray(cv2.addWeighted(changed, saturation, grey, 1 - saturation, 0), np.uint8)
