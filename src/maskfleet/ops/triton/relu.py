"""The gradient before ReLU and its sum over pixels, channels last: each tensor is read once.

Rows are cut into chunks. One kernel writes the gradient of a chunk and sums it by channel, a small one adds up the
chunks. Sums are float32 and added in an order that only the shape decides, so the same inputs give the same bits.

Shapes: n maps, C channels, h x w pixels, R = n h w rows of C numbers, K chunks of rows.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_GRADIENTS = 3
# As in `group_norm`: four warps with 32 numbers of each tensor per thread, eight programs per multiprocessor.
TILE = 4096  # numbers of each tensor that a program reads at a time
WARPS = 4
MAX_BLOCK = 256  # channels of a program
PROGRAMS = 1056
_COMBINED_CHANNELS = 16  # 64 bytes, two sectors of the cache
_COMBINED_CHUNKS = 256


def relu_backward(gradients: Sequence[Tensor], outputs: Tensor, sums: bool) -> tuple[Tensor, Tensor | None]:
    """The sum of 1 to 3 `gradients` [n, C, h, w] where `outputs` are positive, else 0; and if `sums` its sums [C].

    The gradient has the type of `outputs`; its sums are float32, of values that are not rounded to that type.
    """
    assert 1 <= len(gradients) <= MAX_GRADIENTS
    first, second, third = [*map(_channels_last, gradients), None, None][:MAX_GRADIENTS]
    outputs = _channels_last(outputs)
    maps, channels, height, width = outputs.shape
    num_rows = maps * height * width
    # Not `torch.empty_like`, which copies the strides: those of maps of one pixel are ambiguous.
    masked = torch.empty(outputs.shape, dtype=outputs.dtype, device=outputs.device, memory_format=torch.channels_last)
    total = torch.empty(channels, dtype=torch.float32, device=outputs.device) if sums else None
    if outputs.numel() == 0:
        return masked, None if total is None else total.zero_()
    block = min(MAX_BLOCK, triton.next_power_of_2(channels))
    rows, blocks = max(1, TILE // block), triton.cdiv(channels, block)
    tiles = triton.cdiv(num_rows, rows)
    rows_per_chunk = triton.cdiv(tiles, triton.cdiv(PROGRAMS, blocks)) * rows
    chunks = triton.cdiv(num_rows, rows_per_chunk)
    partial = torch.empty(chunks, channels, dtype=torch.float32, device=outputs.device) if sums else None
    _mask[(chunks, blocks)](
        first, second, third, outputs, masked, partial, num_rows, channels, rows_per_chunk,
        ROWS=rows, CHANNELS=block, num_warps=WARPS,
    )  # fmt: skip
    if sums:
        grid = (triton.cdiv(channels, _COMBINED_CHANNELS),)
        tile = {"CHUNKS": min(_COMBINED_CHUNKS, triton.next_power_of_2(chunks)), "CHANNELS": _COMBINED_CHANNELS}
        _combine[grid](partial, total, chunks, channels, **tile, num_warps=8)
    return masked, total


def _channels_last(features: Tensor) -> Tensor:
    return features.contiguous(memory_format=torch.channels_last)


@triton.jit(do_not_specialize=["num_rows", "rows_per_chunk"])
def _mask(
    first, second, third, outputs, masked, partial, num_rows, channels, rows_per_chunk,
    ROWS: tl.constexpr, CHANNELS: tl.constexpr,  # noqa: N803
):  # fmt: skip
    """The gradient of one chunk of rows before ReLU, and its sum by channel."""
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    row = tl.arange(0, ROWS)
    within = row[:, None] * channels + channel[None, :]
    total = tl.zeros([ROWS, CHANNELS], tl.float32)
    start = tl.program_id(0) * rows_per_chunk
    for top in range(start, tl.minimum(start + rows_per_chunk, num_rows), ROWS):
        here = (top + row < num_rows)[:, None] & (channel < channels)[None, :]
        at = tl.cast(top, tl.int64) * channels + within
        change = tl.load(first + at, mask=here, other=0.0).to(tl.float32)
        if second is not None:
            change += tl.load(second + at, mask=here, other=0.0).to(tl.float32)
        if third is not None:
            change += tl.load(third + at, mask=here, other=0.0).to(tl.float32)
        change = tl.where(tl.load(outputs + at, mask=here, other=0.0) > 0.0, change, 0.0)
        tl.store(masked + at, change.to(masked.dtype.element_ty), mask=here)
        if partial is not None:
            total += change
    if partial is not None:
        tl.store(partial + tl.program_id(0) * channels + channel, tl.sum(total, axis=0), mask=channel < channels)


@triton.jit(do_not_specialize=["num_chunks"])
def _combine(partial, sums, num_chunks, channels, CHUNKS: tl.constexpr, CHANNELS: tl.constexpr):  # noqa: N803
    """Sums of all chunks of some channels."""
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    total = tl.zeros([CHUNKS, CHANNELS], tl.float32)
    for first in range(0, num_chunks, CHUNKS):
        chunk = first + tl.arange(0, CHUNKS)
        here = (chunk < num_chunks)[:, None] & (channel < channels)[None, :]
        total += tl.load(partial + chunk[:, None] * channels + channel[None, :], mask=here, other=0.0)
    tl.store(sums + channel, tl.sum(total, axis=0), mask=channel < channels)
