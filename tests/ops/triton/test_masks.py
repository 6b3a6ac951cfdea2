"""The kernel that draws mask targets gives the very numbers of plain torch."""

import numpy as np
import pytest
import torch

from maskfleet.batch import Outlines
from maskfleet.ops import masks as plain
from maskfleet.ops.outlines import bitmap_edges, pack_outlines, polygon_edges

SIZES = torch.tensor([[60, 61], [50, 64]])


def random_outlines(seed: int) -> Outlines:
    """Polygons of one to three parts, one of 40, some on whole pixels; a bitmap; an image with fewer instances."""
    random = np.random.default_rng(seed)

    def polygons(parts: int, corners: int) -> list[np.ndarray]:
        return [random.uniform(-3, 64, (corners, 2)) for _ in range(parts)]

    first = [polygon_edges(polygons(parts, 3 + 2 * parts)) for parts in (1, 2, 3)]
    first.append(bitmap_edges(random.random((20, 30)) < 0.5))
    second = [polygon_edges([polygon.round() for polygon in polygons(2, 5)]), polygon_edges(polygons(40, 3))]
    return pack_outlines([first, second], num_instances=5)


def drawn_by_kernel(
    outlines: Outlines, boxes: torch.Tensor, matched: torch.Tensor, valid: torch.Tensor, resolution: int, device: str
) -> torch.Tensor:
    """What `mask_targets` asks of the kernel on a GPU."""
    from maskfleet.ops.triton import masks as kernels

    batch, num_boxes = matched.shape
    extent = ((SIZES + 7) // 8 * 8)[:, None].expand(-1, num_boxes, -1).reshape(-1, 2)
    y = plain._axis_samples(boxes[..., 1].reshape(-1), boxes[..., 3].reshape(-1), extent[:, 0], resolution)
    x = plain._axis_samples(boxes[..., 0].reshape(-1), boxes[..., 2].reshape(-1), extent[:, 1], resolution)
    image = torch.arange(batch)[:, None].expand(-1, num_boxes).reshape(-1)
    targets = kernels.mask_targets(
        [column.to(device) for column in plain._walk(outlines.edges.reshape(-1, 4))],
        outlines.part.reshape(-1).to(device),
        (outlines.start.gather(1, matched).reshape(-1) + image * outlines.edges.shape[1]).to(device),
        (outlines.count.gather(1, matched) * valid).reshape(-1).to(device),
        [column.to(device) for column in y],
        [column.to(device) for column in x],
        num_parts=outlines.max_parts,
    )
    return targets.view(batch, num_boxes, resolution, resolution).cpu()


@pytest.mark.slow
@pytest.mark.parametrize("resolution", [28, 5])
@pytest.mark.parametrize("num_boxes", [0, 6])
def test_kernel_draws_the_targets_of_plain_torch_bit_for_bit(
    resolution: int, num_boxes: int, kernel_device: str
) -> None:
    outlines = random_outlines(seed=resolution)
    generator = torch.Generator().manual_seed(resolution)
    corner = torch.rand(2, num_boxes, 2, generator=generator) * 40 - 4
    boxes = torch.cat([corner, corner + torch.rand(2, num_boxes, 2, generator=generator) * 40], dim=-1)
    boxes[:, :1] = 0
    matched = torch.randint(0, 5, (2, num_boxes), generator=generator)
    matched[:, 1:3] = torch.tensor([[3, 2], [1, 0]])[:, : max(num_boxes - 1, 0)]
    valid = torch.rand(2, num_boxes, generator=generator) < 0.8
    valid[:, 1:3] = True
    expected = plain.mask_targets(outlines, SIZES, boxes, matched, valid, resolution=resolution)
    actual = drawn_by_kernel(outlines, boxes, matched, valid, resolution, kernel_device)
    assert num_boxes == 0 or 0.05 < expected.mean() < 0.95
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)
