"""Convolutions whose bias, sum and zeros outside come in one pass, against torch's separate operators."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from maskfleet.ops.layers import conv_sum as module
from maskfleet.ops.layers.conv_sum import adds_in_place, conv_sum, sum_of
from maskfleet.ops.layers.exporting import exporting


@pytest.fixture
def on_gpu(kernel_device: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Use the kernel also where Triton's interpreter runs it."""
    monkeypatch.setattr(module, "kernels_for", lambda tensor: True)
    return kernel_device


def inputs(device: str) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    features, coarser = torch.randn(2, 5, 8, 6, generator=generator), torch.randn(2, 7, 4, 3, generator=generator)
    kernel, bias = torch.randn(7, 5, 3, 3, generator=generator), torch.randn(7, generator=generator)
    mask = (torch.rand(2, 1, 8, 6, generator=generator) < 0.7).float()
    features, coarser = (one.contiguous(memory_format=torch.channels_last) for one in (features, coarser))
    return tuple(value.to(device) for value in (features, kernel, bias, coarser, mask))


def expected(features: torch.Tensor, kernel: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
    bias, coarser, mask = rest
    return (F.conv2d(features, kernel, bias, padding=1) + F.interpolate(coarser, scale_factor=2.0)) * mask


@pytest.mark.parametrize("layout", [torch.channels_last, torch.contiguous_format])
def test_without_gradients_the_sum_is_that_of_the_operators(on_gpu: str, layout: torch.memory_format) -> None:
    features, kernel, bias, coarser, mask = inputs(on_gpu)
    features, coarser = features.contiguous(memory_format=layout), coarser.contiguous(memory_format=layout)
    with torch.no_grad():
        assert adds_in_place(features)
        found = conv_sum(features, kernel, bias, padding=1, coarser=coarser, mask=mask)
    torch.testing.assert_close(found, expected(features, kernel, bias, coarser, mask))


def test_with_gradients_the_operators_are_used(on_gpu: str) -> None:
    features, kernel, bias, coarser, mask = inputs(on_gpu)
    kernel.requires_grad_()
    assert not adds_in_place(features)
    found = conv_sum(features, kernel, bias, padding=1, coarser=coarser, mask=mask)
    assert torch.equal(found, expected(features, kernel, bias, coarser, mask))
    found.sum().backward()
    assert kernel.grad is not None


@pytest.mark.slow
def test_programs_for_others_and_compilers_get_the_operators(on_gpu: str) -> None:
    features = torch.zeros(1, device=on_gpu)
    with torch.no_grad(), exporting():
        assert not adds_in_place(features)
    with torch.no_grad():
        compiled = torch.compile(lambda tensor: tensor + adds_in_place(tensor), backend="eager")
        assert compiled(features).item() == 0


def test_relu_comes_after_the_bias_in_half_precision(on_gpu: str) -> None:
    outputs = torch.tensor([-1.0, 0.5, 3.0], dtype=torch.bfloat16, device=on_gpu).view(1, 3, 1, 1)
    bias = torch.tensor([2.0, -1.0, 0.25], device=on_gpu)
    for layout in (torch.channels_last, torch.contiguous_format):
        with torch.no_grad():
            found = sum_of(outputs.clone(memory_format=layout), bias, relu=True)
        assert found.dtype == torch.bfloat16
        assert found.flatten().tolist() == [1.0, 0.0, 3.25]
