"""Triton reads TRITON_INTERPRET when it is imported: without a GPU its kernels run here, slowly, in numpy."""

import functools
import os

import pytest
import torch
import torch.nn.functional as F

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture
def kernel_device() -> str:
    """Where kernels are tested: on the GPU if there is one, else in Triton's interpreter."""
    pytest.importorskip("triton", reason="Triton has no build for this platform")
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture
def operators_on_cpu(kernel_device: str) -> None:
    """The operators around ReLU and image areas by their kernels, `conv_relu` in plain torch, also without a GPU."""
    _register_on_cpu()


@functools.cache
def _register_on_cpu() -> None:
    from maskfleet.ops.layers import conv, cut, relu
    from maskfleet.ops.triton import cut as cut_kernels
    from maskfleet.ops.triton import relu as kernels

    cut.clear_outside.register_kernel("cpu")(cut_kernels.clear_outside)

    @relu.relu_backward.register_kernel("cpu")
    def _(gradients, outputs, sums):
        masked, total = kernels.relu_backward(gradients, outputs, sums)
        return masked, torch.empty(0) if total is None else total

    @conv._conv_relu.register_kernel("cpu")
    def _(features, kernel, bias, residual, mask, stride, padding):
        outputs = F.conv2d(features, kernel, bias, stride=stride, padding=padding)
        outputs = (outputs if residual is None else outputs + residual).relu()
        outputs = outputs if mask is None else outputs * mask.to(outputs.dtype)
        return outputs.contiguous(memory_format=torch.channels_last)
