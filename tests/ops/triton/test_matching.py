"""The kernel that labels anchors gives plain torch's labels and matches, anchor for anchor."""

import pytest
import torch

from maskfleet.ops.anchors import anchor_grid, cell_anchors
from maskfleet.ops.matching import rpn_labels

THRESHOLDS = {"positive_iou": 0.7, "negative_iou": 0.3}


@pytest.mark.parametrize("num_truths", [0, 1, 3, 9])
@pytest.mark.parametrize("whole_pixels", [False, True])  # whole pixels make anchors tie for a truth
def test_kernel_labels_anchors_as_plain_torch_does(num_truths: int, whole_pixels: bool, kernel_device: str) -> None:
    from maskfleet.ops.triton import matching as kernels

    anchors = anchor_grid(cell_anchors([16, 32], [0.5, 1, 2]), stride=8, height=11, width=13)
    generator = torch.Generator().manual_seed(num_truths)
    corner = torch.rand(2, num_truths, 2, generator=generator) * 80
    size = torch.rand(2, num_truths, 2, generator=generator) * 50
    if whole_pixels:
        corner, size = (corner / 4).round() * 4, (size / 8).round() * 8
    boxes = torch.cat([corner, corner + size], dim=-1)
    valid = torch.rand(2, num_truths, generator=generator) < 0.8
    sizes = torch.tensor([[88, 104], [70, 60]])
    crowds, crowds_valid = torch.zeros(2, 0, 4), torch.zeros(2, 0, dtype=torch.bool)
    labels, matched = rpn_labels(anchors, boxes, valid, sizes, crowds, crowds_valid, crowd_overlap=9.99, **THRESHOLDS)
    moved = [tensor.to(kernel_device) for tensor in (anchors, boxes, valid, sizes)]
    actual_labels, actual_matched = kernels.rpn_labels(*moved, **THRESHOLDS)
    assert actual_labels.dtype == torch.int8
    torch.testing.assert_close(actual_labels.cpu(), labels, rtol=0, atol=0)
    torch.testing.assert_close(actual_matched.cpu(), matched, rtol=0, atol=0)


def test_no_anchor_reaching_a_truth_makes_all_anchors_background(kernel_device: str) -> None:
    from maskfleet.ops.triton import matching as kernels

    anchors = torch.tensor([[0.0, 0.0, 4.0, 4.0], [4.0, 0.0, 8.0, 4.0], [6.0, 0.0, 30.0, 4.0]])
    boxes = torch.tensor([[[20.0, 20.0, 24.0, 24.0]]])
    moved = [
        t.to(kernel_device) for t in (anchors, boxes, torch.ones(1, 1, dtype=torch.bool), torch.tensor([[26, 26]]))
    ]
    labels, _ = kernels.rpn_labels(*moved, **THRESHOLDS)
    assert labels.tolist() == [[0, 0, -1]]  # the last one leaves the image
