"""Cells of several feature maps gathered into rows, and rows added up into cells, for a sparse gradient.

Shapes: B images, C channels, h x w one map, M rows, R cells of all maps and images in (map, image, row, column) order.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

_ROWS = 16  # of one program


def gather_cells(maps: Sequence[Tensor], row: Tensor) -> Tensor:
    """The channels of the cells `row` [M] int64 of `maps` [B, C, h, w] -> [M, C]; 0 for a row that is no cell."""
    channels = maps[0].shape[1]
    cells = maps[0].new_zeros(len(row), channels)
    first = 0
    for one in maps:
        batch, _, height, width = one.shape
        one = one if channels == 1 or one.stride(1) == 1 else one.contiguous(memory_format=torch.channels_last)
        if len(row) > 0 and one.numel() > 0:
            strides = (one.stride(0), one.stride(2), one.stride(3))
            _gather[(triton.cdiv(len(row), _ROWS),)](
                one, row, cells, len(row), first, batch, height, width, channels, *strides,
                ROWS=_ROWS, CHANNELS=triton.next_power_of_2(channels),
            )  # fmt: skip
        first += batch * height * width
    return cells


def spread_cells(gradient: Tensor, row: Tensor, num_rows: int) -> Tensor:
    """Sums of the `gradient` [M, C] of each `row` [M] int64, in the order of M -> [num_rows, C]; row -1 is left out."""
    count, channels = gradient.shape
    table = gradient.new_zeros(num_rows, channels)
    if count > 0 and num_rows > 0:
        # 32 bits take half the passes of 64 to sort.
        ordered, order = torch.where(row < 0, num_rows, row).to(torch.int32).sort(stable=True)
        _spread[(count,)](
            gradient.contiguous(), ordered, order, table, count, num_rows, channels,
            CHANNELS=triton.next_power_of_2(channels), num_warps=1,
        )  # fmt: skip
    return table


@triton.jit(do_not_specialize=["num_rows", "first"])
def _gather(
    one, row, cells, num_rows, first, batch, height, width, channels, image_stride, y_stride, x_stride,
    ROWS: tl.constexpr, CHANNELS: tl.constexpr,  # noqa: N803
):  # fmt: skip
    """Copy the rows that are cells of this map."""
    number = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    cell = tl.load(row + number, mask=number < num_rows, other=-1) - first
    is_here = (cell >= 0) & (cell < batch * height * width)
    image, y, x = cell // (height * width), cell // width % height, cell % width
    channel = tl.arange(0, CHANNELS)
    is_copied = is_here[:, None] & (channel < channels)[None, :]
    source = one + (image * image_stride + y * y_stride + x * x_stride)[:, None] + channel[None, :]
    values = tl.load(source, mask=is_copied, other=0.0)
    tl.store(cells + number.to(tl.int64)[:, None] * channels + channel[None, :], values, mask=is_copied)


@triton.jit(do_not_specialize=["count", "num_rows"])
def _spread(gradient, ordered, order, table, count, num_rows, channels, CHANNELS: tl.constexpr):  # noqa: N803
    """The sum of a row whose first entry in sorted order is that of this program."""
    place = tl.program_id(0)
    row = tl.load(ordered + place)
    before = tl.load(ordered + place - 1, mask=place > 0, other=-1)
    if (row < num_rows) & (row != before):
        channel = tl.arange(0, CHANNELS)
        is_channel = channel < channels
        total = tl.zeros([CHANNELS], tl.float32)
        same = row
        while same == row:
            source = gradient + tl.load(order + place) * channels + channel
            total += tl.load(source, mask=is_channel, other=0.0).to(tl.float32)
            place += 1
            same = tl.load(ordered + place, mask=place < count, other=-1)
        tl.store(table + row.to(tl.int64) * channels + channel, total, mask=is_channel)
