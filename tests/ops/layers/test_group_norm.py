"""Group normalisation in plain torch against its definition, one number at a time."""

import math

import pytest
import torch
from torch import Tensor

from maskfleet.ops.layers.group_norm import EPSILON, group_norm


def expected_pixel(features: Tensor, mask: Tensor, weight: Tensor, bias: Tensor, num_groups: int) -> Tensor:
    """The definition: every group of every map over its own pixels; only the pixels of the mask are set."""
    result = torch.zeros_like(features)
    per_group = features.shape[1] // num_groups
    for image in range(features.shape[0]):
        pixels = [(y, x) for y, x in mask[image, 0].nonzero().tolist()]
        for group in range(num_groups):
            channels = range(group * per_group, (group + 1) * per_group)
            values = [features[image, c, y, x].item() for c in channels for y, x in pixels]
            mean = sum(values) / len(values)
            deviation = math.sqrt(sum((value - mean) ** 2 for value in values) / len(values) + EPSILON)
            for c in channels:
                for y, x in pixels:
                    normal = (features[image, c, y, x].item() - mean) / deviation
                    result[image, c, y, x] = normal * weight[c] + bias[c]
    return result


@pytest.mark.parametrize("cuts", [False, True])
def test_each_map_is_normalised_over_its_own_pixels(cuts: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(2, 6, 3, 4, generator=generator, dtype=torch.float64) * 2 + 5
    weight, bias = torch.randn(2, 6, generator=generator, dtype=torch.float64)
    mask = torch.ones(2, 1, 3, 4, dtype=torch.float64)
    if cuts:
        mask[1, :, 2:], mask[1, :, :, 1:] = 0, 0
    expected = expected_pixel(features, mask, weight, bias, num_groups=3)
    actual = group_norm(features, weight, bias, 3, mask=mask if cuts else None)
    torch.testing.assert_close(actual, expected)


def test_the_residual_is_added_before_relu_and_the_mask_cuts_last() -> None:
    features = torch.tensor([[[[1.0, -1.0, 9.0]]]])
    mask = torch.tensor([[[[1.0, 1.0, 0.0]]]])
    residual = torch.tensor([[[[-3.0, 4.0, 7.0]]]])
    outputs = group_norm(features, torch.ones(1), torch.zeros(1), 1, mask=mask, residual=residual, relu=True)
    torch.testing.assert_close(outputs, torch.tensor([[[[0.0, 3.0, 0.0]]]]), rtol=0, atol=1e-5)


def test_a_map_without_pixels_gives_zeros_and_finite_gradients() -> None:
    features = torch.randn(2, 4, 3, 3, generator=torch.Generator().manual_seed(0)).requires_grad_()
    weight, bias = torch.ones(4, requires_grad=True), torch.ones(4, requires_grad=True)
    mask = torch.ones(2, 1, 3, 3)
    mask[1] = 0
    outputs = group_norm(features, weight, bias, 2, mask=mask)
    gradients = torch.autograd.grad(outputs.square().sum(), [features, weight, bias])
    assert outputs[0].all()
    assert not outputs[1].any()
    assert not gradients[0][1].any()
    assert all(gradient.isfinite().all() for gradient in gradients)


@pytest.mark.parametrize("masked", [False, True])
def test_a_group_of_one_value_becomes_the_bias(masked: bool) -> None:
    features = torch.tensor([-3.0, 0.1, 0.7, 2.3]).view(1, 4, 1, 1)
    bias = torch.tensor([1.0, 2.0, 3.0, 4.0])
    mask = torch.ones(1, 1, 1, 1) if masked else None
    actual = group_norm(features, torch.ones(4), bias, 4, mask=mask)
    # torch multiplies value and mean by 1 / sqrt(EPSILON), about 316, before it subtracts them.
    torch.testing.assert_close(actual.flatten(), bias, rtol=0, atol=2e-4)
