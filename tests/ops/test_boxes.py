"""Box geometry against TensorPack's numbers, against one box at a time, and on padding."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import reference
from maskfleet.ops.boxes import area, clip_boxes, decode_boxes, encode_boxes, pairwise_iou

GOLDENS = Path(__file__).parents[1] / "goldens"
MAX_LOG_SCALE = math.log(1344 / 16)


@pytest.fixture(scope="module")
def golden() -> dict[str, Tensor]:
    with np.load(GOLDENS / "ops_boxes.npz", allow_pickle=False) as file:
        return {name: torch.from_numpy(array) for name, array in file.items()}


def random_boxes(*shape: int, seed: int, extent: float = 100.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    corner = torch.rand(*shape, 2, generator=generator) * extent
    size = torch.rand(*shape, 2, generator=generator) * extent * 0.6 + 1
    return torch.cat([corner, corner + size], dim=-1)


def test_area_is_width_times_height_and_zero_for_swapped_corners() -> None:
    boxes = torch.tensor([[1.0, 2.0, 4.0, 7.5], [0, 0, 0, 0], [4, 7, 1, 2], [3, 0, 3, 9]])
    assert area(boxes).tolist() == [16.5, 0.0, 0.0, 0.0]


def test_encode_agrees_with_tensorpack(golden: dict[str, Tensor]) -> None:
    encoded = encode_boxes(golden["boxes"], golden["anchors"])
    torch.testing.assert_close(encoded, golden["encoded"], rtol=2e-6, atol=1e-6)


def test_decode_agrees_with_tensorpack_including_its_limit_on_growth(golden: dict[str, Tensor]) -> None:
    assert float(golden["decode_clip"]) == pytest.approx(MAX_LOG_SCALE)
    assert (golden["logits"][:, 2:] > MAX_LOG_SCALE).any(), "the golden no longer reaches the limit"
    decoded = decode_boxes(golden["logits"], golden["anchors"], max_log_scale=MAX_LOG_SCALE)
    torch.testing.assert_close(decoded, golden["decoded"], rtol=2e-6, atol=1e-4)


def test_clip_agrees_with_tensorpack(golden: dict[str, Tensor]) -> None:
    clipped = clip_boxes(golden["boxes"][None], torch.tensor([[480, 640]]))
    assert torch.equal(clipped[0], golden["clipped_480x640"])


def test_iou_agrees_with_tensorpack(golden: dict[str, Tensor]) -> None:
    boxes, anchors = golden["boxes"][:20], golden["anchors"][:15]
    torch.testing.assert_close(pairwise_iou(boxes, anchors), golden["iou"], rtol=2e-6, atol=1e-7)
    torch.testing.assert_close(pairwise_iou(boxes, anchors), golden["np_iou"], rtol=2e-6, atol=1e-7)


def test_clip_uses_each_images_own_size() -> None:
    boxes = torch.tensor([[-5.0, -6.0, 50.0, 60.0]]).repeat(2, 1, 1)
    clipped = clip_boxes(boxes, torch.tensor([[30, 40], [70, 20]]))
    assert clipped.tolist() == [[[0, 0, 40, 30]], [[0, 0, 20, 60]]]


def test_one_box_at_a_time_gives_the_same_numbers() -> None:
    boxes, anchors = random_boxes(50, seed=1), random_boxes(50, seed=2)
    deltas = torch.randn(50, 4, generator=torch.Generator().manual_seed(3)) * 3
    pairs = list(zip(boxes.tolist(), anchors.tolist(), deltas.tolist(), strict=True))
    encoded = torch.tensor([reference.encode(box, anchor) for box, anchor, _ in pairs])
    decoded = torch.tensor([reference.decode(delta, anchor, 2.0) for _, anchor, delta in pairs])
    clipped = torch.tensor([reference.clip(box, 80, 70) for box, _, _ in pairs])
    torch.testing.assert_close(encode_boxes(boxes, anchors), encoded, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(decode_boxes(deltas, anchors, max_log_scale=2.0), decoded, rtol=1e-5, atol=1e-3)
    torch.testing.assert_close(clip_boxes(boxes[None], torch.tensor([[80, 70]]))[0], clipped)


def test_decode_undoes_encode() -> None:
    boxes, anchors = random_boxes(2, 30, seed=4), random_boxes(2, 30, seed=5)
    decoded = decode_boxes(encode_boxes(boxes, anchors), anchors, max_log_scale=MAX_LOG_SCALE)
    torch.testing.assert_close(decoded, boxes, rtol=1e-5, atol=1e-4)


def test_overlaps_equal_those_of_one_pair_at_a_time() -> None:
    boxes = torch.cat([random_boxes(20, seed=6), torch.zeros(2, 4), torch.tensor([[9.0, 9, 3, 3]])])
    others = torch.cat([random_boxes(10, seed=7), torch.zeros(1, 4)])
    iou = reference.iou_matrix(boxes.numpy(), others.numpy())
    np.testing.assert_allclose(pairwise_iou(boxes, others).numpy(), iou, rtol=1e-5, atol=1e-7)


def test_overlap_of_a_batch_is_that_of_its_images() -> None:
    a, b = random_boxes(3, 7, seed=8), random_boxes(3, 5, seed=9)
    assert torch.equal(pairwise_iou(a, b), torch.stack([pairwise_iou(x, y) for x, y in zip(a, b, strict=True)]))


@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (0, 0)])
def test_overlap_with_nothing_is_empty(shape: tuple[int, int]) -> None:
    assert pairwise_iou(torch.zeros(shape[0], 4), torch.zeros(shape[1], 4)).shape == shape


def test_padding_is_coded_without_nan_or_infinity_in_values_or_gradients() -> None:
    tiny = 1e-42  # a denormal side, which would overflow as a divisor
    boxes = torch.tensor([[0.0, 0, 0, 0], [5, 5, 9, 9], [0, 0, 0, 0], [5, 5, 5, 9], [0, 0, tiny, tiny]])
    anchors = torch.tensor([[1.0, 2, 3, 4], [0, 0, 0, 0], [0, 0, 0, 0], [9, 9, 3, 3], [0, 0, tiny, 4]])
    boxes.requires_grad_(), anchors.requires_grad_()
    encoded = encode_boxes(boxes, anchors)
    encoded.sum().backward()
    assert encoded.isfinite().all()
    assert boxes.grad is not None
    assert boxes.grad.isfinite().all()
    assert anchors.grad is not None
    assert anchors.grad.isfinite().all()


def test_every_function_is_one_graph() -> None:
    boxes, anchors, sizes = random_boxes(2, 6, seed=10), random_boxes(2, 6, seed=11), torch.tensor([[50, 60], [70, 30]])

    def everything(boxes: Tensor, anchors: Tensor, sizes: Tensor) -> tuple[Tensor, ...]:
        clipped = clip_boxes(decode_boxes(encode_boxes(boxes, anchors), anchors, max_log_scale=2.0), sizes)
        return clipped, area(clipped), pairwise_iou(clipped, anchors)

    compiled = torch.compile(everything, fullgraph=True, backend="eager")
    for seen, expected in zip(compiled(boxes, anchors, sizes), everything(boxes, anchors, sizes), strict=True):
        assert torch.equal(seen, expected)
