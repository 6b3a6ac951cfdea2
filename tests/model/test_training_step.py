"""What the switches of the config do to a training step."""

from __future__ import annotations

import dataclasses

import golden
import pytest
import torch
from small import VARIANTS, small_batch, small_model
from torch import Tensor

from maskfleet.batch import Batch
from maskfleet.model.mask_rcnn import MaskRCNN
from maskfleet.model.regions import sample_regions
from maskfleet.model.rpn import Proposals, Rpn, rpn_targets

SIZES = [(97, 130), (64, 96)]


def total(losses: dict[str, Tensor]) -> Tensor:
    return torch.stack(list(losses.values())).sum()


def without_truth(batch: Batch, *, num_slots: int) -> Batch:
    targets = batch.targets
    outlines = dataclasses.replace(
        targets.outlines,
        start=torch.zeros_like(targets.outlines.start[:, :num_slots]),
        count=torch.zeros_like(targets.outlines.count[:, :num_slots]),
    )
    targets = dataclasses.replace(
        targets,
        boxes=torch.zeros_like(targets.boxes[:, :num_slots]),
        labels=torch.zeros_like(targets.labels[:, :num_slots]),
        valid=torch.zeros_like(targets.valid[:, :num_slots]),
        outlines=outlines,
    )
    return dataclasses.replace(batch, targets=targets)


@pytest.mark.parametrize("num_slots", [6, 0])
@pytest.mark.parametrize("variant", sorted(VARIANTS))
def test_images_without_objects_give_finite_losses_and_gradients(variant, num_slots):
    model = small_model(variant)
    losses, metrics = model.losses_and_metrics(without_truth(small_batch(SIZES), num_slots=num_slots))
    total(losses).backward()
    for name, value in (losses | metrics).items():
        assert value.isfinite(), name
        if name.endswith("box_loss") or name == "maskrcnn_loss/maskrcnn_loss":
            assert value.item() == 0, name
    assert losses["rpn_losses/label_loss"].item() > 0
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None, name
            assert bool(parameter.grad.isfinite().all()), name


@pytest.mark.parametrize("variant", ["fpn", "c4"])
def test_gradients_through_the_rpn_are_those_of_its_dense_layers(variant, monkeypatch):
    def dense(rpn, features):
        raw = [rpn.raw_outputs(feature) for feature in features.maps]
        logits = [scores.permute(0, 2, 3, 1).flatten(1) for scores, _ in raw]
        deltas = [shifts.permute(0, 2, 3, 1).flatten(1).unflatten(1, (-1, 4)) for _, shifts in raw]
        return torch.cat(logits, dim=1), torch.cat(deltas, dim=1)

    def step():
        model = small_model(variant)
        losses = model.losses(small_batch(SIZES, canvas=(160, 192)))
        total(losses).backward()
        return losses, {name: one.grad for name, one in model.named_parameters() if one.grad is not None}

    sparse_losses, sparse = step()
    monkeypatch.setattr(Rpn, "scores_and_deltas", dense)
    losses, gradients = step()
    assert all(torch.equal(loss, sparse_losses[name]) for name, loss in losses.items())
    assert sparse.keys() == gradients.keys()
    for name, gradient in gradients.items():
        assert (sparse[name] - gradient).norm() <= 2e-6 * gradient.norm(), name


@pytest.mark.parametrize("variant", sorted(VARIANTS))
def test_every_trainable_parameter_gets_a_gradient(variant):
    # Anchors small enough that every level has some inside these images, and all of them asked.
    model = small_model(variant, rpn={"anchor_sizes": (8.0, 16.0, 24.0, 32.0, 48.0), "samples_per_image": 1 << 14})
    total(model(small_batch(SIZES))).backward()
    for name, parameter in model.named_parameters():
        assert (parameter.grad is not None) == parameter.requires_grad, name
        if parameter.requires_grad and not name.startswith("mask_head.logits"):
            assert bool(parameter.grad.any()), name


def test_the_seed_of_an_image_decides_its_samples():
    model = small_model()
    batch = small_batch(SIZES)
    first, again = model.losses(batch), model.losses(batch)
    other = model.losses(dataclasses.replace(batch, seed=batch.seed + 1))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["rpn_losses/label_loss"], other["rpn_losses/label_loss"])
    assert not torch.equal(first["fastrcnn_losses/label_loss"], other["fastrcnn_losses/label_loss"])


def test_samples_keep_to_their_numbers():
    model = small_model(box_head={"samples_per_image": 24, "positive_fraction": 0.25})
    _, metrics = model.losses_and_metrics(small_batch(SIZES[:1]))
    counts = [metrics[f"rpn_losses/level{level}/num_valid_anchor"].item() for level in range(2, 7)]
    assert sum(counts) == 64
    assert metrics["sample_fast_rcnn_targets/num_fg"].item() <= 6
    total_regions = metrics["sample_fast_rcnn_targets/num_fg"] + metrics["sample_fast_rcnn_targets/num_bg"]
    assert total_regions.item() == 24


def many_foreground(model: MaskRCNN, batch: Batch) -> int:
    """How many of 40 copies of the first ground truth, which leave no background, are sampled as foreground."""
    boxes = batch.targets.boxes[:, :1].repeat(1, 40, 1)
    proposals = Proposals(boxes, torch.zeros(1, 40), torch.ones(1, 40, dtype=torch.bool))
    regions = sample_regions(proposals, batch.targets, batch.seed, model.config.box_head)
    return int(regions.foreground.sum())


def test_foreground_fills_what_background_leaves_free_only_in_the_aws_variant():
    batch = small_batch(SIZES[:1])
    assert many_foreground(small_model("fpn"), batch) == 12
    assert many_foreground(small_model("aws"), batch) == 40 + int(batch.targets.valid.sum())


def test_the_box_loss_is_l1_or_huber():
    batch = small_batch(SIZES)
    losses = {kind: small_model(box_head={"box_loss": kind}).losses(batch) for kind in ("l1", "huber")}
    name = "fastrcnn_losses/box_loss"
    assert 0 < losses["huber"][name].item() < losses["l1"][name].item()
    assert torch.equal(losses["huber"]["fastrcnn_losses/label_loss"], losses["l1"]["fastrcnn_losses/label_loss"])


def test_proposals_not_larger_than_the_smallest_size_are_dropped():
    images = small_batch(SIZES).images
    for least in (0.0, 20.0):
        model = small_model(rpn={"min_size": least})
        with torch.no_grad():
            features = model.features(images)
            proposals = model.proposals(model.rpn(features), features.sizes, training=False)
        sides = (proposals.boxes[..., 2:] - proposals.boxes[..., :2])[proposals.valid]
        assert bool((sides > 20).all()) == (least == 20)
        assert len(sides) > 10


def test_anchors_in_a_crowd_are_not_asked():
    model = small_model(rpn={"crowd_overlap": 0.7})
    batch = small_batch([(128, 128)])
    crowd = dataclasses.replace(
        batch.targets, crowd_boxes=torch.tensor([[[0.0, 0.0, 128.0, 64.0]]]), crowd_valid=torch.tensor([[True]])
    )
    with torch.no_grad():
        outputs = model.rpn(model.features(batch.images))
    plain = rpn_targets(outputs, batch.targets, batch.images.sizes, seed=None, config=model.config.rpn).labels
    spared = rpn_targets(outputs, crowd, batch.images.sizes, seed=None, config=model.config.rpn).labels
    in_crowd = (outputs.anchors[:, 3] <= 64)[None] & (plain >= 0)
    assert bool(in_crowd.any())
    assert bool((spared[in_crowd] == -1).all())
    below = (outputs.anchors[:, 1] >= 64)[None]
    assert torch.equal(spared[below], plain[below])


def test_legacy_anchors_are_centred_half_a_stride_further():
    images = small_batch([(64, 64)]).images
    with torch.no_grad():
        anchors = {
            variant: (model := small_model(variant)).rpn(model.features(images)).anchors
            for variant in ("fpn", "legacy_anchors")
        }
    centre = {name: (boxes[0, :2] + boxes[0, 2:]) / 2 for name, boxes in anchors.items()}
    assert centre["fpn"].tolist() == [0, 0]
    assert centre["legacy_anchors"].tolist() == [2, 2]


def test_the_anchors_of_c4_are_all_sizes_in_one_cell():
    model = small_model("c4")
    with torch.no_grad():
        outputs = model.rpn(model.features(small_batch([(64, 64)]).images))
    assert outputs.counts == (4 * 4 * 15,)
    widths = outputs.anchors[:15, 2] - outputs.anchors[:15, 0]
    assert widths[1::3].tolist() == [32, 64, 128, 256, 512], "size by size, the square in the middle"


def test_metrics_have_their_names_without_a_pyramid():
    losses, metrics = small_model("c4").losses_and_metrics(small_batch(SIZES))
    assert set(losses) | set(metrics) == set(golden.golden_json("summaries_c4_mask")) - {"total_cost", "wd_cost"}


def test_detections_are_sorted_clipped_and_above_the_threshold():
    model = small_model(inference={"score_threshold": 0.2, "max_detections": 7})
    batch = small_batch(SIZES)
    found = model.detect(batch.images)
    assert found.boxes.shape == (2, 7, 4)
    assert found.masks.shape == (2, 7, 28, 28)
    assert bool((found.scores[:, 1:] <= found.scores[:, :-1]).all())
    assert bool((found.scores[found.valid] > 0.2).all())
    assert bool((found.labels[found.valid] >= 1).all())
    assert bool((found.labels[found.valid] <= 5).all())
    assert not found.labels[~found.valid].any()
    limits = batch.images.sizes.flip(1).repeat(1, 2)[:, None]
    assert bool(((found.boxes >= 0) & (found.boxes <= limits)).all())


def test_detections_have_the_same_shape_however_few_there_are():
    found = small_model(inference={"score_threshold": 1.0}).detect(small_batch(SIZES).images)
    assert not found.valid.any()
    assert found.boxes.shape == (2, 30, 4)
    assert found.masks.shape == (2, 30, 28, 28)
    assert not found.masks.any()


def test_half_precision_stays_close():
    model = small_model("cascade")
    batch = small_batch(SIZES)
    exact = model.losses(batch)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rough = model.losses(batch)
    total(rough).backward()
    for name, loss in exact.items():
        assert rough[name].dtype == torch.float32, name
        assert rough[name].item() == pytest.approx(loss.item(), rel=0.2, abs=0.05), name
