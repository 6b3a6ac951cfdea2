"""The gradient of the RPN's head, computed only at the few anchors that carry one.

The head is a 3 x 3 convolution with ReLU, then a 1 x 1 convolution, on every cell of every map. Its losses see a few
hundred sampled anchors per image, of hundreds of thousands. Their cells' 3 x 3 neighbourhoods are gathered, and the
backward pass is that of a small matrix product.

Shapes: B images, C channels of the maps, O of the hidden layer, h x w one map, A anchors per cell, N anchors of all
maps in (map, row, column, a) order, S sampled anchors of the batch, R cells of all maps and images.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from maskfleet.ops.triton import kernels_for

TAPS = 9


def with_sparse_gradient(
    logits: Tensor,
    deltas: Tensor,
    maps: Sequence[Tensor],
    hidden_layer: tuple[Tensor, Tensor],
    output_layer: tuple[Tensor, Tensor],
    *,
    max_anchors: int,
) -> tuple[Tensor, Tensor]:
    """`logits` [B, N] and `deltas` [B, N, 4], computed without gradient from `maps` [B, C, h, w], with their gradient.

    `hidden_layer` is the kernel [O, C, 3, 3] and bias [O] of the convolution with ReLU, `output_layer` the kernel
    [5 A, O] and bias [5 A] of the layer after it: A logits, then four deltas for each of the A anchors. At most
    `max_anchors` anchors of the batch may carry a gradient; with more, the gradients of both layers are NaN.
    """
    outputs: tuple[Tensor, Tensor] = _with_gradient(
        logits.detach(), deltas.detach(), list(maps), *hidden_layer, *output_layer, max_anchors
    )
    return outputs


_SCHEMA = "(Tensor logits, Tensor deltas, Tensor[] maps, Tensor kernel, Tensor bias, Tensor out_kernel, "
_SCHEMA += "Tensor out_bias, int max_anchors) -> (Tensor, Tensor)"


@torch.library.custom_op("maskfleet::with_sparse_gradient", mutates_args=(), schema=_SCHEMA)
def _with_gradient(logits: Tensor, deltas: Tensor, *inputs: Any) -> tuple[Tensor, Tensor]:
    return logits.clone(), deltas.clone()


@_with_gradient.register_fake
def _(logits: Tensor, deltas: Tensor, *inputs: Any) -> tuple[Tensor, Tensor]:
    return logits.clone(), deltas.clone()


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    _, _, maps, kernel, bias, out_kernel, _, ctx.max_anchors = inputs
    ctx.save_for_backward(*maps, kernel, bias, out_kernel)


def _backward(ctx: Any, to_logits: Tensor, to_deltas: Tensor) -> tuple[Any, ...]:
    *maps, kernel, bias, out_kernel = ctx.saved_tensors
    per_cell, dtype = len(out_kernel) // 5, maps[0].dtype
    index, to_anchors = _carried(to_logits, to_deltas, ctx.max_anchors)  # [S], [S, 5]
    row = _neighbourhoods(index, maps, per_cell)  # [S, 9]
    taps: Tensor = _gathered(maps, row.flatten()).view(len(index), -1)  # [S, 9 C]
    flat_kernel = kernel.to(dtype).permute(0, 2, 3, 1).flatten(1)  # [O, 9 C]
    hidden = F.relu(F.linear(taps, flat_kernel, bias.to(dtype)))  # [S, O]

    # Each anchor's five gradients in the places that its slot a of the cell has among 5 A outputs.
    slot = torch.arange(per_cell, device=index.device)
    is_slot = ((index % per_cell)[:, None] == slot).to(to_anchors.dtype)  # [S, A]
    of_deltas = (is_slot[:, :, None] * to_anchors[:, None, 1:]).flatten(1)
    to_outputs = torch.cat([is_slot * to_anchors[:, :1], of_deltas], dim=1).to(dtype)  # [S, 5 A]
    to_hidden = torch.where(hidden > 0, to_outputs @ out_kernel.to(dtype), 0)  # [S, O]
    to_kernel = (to_hidden.T @ taps).view(len(kernel), 3, 3, -1).permute(0, 3, 1, 2)
    to_taps = (to_hidden @ flat_kernel).view(row.numel(), -1)  # [9 S, C]
    return (
        None,
        None,
        _by_map(_spread(to_taps, row.flatten(), sum(_num_cells(one) for one in maps)), maps),
        to_kernel.to(kernel.dtype),
        to_hidden.sum(dim=0).to(bias.dtype),
        (to_outputs.T @ hidden).to(out_kernel.dtype),
        to_outputs.sum(dim=0).to(out_kernel.dtype),
        None,
    )


_with_gradient.register_autograd(_backward, setup_context=_save_for_backward)


def _carried(to_logits: Tensor, to_deltas: Tensor, max_anchors: int) -> tuple[Tensor, Tensor]:
    """Which of the B N anchors have a gradient, and their gradients -> ([S] int64, [S, 5]); B N and 0 for padding."""
    carries = ((to_logits != 0) | (to_deltas != 0).any(dim=-1)).flatten()  # [B N]
    index: Tensor = _first_true(carries, max_anchors)
    known = index.clamp(max=len(carries) - 1)
    gradients = torch.cat([to_logits.flatten()[known, None], to_deltas.flatten(0, 1)[known]], dim=1)
    gradients = torch.where((index < len(carries))[:, None], gradients, 0.0)
    # What cannot be represented must not look right.
    return index, torch.where(carries.sum() > max_anchors, torch.nan, gradients)


def _neighbourhoods(index: Tensor, maps: Sequence[Tensor], per_cell: int) -> Tensor:
    """Rows, among the cells of all maps and images, of the 3 x 3 cells around the anchors `index` [S] -> [S, 9].

    -1 for cells beyond the edge of a map, and for padding.
    """
    batch = maps[0].shape[0]
    num_anchors = per_cell * sum(_num_cells(one) for one in maps) // batch
    step = torch.arange(3, device=index.device) - 1
    down, right = step.repeat_interleave(3), step.repeat(3)  # [9]
    image, anchor = (index // num_anchors)[:, None], (index % num_anchors)[:, None]  # [S, 1]
    row = torch.full((len(index), TAPS), -1, device=index.device)
    first_row = 0
    for one in maps:
        height, width = one.shape[2:]
        cell = anchor // per_cell - first_row // batch
        y, x = cell // width + down, cell % width + right  # [S, 9]
        inside = (cell >= 0) & (cell < height * width) & (image < batch)
        inside = inside & (y >= 0) & (y < height) & (x >= 0) & (x < width)
        row = torch.where(inside, first_row + (image * height + y) * width + x, row)
        first_row += _num_cells(one)
    return row


def _by_map(table: Tensor, maps: Sequence[Tensor]) -> list[Tensor]:
    """Rows [R, C] of all cells as maps [B, C, h, w], channels last."""
    parts, first = [], 0
    for one in maps:
        batch, channels, height, width = one.shape
        last = first + _num_cells(one)
        parts.append(table[first:last].view(batch, height, width, channels).permute(0, 3, 1, 2))
        first = last
    return parts


def _num_cells(one: Tensor) -> int:
    return one.shape[0] * one.shape[2] * one.shape[3]


# Operators of their own, because the compiler cannot fuse running sums over rows this long, nor sort.
@torch.library.custom_op("maskfleet::first_true", mutates_args=())
def _first_true(mask: Tensor, count: int) -> Tensor:
    """Where the first `count` True entries of `mask` [M] are -> [count] int64 ascending; M for those that are not."""
    number = mask.cumsum(dim=0, dtype=torch.int32)
    return torch.searchsorted(number, torch.arange(1, count + 1, dtype=torch.int32, device=mask.device))


@_first_true.register_fake
def _(mask: Tensor, count: int) -> Tensor:
    return mask.new_empty(count, dtype=torch.int64)


@torch.library.custom_op("maskfleet::gathered_cells", mutates_args=())
def _gathered(maps: Sequence[Tensor], row: Tensor) -> Tensor:
    """The channels of the cells `row` [M] of all `maps` and images, 0 for row -1 -> [M, C]."""
    if kernels_for(row):
        from maskfleet.ops.triton import cells as kernels

        return kernels.gather_cells(maps, row)
    cells = maps[0].new_zeros(len(row), maps[0].shape[1])
    first = 0
    for one in maps:
        batch, _, height, width = one.shape
        local = row - first
        here = (local >= 0) & (local < _num_cells(one))
        local = local.clamp(0, max(0, _num_cells(one) - 1))
        image, y, x = local // (height * width), local // width % height, local % width
        cells = torch.where(here[:, None], one.permute(0, 2, 3, 1)[image, y, x], cells)
        first += batch * height * width
    return cells


@_gathered.register_fake
def _(maps: Sequence[Tensor], row: Tensor) -> Tensor:
    return maps[0].new_empty(len(row), maps[0].shape[1])


@torch.library.custom_op("maskfleet::spread_cells", mutates_args=())
def _spread(gradient: Tensor, row: Tensor, num_rows: int) -> Tensor:
    """Sums of the `gradient` [M, C] of each `row` [M], in the order of M -> [num_rows, C]; row -1 is left out.

    Sorted, so that each row of the result is written once: the same bits in every run.
    """
    if kernels_for(row) and gradient.dtype != torch.float64:
        from maskfleet.ops.triton import cells as kernels

        return kernels.spread_cells(gradient, row, num_rows)
    count = len(row)
    ordered, order = torch.where(row < 0, num_rows, row).sort(stable=True)
    is_first = F.pad(ordered[1:] != ordered[:-1], (1, 0), value=True)
    place = torch.arange(count, device=row.device)
    start = torch.searchsorted(is_first.cumsum(dim=0), place + 1)  # of the sum with this number; M if there is none
    wide = torch.promote_types(gradient.dtype, torch.float32)
    sums = F.embedding_bag(order, gradient.to(wide), start, mode="sum")
    target = torch.where(start < count, ordered[start.clamp(max=count - 1)], num_rows)
    table = gradient.new_zeros(num_rows + 1, gradient.shape[1])  # the last row takes what is left out
    table[target] = sums.to(gradient.dtype)
    return table[:num_rows]


@_spread.register_fake
def _(gradient: Tensor, row: Tensor, num_rows: int) -> Tensor:
    return gradient.new_empty(num_rows, gradient.shape[1])
