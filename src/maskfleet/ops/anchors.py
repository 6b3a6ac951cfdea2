"""The grid of anchor boxes over a feature map, and a key for each anchor.

Shapes: A anchors in a cell, N = height * width * A anchors of one feature map, in (row, column, a) order.
A cell's anchors are float64: they are rounded to float32 once, after they have been shifted to their cell.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def cell_anchors(sizes: Sequence[float], ratios: Sequence[float]) -> Tensor:
    """Anchors of the cell at the origin -> [A, 4] float64, centred on (0, 0); by size, then by ratio (height / width).

    A size is the square root of an area.
    """
    cells = []
    for size in sizes:
        for ratio in ratios:
            width = math.sqrt(size * size / ratio)
            height = ratio * width
            cells.append([-width / 2, -height / 2, width / 2, height / 2])
    return torch.tensor(cells, dtype=torch.float64).reshape(-1, 4)


def legacy_cell_anchors(stride: int, sizes: Sequence[float], ratios: Sequence[float]) -> Tensor:
    """Anchors of TensorPack before May 2019 -> [A, 4] float64, centred on stride / 2; by ratio, then by size.

    The sides of a stride x stride window are rounded to whole pixels after the ratio is applied and before the size.
    """
    cells = []
    for ratio in ratios:
        base_width = round(math.sqrt(stride * stride / ratio))
        base_height = round(base_width * ratio)
        for size in sizes:
            width, height = base_width * size / stride, base_height * size / stride
            cells.append([stride / 2 + side for side in (-width / 2, -height / 2, width / 2, height / 2)])
    return torch.tensor(cells, dtype=torch.float64).reshape(-1, 4)


def anchor_grid(cell: Tensor, *, stride: int, height: int, width: int) -> Tensor:
    """`cell` [A, 4] repeated every `stride` pixels over a height x width map -> [N, 4] float32."""
    num_anchors = cell.shape[0]
    row, column = anchor_cells(height=height, width=width, num_anchors=num_anchors, device=cell.device)
    corner = torch.stack([column, row, column, row], dim=-1) * stride  # [N, 4]
    return (cell.repeat(height * width, 1) + corner).to(torch.float32)


def anchor_cells(
    *, height: int, width: int, num_anchors: int, device: torch.device | str | None = None
) -> tuple[Tensor, Tensor]:
    """Row and column, each [N] int64, of the cell that each anchor of the grid sits in."""
    row = torch.arange(height, device=device)[:, None, None].expand(height, width, num_anchors)
    column = torch.arange(width, device=device)[None, :, None].expand(height, width, num_anchors)
    return row.reshape(-1), column.reshape(-1)


def anchor_keys(
    *, level: int, height: int, width: int, num_anchors: int, device: torch.device | str | None = None
) -> Tensor:
    """A number [N] int64 for each anchor that names (level, row, column, a) whatever the size of the map.

    Random samples drawn by these keys stay the same when an image gets a larger canvas.
    """
    assert level < 1 << 12
    assert height <= 1 << 20
    assert width <= 1 << 20
    assert num_anchors <= 1 << 10
    row, column = anchor_cells(height=height, width=width, num_anchors=num_anchors, device=device)
    slot = torch.arange(num_anchors, device=device).repeat(height * width)
    return (level << 50) + (row << 30) + (column << 10) + slot
