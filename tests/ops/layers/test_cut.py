"""Zeros outside of an image by the kernel, against a product with the mask."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from maskfleet.ops.layers import cut

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture
def some_map(operators_on_cpu: None, monkeypatch: pytest.MonkeyPatch) -> tuple[Tensor, Tensor]:
    """Features and mask, which the kernels can read even without a GPU."""
    monkeypatch.setattr(cut, "kernels_for", lambda _: True)
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(2, 5, 4, 7, generator=generator).to(DEVICE, memory_format=torch.channels_last)
    return features.requires_grad_(), (torch.rand(2, 1, 4, 7, generator=generator) < 0.6).float().to(DEVICE)


def squares(features: Tensor, mask: Tensor) -> Tensor:
    return cut.cut_outside(features, mask).square().sum()


def test_features_and_gradient_are_zero_outside(some_map: tuple[Tensor, Tensor]) -> None:
    features, mask = some_map
    outputs = cut.cut_outside(features, mask)
    gradient = torch.arange(outputs.numel(), device=DEVICE).view_as(outputs) + 1.0
    (actual,) = torch.autograd.grad(outputs, features, gradient)
    assert torch.equal(outputs, features * mask)
    assert torch.equal(actual, gradient * mask)
    assert gradient.all(), "the gradient of the outputs belongs to autograd"


def test_without_a_backward_pass_it_is_a_product(some_map: tuple[Tensor, Tensor]) -> None:
    features, mask = some_map
    outputs = cut.cut_outside(features.detach(), mask)
    assert outputs.grad_fn is None
    assert torch.equal(outputs, features * mask)


@pytest.mark.slow
def test_it_compiles_into_one_graph_with_the_same_gradient(some_map: tuple[Tensor, Tensor]) -> None:
    compiled = torch.compile(squares, fullgraph=True, backend="aot_eager")
    features = some_map[0]
    (expected,) = torch.autograd.grad(squares(*some_map), features)
    (actual,) = torch.autograd.grad(compiled(*some_map), features)
    assert torch.equal(actual, expected)
