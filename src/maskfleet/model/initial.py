"""Random initial values of layers, by the rules of TensorFlow's initialisers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import nn

CUT = 2.0  # standard deviations
# Standard deviation of a unit normal cut there; TensorFlow divides by it.
CUT_NORMAL_STD = 0.87962566103423978

Layer = nn.Linear | nn.Conv2d | nn.ConvTranspose2d


_fills = ContextVar("fills", default=True)


@contextmanager
def kernels_left_empty() -> Iterator[None]:
    """Inside the block `fill_normal` draws nothing: for a model whose weights are loaded next."""
    token = _fills.set(False)
    try:
        yield
    finally:
        _fills.reset(token)


@torch.no_grad()
def fill_normal(layer: Layer, *, std: float, cut: bool = False) -> None:
    """Fill the kernel of `layer` from a normal, optionally cut at two standard deviations; its bias with zeros."""
    kernel = layer.weight
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
    if not cut:
        nn.init.normal_(kernel, std=std)
    elif _fills.get() and not kernel.is_meta:  # the meta device has shapes and no values
        kernel.normal_()
        # Values outside are drawn again, as in TensorFlow; five times faster than nn.init.trunc_normal_.
        while (outside := kernel.abs() > CUT).any():
            kernel[outside] = torch.randn(int(outside.sum()), dtype=kernel.dtype, device=kernel.device)
        kernel.mul_(std / CUT_NORMAL_STD)


def fan_in(layer: Layer) -> int:
    """Inputs of one output of a layer whose kernel is [out, in, ...]."""
    return layer.weight[0].numel()


def fan_out(layer: Layer) -> int:
    """Outputs of one input of a layer whose kernel is [out, in, ...]."""
    return layer.weight[:, 0].numel()
