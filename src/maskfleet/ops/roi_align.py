"""Features of boxes: which pyramid level a box is read from, and bilinear sampling of a grid of bins inside it.

Shapes: B images, K boxes per image (padded), C channels, L levels, h x w one level's padded map, r bins per side,
s samples per bin side, T = (2 s)**2 feature cells that make one bin, N = B K r r bins, R rows of all levels together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from maskfleet.ops.layers.exporting import is_exporting
from maskfleet.ops.triton import kernels_for

CANONICAL_SIDE_PX = 224.0  # a box of this side is read from level 4 (Lin et al., Feature Pyramid Networks, section 4.2)
CANONICAL_LEVEL = 4
LEVEL_EPSILON = 1e-6  # added to the side by TensorPack before its logarithm
_KERNEL_LEVELS = 4  # the most that one launch of the kernel reads


def roi_levels(boxes: Tensor, *, min_level: int = 2, max_level: int = 5, aws: bool = False) -> Tensor:
    """Pyramid level, min_level..max_level, that each of `boxes` [..., 4] is read from -> [...] int64.

    TensorPack adds 1e-6 inside the logarithm, AWS's TF2 port does not; an empty box goes to the finest level.
    """
    width, height = (boxes[..., 2:] - boxes[..., :2]).clamp(min=0).unbind(-1)
    side = (width * height).sqrt() / CANONICAL_SIDE_PX
    level = (CANONICAL_LEVEL + torch.log2(side if aws else side + LEVEL_EPSILON)).floor()
    # Clamped as a float: an empty box is at -inf, which has no integer.
    return level.clamp(min_level, max_level).to(torch.int64)


def multilevel_roi_align(
    features: Sequence[Tensor],
    boxes: Tensor,
    extents: Sequence[Tensor],
    *,
    strides: Sequence[int],
    levels: Tensor,
    resolution: int,
    samples: int = 2,
    half_pixel: bool = True,
) -> Tensor:
    """Mean of `samples` x `samples` bilinear samples in each bin of each box -> [B, K, C, resolution, resolution].

    `features[l]` [B, C, h, w] has stride `strides[l]`; `levels` [B, K] int64 says which of `features` each of `boxes`
    [B, K, 4] reads. `extents[l]` [B, 2] is each image's own (height, width) inside the padded map: samples clamp to
    that edge, and count 0 farther than one cell beyond it, so neighbours and padding do not matter.

    `half_pixel=False, samples=1` is AWS's TF2 rule: one sample at the bin's centre, cells at whole numbers, every
    sample clamped. Gradients reach the features only. Half precision is summed in float32. The result's memory is
    channels last.
    """
    (pooled,) = joint_roi_align(
        features,
        [boxes],
        extents,
        strides=strides,
        levels=[levels],
        resolutions=[resolution],
        samples=samples,
        half_pixel=half_pixel,
    )
    return pooled


def joint_roi_align(
    features: Sequence[Tensor],
    boxes: Sequence[Tensor],
    extents: Sequence[Tensor],
    *,
    strides: Sequence[int],
    levels: Sequence[Tensor],
    resolutions: Sequence[int],
    samples: int = 2,
    half_pixel: bool = True,
) -> list[Tensor]:
    """`multilevel_roi_align` of several lists of `boxes`, each with its `levels` and resolution, from the same maps.

    On a GPU all lists are one operator, whose backward pass adds their gradients to one float32 sum per cell.
    """
    grids = [_Grid(resolution=resolution, samples=samples, half_pixel=half_pixel) for resolution in resolutions]
    if kernels_for(features[0]) and features[0].dtype != torch.float64 and len(features) <= _KERNEL_LEVELS:
        pooled: list[Tensor] = _pool_by_kernel(
            list(features),
            [of_list.detach().to(torch.float32) for of_list in boxes],
            torch.stack([extent.to(torch.int64) for extent in extents]),
            list(levels),
            list(strides),
            list(resolutions),
            samples,
            half_pixel,
        )
        return [bins.permute(0, 1, 4, 2, 3) for bins in pooled]
    return [
        _pool_by_rows(features, of_list, _sources(features, extents, strides, level), grid)
        for of_list, level, grid in zip(boxes, levels, grids, strict=True)
    ]


def _pool_by_rows(features: Sequence[Tensor], boxes: Tensor, sources: _Sources, grid: _Grid) -> Tensor:
    """The same in plain torch, for one list of `boxes` [B, K, 4] -> [B, K, C, r, r]."""
    dtype, channels = features[0].dtype, features[0].shape[1]
    wide = torch.promote_types(dtype, torch.float32)
    table = torch.cat([feature.permute(0, 2, 3, 1).reshape(-1, channels) for feature in features]).to(wide)  # [R, C]
    with torch.no_grad():
        index, weight = _bin_taps(sources, boxes.to(wide), grid)
    # An exported program has torch's own operators alone, so that it runs without maskfleet.
    sum_rows = _sum_of_rows if is_exporting() else weighted_rows
    pooled: Tensor = sum_rows(table, index, weight)  # [N, C]
    pooled = pooled.view(*boxes.shape[:2], grid.resolution, grid.resolution, channels)
    return pooled.permute(0, 1, 4, 2, 3).to(dtype)


@torch.library.custom_op("maskfleet::weighted_rows", mutates_args=())
def weighted_rows(table: Tensor, index: Tensor, weight: Tensor) -> Tensor:
    """Weighted sum of the rows `index` [N, T] int32 of `table` [R, C], with `weight` [N, T] -> [N, C].

    The same bits whatever the number of threads: each output row is one sequential sum, and so is each row of the
    gradient. Only `table` gets a gradient.
    """
    return _sum_of_rows(table, index, weight)


def _sum_of_rows(table: Tensor, index: Tensor, weight: Tensor) -> Tensor:
    return F.embedding_bag(index, table, mode="sum", per_sample_weights=weight)


@dataclass(frozen=True, slots=True)
class _Grid:
    """Where samples lie inside a box."""

    resolution: int
    samples: int
    half_pixel: bool


@dataclass(frozen=True, slots=True)
class _Sources:
    """The map each box reads: all [B, K]."""

    scale: Tensor  # float32, cells per pixel
    height: Tensor  # int64, of the image's own area
    width: Tensor  # int64
    row_length: Tensor  # int64, width of the padded map
    first_row: Tensor  # int64, where this image's map begins in the table


def _sources(features: Sequence[Tensor], extents: Sequence[Tensor], strides: Sequence[int], levels: Tensor) -> _Sources:
    scale = torch.zeros_like(levels, dtype=torch.float32)
    height, width = torch.ones_like(levels), torch.ones_like(levels)
    row_length, first_row = torch.zeros_like(levels), torch.zeros_like(levels)
    image = torch.arange(levels.shape[0], device=levels.device)[:, None]  # [B, 1]
    rows_before = 0
    for number, (feature, extent, stride) in enumerate(zip(features, extents, strides, strict=True)):
        map_height, map_width = feature.shape[2:]
        here = levels == number
        scale = torch.where(here, 1.0 / stride, scale)
        height = torch.where(here, extent[:, :1].to(torch.int64), height)
        width = torch.where(here, extent[:, 1:].to(torch.int64), width)
        row_length = torch.where(here, map_width, row_length)
        first_row = torch.where(here, rows_before + image * (map_height * map_width), first_row)
        rows_before += feature.shape[0] * map_height * map_width
    return _Sources(scale=scale, height=height, width=width, row_length=row_length, first_row=first_row)


def _bin_taps(sources: _Sources, boxes: Tensor, grid: _Grid) -> tuple[Tensor, Tensor]:
    """Table rows that each bin of `boxes` [B, K, 4] reads, and their weights -> ([N, T] int32, [N, T])."""
    left, top, right, bottom = (boxes * sources.scale[..., None]).unbind(-1)
    y_cell, y_weight = _axis_taps(top, bottom, sources.height, grid)  # [B, K, r, 2 s]
    x_cell, x_weight = _axis_taps(left, right, sources.width, grid)
    y_row = sources.first_row[..., None, None] + y_cell * sources.row_length[..., None, None]
    index = y_row[:, :, :, None, :, None] + x_cell[:, :, None, :, None, :]  # [B, K, r, r, 2 s, 2 s]
    weight = y_weight[:, :, :, None, :, None] * x_weight[:, :, None, :, None, :]
    taps = (2 * grid.samples) ** 2
    return index.to(torch.int32).reshape(-1, taps), weight.reshape(-1, taps)


def _axis_taps(start: Tensor, end: Tensor, extent: Tensor, grid: _Grid) -> tuple[Tensor, Tensor]:
    """Cells read along one axis by each bin of [start, end] [B, K], and weights -> ([B, K, r, 2 s] int64, same).

    The lower cell of each sample comes first, then the upper ones; weights of a bin sum to 1 where nothing is cut.
    """
    count = grid.resolution * grid.samples
    middle = torch.arange(count, device=start.device, dtype=start.dtype) + 0.5
    position = start[..., None] + middle * ((end - start) / count)[..., None]  # [B, K, r s]
    if grid.half_pixel:
        position = position - 0.5
    last = (extent - 1)[..., None]
    reach = extent[..., None].to(position.dtype)
    share = torch.full_like(position, 1.0 / grid.samples)
    if grid.half_pixel:
        share = torch.where((position >= -1) & (position <= reach), share, 0.0)
    # Clamped before the conversion, so that a far-away box has no integer overflow.
    position = position.clamp(min=0).minimum(reach - 1)
    lower = position.to(torch.int64)
    upper = (lower + 1).minimum(last)
    fraction = position - lower
    cells = torch.stack([lower, upper], dim=-1)  # [B, K, r s, 2]
    weights = torch.stack([share * (1 - fraction), share * fraction], dim=-1)
    shape = (*start.shape, grid.resolution, 2 * grid.samples)
    return cells.reshape(shape), weights.reshape(shape)


@weighted_rows.register_fake
def _(table: Tensor, index: Tensor, weight: Tensor) -> Tensor:
    return table.new_empty(index.shape[0], table.shape[1])


@torch.library.custom_op("maskfleet::spread_rows", mutates_args=())
def _spread_rows(gradient: Tensor, index: Tensor, weight: Tensor, num_rows: int) -> Tensor:
    """Transpose of `weighted_rows`: `gradient` [N, C] sent back to a table of `num_rows` rows -> [R, C].

    Sorting turns the scatter into a gather: index_add_ needs T passes over memory, is slower and, on a GPU, adds in
    no fixed order.
    """
    row, order = index.reshape(-1).sort(stable=True)
    rows = torch.arange(num_rows, device=row.device, dtype=row.dtype)
    first = torch.searchsorted(row, rows, out_int32=True)
    source = (order // index.shape[1]).to(torch.int32)
    return F.embedding_bag(source, gradient, first, mode="sum", per_sample_weights=weight.reshape(-1)[order])


@_spread_rows.register_fake
def _(gradient: Tensor, index: Tensor, weight: Tensor, num_rows: int) -> Tensor:
    return gradient.new_empty(num_rows, gradient.shape[1])


def _save_for_backward(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    table, index, weight = inputs
    ctx.save_for_backward(index, weight)
    ctx.num_rows = table.shape[0]


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
    index, weight = ctx.saved_tensors
    return _spread_rows(gradient.contiguous(), index, weight, ctx.num_rows), None, None


weighted_rows.register_autograd(_backward, setup_context=_save_for_backward)


_POOL = "(Tensor[] features, Tensor[] boxes, Tensor extents, Tensor[] levels, int[] strides, int[] resolutions, "
_POOL += "int samples, bool half_pixel) -> Tensor[]"
_UNPOOL = "(Tensor[] gradients, Tensor[] boxes, Tensor extents, Tensor[] levels, int[] heights, int[] widths, "
_UNPOOL += "int[] strides, int samples, bool half_pixel) -> Tensor"


@torch.library.custom_op("maskfleet::roi_align", mutates_args=(), device_types="cuda", schema=_POOL)
def _pool_by_kernel(*inputs: Any) -> list[Tensor]:
    """Bins [B, K, r, r, C] of each list of `boxes` [B, K, 4]; `extents` are [L, B, 2]."""
    from maskfleet.ops.triton import roi_align as kernels

    return kernels.roi_align(*inputs)


@_pool_by_kernel.register_fake
def _(features: list[Tensor], *inputs: Any) -> list[Tensor]:
    _, _, levels, _, resolutions, *_ = inputs
    return [
        features[0].new_empty(*level.shape, resolution, resolution, features[0].shape[1])
        for level, resolution in zip(levels, resolutions, strict=True)
    ]


@torch.library.custom_op("maskfleet::roi_align_backward", mutates_args=(), device_types="cuda", schema=_UNPOOL)
def _unpool_by_kernel(*inputs: Any) -> Tensor:
    """Gradients of all maps as rows [R, C] float32, from those of the bins [B, K, r, r, C]."""
    from maskfleet.ops.triton import roi_align as kernels

    return kernels.roi_align_backward(*inputs)


@_unpool_by_kernel.register_fake
def _(gradients: list[Tensor], *inputs: Any) -> Tensor:
    _, _, _, heights, widths, *_ = inputs
    cells = sum(height * width for height, width in zip(heights, widths, strict=True))
    batch, channels = gradients[0].shape[0], gradients[0].shape[-1]
    return gradients[0].new_empty(batch * cells, channels, dtype=torch.float32)


def _save_pool_for_backward(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    features, boxes, extents, levels, strides, _, samples, half_pixel = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(extents, *boxes, *levels)
    ctx.dtype, ctx.batch = features[0].dtype, features[0].shape[0]
    ctx.sizes = tuple([feature.shape[axis] for feature in features] for axis in (2, 3))
    ctx.options = (strides, samples, half_pixel)


def _unpool(ctx: Any, gradients: list[Tensor | None]) -> tuple[Any, ...]:
    extents, *of_lists = ctx.saved_tensors
    boxes, levels = of_lists[: len(gradients)], of_lists[len(gradients) :]
    # A list whose bins nobody read has no gradient.
    known = [
        (gradient.contiguous(), of_list, level)
        for gradient, of_list, level in zip(gradients, boxes, levels, strict=True)
        if gradient is not None
    ]
    bins, some_boxes, some_levels = (list(column) for column in zip(*known, strict=True))
    rows = _unpool_by_kernel(bins, some_boxes, extents, some_levels, *ctx.sizes, *ctx.options)
    # Rounded here and not by the kernel, so that the compiler rounds where it adds the gradients of other operators.
    maps = [part.to(ctx.dtype) for part in _as_maps(rows, ctx.batch, *ctx.sizes)]
    return maps, [None] * len(boxes), None, [None] * len(levels), None, None, None, None


def _as_maps(rows: Tensor, batch: int, heights: Sequence[int], widths: Sequence[int]) -> list[Tensor]:
    """Rows [R, C] of the cells of all maps as maps [B, C, h, w], channels last."""
    maps: list[Tensor] = []
    first = 0
    for height, width in zip(heights, widths, strict=True):
        last = first + batch * height * width
        maps.append(rows[first:last].view(batch, height, width, rows.shape[1]).permute(0, 3, 1, 2))
        first = last
    return maps


_pool_by_kernel.register_autograd(_unpool, setup_context=_save_pool_for_backward)
