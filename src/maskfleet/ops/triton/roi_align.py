"""ROIAlign over a whole pyramid, one launch each way for each list of boxes; features are read in place, channels last.

The backward kernel gathers: a program takes one box and makes every cell under it from the gradients of the bins that
read the cell, so a cell is added to memory once per box. Those additions are atomic: their order, and with it the last
bits of a gradient, changes from run to run.

Shapes: B images, K boxes per image, N = B K, C channels, L <= 4 levels, h x w one level's map, r bins per side,
s samples per bin side, R cells of all maps and images.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_LEVELS = 4
_CHANNELS = 256  # of one program
_CELLS = 32  # of a row that one step of the backward kernel makes
_SMALLEST_DOT = 16
# One compilation for all canvases. Starts are 64 bits wide, because maps may be more than 2**31 numbers apart.
_SIZES = [f"{size}{level}" for size in ("height", "width") for level in range(MAX_LEVELS)]


def roi_align(
    features: Sequence[Tensor],
    boxes: Sequence[Tensor],
    extents: Tensor,
    levels: Sequence[Tensor],
    strides: Sequence[int],
    resolutions: Sequence[int],
    samples: int,
    half_pixel: bool,
) -> list[Tensor]:
    """Bins of each list of `boxes` [B, K, 4] float32 from `features` [B, C, h, w] of their `levels` [B, K].

    One [B, K, r, r, C] for each list and its r of `resolutions`. `extents` [L, B, 2] int64 is each image's own
    (height, width) in each map; see `maskfleet.ops.roi_align`.
    """
    channels = features[0].shape[1]
    features = [feature.contiguous(memory_format=torch.channels_last) for feature in features]
    block = min(_CHANNELS, triton.next_power_of_2(channels))
    maps = _map_arguments(*_places(features), strides)
    crops = []
    for of_list, level, resolution in zip(boxes, levels, resolutions, strict=True):
        pooled = features[0].new_empty(*level.shape, resolution, resolution, channels)
        crops.append(pooled)
        if pooled.numel() == 0:
            continue
        _pool[(level.numel() * resolution, triton.cdiv(channels, block))](
            features[0],
            of_list.contiguous(),
            extents.contiguous(),
            level.contiguous(),
            pooled,
            *maps,
            *level.shape,
            channels,
            RESOLUTION=resolution,
            SAMPLES=samples,
            HALF_PIXEL=half_pixel,
            BINS=triton.next_power_of_2(resolution),
            CHANNELS=block,
            num_warps=4,
            enable_fp_fusion=False,
        )
    return crops


def roi_align_backward(
    gradients: Sequence[Tensor],
    boxes: Sequence[Tensor],
    extents: Tensor,
    levels: Sequence[Tensor],
    heights: Sequence[int],
    widths: Sequence[int],
    strides: Sequence[int],
    samples: int,
    half_pixel: bool,
) -> Tensor:
    """Gradients of the maps, of `heights` x `widths`, from those of the bins [B, K, r, r, C] of each list of boxes.

    All lists are added to the same sums -> [R, C] float32, the cells (image, row, column) of one map after the other.
    """
    batch, channels = gradients[0].shape[0], gradients[0].shape[-1]
    cells = [batch * height * width for height, width in zip(heights, widths, strict=True)]
    # One buffer for all maps: one launch clears it.
    sums = torch.zeros(sum(cells), channels, dtype=torch.float32, device=gradients[0].device)
    starts = [sum(cells[:level]) * channels for level in range(len(cells))]
    maps = _map_arguments(starts, heights, widths, strides)
    block = min(_CHANNELS, triton.next_power_of_2(channels))
    for gradient, of_list, level in zip(gradients, boxes, levels, strict=True):
        if gradient.numel() == 0:
            continue
        resolution = gradient.shape[2]
        _spread[(level.numel(), triton.cdiv(channels, block))](
            gradient.contiguous(),
            of_list.contiguous(),
            extents.contiguous(),
            level.contiguous(),
            sums,
            *maps,
            *level.shape,
            channels,
            RESOLUTION=resolution,
            SAMPLES=samples,
            HALF_PIXEL=half_pixel,
            BINS=max(_SMALLEST_DOT, triton.next_power_of_2(resolution)),
            CELLS=_CELLS,
            CHANNELS=max(_SMALLEST_DOT, block),
            # Half precision goes exactly into tf32; the weights keep 10 bits, more than the gradient has.
            EXACT=gradient.dtype == torch.float32,
            num_warps=8,
            enable_fp_fusion=False,
        )
    return sums


def _places(maps: Sequence[Tensor]) -> tuple[list[int], list[int], list[int]]:
    """Start, height and width of each of `maps` [B, C, h, w]."""
    size = maps[0].element_size()
    # Addresses relative to the first map choose the map without a branch.
    starts = [(part.data_ptr() - maps[0].data_ptr()) // size for part in maps]
    return starts, [part.shape[2] for part in maps], [part.shape[3] for part in maps]


def _map_arguments(
    starts: Sequence[int], heights: Sequence[int], widths: Sequence[int], strides: Sequence[int]
) -> list[float]:
    """Start, height, width and scale of each map, four of each; the kernels choose by level."""
    columns: tuple[list[float], ...] = (
        [*starts],
        [*heights],
        [*widths],
        [1.0 / stride for stride in strides],
    )
    return [value for column in columns for value in column + column[:1] * (MAX_LEVELS - len(column))]


@triton.jit
def _of_level(level, a, b, c, d):
    return tl.where(level == 0, a, tl.where(level == 1, b, tl.where(level == 2, c, d)))


@triton.jit
def _position(start, step, sample, extent, HALF_PIXEL: tl.constexpr):  # noqa: N803
    """Where samples lie along an axis, clamped to the image, and whether they count (1.0 or 0.0)."""
    position = start + (sample.to(tl.float32) + 0.5) * step
    reach = extent.to(tl.float32)
    counts = tl.full(position.shape, 1.0, tl.float32)
    if HALF_PIXEL:
        position = position - 0.5
        counts = tl.where((position >= -1.0) & (position <= reach), 1.0, 0.0)
    return tl.minimum(tl.maximum(position, 0.0), reach - 1.0), counts


@triton.jit(do_not_specialize=_SIZES)
def _pool(
    features, boxes, extents, levels, pooled,
    start0: tl.int64, start1: tl.int64, start2: tl.int64, start3: tl.int64,
    height0, height1, height2, height3, width0, width1, width2, width3,
    scale0, scale1, scale2, scale3, num_images, num_boxes, channels,
    RESOLUTION: tl.constexpr, SAMPLES: tl.constexpr, HALF_PIXEL: tl.constexpr,  # noqa: N803
    BINS: tl.constexpr, CHANNELS: tl.constexpr,  # noqa: N803
):  # fmt: skip
    """One row of bins of one box."""
    box, row = tl.program_id(0) // RESOLUTION, tl.program_id(0) % RESOLUTION
    level = tl.load(levels + box).to(tl.int32)
    image = box // num_boxes
    height = _of_level(level, height0, height1, height2, height3)
    width = _of_level(level, width0, width1, width2, width3)
    scale = _of_level(level, scale0, scale1, scale2, scale3)
    own_height = tl.load(extents + (level * num_images + image) * 2).to(tl.int32)
    own_width = tl.load(extents + (level * num_images + image) * 2 + 1).to(tl.int32)
    left = tl.load(boxes + box * 4) * scale
    top = tl.load(boxes + box * 4 + 1) * scale
    step_x = tl.div_rn(tl.load(boxes + box * 4 + 2) * scale - left, 1.0 * RESOLUTION * SAMPLES)
    step_y = tl.div_rn(tl.load(boxes + box * 4 + 3) * scale - top, 1.0 * RESOLUTION * SAMPLES)

    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    column = tl.arange(0, BINS)
    here = (column < RESOLUTION)[:, None] & (channel < channels)[None, :]
    start = _of_level(level, start0, start1, start2, start3).to(tl.int64)
    features += start + image.to(tl.int64) * height * width * channels
    total = tl.zeros([BINS, CHANNELS], tl.float32)
    for sample_y in tl.static_range(SAMPLES):
        y, y_counts = _position(top, step_y, row * SAMPLES + sample_y, own_height, HALF_PIXEL)
        y_low = y.to(tl.int32)
        y_part = y - y_low.to(tl.float32)
        for upper_y in tl.static_range(2):
            y_cell = tl.minimum(y_low + upper_y, own_height - 1)
            y_weight = (y_counts / SAMPLES) * (y_part if upper_y == 1 else 1.0 - y_part)
            for sample_x in tl.static_range(SAMPLES):
                x, x_counts = _position(left, step_x, column * SAMPLES + sample_x, own_width, HALF_PIXEL)
                x_low = x.to(tl.int32)
                x_part = x - x_low.to(tl.float32)
                for upper_x in tl.static_range(2):
                    x_cell = tl.minimum(x_low + upper_x, own_width - 1)
                    x_weight = (x_counts / SAMPLES) * (x_part if upper_x == 1 else 1.0 - x_part)
                    cell = (y_cell * width + x_cell) * channels
                    value = tl.load(features + cell[:, None] + channel[None, :], mask=here, other=0.0)
                    total = tl.fma(
                        tl.broadcast_to((y_weight * x_weight)[:, None], total.shape), value.to(tl.float32), total
                    )
    place = (tl.program_id(0).to(tl.int64) * RESOLUTION + column) * channels
    tl.store(pooled + place[:, None] + channel[None, :], total.to(pooled.dtype.element_ty), mask=here)


@triton.jit(do_not_specialize=_SIZES)
def _spread(
    gradient, boxes, extents, levels, total,
    start0: tl.int64, start1: tl.int64, start2: tl.int64, start3: tl.int64,
    height0, height1, height2, height3, width0, width1, width2, width3,
    scale0, scale1, scale2, scale3, num_images, num_boxes, channels,
    RESOLUTION: tl.constexpr, SAMPLES: tl.constexpr, HALF_PIXEL: tl.constexpr,  # noqa: N803
    BINS: tl.constexpr, CELLS: tl.constexpr, CHANNELS: tl.constexpr, EXACT: tl.constexpr,  # noqa: N803
):  # fmt: skip
    """All cells under one box: cells = y weights [.., r] x gradient [r, r, C] x x weights [.., r]."""
    box = tl.program_id(0)
    level = tl.load(levels + box).to(tl.int32)
    image = box // num_boxes
    height = _of_level(level, height0, height1, height2, height3)
    width = _of_level(level, width0, width1, width2, width3)
    scale = _of_level(level, scale0, scale1, scale2, scale3)
    own_height = tl.load(extents + (level * num_images + image) * 2).to(tl.int32)
    own_width = tl.load(extents + (level * num_images + image) * 2 + 1).to(tl.int32)
    left = tl.load(boxes + box * 4) * scale
    top = tl.load(boxes + box * 4 + 1) * scale
    step_x = tl.div_rn(tl.load(boxes + box * 4 + 2) * scale - left, 1.0 * RESOLUTION * SAMPLES)
    step_y = tl.div_rn(tl.load(boxes + box * 4 + 3) * scale - top, 1.0 * RESOLUTION * SAMPLES)
    y_first, y_last = _cells_met(top, step_y, own_height, RESOLUTION * SAMPLES, HALF_PIXEL)
    x_first, x_last = _cells_met(left, step_x, own_width, RESOLUTION * SAMPLES, HALF_PIXEL)

    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    column = tl.arange(0, BINS)
    here = (column < RESOLUTION)[:, None] & (channel < channels)[None, :]
    gradient += box.to(tl.int64) * RESOLUTION * RESOLUTION * channels + column[:, None] * channels + channel[None, :]
    start = _of_level(level, start0, start1, start2, start3).to(tl.int64)
    total += start + image.to(tl.int64) * height * width * channels
    for x_tile in range(x_first, x_last + 1, CELLS):
        x = x_tile + tl.arange(0, CELLS)
        x_weights = tl.zeros([CELLS, BINS], tl.float32)
        for sample in tl.static_range(SAMPLES):
            at_x, x_counts = _position(left, step_x, column * SAMPLES + sample, own_width, HALF_PIXEL)
            x_counts = tl.where(column < RESOLUTION, x_counts, 0.0) / SAMPLES
            nearness = tl.maximum(1.0 - tl.abs(x[:, None].to(tl.float32) - at_x[None, :]), 0.0)
            x_weights += nearness * x_counts[None, :]
        is_read = (tl.max(x_weights, axis=1) > 0.0) & (x <= x_last)
        for y in range(y_first, y_last + 1):
            line = tl.zeros([BINS, CHANNELS], tl.float32)
            y_total = 0.0
            for row in range(RESOLUTION):
                y_weight = 0.0
                for sample in tl.static_range(SAMPLES):
                    number = tl.full([], 0, tl.int32) + row * SAMPLES + sample
                    at_y, y_counts = _position(top, step_y, number, own_height, HALF_PIXEL)
                    y_weight += y_counts / SAMPLES * tl.maximum(1.0 - tl.abs(y - at_y), 0.0)
                if y_weight > 0.0:
                    bins = tl.load(gradient + row * RESOLUTION * channels, mask=here, other=0.0).to(tl.float32)
                    line = tl.fma(tl.zeros_like(line) + y_weight, bins, line)
                    y_total += y_weight
            if y_total > 0.0:
                cells = tl.dot(x_weights, line, input_precision="ieee" if EXACT else "tf32")
                place = total + ((y * width + x) * channels)[:, None] + channel[None, :]
                tl.atomic_add(place, cells, mask=is_read[:, None] & (channel < channels)[None, :], sem="relaxed")


@triton.jit
def _cells_met(start, step, extent, count, HALF_PIXEL: tl.constexpr):  # noqa: N803
    """First and last cell along an axis that any of `count` samples can read."""
    zero = tl.full([], 0, tl.int32)
    one_end, _ = _position(start, step, zero, extent, HALF_PIXEL)
    other_end, _ = _position(start, step, zero + count - 1, extent, HALF_PIXEL)
    first = tl.minimum(one_end, other_end).to(tl.int32)
    return first, tl.minimum(tl.maximum(one_end, other_end).to(tl.int32) + 1, extent - 1)
