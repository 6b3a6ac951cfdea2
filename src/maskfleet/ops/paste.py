"""Pastes a detected mask into the image, on the host, as a window of pixels.

Shapes: M x M mask probabilities, h x w pixels of the image, p x q pixels of the window.
"""

from __future__ import annotations

import cv2
import numpy as np
from numpy.typing import NDArray

Window = tuple[int, int, NDArray[np.bool_]]
"""Top row, left column, and the pixels [p, q] there; everything outside is False."""


def paste_mask_window(mask: NDArray[np.floating], box: NDArray[np.floating], height: int, width: int) -> Window:
    """The pixels whose centres `mask` [M, M], spread over `box` [4], covers with a probability of at least 0.5.

    The mask's cells are samples at their centres, zero one cell beyond the box, and blended linearly between.
    """
    cells = mask.shape[0] + 2
    padded = np.pad(mask.astype(np.float64), 1)
    left, top, right, bottom = _enlarged(box, cells / mask.shape[0])
    y0, y_weight = _axis_weights(top, bottom, cells, height)
    x0, x_weight = _axis_weights(left, right, cells, width)
    return y0, x0, y_weight @ padded @ x_weight.T >= 0.5


def paste_mask_window_fast(mask: NDArray[np.floating], box: NDArray[np.floating], height: int, width: int) -> Window:
    """As `paste_mask_window`, with the fast rule: the box rounded to whole pixels (at least one per side), the mask
    resized to it, above 0.5, clipped to the image.
    """
    left, top = (int(value) for value in np.asarray(box[:2], dtype=np.float32) + np.float32(0.5))
    right, bottom = (int(value) for value in np.asarray(box[2:], dtype=np.float32) - np.float32(0.5))
    size = (max(right - left, 0) + 1, max(bottom - top, 0) + 1)
    filled = cv2.resize(mask.astype(np.float32), size, interpolation=cv2.INTER_LINEAR) > 0.5
    y0, x0 = min(max(top, 0), height), min(max(left, 0), width)
    window = filled[y0 - top : max(height - top, 0), x0 - left : max(width - left, 0)]
    return y0, x0, np.ascontiguousarray(window)


def _enlarged(box: NDArray[np.floating], factor: float) -> NDArray[np.float32]:
    """`box` [4] stretched about its centre; computed in double and kept in float32, as TensorPack keeps it."""
    corner, opposite = np.asarray(box[:2], dtype=np.float32), np.asarray(box[2:], dtype=np.float32)
    half = (opposite - corner).astype(np.float64) * 0.5 * factor
    centre = (opposite + corner).astype(np.float64) * 0.5
    return np.concatenate([centre - half, centre + half]).astype(np.float32)


def _axis_weights(start: np.float32, end: np.float32, cells: int, extent: int) -> tuple[int, NDArray[np.float64]]:
    """First pixel along an axis that meets the mask, and each such pixel's weights of the mask's cells [p, cells]."""
    if not end > start:
        return 0, np.zeros((0, cells))
    position = (np.arange(extent) + 0.5 - float(start)) / float(end - start) * cells - 0.5  # 0 is the first cell
    met = np.flatnonzero((position >= 0) & (position <= cells - 1))
    position = position[met]
    lower = np.minimum(position.astype(np.int64), cells - 2)
    fraction = position - lower
    weights = np.zeros((len(met), cells))
    pixel = np.arange(len(met))
    weights[pixel, lower] = 1 - fraction
    weights[pixel, lower + 1] = fraction
    return int(met[0]) if len(met) else 0, weights
