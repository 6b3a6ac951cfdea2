"""Random initial values of kernels, by the rules of TensorFlow's initialisers."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

CUT = 2.0  # standard deviations
# Standard deviation of a unit normal cut there; TensorFlow divides by it.
CUT_NORMAL_STD = 0.87962566103423978


@torch.no_grad()
def scaled_cut_normal(kernel: Tensor, *, fan: int, scale: float) -> None:
    """Fill `kernel` from a normal of variance scale / fan, cut at two standard deviations."""
    if kernel.is_meta:  # the meta device has shapes and no values
        return
    kernel.normal_()
    # Values outside are drawn again, as in TensorFlow; five times faster than nn.init.trunc_normal_.
    while (outside := kernel.abs() > CUT).any():
        kernel[outside] = torch.randn(int(outside.sum()), dtype=kernel.dtype, device=kernel.device)
    kernel.mul_(math.sqrt(scale / fan) / CUT_NORMAL_STD)


@torch.no_grad()
def scaled_normal(kernel: Tensor, *, fan: int, scale: float) -> None:
    """Fill `kernel` from a normal of variance scale / fan."""
    nn.init.normal_(kernel, std=math.sqrt(scale / fan))


@torch.no_grad()
def plain_normal(layer: nn.Linear | nn.Conv2d, *, std: float) -> None:
    """Fill the kernel of `layer` from a normal, its bias with zeros."""
    nn.init.normal_(layer.weight, std=std)
    clear_bias(layer)


@torch.no_grad()
def clear_bias(layer: nn.Linear | nn.Conv2d | nn.ConvTranspose2d) -> None:
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)


def fan_in(kernel: Tensor) -> int:
    """Inputs of one output of a convolution or linear kernel [out, in, ...]."""
    return kernel[0].numel()


def fan_out(kernel: Tensor) -> int:
    """Outputs of one input of a convolution kernel [out, in, ...]."""
    return kernel[:, 0].numel()
