"""Layers of the heads that a GPU computes in another way: the results are the same."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from maskfleet.config.model import ModelConfig
from maskfleet.model.heads.layers import flat_linear, mask_output_layers, mask_outputs, pixel_scores


def scores_and_gradients(dtype: torch.dtype, *, as_sum: bool) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    pixels = torch.randn(3, 25, 64, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    kernels = torch.randn(3, 64, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    scores = pixel_scores(pixels, kernels, as_sum=as_sum)
    gradient = torch.randn(3, 25, generator=generator, dtype=torch.float64).to(dtype)
    return (scores.detach(), *torch.autograd.grad(scores, (pixels, kernels), gradient.to(scores.dtype)))


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 1e-2)]
)
def test_products_of_pixels_are_the_same_as_a_matrix_product_and_as_a_sum(dtype, tolerance):
    products, sums = (scores_and_gradients(dtype, as_sum=as_sum) for as_sum in (False, True))
    for product, total in zip(products, sums, strict=True):
        scale = product.abs().max().item()
        torch.testing.assert_close(total.to(product.dtype), product, rtol=tolerance, atol=tolerance * scale)
    assert sums[0].dtype == torch.promote_types(dtype, torch.float32)
    assert [one.dtype for one in sums[1:]] == [dtype, dtype]


def test_half_precision_is_summed_in_float32():
    sums, _, _ = scores_and_gradients(torch.bfloat16, as_sum=True)
    generator = torch.Generator().manual_seed(1)
    pixels = torch.randn(3, 25, 64, generator=generator, dtype=torch.float64).bfloat16().double()
    kernels = torch.randn(3, 64, generator=generator, dtype=torch.float64).bfloat16().double()
    exact = (pixels @ kernels[:, :, None]).squeeze(2)
    torch.testing.assert_close(sums.double(), exact, rtol=0, atol=1e-5)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_a_fully_connected_layer_reads_maps_in_either_order(memory_format):
    torch.manual_seed(0)
    layer = nn.Linear(6 * 3 * 3, 4, dtype=torch.float64)
    maps = torch.randn(5, 6, 3, 3, dtype=torch.float64).to(memory_format=memory_format).requires_grad_()
    wanted, found = (flat_linear(maps, layer, channels_last=channels_last) for channels_last in (False, True))
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    leaves = (maps, layer.weight, layer.bias)
    gradients = [torch.autograd.grad(outputs.square().sum(), leaves) for outputs in (wanted, found)]
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-12, atol=1e-12)


def test_the_gradient_of_channels_last_maps_is_channels_last():
    layer = nn.Linear(6 * 3 * 3, 4)
    maps = torch.randn(5, 6, 3, 3).to(memory_format=torch.channels_last).requires_grad_()
    (gradient,) = torch.autograd.grad(flat_linear(maps, layer, channels_last=True).sum(), maps)
    assert gradient.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_compiled_mask_logits_on_the_gpu_are_those_of_the_cpu():
    torch.manual_seed(0)
    deconv, logits = mask_output_layers(ModelConfig(num_categories=5, mask_head={"channels": 64}), 64)
    features, labels = torch.randn(6, 64, 14, 14), torch.arange(6)
    expected = mask_outputs(features, labels, deconv, logits)
    wanted = torch.autograd.grad(expected.square().sum(), (deconv.weight, logits.weight))
    deconv, logits = deconv.cuda(), logits.cuda()
    found = torch.compile(mask_outputs, fullgraph=True)(features.cuda(), labels.cuda(), deconv, logits)
    gradients = torch.autograd.grad(found.square().sum(), (deconv.weight, logits.weight))
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-3, atol=1e-5)
    for gradient, other in zip(gradients, wanted, strict=True):
        assert (gradient.cpu() - other).norm() <= 5e-3 * other.norm()
