"""The kernels that gather cells of maps and add rows up into cells give the numbers of plain torch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from maskfleet.ops.layers import sparse_gradient as plain

CHANNELS = 5


def maps_of_three_levels(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Channels last; the last one is every second pixel of the one before."""
    generator = torch.Generator().manual_seed(0)
    fine = torch.randn(2, 7, 9, CHANNELS, generator=generator).to(dtype).permute(0, 3, 1, 2)
    coarse = torch.randn(2, 3, 4, CHANNELS, generator=generator).to(dtype).permute(0, 3, 1, 2)
    return [fine, coarse, coarse[:, :, ::2, ::2]]


def rows(count: int, num_cells: int) -> Tensor:
    """Cells that repeat, and some that are none."""
    generator = torch.Generator().manual_seed(1)
    row = torch.randint(0, num_cells, (count,), generator=generator)
    row[::7] = -1
    row[5:9] = 3
    return row


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gathered_cells_are_those_of_plain_torch(dtype: torch.dtype, kernel_device: str) -> None:
    from maskfleet.ops.triton.cells import gather_cells

    maps = maps_of_three_levels(dtype)
    row = rows(50, sum(plain._num_cells(one) for one in maps))
    found = gather_cells([one.to(kernel_device) for one in maps], row.to(kernel_device))
    assert torch.equal(found.cpu(), plain._gathered(maps, row))
    by_hand = maps[0].permute(0, 2, 3, 1).reshape(-1, CHANNELS)
    assert torch.equal(found[6].cpu(), by_hand[3])
    assert not found[0].any()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_of_rows_are_those_of_plain_torch_in_the_same_order(dtype: torch.dtype, kernel_device: str) -> None:
    from maskfleet.ops.triton.cells import spread_cells

    generator = torch.Generator().manual_seed(2)
    gradient = (100 * torch.randn(60, CHANNELS, generator=generator)).to(dtype)
    row = rows(60, 20)
    found = spread_cells(gradient.to(kernel_device), row.to(kernel_device), 20).cpu()
    # Triton's interpreter cuts the last bit of a bfloat16 off, where a GPU rounds it.
    rtol = 0 if dtype == torch.float32 else 2**-7
    torch.testing.assert_close(found, plain._spread(gradient, row, 20), rtol=rtol, atol=0)
    torch.testing.assert_close(found[3].float(), gradient[row == 3].float().sum(dim=0), rtol=1e-2, atol=1e-1)


@pytest.mark.slow
def test_nothing_to_gather_or_add(kernel_device: str) -> None:
    from maskfleet.ops.triton.cells import gather_cells, spread_cells

    maps = [one.to(kernel_device) for one in maps_of_three_levels()]
    none = torch.zeros(0, dtype=torch.int64, device=kernel_device)
    assert gather_cells(maps, none).shape == (0, CHANNELS)
    table = spread_cells(torch.zeros(0, CHANNELS, device=kernel_device), none, 4)
    assert torch.equal(table.cpu(), torch.zeros(4, CHANNELS))
    left_out = torch.full((3,), -1, device=kernel_device)
    assert not spread_cells(torch.ones(3, CHANNELS, device=kernel_device), left_out, 4).any()
