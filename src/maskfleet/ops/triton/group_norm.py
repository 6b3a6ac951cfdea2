"""Group normalisation with sum and ReLU, channels last: two passes over memory forward, two backward, one if it fits.

Large maps are cut into chunks of pixels. One kernel reduces each chunk, a small one combines the chunks of a map, and
one applies the result. Sums are float32 and added in an order that only the shape decides, so the same inputs give the
same bits. Maps that fit into one program (those of the heads) are read once: see `group_norm_small`.

Shapes: n maps, C channels in G groups, h x w pixels, p = h w, K chunks per map.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from maskfleet.ops.triton.group_norm_small import (
    SIZES,
    backward_small,
    before_relu,
    fits_small,
    forward_small,
    inside,
    of_channels,
)

# Four warps with 32 numbers per thread, four vectors of 16 bytes of each tensor: the fastest of twelve combinations for
# almost every layer on an H200 (benchmarks/group_norm.py --tune).
TILE = 4096  # numbers that a program reads at a time
WARPS = 4
REGISTERS = {"statistics": 64, "gradient": 128}  # of a thread of the sums: eight and four programs on a multiprocessor
FOLD = 4  # rows of a tile in one thread: TILE / (32 WARPS threads x 8 numbers of a vector)
MAX_BLOCK = 256  # channels of a program
PROGRAMS = 1056  # eight for each multiprocessor of an H200
MAX_CHUNKS = 512  # of a map: one program combines them
_SIZES = [*SIZES, "num_chunks", "rows_per_chunk"]


@dataclass(frozen=True, slots=True)
class _Split:
    """How programs share [n, p, C], by shape alone: the device must not change the order of sums."""

    rows: int  # pixels of a tile
    block: int  # channels of a tile
    chunks: int  # K
    rows_per_chunk: int  # a multiple of `rows`
    grid: tuple[int, int]
    tile: dict[str, int]  # options of the kernels that read a chunk
    reduced: dict[str, int]  # the same, and those of sums over a chunk
    chunks_tile: dict[str, int]  # options of those that combine the chunks of a group

    @classmethod
    def of(cls, features: Tensor, num_groups: int) -> _Split:
        maps, channels, height, width = features.shape
        block = min(MAX_BLOCK, triton.next_power_of_2(channels))
        rows, blocks = max(1, TILE // block), triton.cdiv(channels, block)
        tiles = triton.cdiv(height * width, rows)
        chunks = min(tiles, MAX_CHUNKS, triton.cdiv(PROGRAMS, maps * blocks))
        rows_per_chunk = triton.cdiv(tiles, chunks) * rows
        chunks = triton.cdiv(height * width, rows_per_chunk)
        tile = {"ROWS": rows, "CHANNELS": block, "num_warps": WARPS}
        reduced = tile | {"FOLD": min(FOLD, rows)}
        per_group = triton.next_power_of_2(channels // num_groups)
        chunks_tile = {"CHUNKS": triton.next_power_of_2(chunks), "PER_GROUP": per_group, "num_warps": 4}
        return cls(rows, block, chunks, rows_per_chunk, (maps * chunks, blocks), tile, reduced, chunks_tile)


def group_norm(
    features: Tensor,
    weight: Tensor,
    bias: Tensor,
    residual: Tensor | None,
    mask: Tensor | None,
    num_groups: int,
    epsilon: float,
    relu: bool,
) -> tuple[Tensor, Tensor]:
    """Outputs like `features` [n, C, h, w], and mean, 1 / deviation and 1 / count [3, n, G] float32 of each group.

    See `maskfleet.ops.layers.group_norm`.
    """
    features, residual = _channels_last(features), None if residual is None else _channels_last(residual)
    mask = None if mask is None else mask.contiguous()
    maps, channels, height, width = features.shape
    outputs = _empty_like(features)
    statistics = torch.empty(3, maps, num_groups, dtype=torch.float32, device=features.device)
    if features.numel() == 0:
        return outputs, statistics.zero_()
    if fits_small(features, num_groups):
        forward_small(features, weight, bias, residual, mask, outputs, statistics, epsilon=epsilon, relu=relu)
        return outputs, statistics
    split = _Split.of(features, num_groups)
    partial = torch.empty(2, maps, split.chunks, channels, dtype=torch.float32, device=features.device)
    counted = torch.empty(maps, split.chunks, dtype=torch.float32, device=features.device)
    sizes = (maps, num_groups, height * width, channels, split.chunks, split.rows_per_chunk)
    _reduce[split.grid](features, mask, partial, counted, *sizes, **split.reduced, maxnreg=REGISTERS["statistics"])
    _combine[(maps * num_groups,)](partial, counted, statistics, epsilon, *sizes, **split.chunks_tile)
    read = (features, weight, bias, residual, mask, statistics)
    _apply[split.grid](*read, outputs, *sizes, RELU=relu, **split.tile)
    return outputs, statistics


def group_norm_backward(
    gradients: Sequence[Tensor],
    features: Tensor,
    weight: Tensor,
    bias: Tensor,
    statistics: Tensor,
    mask: Tensor | None,
    outputs: Tensor | None,
    relu: bool,
    separate: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Gradients of the features [n, C, h, w], of bias and weight [2, C], and if `separate` of the sum before ReLU.

    The gradient of the outputs is the sum of 1 to 3 `gradients`; of several only if `separate`. `outputs` are those of
    `group_norm` if it had a residual and ReLU; without a residual the features tell which outputs are positive.
    """
    assert len(gradients) == 1 or (separate and len(gradients) <= 3)
    features, is_small = _channels_last(features), fits_small(features, statistics.shape[2])
    gradients = [functools.reduce(torch.add, gradients)] if is_small else gradients
    first, *others = [_channels_last(gradient) for gradient in gradients]
    second, third = [*others, None, None][:2]
    outputs = None if outputs is None else _channels_last(outputs)
    mask = None if mask is None else mask.contiguous()
    maps, channels, height, width = features.shape
    num_groups = statistics.shape[2]
    to_features, to_sum = _empty_like(features), _empty_like(features) if separate else None
    to_parameters = torch.empty(2, channels, dtype=torch.float32, device=features.device)
    if features.numel() == 0:
        return to_features, to_parameters.zero_(), to_sum
    sums = torch.empty(2, maps, channels, dtype=torch.float32, device=features.device)  # of bias and weight, by map
    read = (first, features, weight, bias, mask, outputs, statistics)
    if is_small:
        backward_small(*read, to_features, to_sum, sums, relu=relu)
        return to_features, sums.sum(dim=1), to_sum
    split = _Split.of(features, num_groups)
    partial = torch.empty(2, maps, split.chunks, channels, dtype=torch.float32, device=features.device)
    means = torch.empty(2, maps, num_groups, dtype=torch.float32, device=features.device)
    sizes = (maps, num_groups, height * width, channels, split.chunks, split.rows_per_chunk)
    # More gradients need more registers.
    registers = REGISTERS["gradient"] if second is None else None
    _reduce_gradient[split.grid](
        *read, second, third, to_sum, partial, *sizes, RELU=relu, **split.reduced, maxnreg=registers
    )
    _combine_gradient[(maps * num_groups,)](partial, weight, statistics, sums, means, *sizes, **split.chunks_tile)
    written = (to_features, to_parameters)
    _apply_gradient[split.grid](*read, to_sum, means, sums, *written, *sizes, RELU=relu, **split.tile)
    return to_features, to_parameters, to_sum


def _channels_last(features: Tensor) -> Tensor:
    return features.contiguous(memory_format=torch.channels_last)


def _empty_like(features: Tensor) -> Tensor:
    """Not `torch.empty_like`, which copies the strides: those of maps of one pixel are ambiguous."""
    return torch.empty(features.shape, dtype=features.dtype, device=features.device, memory_format=torch.channels_last)


@triton.jit(do_not_specialize=_SIZES)
def _reduce(
    features, mask, partial, counted, num_maps, num_groups, num_pixels, channels, num_chunks, rows_per_chunk,
    ROWS: tl.constexpr, CHANNELS: tl.constexpr, FOLD: tl.constexpr,  # noqa: N803
):  # fmt: skip
    """Mean, and sum of squared distances from it, of each channel of one chunk; how many pixels they are of."""
    place = tl.program_id(0)
    image, chunk = place // num_chunks, place % num_chunks
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    features += image.to(tl.int64) * num_pixels * channels
    # Distances from the map's first pixel, which take fewer instructions and registers than Welford's method. If that
    # pixel is 10 deviations from the mean of a large map, the variance is wrong by 2e-7 of itself; if 100, by 3e-5.
    has_origin = (channel < channels) & inside(mask, image, 0, num_pixels)
    origin = tl.load(features + channel, mask=has_origin, other=0.0).to(tl.float32)
    total = tl.zeros([ROWS // FOLD, CHANNELS], tl.float32)
    squares = tl.zeros([ROWS // FOLD, CHANNELS], tl.float32)
    seen = tl.zeros([ROWS], tl.float32)
    for first in range(chunk * rows_per_chunk, tl.minimum((chunk + 1) * rows_per_chunk, num_pixels), ROWS):
        row = first + tl.arange(0, ROWS)
        counts = inside(mask, image, row, num_pixels)
        here = (row < num_pixels)[:, None] & (channel < channels)[None, :]
        value = tl.load(features + row[:, None] * channels + channel[None, :], mask=here, other=0.0).to(tl.float32)
        distance = tl.where(counts[:, None], value - origin[None, :], 0.0)
        total += _add_rows(distance, FOLD)
        squares += _add_rows(distance * distance, FOLD)
        seen += counts.to(tl.float32)
    number = tl.sum(seen, axis=0)
    distance = tl.sum(total, axis=0) / tl.maximum(number, 1.0)
    spread = tl.maximum(tl.sum(squares, axis=0) - distance * distance * number, 0.0)
    partial += place * channels + channel
    size = tl.num_programs(0) * channels
    # Read again, not kept: it would not fit into the registers during the loop.
    origin = tl.load(features + channel, mask=has_origin, other=0.0, eviction_policy="evict_last").to(tl.float32)
    tl.store(partial, origin + distance, mask=channel < channels)
    tl.store(partial + size, spread, mask=channel < channels)
    if tl.program_id(1) == 0:
        tl.store(counted + place, number)


@triton.jit
def _add_rows(values, FOLD: tl.constexpr):  # noqa: N803
    """Sums of FOLD rows of a tile [ROWS, CHANNELS] that are in one thread -> [ROWS // FOLD, CHANNELS]."""
    return tl.sum(tl.reshape(values, [FOLD, values.shape[0] // FOLD, values.shape[1]]), axis=0)


@triton.jit(do_not_specialize=_SIZES)
def _combine(
    partial, counted, statistics, epsilon, num_maps, num_groups, num_pixels, channels, num_chunks, rows_per_chunk,
    CHUNKS: tl.constexpr, PER_GROUP: tl.constexpr,  # noqa: N803
):  # fmt: skip
    """Statistics of one group of one map, from those of its chunks and channels."""
    image, group = tl.program_id(0) // num_groups, tl.program_id(0) % num_groups
    chunk, place, here = _group_of_chunks(image, group, channels, num_groups, num_chunks, CHUNKS, PER_GROUP)
    size = num_maps * num_chunks * channels
    count = tl.load(counted + image * num_chunks + chunk, mask=chunk < num_chunks, other=0.0)
    means = tl.load(partial + place, mask=here, other=0.0)
    spread = tl.load(partial + size + place, mask=here, other=0.0)
    total = tl.maximum(tl.sum(count, axis=0), 1.0) * (channels // num_groups)
    mean = tl.sum(tl.sum(means * count[:, None], axis=1), axis=0) / total
    distance = tl.where(here, means - mean, 0.0)
    spread += distance * distance * count[:, None]
    variance = tl.sum(tl.sum(spread, axis=1), axis=0) / total
    statistics += tl.program_id(0)
    tl.store(statistics, mean)
    tl.store(statistics + num_maps * num_groups, tl.rsqrt(variance + epsilon))
    tl.store(statistics + 2 * num_maps * num_groups, 1.0 / total)


@triton.jit
def _group_of_chunks(
    image, group, channels, num_groups, num_chunks, CHUNKS: tl.constexpr, PER_GROUP: tl.constexpr  # noqa: N803
):  # fmt: skip
    """Numbers of a map's chunks, and the places in [n, K, C] of one group's channels in them."""
    per_group = channels // num_groups
    chunk, channel = tl.arange(0, CHUNKS), tl.arange(0, PER_GROUP)
    here = (chunk < num_chunks)[:, None] & (channel < per_group)[None, :]
    row = (image * num_chunks + chunk) * channels + group * per_group
    return chunk, row[:, None] + channel[None, :], here


@triton.jit(do_not_specialize=_SIZES)
def _apply(
    features, weight, bias, residual, mask, statistics, outputs,
    num_maps, num_groups, num_pixels, channels, num_chunks, rows_per_chunk,
    RELU: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr,  # noqa: N803
):  # fmt: skip
    """Outputs of one chunk."""
    # Backwards: what the reduction read last is still in the cache.
    place = tl.num_programs(0) - 1 - tl.program_id(0)
    image, chunk = place // num_chunks, place % num_chunks
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    mean, inverse, scale, offset = of_channels(statistics, weight, bias, image, channel, num_maps, num_groups, channels)
    factor = inverse * scale
    start = image.to(tl.int64) * num_pixels * channels
    for first in range(chunk * rows_per_chunk, tl.minimum((chunk + 1) * rows_per_chunk, num_pixels), ROWS):
        row = first + tl.arange(0, ROWS)
        counts = inside(mask, image, row, num_pixels)
        here = (row < num_pixels)[:, None] & (channel < channels)[None, :]
        at = start + row[:, None] * channels + channel[None, :]
        value = tl.load(features + at, mask=here, other=0.0).to(tl.float32)
        value = (value - mean[None, :]) * factor[None, :] + offset[None, :]
        if residual is not None:
            value += tl.load(residual + at, mask=here, other=0.0).to(tl.float32)
        if RELU:
            value = tl.maximum(value, 0.0)
        tl.store(outputs + at, tl.where(counts[:, None], value, 0.0).to(outputs.dtype.element_ty), mask=here)


@triton.jit(do_not_specialize=_SIZES)
def _reduce_gradient(
    gradient, features, weight, bias, mask, outputs, statistics, second, third, to_sum, partial,
    num_maps, num_groups, num_pixels, channels, num_chunks, rows_per_chunk,
    RELU: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr, FOLD: tl.constexpr,  # noqa: N803
):  # fmt: skip
    """Sums over one chunk of each channel's gradient before ReLU, and of that times the normalised features."""
    place = tl.program_id(0)
    image, chunk = place // num_chunks, place % num_chunks
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    mean, inverse, scale, offset = of_channels(statistics, weight, bias, image, channel, num_maps, num_groups, channels)
    factor = inverse * scale
    start = image.to(tl.int64) * num_pixels * channels
    total = tl.zeros([ROWS // FOLD, CHANNELS], tl.float32)
    product = tl.zeros([ROWS // FOLD, CHANNELS], tl.float32)
    for first in range(chunk * rows_per_chunk, tl.minimum((chunk + 1) * rows_per_chunk, num_pixels), ROWS):
        row = first + tl.arange(0, ROWS)
        counts = inside(mask, image, row, num_pixels)
        here = (row < num_pixels)[:, None] & (channel < channels)[None, :]
        at = start + row[:, None] * channels + channel[None, :]
        value = tl.load(features + at, mask=here, other=0.0).to(tl.float32)
        change = tl.load(gradient + at, mask=here, other=0.0).to(tl.float32)
        if second is not None:
            change += tl.load(second + at, mask=here, other=0.0).to(tl.float32)
        if third is not None:
            change += tl.load(third + at, mask=here, other=0.0).to(tl.float32)
        centred = value - mean[None, :]
        change = before_relu(change, centred, outputs, at, here, counts, factor, offset, RELU)
        total += _add_rows(change, FOLD)
        product += _add_rows(tl.where(counts[:, None], change * centred, 0.0), FOLD)
        if to_sum is not None:
            tl.store(to_sum + at, change.to(to_sum.dtype.element_ty), mask=here)
    partial += place * channels + channel
    tl.store(partial, tl.sum(total, axis=0), mask=channel < channels)
    partial += tl.num_programs(0) * channels
    tl.store(partial, tl.sum(product, axis=0) * inverse, mask=channel < channels)


@triton.jit(do_not_specialize=_SIZES)
def _combine_gradient(
    partial, weight, statistics, sums, means, num_maps, num_groups, num_pixels, channels, num_chunks, rows_per_chunk,
    CHUNKS: tl.constexpr, PER_GROUP: tl.constexpr,  # noqa: N803
):  # fmt: skip
    """Sums of one group of one map by channel, and their weighted means over the group."""
    image, group = tl.program_id(0) // num_groups, tl.program_id(0) % num_groups
    _, place, here = _group_of_chunks(image, group, channels, num_groups, num_chunks, CHUNKS, PER_GROUP)
    per_group = channels // num_groups
    inverse_count = tl.load(statistics + 2 * num_maps * num_groups + tl.program_id(0))
    member = tl.arange(0, PER_GROUP)
    scale = tl.load(weight + group * per_group + member, mask=member < per_group, other=0.0).to(tl.float32)
    for _ in tl.static_range(2):
        value = tl.load(partial + place, mask=here, other=0.0)
        by_channel = tl.sum(value, axis=0)
        tl.store(sums + image * channels + group * per_group + member, by_channel, mask=member < per_group)
        tl.store(means + tl.program_id(0), tl.sum(by_channel * scale, axis=0) * inverse_count)
        partial += num_maps * num_chunks * channels
        sums += num_maps * channels
        means += num_maps * num_groups


@triton.jit(do_not_specialize=_SIZES)
def _apply_gradient(
    gradient, features, weight, bias, mask, outputs, statistics, to_sum, means, sums, to_features, to_parameters,
    num_maps, num_groups, num_pixels, channels, num_chunks, rows_per_chunk,
    RELU: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr,  # noqa: N803
):  # fmt: skip
    """Gradient of the features of one chunk; the first program also adds up the gradients of bias and weight."""
    # Backwards: what the reduction read last is still in the cache.
    place = tl.num_programs(0) - 1 - tl.program_id(0)
    image, chunk = place // num_chunks, place % num_chunks
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    if tl.program_id(0) == 0:
        _add_maps(sums, to_parameters, channel, num_maps, channels, CHANNELS)
    mean, inverse, scale, offset = of_channels(statistics, weight, bias, image, channel, num_maps, num_groups, channels)
    mean_change, mean_product, _, _ = of_channels(means, weight, bias, image, channel, num_maps, num_groups, channels)
    factor, shift, slope = inverse * scale, inverse * mean_change, inverse * inverse * mean_product
    start = image.to(tl.int64) * num_pixels * channels
    for first in range(chunk * rows_per_chunk, tl.minimum((chunk + 1) * rows_per_chunk, num_pixels), ROWS):
        row = first + tl.arange(0, ROWS)
        counts = inside(mask, image, row, num_pixels)
        here = (row < num_pixels)[:, None] & (channel < channels)[None, :]
        at = start + row[:, None] * channels + channel[None, :]
        value = tl.load(features + at, mask=here, other=0.0).to(tl.float32)
        centred = value - mean[None, :]
        if to_sum is not None:
            change = tl.load(to_sum + at, mask=here, other=0.0).to(tl.float32)
        else:
            change = tl.load(gradient + at, mask=here, other=0.0).to(tl.float32)
            change = before_relu(change, centred, outputs, at, here, counts, factor, offset, RELU)
        change = change * factor[None, :] - shift[None, :] - centred * slope[None, :]
        change = tl.where(counts[:, None], change, 0.0)
        tl.store(to_features + at, change.to(to_features.dtype.element_ty), mask=here)


@triton.jit
def _add_maps(sums, to_parameters, channel, num_maps, channels, CHANNELS: tl.constexpr):  # noqa: N803
    """The sums [2, n, C] of all maps -> [2, C]."""
    MAPS: tl.constexpr = 8  # noqa: N806  at a time: more would take registers from the rest of the kernel
    for _ in tl.static_range(2):
        total = tl.zeros([MAPS, CHANNELS], tl.float32)
        for first in range(0, num_maps, MAPS):
            image = first + tl.arange(0, MAPS)
            here = (image < num_maps)[:, None] & (channel < channels)[None, :]
            total += tl.load(sums + image[:, None] * channels + channel[None, :], mask=here, other=0.0)
        tl.store(to_parameters + channel, tl.sum(total, axis=0), mask=channel < channels)
        sums += num_maps * channels
        to_parameters += channels
