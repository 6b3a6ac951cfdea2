"""The suppression kernel keeps the very boxes that the CPU keeps."""

import pytest
import torch
from torch import Tensor

from maskfleet.ops.nms import nms_keep


def random_rows(rows: int, num_boxes: int, seed: int) -> tuple[Tensor, Tensor]:
    """Crowded boxes on a coarse grid (so that IoUs meet the threshold exactly), some empty, some not valid."""
    generator = torch.Generator().manual_seed(seed)
    corner = torch.rand(rows, num_boxes, 2, generator=generator) * 60
    size = torch.rand(rows, num_boxes, 2, generator=generator) * 30
    size[torch.rand(rows, num_boxes, 2, generator=generator) < 0.05] = 0
    boxes = torch.cat([corner, corner + size], dim=-1)
    return (boxes.round() if seed % 2 else boxes), torch.rand(rows, num_boxes, generator=generator) < 0.8


@pytest.mark.parametrize(("rows", "num_boxes"), [(0, 5), (2, 0), (1, 1), (2, 31), (3, 32), (2, 33), (1, 65), (2, 150)])
@pytest.mark.parametrize("threshold", [0.3, 0.5])
def test_kernel_keeps_the_boxes_that_the_cpu_keeps(
    rows: int, num_boxes: int, threshold: float, kernel_device: str
) -> None:
    from maskfleet.ops.triton import nms as kernels

    for seed in range(2):
        boxes, valid = random_rows(rows, num_boxes, seed)
        expected = nms_keep(boxes, valid, threshold=threshold)
        actual = kernels.nms_keep(boxes.to(kernel_device), valid.to(kernel_device), threshold)
        assert actual.dtype == torch.bool
        torch.testing.assert_close(actual.cpu(), expected, rtol=0, atol=0)


def test_a_chain_of_overlaps_keeps_every_second_box(kernel_device: str) -> None:
    from maskfleet.ops.triton import nms as kernels

    left = torch.arange(70) * 5.0
    boxes = torch.stack([left, torch.zeros(70), left + 10, torch.full((70,), 10.0)], dim=-1)[None]  # neighbours: 1/3
    keep = kernels.nms_keep(boxes.to(kernel_device), torch.ones(1, 70, dtype=torch.bool, device=kernel_device), 0.3)
    assert keep[0].tolist() == [number % 2 == 0 for number in range(70)]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("rows", "num_boxes"), [(80, 2000), (16, 4000), (2, 12000)])
def test_kernel_keeps_the_boxes_that_the_cpu_keeps_at_full_size(rows: int, num_boxes: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    corner = torch.rand(rows, num_boxes, 2, generator=generator) * 1000
    size = torch.rand(rows, num_boxes, 2, generator=generator) * 300
    boxes = torch.cat([corner, corner + size], dim=-1)
    valid = torch.rand(rows, num_boxes, generator=generator) < 0.9
    few = slice(0, 4)
    actual = nms_keep(boxes.cuda(), valid.cuda(), threshold=0.7)
    torch.testing.assert_close(actual[few].cpu(), nms_keep(boxes[few], valid[few], threshold=0.7), rtol=0, atol=0)
