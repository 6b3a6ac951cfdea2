"""The anchor field against TensorPack's numbers, and the names of its anchors."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from maskfleet.ops.anchors import anchor_cells, anchor_grid, anchor_keys, cell_anchors, legacy_cell_anchors

GOLDENS = Path(__file__).parents[1] / "goldens"
SIZES = (32, 64, 128, 256, 512)
STRIDES = (4, 8, 16, 32, 64)
RATIOS = (0.5, 1.0, 2.0)


@pytest.fixture(scope="module")
def golden() -> dict[str, Tensor]:
    with np.load(GOLDENS / "ops_anchors.npz", allow_pickle=False) as file:
        return {name: torch.from_numpy(array) for name, array in file.items()}


@pytest.mark.parametrize("level", range(2, 7))
def test_fpn_field_is_tensorpacks_to_the_bit(golden: dict[str, Tensor], level: int) -> None:
    cell = cell_anchors([SIZES[level - 2]], RATIOS)
    grid = anchor_grid(cell, stride=STRIDES[level - 2], height=5, width=7)
    assert grid.dtype == torch.float32
    assert torch.equal(grid.reshape(5, 7, 3, 4), golden[f"fpn_lvl{level}"])


def test_c4_field_is_tensorpacks_to_the_bit(golden: dict[str, Tensor]) -> None:
    grid = anchor_grid(cell_anchors(SIZES, RATIOS), stride=16, height=5, width=7)
    assert torch.equal(grid.reshape(5, 7, 15, 4), golden["c4"])


@pytest.mark.parametrize("level", range(2, 7))
def test_legacy_fpn_field_is_old_tensorpacks_to_the_bit(golden: dict[str, Tensor], level: int) -> None:
    stride = STRIDES[level - 2]
    grid = anchor_grid(legacy_cell_anchors(stride, [SIZES[level - 2]], RATIOS), stride=stride, height=5, width=7)
    assert torch.equal(grid.reshape(5, 7, 3, 4), golden[f"legacy_fpn_lvl{level}"])


def test_legacy_c4_field_is_old_tensorpacks_to_the_bit(golden: dict[str, Tensor]) -> None:
    grid = anchor_grid(legacy_cell_anchors(16, SIZES, RATIOS), stride=16, height=5, width=7)
    assert torch.equal(grid.reshape(5, 7, 15, 4), golden["legacy_c4"])


def test_ratio_is_height_over_width_and_size_is_the_root_of_the_area() -> None:
    tall = cell_anchors([100], [4.0])[0]
    assert tall.tolist() == [-25, -100, 25, 100]


def test_rows_and_columns_follow_the_order_of_the_grid() -> None:
    row, column = anchor_cells(height=2, width=3, num_anchors=2)
    assert row.tolist() == [0] * 6 + [1] * 6
    assert column.tolist() == [0, 0, 1, 1, 2, 2] * 2
    grid = anchor_grid(cell_anchors([8], [1.0, 1.0]), stride=10, height=2, width=3)
    assert torch.equal(grid[:, 0], column * 10.0 - 4)
    assert torch.equal(grid[:, 1], row * 10.0 - 4)


def test_keys_are_unique_over_levels() -> None:
    keys = torch.cat([anchor_keys(level=level, height=9, width=2 * level, num_anchors=4) for level in (2, 3, 4, 5, 6)])
    assert keys.unique().numel() == keys.numel() == 9 * 2 * 20 * 4
    assert keys.dtype == torch.int64


def test_keys_do_not_depend_on_the_canvas() -> None:
    small = anchor_keys(level=3, height=4, width=5, num_anchors=3).reshape(4, 5, 3)
    large = anchor_keys(level=3, height=7, width=11, num_anchors=3).reshape(7, 11, 3)
    assert torch.equal(small, large[:4, :5])


def test_every_function_is_one_graph() -> None:
    def field(cell: Tensor) -> tuple[Tensor, Tensor]:
        grid = anchor_grid(cell, stride=8, height=3, width=4)
        return grid, anchor_keys(level=3, height=3, width=4, num_anchors=cell.shape[0], device=cell.device)

    cell = cell_anchors([32], RATIOS)
    compiled = torch.compile(field, fullgraph=True, backend="eager")
    for seen, expected in zip(compiled(cell), field(cell), strict=True):
        assert torch.equal(seen, expected)
