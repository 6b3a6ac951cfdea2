"""COCO's run-length masks: runs of 0 and 1 in column order, and the text they are packed in.

The text has six bits a character, offset 48: five of the number, low ones first, and one that says more follow.
From the fourth run on, what is written is the difference from the run two before.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

MAX_CHARS_PER_RUN = 12  # 12 x 5 bits fill an int64; no image needs more


class RleError(ValueError):
    """The text is not a run-length mask; says why."""


def runs_from_text(text: bytes) -> npt.NDArray[np.int64]:
    """Lengths of the runs, the first of zeros, that `text` packs -> [R]."""
    digits = np.frombuffer(text, np.uint8).astype(np.int64) - 48
    if not len(digits):
        return np.zeros(0, np.int64)
    if digits.min() < 0 or digits.max() > 63:
        raise RleError("a character outside '0'..'o'")
    is_last = (digits & 0x20) == 0
    if not is_last[-1]:
        raise RleError("the text ends inside a number")
    first = np.concatenate([[0], np.flatnonzero(is_last)[:-1] + 1])
    length = np.diff(np.append(first, len(digits)))
    if length.max() > MAX_CHARS_PER_RUN:
        raise RleError("a number too long for a mask")
    place = np.arange(len(digits)) - np.repeat(first, length)
    value = np.add.reduceat((digits & 0x1F) << (5 * place), first)
    is_negative = (digits[first + length - 1] & 0x10) != 0
    value -= np.where(is_negative, np.int64(1) << np.minimum(5 * length, 62), 0)
    value[1::2] = np.cumsum(value[1::2])
    value[2::2] = np.cumsum(value[2::2])
    return value


def text_from_runs(runs: Sequence[int]) -> bytes:
    """The packed text of `runs`; the inverse of `runs_from_text`."""
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


def check_runs(runs: npt.NDArray[np.int64], height: int, width: int) -> None:
    """Raise RleError unless `runs` cover a mask of height x width exactly."""
    if len(runs) and runs.min() < 0:
        raise RleError("a run of negative length")
    total = int(runs.sum())
    if total != height * width:
        raise RleError(f"its runs cover {total} pixels, but {height} x {width} has {height * width}")
