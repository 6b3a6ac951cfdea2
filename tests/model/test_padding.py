"""An image gives the same numbers alone, on a larger canvas, and beside other images."""

from __future__ import annotations

import pytest
import torch
from small import VARIANTS, small_batch, small_model
from torch import Tensor

from maskfleet.batch import Batch
from maskfleet.model.mask_rcnn import MaskRCNN

SIZES = [(97, 130), (64, 96), (121, 75), (160, 128)]
CANVAS = (192, 224)
# Their statistics mix the images of a batch by design.
MIXING = {"sync", "c4_sync"}
# Small groups magnify the roundings of float32, and without norms a rounding may flip a ReLU; in float64, where
# convolutions are slow, both are held to the figures of the rest.
MASK_TOLERANCE = {"gn": 3e-5}
GRADIENT_TOLERANCE = {"no_norm": 5e-3}


def step(model: MaskRCNN, batch: Batch) -> tuple[dict[str, Tensor], Tensor]:
    """Losses, and all gradients in one row."""
    model.zero_grad(set_to_none=True)
    losses = model.losses(batch)
    torch.stack(list(losses.values())).sum().backward()
    gradients = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    return {name: loss.detach() for name, loss in losses.items()}, torch.cat(gradients)


@pytest.mark.parametrize("variant", sorted(set(VARIANTS) - MIXING - {"aws"}))
def test_losses_and_gradients_of_a_batch_are_the_mean_of_its_images_alone(variant):
    model = small_model(variant)
    together, gradients = step(model, small_batch(SIZES, canvas=CANVAS))
    alone = [step(model, small_batch([size], numbers=[number])) for number, size in enumerate(SIZES)]
    for name, loss in together.items():
        expected = torch.stack([losses[name] for losses, _ in alone]).mean()
        torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-7, msg=lambda m, name=name: f"{name}: {m}")
    expected = torch.stack([gradient for _, gradient in alone]).mean(dim=0)
    assert (gradients - expected).norm() < GRADIENT_TOLERANCE.get(variant, 1e-4) * expected.norm()


@pytest.mark.parametrize("variant", sorted(VARIANTS))
def test_a_larger_canvas_changes_nothing(variant):
    model = small_model(variant)
    for number, size in enumerate(SIZES):
        small, small_gradients = step(model, small_batch([size], numbers=[number]))
        large, large_gradients = step(model, small_batch([size], numbers=[number], canvas=CANVAS, num_slots=9))
        for name, loss in small.items():
            torch.testing.assert_close(large[name], loss, rtol=1e-5, atol=1e-7)
        assert (large_gradients - small_gradients).norm() < GRADIENT_TOLERANCE.get(
            variant, 1e-4
        ) * small_gradients.norm()


@pytest.mark.parametrize("variant", sorted(VARIANTS))
def test_detections_do_not_depend_on_the_neighbours(variant):
    model = small_model(variant, inference={"score_threshold": 0.1})
    together = model.detect(small_batch(SIZES, canvas=CANVAS).images)
    for number, size in enumerate(SIZES):
        alone = model.detect(small_batch([size], numbers=[number]).images)
        assert int(alone.valid.sum()) >= 5, "nothing is compared"
        assert torch.equal(together.valid[number], alone.valid[0])
        assert torch.equal(together.labels[number], alone.labels[0])
        torch.testing.assert_close(together.scores[number], alone.scores[0], rtol=0, atol=1e-5)
        torch.testing.assert_close(together.boxes[number], alone.boxes[0], rtol=0, atol=1e-3)
        if alone.masks is not None:
            tolerance = MASK_TOLERANCE.get(variant, 1e-5)
            torch.testing.assert_close(together.masks[number], alone.masks[0], rtol=0, atol=tolerance)


def test_in_float64_small_groups_keep_to_the_figure_too():
    model = small_model("gn", inference={"score_threshold": 0.1}).double()
    together = model.detect(small_batch(SIZES[:2], canvas=CANVAS).images)
    alone = model.detect(small_batch(SIZES[:1]).images)
    torch.testing.assert_close(together.boxes[0], alone.boxes[0], rtol=0, atol=1e-3)
    torch.testing.assert_close(together.masks[0], alone.masks[0], rtol=0, atol=1e-5)


def test_in_float64_gradients_without_norms_keep_to_the_figure_too():
    model = small_model("no_norm").double()
    _, small = step(model, small_batch(SIZES[:1]))
    _, large = step(model, small_batch(SIZES[:1], canvas=(128, 160)))
    assert (large - small).norm() < 1e-5 * small.norm()


def test_aws_losses_of_a_batch_are_the_mean_over_all_its_regions():
    model = small_model("aws")
    batch = small_batch(SIZES, canvas=CANVAS)
    together = model.losses(batch)
    sums = dict.fromkeys(together, 0.0)
    counts = dict.fromkeys(together, 0.0)
    for number, size in enumerate(SIZES):
        losses, alone = model.losses_and_metrics(small_batch([size], numbers=[number]))
        num_foreground = alone["sample_fast_rcnn_targets/num_fg"].item()
        num_regions = num_foreground + alone["sample_fast_rcnn_targets/num_bg"].item()
        for name, loss in losses.items():
            share = {"rpn_losses": 1.0, "fastrcnn_losses": num_regions, "maskrcnn_loss": num_foreground}
            sums[name] += loss.item() * share[name.partition("/")[0]]
            counts[name] += share[name.partition("/")[0]]
    for name, loss in together.items():
        assert loss.item() == pytest.approx(sums[name] / counts[name], rel=1e-5), name


def test_uint8_images_give_the_same_detections_as_floats():
    model = small_model()
    images = small_batch(SIZES[:1]).images
    whole = type(images)(images.pixels.round(), images.sizes)
    bytes_ = type(images)(images.pixels.round().to(torch.uint8), images.sizes)
    for ours, expected in zip(
        (model.detect(bytes_).boxes, model.detect(bytes_).scores),
        (model.detect(whole).boxes, model.detect(whole).scores),
        strict=True,
    ):
        assert torch.equal(ours, expected)


@pytest.mark.parametrize("variant", ["c4", "gn"])
def test_images_smaller_than_a_cell_of_the_coarsest_map_are_learned_from(variant):
    sizes = [(8, 130), (97, 5), (1, 1)]
    model = small_model(variant)
    for batch in (small_batch(sizes[:1]), small_batch(sizes)):
        losses, gradients = step(model, batch)
        assert all(loss.isfinite() for loss in losses.values())
        assert gradients.isfinite().all()
        assert model.detect(batch.images).scores.isfinite().all()


def test_small_images_give_the_same_losses_on_a_larger_canvas():
    model = small_model("c4")
    small, _ = step(model, small_batch([(8, 130)]))
    large, _ = step(model, small_batch([(8, 130)], canvas=CANVAS))
    for name, loss in small.items():
        torch.testing.assert_close(large[name], loss, rtol=1e-5, atol=1e-7)
