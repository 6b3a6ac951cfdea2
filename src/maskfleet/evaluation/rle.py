"""Masks as COCO run lengths: made from a window of an image, and checked before they are trusted.

Shapes: h x w a window, H x W the image, N masks, V run lengths of a mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypedDict

import hotcoco
import numpy as np
from numpy.typing import NDArray

from maskfleet.rle import wrong_texts

MASKS_AT_ONCE = 256  # checked together: few enough to stay in the cache


class Rle(TypedDict):
    """A compressed mask that JSON can hold."""

    size: list[int]  # [height, width]
    counts: str


def encode_window(y0: int, x0: int, window: NDArray[np.bool_], height: int, width: int) -> Rle:
    """The RLE of an all-zero height x width mask with `window` [h, w] pasted at row `y0`, column `x0`.

    The large mask is never made. What sticks out of the image is cut off.
    """
    inside = window[max(-y0, 0) : max(height - y0, 0), max(-x0, 0) : max(width - x0, 0)]
    runs = _window_runs(max(y0, 0), max(x0, 0), inside, height, width)
    return Rle(size=[height, width], counts=hotcoco.mask.rle_to_string({"size": [height, width], "counts": runs}))


def bad_mask(segmentations: Sequence[Any], sizes: Sequence[tuple[int, int]]) -> tuple[int, str] | None:
    """The place of the first mask of N that cannot be right for its (height, width), and why; None if all can be.

    A mask is an RLE, compressed or not, or a list of polygons. A library would read a damaged RLE as some other mask.
    """
    compressed: list[tuple[int, bytes]] = []
    worst: tuple[int, str] | None = None
    for index, (segmentation, size) in enumerate(zip(segmentations, sizes, strict=True)):
        why = _form_problem(segmentation, size)
        if why:
            worst = (index, why)
            break
        if isinstance(segmentation, dict) and isinstance(segmentation["counts"], (str, bytes)):
            counts = segmentation["counts"]
            compressed.append((index, counts.encode("utf-8") if isinstance(counts, str) else counts))
    for start in range(0, len(compressed), MASKS_AT_ONCE):
        chunk = compressed[start : start + MASKS_AT_ONCE]
        pixels = np.array([sizes[index][0] * sizes[index][1] for index, _ in chunk])
        wrong = wrong_texts([counts for _, counts in chunk], pixels)
        if wrong.any():
            return chunk[int(wrong.argmax())][0], "its run lengths do not add up to the image's pixels"
    return worst


def _window_runs(y0: int, x0: int, window: NDArray[np.bool_], height: int, width: int) -> NDArray[np.int64]:
    """Run lengths [V] of the image around `window` [h, w], which lies inside it."""
    rows, columns = window.shape
    padded = np.zeros((columns, rows + 1), dtype=np.bool_)
    padded[:, 1:] = window.T
    flat = np.append(padded.ravel(), False)
    change = np.flatnonzero(flat[1:] != flat[:-1])  # start, end, start, end, ... of each column's runs
    column, row = np.divmod(change, rows + 1)
    bounds = (x0 + column) * height + y0 + row
    if rows == height:  # a run may go on from the foot of a column to the head of the next
        joined = np.flatnonzero(bounds[1:-1:2] == bounds[2::2]) * 2 + 1
        bounds = np.delete(bounds, np.concatenate([joined, joined + 1]))
    if len(bounds) == 0 or bounds[-1] != height * width:
        bounds = np.append(bounds, height * width)
    return np.diff(bounds, prepend=0).astype(np.int64)


def _form_problem(segmentation: Any, size: tuple[int, int]) -> str:
    """What is wrong with the form of a mask of an image of `size`; "" if nothing is."""
    if isinstance(segmentation, dict):
        given, counts = segmentation.get("size"), segmentation.get("counts")
        if not isinstance(given, (list, tuple)) or tuple(given) != size:
            return f"its size is {given}, its image's [height, width] is {list(size)}"
        if isinstance(counts, (str, bytes)):
            return "" if counts else "its counts are empty"
        if not isinstance(counts, list) or not all(type(count) is int and count >= 0 for count in counts):
            return "its counts are neither a string nor a list of whole numbers"
        return "" if sum(counts) == size[0] * size[1] else "its run lengths do not add up to the image's pixels"
    if not isinstance(segmentation, list) or not segmentation:
        return "it is neither an RLE nor a list of polygons"
    for polygon in segmentation:
        if not isinstance(polygon, (list, tuple)) or len(polygon) < 6 or len(polygon) % 2:
            return "a polygon needs three points or more, as x1, y1, x2, y2, ..."
        try:
            finite = bool(np.isfinite(np.asarray(polygon, dtype=np.float64)).all())
        except (TypeError, ValueError):
            finite = False
        if not finite:
            return "a polygon has a coordinate that is not a number"
    return ""
