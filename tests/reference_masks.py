"""Slow, obvious versions of RoI align, mask rasterising and mask sampling: one pixel, one sample at a time."""

from __future__ import annotations

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
