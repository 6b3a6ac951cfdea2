"""Convolution, bias, sum and ReLU in one pass over memory where cuDNN can, and other layouts that suit a GPU.

Shapes: n maps, C input and O output channels, h x w pixels, k x k kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from maskfleet.ops.layers.relu import needs_gradient, relu_backward
from maskfleet.ops.triton import kernels_for

ALIGNED_CHANNELS = 8  # tensor cores read half precision in vectors of this many


def fuses(features: Tensor) -> bool:
    """Whether `conv_relu` runs in one pass: half precision on a GPU."""
    return kernels_for(features) and features.dtype in (torch.bfloat16, torch.float16)


def conv_relu(
    features: Tensor,
    kernel: Tensor,
    bias: Tensor,
    *,
    stride: int = 1,
    residual: Tensor | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """relu(features * kernel + bias + residual), 0 where `mask` is 0 -> [n, O, h', w'] in the type of `features`.

    `features` [n, C, h, w], `kernel` [O, C, k, k], `bias` [O], `residual` [n, O, h', w'], `mask` [n, 1, h', w']. Padded
    by k // 2 pixels on all sides.
    """
    return shared_conv_relu(features, kernel, bias, stride=stride, residual=residual, mask=mask, readers=1)[0]


def shared_conv_relu(
    features: Tensor,
    kernel: Tensor,
    bias: Tensor,
    *,
    stride: int = 1,
    residual: Tensor | None = None,
    mask: Tensor | None = None,
    readers: int,
) -> tuple[Tensor, ...]:
    """The result of `conv_relu` once for each of its 1 to 3 `readers`: tensors that share memory.

    If each reader takes its own one, the pass over memory that computes the gradient before ReLU also adds up theirs.
    """
    padding = kernel.shape[2] // 2
    if fuses(features):
        kernel, bias = kernel.to(features.dtype), bias.to(features.dtype)
        inputs = (features, kernel, bias, residual, mask, stride, padding)
        if readers > 1 and needs_gradient(features, kernel, bias, residual):
            shared: tuple[Tensor, ...] = _SharedConvRelu.apply(*inputs, readers)  # type: ignore[no-untyped-call]
            return shared
        return (_conv_relu(*inputs),) * readers
    outputs = F.conv2d(features, kernel, bias, stride=stride, padding=padding)
    outputs = F.relu_(outputs if residual is None else outputs + residual)
    return (outputs if mask is None else outputs * mask.to(outputs.dtype),) * readers


def aligned_outputs(kernels: Sequence[Tensor], biases: Sequence[Tensor | None]) -> tuple[Tensor, Tensor]:
    """Kernels [O, C, ...] and biases [O] of layers that read the same input, joined and padded to whole vectors."""
    together, bias = torch.cat(list(kernels)), torch.cat([bias for bias in biases if bias is not None])
    assert len(together) == len(bias)
    missing = -len(bias) % ALIGNED_CHANNELS
    return F.pad(together, (0, 0) * (together.dim() - 1) + (0, missing)), F.pad(bias, (0, missing))


def upsampled(features: Tensor) -> Tensor:
    """Every pixel of `features` [n, C, h, w] doubled both ways -> [n, C, 2 h, 2 w]."""
    if not features.is_cuda:
        return F.interpolate(features, scale_factor=2.0)
    return upsampled_by_expansion(features)


def upsampled_by_expansion(features: Tensor) -> Tensor:
    """As `upsampled`, for a GPU: the gradient of `interpolate` compiles to atomic additions, this one to sums of four.

    With channels as the last axis, result and gradient are channels last; a sum over inner axes would not be.
    """
    maps, channels, height, width = features.shape
    wide = features.permute(0, 2, 3, 1)[:, :, None, :, None].expand(-1, -1, 2, -1, 2, -1)
    return wide.reshape(maps, 2 * height, 2 * width, channels).permute(0, 3, 1, 2)


def conv7_by_blocks(features: Tensor, kernel: Tensor, bias: Tensor | None) -> Tensor:
    """The 7 x 7 convolution of stride 2 and padding 3 of a few channels, h and w even -> [n, O, h / 2, w / 2].

    Blocks of 2 x 2 pixels become channels, so that four times as many of them fill the tensor cores: a 4 x 4
    convolution of stride 1 whose kernel is the old one with a row and a column of zeros in front.
    """
    outputs, inputs = kernel.shape[:2]
    missing = -4 * inputs % ALIGNED_CHANNELS
    # Padded here by one row and column less at the end, not by the convolution: a slice of its result would be copied,
    # and so would its gradient.
    blocks = F.pad(F.pixel_unshuffle(features, 2), (2, 1, 2, 1, 0, missing))  # [n, 4 C + missing, h / 2 + 3, w / 2 + 3]
    taps = F.pad(kernel, (1, 0, 1, 0)).reshape(outputs, inputs, 4, 2, 4, 2).permute(0, 1, 3, 5, 2, 4)
    taps = F.pad(taps.reshape(outputs, 4 * inputs, 4, 4), (0, 0, 0, 0, 0, missing))
    # The result takes the kernel's layout; operators after it would copy another one.
    taps = taps.contiguous(memory_format=torch.channels_last)
    return F.conv2d(blocks, taps, bias)


_SCHEMA = "(Tensor features, Tensor kernel, Tensor bias, Tensor? residual, Tensor? mask, int stride, int padding)"


@torch.library.custom_op("maskfleet::conv_relu", mutates_args=(), device_types="cuda", schema=f"{_SCHEMA} -> Tensor")
def _conv_relu(
    features: Tensor,
    kernel: Tensor,
    bias: Tensor,
    residual: Tensor | None,
    mask: Tensor | None,
    stride: int,
    padding: int,
) -> Tensor:
    features = features.contiguous(memory_format=torch.channels_last)
    kernel = kernel.contiguous(memory_format=torch.channels_last)
    geometry = ((stride, stride), (padding, padding), (1, 1), 1)
    if residual is None:
        outputs = torch.cudnn_convolution_relu(features, kernel, bias, *geometry)
    else:
        residual = residual.contiguous(memory_format=torch.channels_last)
        outputs = torch.cudnn_convolution_add_relu(features, kernel, residual, 1.0, bias, *geometry)
    if mask is not None:
        from maskfleet.ops.triton import cut as kernels

        kernels.clear_outside(outputs, mask)
    return outputs


@_conv_relu.register_fake
def _(features: Tensor, kernel: Tensor, *inputs: Any) -> Tensor:
    *_, stride, padding = inputs
    height, width = (
        (side + 2 * padding - span) // stride + 1
        for side, span in zip(features.shape[2:], kernel.shape[2:], strict=True)
    )
    shape = (features.shape[0], kernel.shape[0], height, width)
    return torch.empty(shape, dtype=features.dtype, device=features.device, memory_format=torch.channels_last)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    features, kernel, _, _, _, ctx.stride, ctx.padding = inputs
    ctx.save_for_backward(features, kernel, output)


def _backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
    features, kernel, output = ctx.saved_tensors
    wants_features, wants_kernel, wants_bias, wants_residual = ctx.needs_input_grad[:4]
    # Zero outside the mask too: the output is zero there.
    gradient, to_bias = relu_backward(list(gradients), output, wants_bias)
    geometry = ((ctx.stride, ctx.stride), (ctx.padding, ctx.padding), (1, 1), False, (0, 0), 1)
    output_mask = (wants_features, wants_kernel, False)
    to_features, to_kernel, _ = torch.ops.aten.convolution_backward(
        gradient, features, kernel, None, *geometry, output_mask
    )
    to_bias = to_bias.to(kernel.dtype) if wants_bias else None
    return to_features, to_kernel, to_bias, gradient if wants_residual else None, None, None, None


_conv_relu.register_autograd(_backward, setup_context=_save_for_backward)


class _SharedConvRelu(torch.autograd.Function):
    """The operator with several results; an operator's own results may not share memory."""

    @staticmethod
    def forward(
        ctx: Any,
        features: Tensor,
        kernel: Tensor,
        bias: Tensor,
        residual: Tensor | None,
        mask: Tensor | None,
        stride: int,
        padding: int,
        readers: int,
    ) -> tuple[Tensor, ...]:
        inputs = (features, kernel, bias, residual, mask, stride, padding)
        output = _conv_relu(*inputs)
        _save_for_backward(ctx, inputs, output)
        return tuple(output.view_as(output) for _ in range(readers))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return *_backward(ctx, *gradients), None
