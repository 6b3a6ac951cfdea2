"""Zeros outside of each image, in a map and in its gradient.

Shapes: n maps, C channels, h x w pixels.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from maskfleet.ops.layers.relu import needs_gradient
from maskfleet.ops.triton import kernels_for


def cut_outside(features: Tensor, mask: Tensor) -> Tensor:
    """`features` [n, C, h, w] with zeros where `mask` [n, 1, h, w] is 0; it is 1 elsewhere.

    The product is part of what computed the features if the compiler fuses both. The gradient often comes from an
    operator that the compiler cannot fuse with: it is cleared outside, in place, and not read.
    """
    if kernels_for(features) and needs_gradient(features):
        return cast(Tensor, _CutOutside.apply(features, mask))  # type: ignore[no-untyped-call]
    return features * mask.to(features.dtype)


class _CutOutside(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, features: Tensor, mask: Tensor) -> Tensor:
        ctx.save_for_backward(mask)
        return features * mask.to(features.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (mask,) = ctx.saved_tensors
        # Others may read the gradient. Where nobody does, the compiler removes this copy.
        gradient = gradient.clone(memory_format=torch.channels_last)
        clear_outside(gradient, mask)
        return gradient, None


@torch.library.custom_op(
    "maskfleet::clear_outside",
    mutates_args=("features",),
    device_types="cuda",
    schema="(Tensor(a!) features, Tensor mask) -> ()",
)
def clear_outside(features: Tensor, mask: Tensor) -> None:
    """Set `features` [n, C, h, w], channels last, to 0 where `mask` [n, 1, h, w] is."""
    from maskfleet.ops.triton import cut as kernels

    kernels.clear_outside(features, mask)
