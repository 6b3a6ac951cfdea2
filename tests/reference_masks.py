"""Slow, obvious versions of RoI align, mask rasterising and mask sampling: one pixel, one sample at a time."""

from __future__ import annotations

import itertools
import math

import numpy as np


def bilinear(image: np.ndarray, y: float, x: float) -> np.ndarray:
    """`image` [C, h, w] at a point whose whole numbers are pixels, inside [0, h-1] x [0, w-1] -> [C]."""
    height, width = image.shape[1:]
    y0, x0 = math.floor(y), math.floor(x)
    total = np.zeros(image.shape[0])
    for row in (y0, y0 + 1):
        for column in (x0, x0 + 1):
            weight = (1 - abs(y - row)) * (1 - abs(x - column))
            if weight > 0:
                assert 0 <= row < height
                assert 0 <= column < width
                total += weight * image[:, row, column]
    return total


def clamped_sample(feature: np.ndarray, y: float, x: float, *, cut: bool) -> np.ndarray:
    """A sample clamped to the edge of `feature` [C, h, w]; with `cut`, 0 farther than a cell beyond it -> [C]."""
    height, width = feature.shape[1:]
    if cut and not (-1 <= y <= height and -1 <= x <= width):
        return np.zeros(feature.shape[0])
    return bilinear(feature, min(max(y, 0), height - 1), min(max(x, 0), width - 1))


def roi_align(feature: np.ndarray, box: np.ndarray, *, resolution: int, samples: int, half_pixel: bool) -> np.ndarray:
    """RoIAlign of one `box`, in cells, on one image's `feature` [C, h, w] -> [C, resolution, resolution] float64."""
    feature = feature.astype(np.float64)
    left, top, right, bottom = (float(value) for value in box)
    shift = 0.5 if half_pixel else 0.0
    out = np.zeros((feature.shape[0], resolution, resolution))
    for i in range(resolution):
        for j in range(resolution):
            for a in range(samples):
                for b in range(samples):
                    y = top + (bottom - top) / resolution * (i + (a + 0.5) / samples) - shift
                    x = left + (right - left) / resolution * (j + (b + 0.5) / samples) - shift
                    out[:, i, j] += clamped_sample(feature, y, x, cut=half_pixel) / samples**2
    return out


def rasterise(polygon: np.ndarray, height: int, width: int) -> np.ndarray:
    """One polygon [V, 2], its border walked a fifth of a pixel at a time as pycocotools does -> [h, w] bool."""
    corners = [(int(5 * float(x) + 0.5), int(5 * float(y) + 0.5)) for x, y in polygon]
    toggles: list[list[int]] = [[] for _ in range(width)]
    for start, end in zip(corners, corners[1:] + corners[:1], strict=True):
        steps = _border(start, end)
        for (u0, v0), (u1, v1) in itertools.pairwise(steps):
            left, right = min(u0, u1), max(u0, u1)
            if right == left + 1 and left % 5 == 2 and 0 <= left // 5 < width:
                toggles[left // 5].append(min(max(math.ceil((min(v0, v1) - 2) / 5), 0), height))
    mask = np.zeros((height, width), dtype=bool)
    for x, rows in enumerate(toggles):
        for y in range(height):
            mask[y, x] = sum(row <= y for row in rows) % 2 == 1
    return mask


def _border(start: tuple[int, int], end: tuple[int, int]) -> list[tuple[int, int]]:
    """Points from `start` to `end` (in no promised direction), one unit at a time along the longer axis."""
    width, height = abs(end[0] - start[0]), abs(end[1] - start[1])
    if width == height == 0:
        return [start]
    if width >= height:
        (x0, y0), (_, y1) = sorted([start, end])
        return [(x0 + t, int(y0 + (y1 - y0) / width * t + 0.5)) for t in range(width + 1)]
    (x0, y0), (x1, _) = sorted([start, end], key=lambda point: point[1])
    return [(int(x0 + (x1 - x0) / height * t + 0.5), y0 + t) for t in range(height + 1)]


def crop_mask(mask: np.ndarray, box: np.ndarray, resolution: int) -> np.ndarray:
    """Bilinear samples of a 0/1 `mask` [h, w] in `box`, 0 outside -> [resolution, resolution] float32.

    All in float32 and in the order of TensorFlow's training graph, so that it can be compared to the last bit.
    """
    left, top, right, bottom = (np.float32(value) for value in box)
    ys = _crop_positions(top, bottom, mask.shape[0], resolution)
    xs = _crop_positions(left, right, mask.shape[1], resolution)
    out = np.zeros((resolution, resolution), dtype=np.float32)
    for i, y in enumerate(ys):
        for j, x in enumerate(xs):
            if 0 <= y <= mask.shape[0] - 1 and 0 <= x <= mask.shape[1] - 1:
                out[i, j] = _lerp(
                    _lerp(mask[math.floor(y), math.floor(x)], mask[math.floor(y), math.ceil(x)], x),
                    _lerp(mask[math.ceil(y), math.floor(x)], mask[math.ceil(y), math.ceil(x)], x),
                    y,
                )
    return out


def _crop_positions(start: np.float32, end: np.float32, extent: int, resolution: int) -> list[np.float32]:
    one = np.float32
    last = one(extent - 1)
    spacing = (end - start) * one(1 / resolution)
    near = (start + (spacing / one(2) - one(0.5))) / last
    far = near + spacing * one(resolution - 1) / last
    step = (far - near) * last / one(resolution - 1)
    return [near * last + one(i) * step for i in range(resolution)]


def _lerp(first: float, second: float, position: np.float32) -> np.float32:
    fraction = position - np.float32(math.floor(position))
    return np.float32(first) + (np.float32(second) - np.float32(first)) * fraction


def paste(mask: np.ndarray, box: np.ndarray, height: int, width: int) -> np.ndarray:
    """`mask` [M, M] stretched over `box`, interpolated at each pixel's centre, at least 0.5 -> [height, width] bool."""
    side = mask.shape[0]
    left, top, right, bottom = (float(value) for value in box)
    padded = np.pad(mask.astype(np.float64), 1)[None]
    bitmap = np.zeros((height, width), dtype=bool)
    for i in range(height):
        for j in range(width):
            y = (i + 0.5 - top) / (bottom - top) * side - 0.5 + 1  # in cells of the padded mask
            x = (j + 0.5 - left) / (right - left) * side - 0.5 + 1
            if 0 <= y <= side + 1 and 0 <= x <= side + 1:
                bitmap[i, j] = bilinear(padded, y, x)[0] >= 0.5
    return bitmap
