"""Canvas shapes: the few sizes that images are padded to, and which image gets which.

Shapes: I images. A canvas is (height, width) in pixels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from maskfleet.data.pipeline.geometry import resized_sizes
from maskfleet.errors import ConfigError, DataError

Ints = npt.NDArray[np.int64]
Canvas = tuple[int, int]
BucketRule = Literal["orientation", "tight", "none"] | Sequence[Canvas]

MAX_TIGHT_LENGTHS = 3  # per orientation
MIN_TIGHT_SAVING = 0.03  # every shape costs one compilation; it must save this share of an orientation's pixels
TIGHT_STEP_PX = 32


@dataclass(frozen=True, slots=True)
class Buckets:
    """The canvases of a set, in order of preference; None means that each batch has a canvas of its own size.

    `short_edge_px` and `max_px` are the largest that an image is resized to. With `crops` an image need not fit its
    canvas: it gets the canvas that shows it largest.
    """

    canvases: tuple[Canvas | None, ...]
    short_edge_px: int
    max_px: int
    divisor: int
    crops: bool = False

    def of(self, heights: Any, widths: Any) -> Ints:
        """Index of the canvas for each image of the given source sizes [I] -> [I]; DataError if an image fits none."""
        heights, widths = np.atleast_1d(heights), np.atleast_1d(widths)
        if None in self.canvases:
            return np.asarray(heights > widths, np.int64)
        canvases = np.array(self.canvases, np.int64)  # [K, 2]
        if self.crops:
            scales = np.minimum(canvases[:, :1] / heights, canvases[:, 1:] / widths)  # [K, I]
            return np.asarray(scales.argmax(axis=0), np.int64)
        sizes = self.resized(heights, widths)
        fits = (sizes[None] <= canvases[:, None]).all(axis=-1)  # [K, I]
        if not fits.any(axis=0).all():
            self._raise_no_fit(heights, widths, sizes, int(np.flatnonzero(~fits.any(axis=0))[0]))
        return np.asarray(fits.argmax(axis=0), np.int64)

    def resized(self, heights: Any, widths: Any) -> Ints:
        """The largest size each image is resized to [I, 2]."""
        return resized_sizes(heights, widths, short_edge_px=self.short_edge_px, max_px=self.max_px)

    def canvas(self, bucket: int, sizes: Sequence[tuple[int, int]]) -> Canvas:
        """The canvas of a batch of images of `sizes`, all in `bucket`."""
        fixed = self.canvases[bucket]
        if fixed is not None:
            return fixed
        height, width = np.max(np.array(sizes), axis=0).tolist()
        return _rounded_up(height, self.divisor), _rounded_up(width, self.divisor)

    def padded_pixels(self, heights: Any, widths: Any) -> int:
        """Pixels of the canvases of these images, padding included, one canvas per image."""
        if None in self.canvases:
            sizes = self.resized(heights, widths)
            return int((-(-sizes // self.divisor) * self.divisor).prod(axis=1).sum())
        areas = np.array(self.canvases, np.int64).prod(axis=1)
        return int(areas[self.of(heights, widths)].sum())

    def _raise_no_fit(self, heights: Ints, widths: Ints, sizes: Ints, index: int) -> None:
        height, width = sizes[index].tolist()
        raise DataError(
            f"an image of {heights[index]} x {widths[index]} is resized to {height} x {width} (height x width), "
            f"which fits none of data.buckets {[list(canvas) for canvas in self.canvases if canvas]}",
            remedy=f"add a canvas of {height} x {width} or more, lower the short side, or set data.buckets=orientation",
        )


def choose_buckets(
    rule: BucketRule,
    heights: Any,
    widths: Any,
    *,
    short_edge_px: int,
    max_px: int,
    divisor: int,
    crops: bool = False,
) -> Buckets:
    """The canvases that `data.buckets` asks for, given the source sizes [I] of the whole set.

    "tight" chooses up to MAX_TIGHT_LENGTHS per orientation from them; each must save MIN_TIGHT_SAVING.
    """
    if crops and rule == "none":
        raise ConfigError(
            "data.scale_jitter crops images to a fixed canvas, but data.buckets=none has none",
            remedy="set data.buckets=orientation, or name one canvas such as [[1024, 1024]]",
        )
    short = _rounded_up(min(short_edge_px, max_px), divisor)
    long = max(short, _rounded_up(max_px, divisor))
    orientation: tuple[Canvas, ...] = ((short, long),) if short == long else ((short, long), (long, short))
    canvases: tuple[Canvas | None, ...]
    match rule:
        case "none":
            canvases = (None, None)
        case "orientation":
            canvases = orientation
        case "tight":
            sizes = resized_sizes(heights, widths, short_edge_px=short_edge_px, max_px=max_px)
            portrait = sizes[:, 0] > sizes[:, 1]
            widths = _tight_lengths(sizes[~portrait, 1], short, long, divisor)
            heights = _tight_lengths(sizes[portrait, 0], short, long, divisor)
            canvases = tuple((short, width) for width in widths)
            canvases += tuple((height, short) for height in heights if (height, short) not in canvases)
            canvases = canvases or orientation
        case _:
            canvases = tuple((_rounded_up(height, divisor), _rounded_up(width, divisor)) for height, width in rule)
    return Buckets(canvases, short_edge_px, max_px, divisor, crops)


def with_fallback(buckets: Buckets) -> Buckets:
    """`buckets` plus canvases that every image fits: evaluation uses all images, also those that training crops."""
    if None in buckets.canvases:
        return buckets
    spare = choose_buckets(
        "orientation", [], [], short_edge_px=buckets.short_edge_px, max_px=buckets.max_px, divisor=buckets.divisor
    )
    extra = tuple(canvas for canvas in spare.canvases if canvas not in buckets.canvases)
    return Buckets(buckets.canvases + extra, buckets.short_edge_px, buckets.max_px, buckets.divisor)


def _tight_lengths(long_sides: Ints, short: int, long: int, divisor: int) -> tuple[int, ...]:
    """Canvas lengths for images of these long sides, in ascending order; the last one fits the longest."""
    if not len(long_sides):
        return ()
    step = _rounded_up(TIGHT_STEP_PX, divisor)
    needed = np.minimum(np.maximum(-(-long_sides // step) * step, short), long)
    candidates, counts = np.unique(needed, return_counts=True)
    best, best_cost = (int(candidates[-1]),), int(candidates[-1]) * len(needed)
    for number in range(2, min(MAX_TIGHT_LENGTHS, len(candidates)) + 1):
        cost, lengths = min(
            (_padded_length(candidates, counts, chosen), chosen)
            for chosen in ((*head, int(candidates[-1])) for head in combinations(candidates[:-1].tolist(), number - 1))
        )
        if best_cost - cost < MIN_TIGHT_SAVING * best_cost:
            break
        best, best_cost = lengths, cost
    return best


def _padded_length(needed: Ints, counts: Ints, chosen: tuple[int, ...]) -> int:
    """Sum of the canvas lengths when each needed length is rounded up to the next chosen one."""
    lengths = np.array(chosen)
    return int((lengths[np.searchsorted(lengths, needed)] * counts).sum())


def _rounded_up(number: int, divisor: int) -> int:
    return -(-number // divisor) * divisor
