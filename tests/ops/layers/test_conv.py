"""Convolutions as a GPU likes them, against the plain ones."""

import pytest
import torch
import torch.nn.functional as F

from maskfleet.ops.layers import conv
from maskfleet.ops.layers.conv import aligned_outputs, conv7_by_blocks, conv_relu, upsampled, upsampled_by_expansion

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize(("channels", "height", "width"), [(3, 8, 12), (1, 2, 2), (4, 32, 6)])
def test_seven_by_seven_by_blocks_is_the_plain_convolution(channels: int, height: int, width: int) -> None:
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(2, channels, height, width, dtype=torch.float64, generator=generator)
    kernel = torch.randn(5, channels, 7, 7, dtype=torch.float64, generator=generator)
    bias = torch.randn(5, dtype=torch.float64, generator=generator)
    expected = F.conv2d(features, kernel, bias, stride=2, padding=3)
    actual = conv7_by_blocks(features, kernel, bias)
    torch.testing.assert_close(actual, expected)
    assert actual.is_contiguous(memory_format=torch.channels_last), "a slice, which others would copy"


def test_upsampling_for_a_gpu_keeps_result_and_gradient_channels_last() -> None:
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(2, 6, 3, 5, generator=generator).to(memory_format=torch.channels_last).requires_grad_()
    gradient = torch.randn(2, 6, 6, 10, generator=generator).to(memory_format=torch.channels_last)
    wide, plain = upsampled_by_expansion(features), F.interpolate(features, scale_factor=2.0)
    assert torch.equal(wide, plain)
    (actual,), (expected,) = (torch.autograd.grad(one, [features], gradient) for one in (wide, plain))
    torch.testing.assert_close(actual, expected)
    for one in (wide, actual):
        assert one.is_contiguous(memory_format=torch.channels_last)


def test_layers_put_together_give_the_outputs_of_each() -> None:
    generator = torch.Generator().manual_seed(0)
    first, second = (torch.randn(rows, 6, dtype=torch.float64, generator=generator) for rows in (3, 8))
    biases = [torch.randn(rows, dtype=torch.float64, generator=generator) for rows in (3, 8)]
    kernel, bias = aligned_outputs((first, second), biases)
    assert kernel.shape == (16, 6)
    inputs = torch.randn(4, 6, dtype=torch.float64, generator=generator)
    outputs = F.linear(inputs, kernel, bias)
    torch.testing.assert_close(outputs[:, :3], F.linear(inputs, first, biases[0]))
    torch.testing.assert_close(outputs[:, 3:11], F.linear(inputs, second, biases[1]))
    assert not outputs[:, 11:].any()


def test_plain_conv_relu_adds_the_residual_before_and_cuts_after() -> None:
    features = torch.tensor([[[[1.0, -2.0], [3.0, 4.0]]]])
    outputs = conv_relu(
        features,
        torch.tensor([[[[2.0]]]]),
        torch.tensor([1.0]),
        residual=torch.tensor([[[[0.0, 5.0], [-9.0, 0.0]]]]),
        mask=torch.tensor([[[[1.0, 1.0], [1.0, 0.0]]]]),
    )
    assert outputs.tolist() == [[[[3.0, 2.0], [0.0, 0.0]]]]


@pytest.mark.parametrize("channels", [1, 70])
def test_kernel_clears_what_the_mask_leaves_out(channels: int, kernel_device: str) -> None:
    from maskfleet.ops.triton import cut as kernels

    generator = torch.Generator().manual_seed(0)
    features = torch.randn(2, channels, 9, 11, generator=generator).to(memory_format=torch.channels_last)
    mask = (torch.rand(2, 1, 9, 11, generator=generator) < 0.7).float()
    expected = features * mask
    actual = features.to(kernel_device, copy=True)
    kernels.clear_outside(actual, mask.to(kernel_device))
    torch.testing.assert_close(actual.cpu(), expected, rtol=0, atol=0)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize(("kernel_side", "stride"), [(1, 1), (3, 1), (1, 2), (3, 2)])
@pytest.mark.parametrize("has_residual", [False, True])
@pytest.mark.parametrize("has_mask", [False, True])
def test_fused_conv_relu_agrees_with_double_precision_forward_and_back(
    kernel_side: int, stride: int, has_residual: bool, has_mask: bool
) -> None:
    generator = torch.Generator().manual_seed(0)

    def half(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(torch.bfloat16)

    features, kernel, bias = half(2, 16, 12, 20), half(24, 16, kernel_side, kernel_side) / 8, half(24)
    side = (12 // stride, 20 // stride)
    residual = half(2, 24, *side) if has_residual else None
    mask = (torch.rand(2, 1, *side, generator=generator) < 0.8).float() if has_mask else None
    inputs = [value for value in (features, kernel, bias, residual) if value is not None]

    def run(values: list[torch.Tensor], cut: torch.Tensor | None) -> tuple[torch.Tensor, list[torch.Tensor]]:
        values = [value.detach().requires_grad_() for value in values]
        outputs = conv_relu(*values[:3], stride=stride, residual=values[3] if has_residual else None, mask=cut)
        outputs.backward(torch.cos(torch.arange(outputs.numel()).reshape(outputs.shape)).to(outputs))
        return outputs.detach().double().cpu(), [value.grad.double().cpu() for value in values]

    expected, expected_gradients = run([value.double() for value in inputs], mask)
    actual, gradients = run([value.cuda() for value in inputs], None if mask is None else mask.cuda())
    torch.testing.assert_close(actual, expected, rtol=1e-2, atol=1e-2 * expected.abs().max().item())
    for gradient, wanted in zip(gradients, expected_gradients, strict=True):
        error = (gradient - wanted).norm() / wanted.norm()
        assert error < 3e-2, error  # a rounded output may fall on the other side of 0


READERS = [(False, False, 1), (True, False, 2), (True, True, 3)]


@pytest.fixture
def fused(operators_on_cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The operators of a GPU, also without one and in float32."""
    monkeypatch.setattr(conv, "fuses", lambda _: True)


def some_layer(has_residual: bool, has_mask: bool) -> tuple[list[torch.Tensor], torch.Tensor | None]:
    """Features, kernel, bias and perhaps a residual; and perhaps a mask."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, 6, 5, 7), (9, 6, 3, 3), (9,)] + [(2, 9, 5, 7)] * has_residual
    values = [torch.randn(shape, generator=generator).to(DEVICE).requires_grad_() for shape in shapes]
    return values, (torch.rand(2, 1, 5, 7, generator=generator) < 0.7).float().to(DEVICE) if has_mask else None


def weighted(shared: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """A number with another gradient for each of `shared`."""
    weights = [torch.cos(torch.arange(one.numel()) * (number + 1.0)) for number, one in enumerate(shared)]
    return torch.stack([(one * by.to(one).view_as(one)).sum() for one, by in zip(shared, weights, strict=True)]).sum()


@pytest.mark.parametrize(("has_residual", "has_mask", "readers"), READERS)
def test_each_reader_of_a_fused_layer_contributes_its_gradient(
    has_residual: bool, has_mask: bool, readers: int, fused: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    values, mask = some_layer(has_residual, has_mask)
    residual = values[3] if has_residual else None
    shared = conv.shared_conv_relu(*values[:3], residual=residual, mask=mask, readers=readers)
    assert len({one.data_ptr() for one in shared}) == 1
    gradients = torch.autograd.grad(weighted(shared), values)
    monkeypatch.setattr(conv, "fuses", lambda _: False)
    plain = conv.shared_conv_relu(*values[:3], residual=residual, mask=mask, readers=readers)
    assert all(one is plain[0] for one in plain)
    torch.testing.assert_close(shared[-1], plain[0])
    for gradient, expected in zip(gradients, torch.autograd.grad(weighted(plain), values), strict=True):
        torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=1e-4)


def test_a_reader_may_be_missing_and_inputs_may_be_frozen(fused: None) -> None:
    (features, kernel, bias), _ = some_layer(False, False)
    inputs = (features.detach(), kernel, bias.detach())
    _, second, _ = conv.shared_conv_relu(*inputs, readers=3)
    (alone,) = torch.autograd.grad(second.sum(), kernel)
    (expected,) = torch.autograd.grad(conv.conv_relu(*inputs).sum(), kernel)
    assert torch.equal(alone, expected)


def test_without_a_backward_pass_all_readers_get_one_tensor(fused: None) -> None:
    values, _ = some_layer(False, False)
    with torch.no_grad():
        first, second = conv.shared_conv_relu(*values, readers=2)
    assert first is second
    first, second = conv.shared_conv_relu(*(value.detach() for value in values), readers=2)
    assert first is second


@pytest.mark.slow
def test_readers_compile_into_one_graph_with_the_same_gradients(fused: None) -> None:
    values, mask = some_layer(True, True)

    def step(features, kernel, bias, residual):
        return weighted(conv.shared_conv_relu(features, kernel, bias, residual=residual, mask=mask, readers=3))

    expected = torch.autograd.grad(step(*values), values)
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for gradient, other in zip(torch.autograd.grad(compiled(*values), values), expected, strict=True):
        assert torch.equal(gradient, other)


def test_upsampling_doubles_pixels_and_sums_gradients() -> None:
    for device in ["cpu"] + (["cuda"] if torch.cuda.is_available() else []):
        features = torch.tensor([[[[1.0, 2.0]]]], device=device, requires_grad=True)
        doubled = upsampled(features)
        assert doubled.tolist() == [[[[1.0, 1.0, 2.0, 2.0], [1.0, 1.0, 2.0, 2.0]]]]
        doubled.backward(torch.tensor([[[[1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0]]]], device=device))
        assert features.grad is not None
        assert features.grad.tolist() == [[[[14.0, 22.0]]]]
