"""Pastes detected masks into the image, on the host, as windows of pixels.

Shapes: N masks of M x M probabilities, h x w pixels of the image, p x q pixels of a window.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import cv2
import numpy as np
from numpy.typing import NDArray

MASKS_AT_ONCE = 32  # in large images, the weights of more take too much memory

Window = tuple[int, int, NDArray[np.bool_]]
"""Top row, left column, and the pixels [p, q] there; everything outside is False."""


def paste_mask_windows(
    masks: NDArray[np.floating], boxes: NDArray[np.floating], height: int, width: int
) -> Iterator[Window]:
    """The pixels whose centres each of `masks` [N, M, M], spread over its box [N, 4], covers with at least 0.5.

    A mask's cells are samples at their centres, zero one cell beyond the box, and blended linearly between. The memory
    of a window is in column order, as run lengths are.
    """
    for start in range(0, len(masks), MASKS_AT_ONCE):
        part = slice(start, start + MASKS_AT_ONCE)
        yield from _windows(masks[part], boxes[part], height, width)


def paste_mask_window_fast(mask: NDArray[np.floating], box: NDArray[np.floating], height: int, width: int) -> Window:
    """One mask by the fast rule: the box rounded to whole pixels (at least one per side), the mask resized to it, above
    0.5, clipped to the image.
    """
    left, top = (int(value) for value in np.asarray(box[:2], dtype=np.float32) + np.float32(0.5))
    right, bottom = (int(value) for value in np.asarray(box[2:], dtype=np.float32) - np.float32(0.5))
    size = (max(right - left, 0) + 1, max(bottom - top, 0) + 1)
    filled = cv2.resize(mask.astype(np.float32), size, interpolation=cv2.INTER_LINEAR) > 0.5
    y0, x0 = min(max(top, 0), height), min(max(left, 0), width)
    window = filled[y0 - top : max(height - top, 0), x0 - left : max(width - left, 0)]
    return y0, x0, np.ascontiguousarray(window)


def _windows(masks: NDArray[np.floating], boxes: NDArray[np.floating], height: int, width: int) -> Iterator[Window]:
    cells = masks.shape[1] + 2
    padded = np.zeros((len(masks), cells, cells))
    padded[:, 1:-1, 1:-1] = masks
    left, top, right, bottom = _enlarged(boxes, cells / masks.shape[1]).T
    rows, columns = _axis(top, bottom, cells, height), _axis(left, right, cells, width)
    for index, cell in enumerate(padded):
        y0, y_weight = rows.of(index)
        x0, x_weight = columns.of(index)
        yield y0, x0, (x_weight @ (y_weight @ cell).T >= 0.5).T


def _enlarged(boxes: NDArray[np.floating], factor: float) -> NDArray[np.float32]:
    """`boxes` [N, 4] stretched about their centres; computed in double, kept in float32 as in TensorPack."""
    corner, opposite = np.asarray(boxes[:, :2], dtype=np.float32), np.asarray(boxes[:, 2:], dtype=np.float32)
    half = (opposite - corner).astype(np.float64) * 0.5 * factor
    centre = (opposite + corner).astype(np.float64) * 0.5
    return np.concatenate([centre - half, centre + half], axis=1).astype(np.float32)


@dataclass(frozen=True, slots=True)
class _Axis:
    """Where the pixels along one axis of the image lie in each mask. Boxes without a side meet no pixel."""

    first: list[int]  # [N] first pixel that meets the mask
    past: list[int]  # [N] rows of `weights` up to and with those of the mask
    weights: NDArray[np.float64]  # [P, cells] weights of a mask's cells, for each pixel of each mask

    def of(self, index: int) -> tuple[int, NDArray[np.float64]]:
        """First pixel that meets mask `index`, and each such pixel's weights of the mask's cells [p, cells]."""
        return self.first[index], self.weights[self.past[index - 1] if index else 0 : self.past[index]]


def _axis(start: NDArray[np.float32], end: NDArray[np.float32], cells: int, extent: int) -> _Axis:
    """The pixels of an axis of `extent` pixels in masks from `start` to `end` [N]; all masks at once saves calls."""
    length = end - start
    usable = np.isfinite(length) & (length > 0)
    origin, side = (np.where(usable, values, 1).astype(np.float64)[:, None] for values in (start, length))
    position = (np.arange(extent) + 0.5 - origin) / side * cells - 0.5  # [N, extent]; 0 is the first cell
    met = (position >= 0) & (position <= cells - 1) & usable[:, None]
    position = position[met]  # [P], mask by mask
    lower = np.minimum(position.astype(np.int64), cells - 2)  # cell before each pixel's centre
    fraction = position - lower  # weight of the cell after it
    weights = np.zeros((len(position), cells))
    pixel = np.arange(len(position))
    weights[pixel, lower] = 1 - fraction
    weights[pixel, lower + 1] = fraction
    return _Axis(met.argmax(axis=1).tolist(), met.sum(axis=1).cumsum().tolist(), weights)
