"""COCO's run-length masks (RLE): runs of 0 and 1 in column order, zeros first, and their compressed text.

The text has six bits per character, offset by 48: five bits of the number, low ones first, and one that is set if more
follow. From a mask's fourth run on, the text holds the difference from the run two before.

Shapes: H x W an image, h x w a window of it, N masks, V runs of many masks, one mask after the other, R runs of one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

import hotcoco
import numpy as np
from numpy.typing import NDArray

MAX_GROUPS = 7  # 35 bits: more than any run of an image needs, and safe to shift in int64
MAX_PIXELS = 1 << 30  # of a mask, as of an image in OpenCV; the loader allows fewer
MASKS_PER_CHECK = 256  # few enough to stay in the cache


class RleError(ValueError):
    """The text is not a run-length mask; the message says why."""


class Rle(TypedDict):
    """A compressed mask that JSON can hold."""

    size: list[int]  # [height, width]
    counts: str


def encode_window(y0: int, x0: int, window: NDArray[np.bool_], height: int, width: int) -> Rle:
    """The RLE of an all-zero height x width mask with `window` [h, w] pasted at row `y0`, column `x0`.

    The full mask is never allocated. Pixels outside the image are cut off.
    """
    inside = window[max(-y0, 0) : max(height - y0, 0), max(-x0, 0) : max(width - x0, 0)]
    runs = window_runs(max(y0, 0), max(x0, 0), inside, height, width)
    size = [height, width]
    return Rle(size=size, counts=hotcoco.mask.rle_to_string({"size": size, "counts": runs.tolist()}))


def rle_pixels(rle: Mapping[str, Any]) -> NDArray[np.bool_]:
    """The pixels [H, W] of a compressed mask; RleError if its runs are not those of a mask of its size."""
    height, width = rle["size"]
    counts = rle["counts"]
    runs = runs_from_text(counts.encode() if isinstance(counts, str) else counts)
    check_runs(runs, height, width)
    return np.repeat(np.arange(len(runs)) % 2 == 1, runs).reshape(width, height).T


def runs_from_text(text: bytes) -> NDArray[np.int64]:
    """Run lengths of the compressed `text`, zeros first -> [R]."""
    if not text:
        return np.zeros(0, np.int64)
    if min(text) < 48 or max(text) > 48 + 63:
        raise RleError("a character outside '0'..'o'")
    code, end, num_groups = _groups(text, np.array([len(text) - 1]))
    if code[-1] >= 32:
        raise RleError("the text ends inside a number")
    if num_groups.max() > MAX_GROUPS:
        raise RleError("a number too long for a mask")
    return _undo_differences(_values(code, end, num_groups), np.array([0]), np.array([len(end)]))


def text_from_runs(runs: Sequence[int]) -> bytes:
    """The compressed text of `runs`; the inverse of `runs_from_text`."""
    text = bytearray()
    for index, run in enumerate(runs):
        value = int(run) - (int(runs[index - 2]) if index > 2 else 0)
        more = True
        while more:
            digit = value & 0x1F
            value >>= 5
            more = value != (-1 if digit & 0x10 else 0)
            text.append((digit | 0x20 if more else digit) + 48)
    return bytes(text)


def check_runs(runs: NDArray[np.int64], height: int, width: int) -> None:
    """Raise RleError unless `runs` cover a mask of height x width exactly."""
    if height < 0 or width < 0 or height * width > MAX_PIXELS:
        raise RleError(f"a mask of {height} x {width} pixels")
    if len(runs) and runs.min() < 0:
        raise RleError("a run of negative length")
    total = int(runs.sum())
    if total != height * width:
        raise RleError(f"its runs cover {total} pixels, but {height} x {width} has {height * width}")


def bad_mask(segmentations: Sequence[Any], sizes: Sequence[tuple[int, int]]) -> tuple[int, str] | None:
    """Index of the first of N masks that does not fit its (height, width), and the reason; None if all fit.

    A mask is an RLE, compressed or not, or a list of polygons. Libraries decode a damaged RLE to some other mask.
    """
    compressed: list[tuple[int, bytes]] = []
    first_bad: tuple[int, str] | None = None
    for index, (segmentation, size) in enumerate(zip(segmentations, sizes, strict=True)):
        why = _form_problem(segmentation, size)
        if why:
            first_bad = (index, why)
            break
        if isinstance(segmentation, dict) and isinstance(segmentation["counts"], (str, bytes)):
            counts = segmentation["counts"]
            compressed.append((index, counts.encode("utf-8") if isinstance(counts, str) else counts))
    for start in range(0, len(compressed), MASKS_PER_CHECK):
        chunk = compressed[start : start + MASKS_PER_CHECK]
        pixels = np.array([sizes[index][0] * sizes[index][1] for index, _ in chunk])
        wrong = _wrong_texts([counts for _, counts in chunk], pixels)
        if wrong.any():
            return chunk[int(wrong.argmax())][0], "its run lengths do not add up to the image's pixels"
    return first_bad


def window_runs(y0: int, x0: int, window: NDArray[np.bool_], height: int, width: int) -> NDArray[np.int64]:
    """Run lengths [V] of the image around `window` [h, w], which lies inside it."""
    rows, columns = window.shape
    flat = np.zeros(columns * (rows + 1) + 1, dtype=np.bool_)  # each column after a False, and one at the end
    flat[:-1].reshape(columns, rows + 1)[:, 1:] = window.T
    change = np.flatnonzero(flat[1:] != flat[:-1])  # start, end, start, end, ... of each column's runs
    bounds = change + change // (rows + 1) * (height - rows - 1) + (x0 * height + y0)
    if rows == height:  # a run may continue from the bottom of a column to the top of the next
        joined = np.flatnonzero(bounds[1:-1:2] == bounds[2::2]) * 2 + 1
        bounds = np.delete(bounds, np.concatenate([joined, joined + 1]))
    runs = np.empty(len(bounds) + 1, dtype=np.int64)
    runs[:-1], runs[-1] = bounds, height * width
    runs[1:] -= bounds
    return runs if runs[-1] or not len(bounds) else runs[:-1]


def _form_problem(segmentation: Any, size: tuple[int, int]) -> str:
    """What is wrong with the structure of a mask of an image of `size`; "" if nothing is."""
    if isinstance(segmentation, dict):
        given, counts = segmentation.get("size"), segmentation.get("counts")
        if not isinstance(given, (list, tuple)) or tuple(given) != size:
            return f"its size is {given}, its image's [height, width] is {list(size)}"
        if isinstance(counts, (str, bytes)):
            return "" if counts else "its counts are empty"
        if not isinstance(counts, list) or not set(map(type, counts)) <= {int} or min(counts, default=0) < 0:
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


def _wrong_texts(texts: Sequence[bytes], pixels: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Which of N non-empty texts are not readable or do not add up to `pixels` [N] -> [N]."""
    last = np.cumsum([len(text) for text in texts]) - 1
    code, end, num_groups = _groups(b"".join(texts), last)
    past = np.searchsorted(end, last) + 1  # [N] one past each mask's last number
    first = np.concatenate([[0], past[:-1]])
    wrong: NDArray[np.bool_] = (code[last] >= 32) | (np.maximum.reduceat(num_groups, first) > MAX_GROUPS)
    wrong |= np.maximum.reduceat(code, np.concatenate([[0], last[:-1] + 1])) > 63
    lengths = _undo_differences(_values(code, end, num_groups), first, past)
    wrong |= np.minimum.reduceat(lengths, first) < 0
    wrong |= np.add.reduceat(lengths, first) != pixels
    return wrong


def _groups(text: bytes, last: NDArray[np.int64]) -> tuple[NDArray[np.uint8], NDArray[np.int64], NDArray[np.int64]]:
    """The six bits of each character, each number's last character [V], and its number of characters [V].

    A number ends with its mask, whose last character is in `last` [N]: a truncated mask does not run into the next.
    """
    code = np.frombuffer(text, dtype=np.uint8) - np.uint8(48)  # wraps below "0"
    more = code >= 32
    more[last] = False
    end = np.flatnonzero(~more)
    return code, end, np.diff(end, prepend=-1)


def _values(code: NDArray[np.uint8], end: NDArray[np.int64], num_groups: NDArray[np.int64]) -> NDArray[np.int64]:
    """The signed numbers [V] of the five-bit groups, least significant first, whose last one is at `end` [V]."""
    digits = code & 31
    values = (digits[end].astype(np.int64) ^ 16) - 16
    for group in range(1, min(int(num_groups.max()), MAX_GROUPS)):
        longer = np.flatnonzero(num_groups > group)
        values[longer] = values[longer] * 32 + digits[end[longer] - group]
    return values


def _undo_differences(
    values: NDArray[np.int64], first: NDArray[np.int64], past: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Run lengths [V] from the numbers of the text [V], which are differences from a mask's fourth run on.

    The numbers of mask n are first[n] up to past[n].
    """
    steps = values.copy()
    steps[first] = 0  # the third run is stored as it is, not relative to the first
    lengths = np.empty_like(values)
    for parity in (0, 1):
        running = np.cumsum(steps[parity::2])
        begin, stop = (first - parity + 1) // 2, (past - parity + 1) // 2  # range of each mask in `running`
        before = np.concatenate([[0], running])[begin]
        lengths[parity::2] = running - np.repeat(before, stop - begin)
    lengths[first] = values[first]
    return lengths
