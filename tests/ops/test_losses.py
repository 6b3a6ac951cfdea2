"""Losses, gradients and metrics against TensorPack's numbers, against sums over one entry at a time, and on nothing."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import reference
from maskfleet.ops.anchors import anchor_grid, cell_anchors
from maskfleet.ops.boxes import encode_boxes
from maskfleet.ops.losses import (
    box_head_losses,
    box_head_metrics,
    mask_head_loss,
    mask_head_metrics,
    proposal_metrics,
    rpn_losses,
    rpn_metrics,
)

GOLDENS = Path(__file__).parents[1] / "goldens"


def load(name: str) -> dict[str, Tensor]:
    with np.load(GOLDENS / name, allow_pickle=False) as file:
        return {name: torch.from_numpy(file[name]) for name in file.files if file[name].dtype.kind in "fiu"}


def summaries() -> dict[str, float]:
    with np.load(GOLDENS / "train_fpn_mask_A.npz", allow_pickle=False) as file:
        return dict(zip(file["scalar_names"].tolist(), file["scalar_values"].tolist(), strict=True))


@pytest.fixture(scope="module")
def golden() -> dict[str, Tensor]:
    return load("ops_losses.npz")


def yes(*shape: int) -> Tensor:
    return torch.ones(shape, dtype=torch.bool)


def test_rpn_losses_and_gradients_are_tensorpacks(golden: dict[str, Tensor]) -> None:
    logits = golden["rpn_label_logits"].reshape(1, -1).requires_grad_()
    deltas = golden["rpn_box_logits"].reshape(1, -1, 4).requires_grad_()
    labels, targets = golden["rpn_anchor_labels"].reshape(1, -1), golden["rpn_anchor_targets"].reshape(1, -1, 4)
    label_loss, box_loss = rpn_losses(logits, deltas, labels, targets, normalizer=256)
    (label_loss + box_loss).sum().backward()
    torch.testing.assert_close(label_loss[0], golden["rpn_label_loss"], rtol=1e-6, atol=0)
    torch.testing.assert_close(box_loss[0], golden["rpn_box_loss"], rtol=1e-6, atol=0)
    torch.testing.assert_close(logits.grad, golden["rpn_label_grad"].reshape(1, -1), rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(deltas.grad, golden["rpn_box_grad"].reshape(1, -1, 4), rtol=1e-6, atol=1e-9)


def test_box_head_losses_and_gradients_are_tensorpacks(golden: dict[str, Tensor]) -> None:
    labels = golden["frcnn_labels"][None]
    foreground = labels[0] > 0
    logits = golden["frcnn_logits"][None].requires_grad_()
    deltas, targets = torch.zeros(1, 40, 81, 4), torch.zeros(1, 40, 4)
    deltas[0, foreground], targets[0, foreground] = golden["frcnn_fg_box_logits"], golden["frcnn_fg_targets"]
    deltas.requires_grad_()
    label_loss, box_loss = box_head_losses(logits, deltas, labels, yes(1, 40), targets, huber=False)
    (label_loss + box_loss).sum().backward()
    torch.testing.assert_close(label_loss[0], golden["frcnn_label_loss"], rtol=1e-6, atol=0)
    torch.testing.assert_close(box_loss[0], golden["frcnn_box_loss"], rtol=1e-6, atol=0)
    torch.testing.assert_close(logits.grad[0], golden["frcnn_label_grad"], rtol=1e-5, atol=1e-8)
    torch.testing.assert_close(deltas.grad[0, foreground], golden["frcnn_box_grad"], rtol=1e-6, atol=1e-9)
    assert not deltas.grad[0, ~foreground].any()


def test_mask_loss_is_tensorpacks(golden: dict[str, Tensor]) -> None:
    loss = mask_head_loss(golden["mask_logits_f16"].float()[None], golden["mask_targets"][None], yes(1, 6))
    torch.testing.assert_close(loss[0], golden["mask_loss"], rtol=1e-6, atol=0)


def test_rpn_losses_and_metrics_of_every_level_are_those_tensorpack_logged() -> None:
    train, infer, logged = load("train_fpn_mask_A.npz"), load("infer_fpn_mask_A.npz"), summaries()
    for level in range(2, 7):
        height, width = infer[f"rpn_cls_lvl{level}"].shape[2:]
        logits = infer[f"rpn_cls_lvl{level}"].permute(0, 2, 3, 1).reshape(1, -1)
        deltas = infer[f"rpn_box_lvl{level}"].reshape(1, 3, 4, height, width).permute(0, 3, 4, 1, 2).reshape(1, -1, 4)
        labels = train[f"anchor_labels_lvl{level}"].reshape(1, -1)
        cell = cell_anchors([2 ** (level + 3)], [0.5, 1.0, 2.0])
        anchors = anchor_grid(cell, stride=2**level, height=height, width=width)
        targets = encode_boxes(train[f"anchor_boxes_lvl{level}"].reshape(1, -1, 4), anchors)
        label_loss, box_loss = rpn_losses(logits, deltas, labels, targets, normalizer=65536)
        seen = rpn_metrics(logits, labels) | {"label_loss": label_loss[0], "box_loss": box_loss[0]}
        scope = f"rpn_losses/level{level}/"
        expected = {name.removeprefix(scope): value for name, value in logged.items() if name.startswith(scope)}
        assert {name: float(value) for name, value in seen.items()} == pytest.approx(expected, rel=3e-6)


def test_proposal_metrics_are_those_tensorpack_logged() -> None:
    train, logged = load("train_fpn_mask_A.npz"), summaries()
    boxes, gt = train["proposal_boxes"], train["gt_boxes"]
    alone = proposal_metrics(boxes[None], yes(1, len(boxes)), gt[None], yes(1, len(gt)))
    scope = "sample_fast_rcnn_targets/"
    expected = {name: logged[scope + name] for name in alone}
    assert len(expected) == 3
    assert {name: float(value) for name, value in alone.items()} == pytest.approx(expected, rel=1e-6)

    padded_gt = torch.cat([gt, boxes[:2]])[None].repeat(2, 1, 1)  # image 1 has no ground truth at all
    gt_valid = torch.zeros(2, len(gt) + 2, dtype=torch.bool)
    gt_valid[0, : len(gt)] = True
    padded = torch.cat([boxes, gt])[None].repeat(2, 1, 1)
    valid = yes(2, len(boxes) + len(gt))
    valid[0, len(boxes) :] = False
    batch = proposal_metrics(padded, valid, padded_gt, gt_valid)
    assert {name: float(value) for name, value in batch.items()} == pytest.approx(expected, rel=1e-6)


def test_mask_metrics_are_those_tensorpack_logged_and_hand_counts() -> None:
    targets = load("train_fpn_mask_A.npz")["mask_targets"][None]
    ratio = mask_head_metrics(targets, targets, yes(1, 14))["fg_pixel_ratio"]
    assert float(ratio) == pytest.approx(summaries()["maskrcnn_loss/fg_pixel_ratio"], rel=1e-6)

    logits = torch.tensor([[[[1.0, 1], [-1, -1]], [[9, 9], [9, 9]]]])
    targets = torch.tensor([[[[0.9, 0.1], [0.9, 0.5]], [[0, 0], [0, 0]]]])
    metrics = mask_head_metrics(logits, targets, torch.tensor([[True, False]]))
    assert {name: float(value) for name, value in metrics.items()} == {
        "accuracy": 0.5,
        "pos_accuracy": 0.25,
        "fg_pixel_ratio": 0.5,
    }


def test_box_head_metrics_by_hand() -> None:
    predicted = torch.tensor([[1, 0, 2, 0, 1, 2], [0, 0, 1, 1, 1, 1]])
    labels = torch.tensor([[1, 1, 1, 0, 0, 2], [0, 0, 0, 2, 2, 2]])
    valid = torch.tensor([[True] * 5 + [False], [True] * 3 + [False] * 3])
    logits = torch.nn.functional.one_hot(predicted, 3).float()
    metrics = {name: float(value) for name, value in box_head_metrics(logits, labels, valid).items()}
    assert metrics == pytest.approx(
        {
            "num_fg_label": (3 + 0) / 2,
            "label_metrics/accuracy": (2 / 5 + 2 / 3) / 2,
            "label_metrics/fg_accuracy": (1 / 3 + 0) / 2,  # no foreground counts as 0
            "label_metrics/false_negative": (1 / 3 + 0) / 2,
        }
    )


def test_rpn_metrics_say_one_half_where_there_is_nothing_to_count() -> None:
    metrics = rpn_metrics(torch.full((1, 3), -9.0), torch.tensor([[0, 0, -1]], dtype=torch.int8))
    assert all(float(metrics[name]) == 0.5 for name in metrics if name.startswith("label_metrics/"))
    assert float(metrics["num_valid_anchor"]) == 2


def test_rpn_losses_equal_sums_over_single_anchors() -> None:
    generator = torch.Generator().manual_seed(0)
    logits, deltas = torch.randn(2, 20, generator=generator) * 3, torch.randn(2, 20, 4, generator=generator) * 0.2
    targets = torch.randn(2, 20, 4, generator=generator) * 0.2
    labels = torch.randint(-1, 2, (2, 20), generator=generator).to(torch.int8)
    label_loss, box_loss = rpn_losses(logits, deltas, labels, targets, normalizer=16)
    for image in range(2):
        label_sum = box_sum = 0.0
        for anchor in range(20):
            label = int(labels[image, anchor])
            if label >= 0:
                label_sum += reference.binary_cross_entropy(float(logits[image, anchor]), label)
            if label == 1:
                differences = (deltas - targets)[image, anchor].tolist()
                box_sum += sum(reference.smooth_l1(difference, 1 / 9) for difference in differences)
        assert float(label_loss[image]) == pytest.approx(label_sum / 16, rel=1e-5)
        assert float(box_loss[image]) == pytest.approx(box_sum / 16, rel=1e-5)


@pytest.mark.parametrize("huber", [False, True])
@pytest.mark.parametrize("shared", [False, True])
def test_box_head_losses_equal_sums_over_single_regions(huber: bool, shared: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(2, 12, 5, generator=generator)
    deltas = torch.randn(2, 12, 1 if shared else 5, 4, generator=generator) * 2
    targets = torch.randn(2, 12, 4, generator=generator)
    labels = torch.randint(0, 5, (2, 12), generator=generator)
    valid = torch.rand(2, 12, generator=generator) < 0.7
    label_loss, box_loss = box_head_losses(logits, deltas, labels, valid, targets, huber=huber)
    for image in range(2):
        label_sum = box_sum = 0.0
        for region in valid[image].nonzero()[:, 0].tolist():
            label = int(labels[image, region])
            label_sum += reference.cross_entropy(logits[image, region].tolist(), label)
            if label > 0:
                own = deltas[image, region, 0 if shared else label]
                differences = (own - targets[image, region]).tolist()
                box_sum += sum(reference.smooth_l1(d, 1.0) if huber else abs(d) for d in differences)
        count = int(valid[image].sum())
        assert float(label_loss[image]) == pytest.approx(label_sum / count, rel=1e-5)
        assert float(box_loss[image]) == pytest.approx(box_sum / count, rel=1e-5)


def test_mask_loss_is_the_mean_over_the_pixels_of_valid_masks() -> None:
    generator = torch.Generator().manual_seed(2)
    logits, targets = torch.randn(2, 3, 4, 4, generator=generator), torch.rand(2, 3, 4, 4, generator=generator)
    valid = torch.tensor([[True, False, True], [False, True, False]])
    loss = mask_head_loss(logits, targets, valid)
    for image in range(2):
        pixels = zip(logits[image, valid[image]].flatten(), targets[image, valid[image]].flatten(), strict=True)
        each = [reference.binary_cross_entropy(float(logit), float(target)) for logit, target in pixels]
        assert float(loss[image]) == pytest.approx(sum(each) / len(each), rel=1e-5)


def test_losses_over_nothing_are_zero_with_a_gradient_of_zero() -> None:
    logits, deltas = torch.randn(2, 6, requires_grad=True), torch.randn(2, 6, 4, requires_grad=True)
    classes, boxes = torch.randn(2, 6, 3, requires_grad=True), torch.randn(2, 6, 3, 4, requires_grad=True)
    masks = torch.randn(2, 6, 4, 4, requires_grad=True)
    garbage = torch.full((2, 6, 4), float("inf"))  # what padding may have been coded as
    no = torch.zeros(2, 6, dtype=torch.bool)
    losses = [
        *rpn_losses(logits, deltas, torch.full((2, 6), -1, dtype=torch.int8), garbage, normalizer=256),
        *box_head_losses(classes, boxes, torch.full((2, 6), 2), no, garbage, huber=False),
        mask_head_loss(masks, torch.rand(2, 6, 4, 4), no),
    ]
    assert all(torch.equal(loss, torch.zeros(2)) for loss in losses)
    torch.stack(losses).sum().backward()
    for leaf in (logits, deltas, classes, boxes, masks):
        assert leaf.grad is not None
        assert not leaf.grad.any()


def test_an_images_losses_do_not_depend_on_padding_or_neighbours() -> None:
    generator = torch.Generator().manual_seed(3)
    logits, deltas = torch.randn(3, 9, 4, generator=generator), torch.randn(3, 9, 4, 4, generator=generator)
    targets, labels = torch.randn(3, 9, 4, generator=generator), torch.randint(0, 4, (3, 9), generator=generator)
    valid = yes(3, 9)
    valid[1, 6:] = False
    batch = box_head_losses(logits, deltas, labels, valid, targets, huber=False)
    alone = box_head_losses(logits[1:2, :6], deltas[1:2, :6], labels[1:2, :6], yes(1, 6), targets[1:2, :6], huber=False)
    for a, b in zip(batch, alone, strict=True):
        torch.testing.assert_close(a[1:2], b, rtol=1e-6, atol=0)


def test_losses_are_float32_whatever_the_heads_computed_in() -> None:
    half = torch.bfloat16
    losses = [
        *rpn_losses(
            torch.randn(1, 4).to(half), torch.randn(1, 4, 4).to(half), yes(1, 4).to(torch.int8), torch.randn(1, 4, 4),
            normalizer=4,
        ),
        *box_head_losses(
            torch.randn(1, 4, 3).to(half), torch.randn(1, 4, 3, 4).to(half), torch.ones(1, 4, dtype=torch.int64),
            yes(1, 4), torch.randn(1, 4, 4), huber=True,
        ),
        mask_head_loss(torch.randn(1, 2, 4, 4).to(half), torch.rand(1, 2, 4, 4), yes(1, 2)),
    ]  # fmt: skip
    assert {loss.dtype for loss in losses} == {torch.float32}


def test_every_function_is_one_graph() -> None:
    def everything(logits: Tensor, deltas: Tensor, labels: Tensor, masks: Tensor) -> list[Tensor]:
        valid = labels >= 0
        rpn_labels, boxes = labels.clamp(max=1), deltas[:, :, 0]
        metrics = (
            rpn_metrics(logits[..., 0], rpn_labels)
            | box_head_metrics(logits, labels, valid)
            | mask_head_metrics(masks, masks.sigmoid(), valid)
            | proposal_metrics(boxes, valid, boxes, valid)
        )
        return [
            *rpn_losses(logits[..., 0], boxes, rpn_labels, boxes * 2, normalizer=8),
            *box_head_losses(logits, deltas, labels, valid, boxes * 2, huber=True),
            mask_head_loss(masks, masks.sigmoid(), valid),
            *metrics.values(),
        ]

    generator = torch.Generator().manual_seed(4)
    arguments = (
        torch.randn(2, 7, 3, generator=generator),
        torch.randn(2, 7, 3, 4, generator=generator),
        torch.randint(-1, 3, (2, 7), generator=generator),
        torch.randn(2, 7, 4, 4, generator=generator),
    )
    compiled = torch.compile(everything, fullgraph=True, backend="eager")
    for seen, expected in zip(compiled(*arguments), everything(*arguments), strict=True):
        assert torch.equal(seen, expected)
