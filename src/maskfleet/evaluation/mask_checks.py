"""Masks of annotations and results, checked before a library reads a damaged one as some other mask.

Shapes: N masks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from maskfleet.rle import wrong_texts

MASKS_AT_ONCE = 256  # checked together: few enough to stay in the cache


def bad_mask(segmentations: Sequence[Any], sizes: Sequence[tuple[int, int]]) -> tuple[int, str] | None:
    """Index of the first of N masks that does not fit its (height, width), and why; None if all fit.

    A mask is an RLE, compressed or not, or a list of polygons.
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
