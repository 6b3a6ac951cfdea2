"""Maximum of 3 x 3 pixels at every second pixel, channels last; its gradient is gathered, without atomic additions.

The forward pass stores in one byte which of a window's nine pixels is the maximum. In the backward pass every pixel
looks at the windows that contain it, four at most.

Shapes: n maps, C channels, h x w pixels.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

WARPS = 4
# Eight numbers per thread: 16 bytes in half precision. With more, Triton would read the positions, which are bytes, in
# vectors of 16 and exchange numbers between threads.
TILE = 8 * 32 * WARPS
MAX_BLOCK = 64  # channels of a program
ROWS = 8  # of windows that a program processes, one after the other
# Sizes that differ between canvases and do not align addresses, as `channels` does: one compilation serves them all.
_SIZES = ["height", "width", "num_rows"]


def max_pool(features: Tensor, pads_first: bool) -> tuple[Tensor, Tensor]:
    """Maxima of `features` [n, C, h, w] and their positions 0..8 in the windows, uint8 -> [n, C, h // 2, w // 2] each.

    See `maskfleet.ops.layers.max_pool`.
    """
    features = features.contiguous(memory_format=torch.channels_last)
    maps, channels, height, width = features.shape
    outputs = _empty((maps, channels, height // 2, width // 2), features, features.dtype)
    positions = _empty(outputs.shape, features, torch.uint8)
    if outputs.numel() > 0:
        grid, tile = _launch(maps, channels, height // 2, width // 2)
        sizes = (channels, height, width, height // 2)
        _forward[grid](features, outputs, positions, *sizes, FIRST=int(pads_first), **tile)
    return outputs, positions


def max_pool_backward(gradient: Tensor, positions: Tensor, height: int, width: int, pads_first: bool) -> Tensor:
    """Gradient of the features [n, C, height, width] from that of the maxima [n, C, h // 2, w // 2]."""
    gradient = gradient.contiguous(memory_format=torch.channels_last)
    maps, channels = gradient.shape[:2]
    to_features = _empty((maps, channels, height, width), gradient, gradient.dtype)
    if to_features.numel() > 0:
        # Blocks of 2 x 2 pixels; without padding in front, the first pixel is the second of its block.
        rows, columns = ((side + 1) // 2 if pads_first else side // 2 + 1 for side in (height, width))
        grid, tile = _launch(maps, channels, rows, columns)
        sizes = (channels, height, width, rows)
        _backward[grid](gradient, positions, to_features, *sizes, FIRST=int(pads_first), **tile)
    return to_features


def _launch(maps: int, channels: int, rows: int, columns: int) -> tuple[tuple[int, int, int], dict[str, int]]:
    block = min(MAX_BLOCK, triton.next_power_of_2(channels))
    pixels = TILE // block
    grid = (maps * triton.cdiv(rows, ROWS), triton.cdiv(columns, pixels), triton.cdiv(channels, block))
    return grid, {"PIXELS": pixels, "CHANNELS": block, "ROWS": ROWS, "num_warps": WARPS}


def _empty(shape: tuple[int, ...], like: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=like.device, memory_format=torch.channels_last)


@triton.jit(do_not_specialize=_SIZES)
def _forward(
    features, outputs, positions, channels, height, width, num_rows,
    FIRST: tl.constexpr, PIXELS: tl.constexpr, CHANNELS: tl.constexpr, ROWS: tl.constexpr,  # noqa: N803
):  # fmt: skip
    """Some neighbouring columns of up to ROWS rows of windows of one map."""
    num_strips = tl.cdiv(num_rows, ROWS)
    image, strip = tl.program_id(0) // num_strips, tl.program_id(0) % num_strips
    column = tl.program_id(1) * PIXELS + tl.arange(0, PIXELS)
    channel = tl.program_id(2) * CHANNELS + tl.arange(0, CHANNELS)
    here = (column < width // 2)[:, None] & (channel < channels)[None, :]
    features += image.to(tl.int64) * height * width * channels + channel[None, :]
    place = image.to(tl.int64) * num_rows * (width // 2) * channels + column[:, None] * channels + channel[None, :]
    left = 2 * column - FIRST
    top = 2 * strip * ROWS - FIRST
    upper, upper_at = _maximum_of_row(features, top, left, here, channels, height, width)
    for row in range(strip * ROWS, tl.minimum((strip + 1) * ROWS, num_rows)):
        top = 2 * row - FIRST
        middle, middle_at = _maximum_of_row(features, top + 1, left, here, channels, height, width)
        lower, lower_at = _maximum_of_row(features, top + 2, left, here, channels, height, width)
        # A row before the map must not be the maximum, even if all pixels are minus infinity.
        best, at = _larger(upper, upper_at, middle, middle_at + 3, top < 0)
        best, at = _larger(best, at, lower, lower_at + 6, False)
        tl.store(outputs + place + row * (width // 2) * channels, best.to(outputs.dtype.element_ty), mask=here)
        tl.store(positions + place + row * (width // 2) * channels, at.to(tl.uint8), mask=here)
        upper, upper_at = lower, lower_at


@triton.jit
def _maximum_of_row(features, row, left, here, channels, height, width):
    """Maximum of three pixels of `row` from column `left` on, and which of them it is: 0, 1 or 2."""
    here = here & (row >= 0) & (row < height)
    place = features + (row * width + left)[:, None] * channels
    lowest = float("-inf")
    first = tl.load(place, mask=here & (left >= 0)[:, None], other=lowest).to(tl.float32)
    second = tl.load(place + channels, mask=here, other=lowest).to(tl.float32)
    third = tl.load(place + 2 * channels, mask=here & (left + 2 < width)[:, None], other=lowest).to(tl.float32)
    best, at = _larger(first, tl.zeros(here.shape, tl.int32), second, 1, (left < 0)[:, None])
    return _larger(best, at, third, 2, False)


@triton.jit
def _larger(one, one_at, other, other_at, must_be_other):
    """The larger of two values and its position: the first of two equal ones, the last NaN, as torch has it."""
    takes_other = (other > one) | (other != other) | must_be_other
    return tl.where(takes_other, other, one), tl.where(takes_other, other_at, one_at)


@triton.jit(do_not_specialize=_SIZES)
def _backward(
    gradient, positions, to_features, channels, height, width, num_rows,
    FIRST: tl.constexpr, PIXELS: tl.constexpr, CHANNELS: tl.constexpr, ROWS: tl.constexpr,  # noqa: N803
):  # fmt: skip
    """Some neighbouring columns of up to ROWS rows of blocks of one map.

    A block is the 2 x 2 pixels that start at the middle of a window. Only that window contains the first pixel; the
    others may also be in the next window to the right, below, or both.
    """
    num_strips = tl.cdiv(num_rows, ROWS)
    image, strip = tl.program_id(0) // num_strips, tl.program_id(0) % num_strips
    # Without padding in front, the first block starts one pixel before the map.
    column = tl.program_id(1) * PIXELS + tl.arange(0, PIXELS) - 1 + FIRST
    channel = tl.program_id(2) * CHANNELS + tl.arange(0, CHANNELS)
    x = 2 * column + 1 - FIRST
    window = image.to(tl.int64) * (height // 2) * (width // 2) * channels + channel[None, :]
    gradient, positions = gradient + window, positions + window
    to_features += image.to(tl.int64) * height * width * channels + channel[None, :]
    exists = (channel < channels)[None, :]
    for block in range(strip * ROWS, tl.minimum((strip + 1) * ROWS, num_rows)):
        row = block - 1 + FIRST
        y = 2 * row + 1 - FIRST
        one, one_at = _window(gradient, positions, row, column, exists, channels, height, width)
        right, right_at = _window(gradient, positions, row, column + 1, exists, channels, height, width)
        below, below_at = _window(gradient, positions, row + 1, column, exists, channels, height, width)
        last, last_at = _window(gradient, positions, row + 1, column + 1, exists, channels, height, width)
        total = _if_at(one, one_at, 4)
        _store_pixel(to_features, total, y, x, exists, channels, height, width)
        total = _if_at(one, one_at, 5) + _if_at(right, right_at, 3)
        _store_pixel(to_features, total, y, x + 1, exists, channels, height, width)
        total = _if_at(one, one_at, 7) + _if_at(below, below_at, 1)
        _store_pixel(to_features, total, y + 1, x, exists, channels, height, width)
        total = _if_at(one, one_at, 8) + _if_at(right, right_at, 6)
        total = total + _if_at(below, below_at, 2) + _if_at(last, last_at, 0)
        _store_pixel(to_features, total, y + 1, x + 1, exists, channels, height, width)


@triton.jit
def _window(gradient, positions, row, column, exists, channels, height, width):
    """Gradient and position of the maximum of windows in `row`; 0 where there is no window."""
    here = exists & ((column >= 0) & (column < width // 2))[:, None] & (row >= 0) & (row < height // 2)
    place = (row * (width // 2) + column)[:, None] * channels
    value = tl.load(gradient + place, mask=here, other=0.0).to(tl.float32)
    return value, tl.load(positions + place, mask=here, other=0)


@triton.jit
def _if_at(value, position, wanted: tl.constexpr):
    return tl.where(position == wanted, value, 0.0)


@triton.jit
def _store_pixel(to_features, value, y, x, exists, channels, height, width):
    here = exists & ((x >= 0) & (x < width))[:, None] & (y >= 0) & (y < height)
    place = to_features + (y * width + x)[:, None] * channels
    tl.store(place, value.to(to_features.dtype.element_ty), mask=here)
