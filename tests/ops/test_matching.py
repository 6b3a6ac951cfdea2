"""Labels and matches against TensorPack's, against loops, and against themselves on other canvases."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import reference
from maskfleet.ops import matching
from maskfleet.ops.anchors import anchor_grid, cell_anchors
from maskfleet.ops.matching import match_rois, rpn_labels

GOLDENS = Path(__file__).parents[1] / "goldens"
LEVELS = {2: (4, 32), 3: (8, 64), 4: (16, 128), 5: (32, 256), 6: (64, 512)}  # level: stride, anchor size
RULES: dict[str, Any] = {"positive_iou": 0.7, "negative_iou": 0.3, "crowd_overlap": 9.99}


def field(height: int, width: int, levels: tuple[int, ...] = (2, 3, 4, 5, 6)) -> Tensor:
    grids = []
    for level in levels:
        stride, size = LEVELS[level]
        cell = cell_anchors([size], [0.5, 1.0, 2.0])
        grids.append(anchor_grid(cell, stride=stride, height=height // stride, width=width // stride))
    return torch.cat(grids)


def labels_of_one(anchors: Tensor, boxes: Tensor, size: tuple[int, int], **rules: Any) -> tuple[Tensor, Tensor]:
    crowds = rules.pop("crowds", torch.zeros(0, 4))
    labels, matched = rpn_labels(
        anchors,
        boxes[None],
        torch.ones(1, len(boxes), dtype=torch.bool),
        torch.tensor([size]),
        crowds[None],
        torch.ones(1, len(crowds), dtype=torch.bool),
        **(RULES | rules),
    )
    return labels[0], matched[0]


def load(name: str) -> dict[str, Tensor]:
    with np.load(GOLDENS / name, allow_pickle=False) as file:
        return {name: torch.from_numpy(file[name]) for name in file.files if file[name].dtype.kind in "fiu"}


@pytest.mark.parametrize(
    ("file", "gt", "labels", "targets"),
    [
        ("ops_anchors.npz", "label_gt_boxes", "label_lvl", "label_boxes_lvl"),
        ("train_fpn_mask_A.npz", "gt_boxes", "anchor_labels_lvl", "anchor_boxes_lvl"),
    ],
)
def test_labels_are_tensorpacks_anchor_for_anchor(file: str, gt: str, labels: str, targets: str) -> None:
    golden = load(file)
    crowd = golden.get("label_is_crowd", torch.zeros(len(golden[gt]))) == 1
    boxes = golden[gt][~crowd]
    expected = torch.cat([golden[f"{labels}{level}"].flatten() for level in LEVELS])
    expected_boxes = torch.cat([golden[f"{targets}{level}"].reshape(-1, 4) for level in LEVELS])
    seen, matched = labels_of_one(field(256, 320), boxes, (256, 320), crowds=golden[gt][crowd])
    assert (expected == 1).sum() > 20
    assert torch.equal(seen, expected)
    assert torch.equal(boxes[matched][expected == 1], expected_boxes[expected == 1])


@pytest.mark.parametrize("crowd_overlap", [0.1, 0.3, 0.6])
def test_overlap_with_crowds_is_the_share_of_the_anchor_as_in_tensorpack(crowd_overlap: float) -> None:
    with np.load(GOLDENS / "ops_boxes.npz", allow_pickle=False) as golden:
        crowds, anchors = torch.from_numpy(golden["boxes"][:20]), torch.from_numpy(golden["anchors"][:15])
        in_crowd = torch.from_numpy((golden["np_ioa"] > crowd_overlap).any(axis=0))
    inside = (anchors[:, :2] >= 0).all(dim=1)
    rules = {"crowds": crowds, "crowd_overlap": crowd_overlap}
    labels, _ = labels_of_one(anchors, torch.zeros(0, 4), (10_000, 10_000), **rules)
    assert (in_crowd & inside).any()
    assert (~in_crowd & inside).any()
    assert torch.equal(labels == 0, ~in_crowd & inside)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("crowd_overlap", [0.7, 0.2, 9.99])
def test_labels_equal_those_of_a_loop_over_anchors(seed: int, crowd_overlap: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    anchors = field(96, 128, levels=(3, 4))
    # Whole pixels, some sizes equal to an anchor's: many IoUs tie, as with real annotations on a grid.
    corner = torch.randint(0, 80, (seed, 2), generator=generator).float()
    boxes = torch.cat([corner, corner + torch.randint(8, 65, (seed, 2), generator=generator)], dim=-1)
    crowds = torch.tensor([[0.0, 0, 60, 50], [70, 10, 90, 96]])
    rules = RULES | {"negative_iou": 0.2, "positive_iou": 0.5, "crowd_overlap": crowd_overlap}
    seen, matched = labels_of_one(anchors, boxes, (90, 120), crowds=crowds, **rules)
    labels, gts = reference.rpn_labels(
        anchors.double().numpy(), boxes.double().numpy(), crowds.double().numpy(), height=90, width=120, **rules
    )
    assert seen.tolist() == labels
    assert [m for m, gt in zip(matched.tolist(), gts, strict=True) if gt is not None] == [
        g for g in gts if g is not None
    ]


def test_every_anchor_that_ties_for_a_ground_truth_is_positive() -> None:
    anchors = torch.tensor([[0.0, 0, 10, 10], [20, 0, 30, 10], [40, 40, 50, 50], [60, 60, 70, 70]])
    gt = torch.tensor([[5.0, 0, 25, 10]])  # IoU 50 / 250 with each of the first two
    assert labels_of_one(anchors, gt, (100, 100), negative_iou=0.1)[0].tolist() == [1, 1, 0, 0]


def test_a_best_match_below_the_negative_threshold_is_background() -> None:
    anchors = torch.tensor([[0.0, 0, 10, 10], [20, 0, 30, 10]])
    gt = torch.tensor([[0.0, 0, 10, 100]])  # IoU 0.1 with the first
    assert labels_of_one(anchors, gt, (200, 200))[0].tolist() == [0, 0]


def test_thresholds_count_the_values_they_name() -> None:
    anchors = torch.tensor([[0.0, 0, 10, 10]] * 3)
    anchors = anchors + torch.tensor([0.0, 100, 200])[:, None] * torch.tensor([1.0, 0, 1, 0])
    gt = torch.tensor([[0.0, 0, 10, 7], [100, 0, 110, 3], [200, 0, 210, 10]])  # IoU 0.7, 0.3, 1
    better = torch.tensor([[0.0, 0, 10, 7.5], [100, 0, 110, 3.5]])  # takes the first two's place as the best
    labels, _ = labels_of_one(torch.cat([anchors, better]), gt, (300, 300))
    assert labels.tolist()[:3] == [1, -1, 1]


def test_anchors_that_leave_the_unpadded_image_are_ignored_and_the_border_itself_is_inside() -> None:
    anchors = torch.tensor([[0.0, 0, 50, 40], [0, 0, 50.01, 40], [0, 0, 50, 40.01], [-0.01, 0, 9, 9], [0, -0.01, 9, 9]])
    labels, _ = labels_of_one(anchors, torch.zeros(0, 4), (40, 50))
    assert labels.tolist() == [0, -1, -1, -1, -1]


def test_an_image_without_ground_truth_is_background_inside_and_nothing_outside() -> None:
    anchors = field(64, 64, levels=(2,))
    inside = (anchors[:, :2] >= 0).all(dim=1) & (anchors[:, 2:] <= 64).all(dim=1)
    padded = rpn_labels(
        anchors, torch.zeros(1, 3, 4), torch.zeros(1, 3, dtype=torch.bool), torch.tensor([[64, 64]]),
        torch.zeros(1, 0, 4), torch.zeros(1, 0, dtype=torch.bool), **RULES,
    )  # fmt: skip
    assert torch.equal(padded[0][0] == 0, inside)
    assert torch.equal(padded[0][0] == -1, ~inside)
    assert (padded[1] == 0).all()
    assert torch.equal(labels_of_one(anchors, torch.zeros(0, 4), (64, 64))[0], padded[0][0])


def test_a_ground_truth_no_anchor_reaches_makes_positives_of_middling_anchors_as_in_tensorpack() -> None:
    anchors = torch.tensor([[0.0, 0, 10, 10], [50, 50, 60, 60]])
    gt = torch.tensor([[0.0, 0, 10, 20], [0, 80, 5, 90]])  # the second overlaps nothing, so all tie at 0
    assert labels_of_one(anchors, gt, (100, 100))[0].tolist() == [1, 0]


def test_padding_and_neighbours_change_nothing_for_an_image() -> None:
    anchors = field(96, 128, levels=(3, 4))
    boxes = torch.tensor([[10.0, 10, 70, 60], [40, 30, 100, 90], [5, 5, 60, 80]])
    alone = labels_of_one(anchors, boxes, (90, 100), crowds=boxes[:1] + 3, crowd_overlap=0.7)
    batch = torch.zeros(3, 7, 4)
    batch[1, :3] = boxes
    batch[0] = torch.tensor([0.0, 0, 64, 64])
    batch[1, 3:] = torch.tensor([16.0, 16, 80, 80])  # garbage behind the valid ones
    valid = torch.zeros(3, 7, dtype=torch.bool)
    valid[0], valid[1, :3] = True, True
    crowds = torch.full((3, 2, 4), 50.0)
    crowds[1, 0], crowds[1, 1] = boxes[0] + 3, torch.tensor([0.0, 0, 128, 96])
    crowd_valid = torch.tensor([[True, True], [True, False], [False, False]])
    labels, matched = rpn_labels(
        anchors, batch, valid, torch.tensor([[96, 128], [90, 100], [50, 50]]), crowds, crowd_valid,
        **(RULES | {"crowd_overlap": 0.7}),
    )  # fmt: skip
    assert (alone[0] == 1).any()
    assert torch.equal(labels[1], alone[0])
    assert torch.equal(matched[1], alone[1])


def test_looking_at_few_ground_truths_at_a_time_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    anchors = field(96, 128, levels=(3, 4))
    corner = torch.randint(0, 60, (11, 2), generator=torch.Generator().manual_seed(0)).float()
    boxes = torch.cat([corner, corner + 30], dim=-1)
    boxes[7] = boxes[2]  # equals, in different portions
    monkeypatch.setattr(matching, "_GTS_AT_ONCE", 11)
    whole = labels_of_one(anchors, boxes, (96, 128))
    monkeypatch.setattr(matching, "_GTS_AT_ONCE", 3)
    parts = labels_of_one(anchors, boxes, (96, 128))
    assert torch.equal(whole[0], parts[0])
    assert torch.equal(whole[1], parts[1])


def test_rois_match_the_first_ground_truth_of_highest_iou() -> None:
    generator = torch.Generator().manual_seed(5)
    corner = torch.rand(2, 30, 2, generator=generator) * 60
    boxes = torch.cat([corner, corner + torch.rand(2, 30, 2, generator=generator) * 40], dim=-1)
    gt = boxes[:, [3, 8, 8, 20]] + torch.tensor([1.0, -1, 2, 0])
    gt_valid = torch.tensor([[True, True, True, True], [False, True, True, False]])
    boxes_valid = torch.ones(2, 30, dtype=torch.bool)
    boxes_valid[1, 25:] = False
    best_iou, matched = match_rois(boxes, boxes_valid, gt, gt_valid)
    for image in range(2):
        iou = reference.iou_matrix(boxes[image].double().numpy(), gt[image].double().numpy())
        iou[:, ~gt_valid[image].numpy()] = 0
        iou[~boxes_valid[image].numpy()] = 0
        np.testing.assert_allclose(best_iou[image].numpy(), iou.max(axis=1), rtol=1e-5, atol=1e-6)
        assert matched[image].tolist() == iou.argmax(axis=1).tolist()


def test_a_roi_that_is_a_ground_truth_has_an_iou_of_exactly_one() -> None:
    gt = torch.tensor([[[10.3, 20.7, 99.1, 77.7], [1.1, 2.2, 3.3, 4.4]]])
    valid = torch.ones(1, 2, dtype=torch.bool)
    best_iou, matched = match_rois(gt, valid, gt, valid)
    assert best_iou.tolist() == [[1.0, 1.0]]
    assert matched.tolist() == [[0, 1]]


@pytest.mark.parametrize("num_gt", [0, 2])
def test_rois_of_an_image_without_ground_truth_have_iou_zero(num_gt: int) -> None:
    boxes, valid = torch.tensor([[[0.0, 0, 9, 9], [0, 0, 0, 0]]]), torch.tensor([[True, False]])
    best_iou, matched = match_rois(
        boxes, valid, torch.full((1, num_gt, 4), 5.0), torch.zeros(1, num_gt, dtype=torch.bool)
    )
    assert best_iou.tolist() == [[0.0, 0.0]]
    assert matched.tolist() == [[0, 0]]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")  # inductor's own
@pytest.mark.timeout(3600)  # inductor runs a C++ compiler, slowly on a busy machine
def test_compiled_labels_keep_every_tie() -> None:
    anchors = field(256, 320)
    boxes = load("ops_anchors.npz")["label_gt_boxes"]
    boxes = torch.cat([boxes, torch.tensor([[10.0, 20, 210, 220], [33.3, 44.4, 200.1, 190.7]])])
    eager = labels_of_one(anchors, boxes, (256, 320))
    compiled = torch.compile(rpn_labels, fullgraph=True)(
        anchors, boxes[None], torch.ones(1, len(boxes), dtype=torch.bool), torch.tensor([[256, 320]]),
        torch.zeros(1, 0, 4), torch.zeros(1, 0, dtype=torch.bool), **RULES,
    )  # fmt: skip
    assert torch.equal(compiled[0][0], eager[0])
    assert torch.equal(compiled[1][0], eager[1])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")  # inductor's own
@pytest.mark.parametrize("compiled", [False, True])
def test_labels_of_a_cuda_device_are_the_cpus(compiled: bool) -> None:
    anchors = field(256, 320)
    boxes = load("ops_anchors.npz")["label_gt_boxes"].repeat(3, 1)  # more than one portion, and ties
    valid, no_crowd = torch.ones(1, len(boxes), dtype=torch.bool), torch.zeros(1, 0, dtype=torch.bool)
    arguments = (anchors, boxes[None], valid, torch.tensor([[256, 320]]), torch.zeros(1, 0, 4), no_crowd)
    there = torch.compile(rpn_labels, fullgraph=True) if compiled else rpn_labels
    on_device = there(*(tensor.cuda() for tensor in arguments), **RULES)
    for seen, expected in zip(on_device, rpn_labels(*arguments, **RULES), strict=True):
        assert torch.equal(seen.cpu(), expected)


def test_both_functions_are_one_graph() -> None:
    anchors = field(64, 64, levels=(3,))
    boxes = torch.tensor([[[5.0, 5, 50, 60], [0, 0, 0, 0]]] * 2)
    valid = torch.tensor([[True, False]] * 2)

    def match(anchors: Tensor, boxes: Tensor, valid: Tensor) -> tuple[Tensor, ...]:
        sizes = torch.full((2, 2), 64)
        labels = rpn_labels(anchors, boxes, valid, sizes, boxes, valid, **(RULES | {"crowd_overlap": 0.9}))
        return *labels, *match_rois(boxes, valid, boxes, valid)

    compiled = torch.compile(match, fullgraph=True, backend="eager")
    for seen, expected in zip(compiled(anchors, boxes, valid), match(anchors, boxes, valid), strict=True):
        assert torch.equal(seen, expected)
