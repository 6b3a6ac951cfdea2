"""Suppression and top-k against TensorFlow's numbers, against loops, and on ties, padding and degenerate boxes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import reference
from maskfleet.ops.boxes import clip_boxes
from maskfleet.ops.nms import (
    MAX_SCAN,
    SCAN_BLOCK,
    _nms_keep_in_program,
    _nms_keep_on_device,
    detections_nms,
    first_kept,
    nms_keep,
    topk_sorted,
    topk_sorted_each,
)

GOLDENS = Path(__file__).parents[1] / "goldens"
Keep = Callable[[Tensor, Tensor, float], Tensor]
RULES: dict[str, Any] = {"score_threshold": 0.05, "iou_threshold": 0.5, "max_detections": 100}


def on_cpu(boxes: Tensor, valid: Tensor, threshold: float) -> Tensor:
    return nms_keep(boxes, valid, threshold=threshold)


bodies = [
    pytest.param(on_cpu, id="cpu"),
    pytest.param(_nms_keep_on_device, id="device"),
    pytest.param(_nms_keep_in_program, id="program", marks=pytest.mark.slow),
]
each_body = pytest.mark.parametrize("keep", bodies)


@pytest.fixture(scope="module")
def golden() -> dict[str, Tensor]:
    with np.load(GOLDENS / "ops_nms.npz", allow_pickle=False) as file:
        return {name: torch.from_numpy(array) for name, array in file.items()}


def random_boxes(rows: int, count: int, *, seed: int, size: float = 40.0, extent: float = 100.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    corner = torch.rand(rows, count, 2, generator=generator) * extent
    return torch.cat([corner, corner + torch.rand(rows, count, 2, generator=generator) * size], dim=-1)


@each_body
def test_proposals_are_tensorpacks(golden: dict[str, Tensor], keep: Keep) -> None:
    boxes = clip_boxes(golden["boxes"][None], golden["hw"][None])
    everything = torch.ones(1, boxes.shape[1], dtype=torch.bool)
    scores, index, valid = topk_sorted(golden["scores"][None], everything, int(golden["pre_topk"]))
    boxes = boxes[:, index[0]]
    kept = keep(boxes, valid, float(golden["nms_thresh"]))
    scores, index, valid = topk_sorted(scores, kept, int(golden["post_topk"]))
    order = golden["out_scores"].argsort(descending=True, stable=True)
    assert valid.all()
    assert torch.equal(scores[0], golden["out_scores"][order])
    assert torch.equal(boxes[0, index[0]], golden["out_boxes"][order])


def test_detections_are_tensorpacks(golden: dict[str, Tensor]) -> None:
    boxes, scores = golden["pred_boxes"][None, :, 1:], golden["pred_scores"][None, :, 1:]
    found = detections_nms(boxes, scores, torch.ones(1, 80, dtype=torch.bool), **RULES)
    assert torch.equal(found[0][0], golden["final_boxes"])
    assert torch.equal(found[1][0], golden["final_scores"])
    assert torch.equal(found[2][0], golden["final_labels"])
    assert found[3].all()
    assert torch.equal(boxes[0].reshape(-1, 4)[found[4][0]], golden["final_boxes"])


@each_body
@pytest.mark.parametrize("count", [0, 1, 63, 64, 65, 200])
@pytest.mark.parametrize("threshold", [0.0, 0.3, 0.7, 1.0])
def test_suppression_equals_a_greedy_loop(keep: Keep, count: int, threshold: float) -> None:
    boxes = random_boxes(3, count, seed=count)
    valid = torch.rand(3, count, generator=torch.Generator().manual_seed(1)) < 0.8
    if count:
        valid[2] = False
    boxes[:, 10:20] = boxes[:, 5:15].clone()  # doubles
    seen = keep(boxes, valid, threshold)
    for row in range(3):
        chosen = valid[row].nonzero()[:, 0]
        expected = torch.zeros(count, dtype=torch.bool)
        expected[chosen[reference.nms(boxes[row, chosen].numpy(), threshold)]] = True
        assert torch.equal(seen[row], expected)


@each_body
def test_a_removed_box_removes_nothing(keep: Keep) -> None:
    # Each overlaps the next by an IoU of 2/3 and the one after by 3/7: first, third and fifth stay.
    left = torch.arange(5) * 2.0
    boxes = torch.stack([left, torch.zeros(5), left + 10, torch.full((5,), 10.0)], dim=-1)[None]
    assert keep(boxes, torch.ones(1, 5, dtype=torch.bool), 0.5).tolist() == [[True, False, True, False, True]]


@each_body
def test_an_overlap_equal_to_the_threshold_is_kept(keep: Keep) -> None:
    boxes = torch.tensor([[[0.0, 0, 10, 10], [0, 0, 10, 5], [0, 0, 10, 5.1]]])  # IoU 0.5 and 0.51 with the first
    assert keep(boxes, torch.ones(1, 3, dtype=torch.bool), 0.5).tolist() == [[True, True, False]]


@each_body
def test_boxes_without_area_neither_remove_nor_are_removed(keep: Keep) -> None:
    flat, swapped, whole = [3.0, 3, 3, 8], [9.0, 9, 1, 1], [0.0, 0, 10, 10]
    boxes = torch.tensor([[flat, flat, swapped, whole, swapped, flat, whole]])
    expected = [[True, True, True, True, True, True, False]]
    assert keep(boxes, torch.ones(1, 7, dtype=torch.bool), 0.0).tolist() == expected


def test_a_row_does_not_depend_on_its_neighbours_or_its_padding() -> None:
    boxes = random_boxes(1, 100, seed=3)
    alone = nms_keep(boxes, torch.ones(1, 100, dtype=torch.bool), threshold=0.3)
    many = random_boxes(3, 150, seed=4)
    many[1, :100] = boxes[0]
    valid = torch.ones(3, 150, dtype=torch.bool)
    valid[1, 100:] = False
    assert torch.equal(nms_keep(many, valid, threshold=0.3)[1, :100], alone[0])


@pytest.mark.parametrize("num_slots", [0, 1, 7, MAX_SCAN, MAX_SCAN + 1, 12_000, 3 * SCAN_BLOCK + MAX_SCAN])
@pytest.mark.parametrize("count", [0, 1, 2000])
def test_the_first_of_the_kept_stay_however_long_the_row(num_slots: int, count: int) -> None:
    keep = torch.rand(3, num_slots, generator=torch.Generator().manual_seed(num_slots)) < 0.4
    expected = torch.zeros_like(keep)
    for row, found in enumerate(keep):
        expected[row, found.nonzero()[:count, 0]] = True
    assert torch.equal(first_kept(keep, count), expected)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_cuda_device_keeps_what_the_cpu_keeps() -> None:
    boxes, valid = random_boxes(4, 1000, seed=5, extent=300), torch.ones(4, 1000, dtype=torch.bool)
    on_device = nms_keep(boxes.cuda(), valid.cuda(), threshold=0.5).cpu()
    assert torch.equal(on_device, nms_keep(boxes, valid, threshold=0.5))


@settings(max_examples=200, deadline=None)
@given(
    entries=st.lists(st.tuples(st.sampled_from([-2.5, -1.0, -0.0, 0.0, 1.0, 3.5]), st.booleans()), max_size=30),
    k=st.integers(0, 40),
)
def test_topk_is_a_stable_sort_of_the_valid(entries: list[tuple[float, bool]], k: int) -> None:
    scores = torch.tensor([[score for score, _ in entries]]).reshape(1, -1)
    valid = torch.tensor([[ok for _, ok in entries]], dtype=torch.bool).reshape(1, -1)
    top, index, found = topk_sorted(scores, valid, k)
    best = sorted((i for i, (_, ok) in enumerate(entries) if ok), key=lambda i: -entries[i][0])[:k]
    padding = min(k, len(entries)) - len(best)
    assert index.tolist() == [best + [0] * padding]
    assert top.tolist() == [[entries[i][0] for i in best] + [0.0] * padding]
    assert found.tolist() == [[True] * len(best) + [False] * padding]


def test_topk_orders_any_float32() -> None:
    scores = torch.randn(3, 500, generator=torch.Generator().manual_seed(0)) * 10.0 ** torch.arange(-30, 30, 0.12)
    scores[0, 7], scores[0, 9], scores[1, 3] = float("inf"), float("-inf"), torch.finfo(torch.float32).tiny / 4
    top, index, found = topk_sorted(scores, torch.ones_like(scores, dtype=torch.bool), 500)
    expected = scores.sort(dim=-1, descending=True, stable=True)
    assert found.all()
    assert torch.equal(top, expected.values)
    assert torch.equal(index, expected.indices)


@pytest.mark.parametrize("k", [1, 6, 40])
def test_topk_of_several_lists_together_is_that_of_each(k: int) -> None:
    generator = torch.Generator().manual_seed(k)
    lists = [(4 * torch.randn(2, size, generator=generator)).round() for size in (1, 7, 33)]  # many are equal
    valid = [torch.rand(scores.shape, generator=generator) < 0.7 for scores in lists]
    together = topk_sorted_each(lists, valid, k)
    for scores, of_list, found in zip(lists, valid, together, strict=True):
        expected = topk_sorted(scores, of_list, k)
        for one, other in zip(found, expected, strict=True):
            assert one.shape == (2, k)
            assert torch.equal(one[:, : other.shape[1]], other)
            assert not one[:, other.shape[1] :].any()


@pytest.mark.parametrize("seed", range(5))
def test_detections_equal_those_of_each_category_by_itself(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    boxes = random_boxes(2, 25 * 4, seed=seed).reshape(2, 25, 4, 4).round()  # whole, so that moving is exact
    scores = (torch.rand(2, 25, 4, generator=generator) * 20).round() / 20  # many equal scores
    valid = torch.rand(2, 25, generator=generator) < 0.8
    found = detections_nms(boxes, scores, valid, score_threshold=0.2, iou_threshold=0.3, max_detections=30)
    for image in range(2):
        rows = valid[image].nonzero()[:, 0]
        expected = reference.detections(
            boxes[image, rows].numpy(), scores[image, rows].numpy(),
            score_threshold=0.2, iou_threshold=0.3, max_detections=30,
        )  # fmt: skip
        index = [int(rows[region]) * 4 + category for region, category in expected]
        padding = 30 - len(index)
        assert found[4][image].tolist() == index + [0] * padding
        assert found[3][image].tolist() == [True] * len(index) + [False] * padding
        assert found[2][image].tolist() == [i % 4 + 1 for i in index] + [0] * padding
        assert torch.equal(found[0][image, : len(index)], boxes[image].reshape(-1, 4)[index])
        assert torch.equal(found[1][image, : len(index)], scores[image].flatten()[index])
        assert not found[0][image, len(index) :].any()


def test_a_score_equal_to_the_threshold_is_no_detection() -> None:
    boxes = torch.tensor([[[[0.0, 0, 5, 5]], [[50, 50, 60, 60]]]])
    found = detections_nms(
        boxes, torch.tensor([[[0.25], [0.26]]]), torch.ones(1, 2, dtype=torch.bool),
        score_threshold=0.25, iou_threshold=0.5, max_detections=2,
    )  # fmt: skip
    assert found[3].tolist() == [[True, False]]
    assert found[4].tolist() == [[1, 0]]


def test_a_cap_on_candidates_that_leaves_enough_survivors_changes_nothing(golden: dict[str, Tensor]) -> None:
    boxes, scores, valid = golden["pred_boxes"][None, :, 1:], golden["pred_scores"][None, :, 1:], torch.ones(1, 80) > 0
    rules = RULES | {"max_detections": 20}
    assert int((scores > 0.05).sum()) == 365
    full = detections_nms(boxes, scores, valid, **rules)
    capped = detections_nms(boxes, scores, valid, **rules, max_candidates=60)
    for a, b in zip(full, capped, strict=True):
        assert torch.equal(a, b)


def test_detections_of_an_image_do_not_depend_on_neighbours_or_invalid_regions(golden: dict[str, Tensor]) -> None:
    boxes, scores = golden["pred_boxes"][:, 1:], golden["pred_scores"][:, 1:]
    alone = detections_nms(boxes[None], scores[None], torch.ones(1, 80) > 0, **RULES)
    many = torch.full((2, 95, 80, 4), 5000.0)
    many_scores = torch.full((2, 95, 80), 0.99)
    many[1, :80], many_scores[1, :80] = boxes, scores
    valid = torch.ones(2, 95, dtype=torch.bool)
    valid[1, 80:] = False
    both = detections_nms(many, many_scores, valid, **RULES)
    for a, b in zip(alone, both, strict=True):
        assert torch.equal(a[0], b[1])


def test_no_valid_region_gives_no_detection() -> None:
    found = detections_nms(torch.ones(1, 3, 2, 4), torch.ones(1, 3, 2), torch.zeros(1, 3) > 0, **RULES)
    for tensor in found:
        assert not tensor.any()
        assert tensor.shape[:2] == (1, 6)


def test_every_function_is_one_graph_and_the_suppression_one_node() -> None:
    def pick(boxes: Tensor, scores: Tensor, valid: Tensor) -> tuple[Tensor, ...]:
        return detections_nms(boxes, scores, valid, score_threshold=0.1, iou_threshold=0.5, max_detections=5)

    graphs = []

    def backend(graph: torch.fx.GraphModule, _: list[Tensor]) -> Callable[..., object]:
        graphs.append(graph)
        return graph.forward

    boxes, scores = random_boxes(2, 30, seed=9).reshape(2, 10, 3, 4), torch.rand(2, 10, 3)
    valid = torch.ones(2, 10, dtype=torch.bool)
    seen = torch.compile(pick, fullgraph=True, backend=backend)(boxes, scores, valid)
    for a, b in zip(seen, pick(boxes, scores, valid), strict=True):
        assert torch.equal(a, b)
    assert sum("nms_keep" in str(node.target) for graph in graphs for node in graph.graph.nodes) == 1


def test_the_suppression_op_is_declared_as_it_behaves() -> None:
    sample = (random_boxes(2, 9, seed=1), torch.ones(2, 9, dtype=torch.bool), 0.5)
    torch.library.opcheck(torch.ops.maskfleet.nms_keep.default, sample)
