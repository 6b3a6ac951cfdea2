"""Maximum of 3 x 3 pixels at every second pixel, as the stem of a ResNet has it.

Shapes: n feature maps, C channels, h x w pixels.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from maskfleet.ops.layers.conv_sum import adds_in_place
from maskfleet.ops.triton import kernels_for


def max_pool(features: Tensor, *, pads_first: bool) -> Tensor:
    """Maximum of each window of 3 x 3 pixels, of stride 2, in `features` [n, C, h, w] -> [n, C, h // 2, w // 2].

    The first window starts one pixel before the map if `pads_first`, else with the map, so that the last one may end
    one pixel after it. Pixels outside of the map do not count. The first of equal pixels gets the gradient.
    """
    trains = features.requires_grad and torch.is_grad_enabled()
    # Without a gradient, torch's compiler joins the pooling with what is before it, which no operator of ours can. But
    # detection may run without the compiler, and this kernel is faster than torch's, though it stores positions.
    if (trains or adds_in_place(features)) and kernels_for(features) and features.dtype != torch.float64:
        maxima, _ = _max_pool(features, pads_first)
        return maxima  # type: ignore[no-any-return]
    if not pads_first:
        return F.max_pool2d(F.pad(features, (0, 1, 0, 1), value=-torch.inf), 3, stride=2)
    height, width = features.shape[2] // 2, features.shape[3] // 2
    # Symmetric padding gives one window too many for odd sides, and the same windows otherwise.
    return F.max_pool2d(features, 3, stride=2, padding=1)[:, :, :height, :width]


@torch.library.custom_op(
    "maskfleet::max_pool",
    mutates_args=(),
    device_types="cuda",
    schema="(Tensor features, bool pads_first) -> (Tensor, Tensor)",
)
def _max_pool(features: Tensor, pads_first: bool) -> tuple[Tensor, Tensor]:
    """The maxima, and the position of each in its window."""
    from maskfleet.ops.triton import max_pool as kernels

    return kernels.max_pool(features, pads_first)


@_max_pool.register_fake
def _(features: Tensor, pads_first: bool) -> tuple[Tensor, Tensor]:
    maps, channels, height, width = features.shape
    shape = (maps, channels, height // 2, width // 2)
    return _empty(shape, features, features.dtype), _empty(shape, features, torch.uint8)


@torch.library.custom_op(
    "maskfleet::max_pool_backward",
    mutates_args=(),
    device_types="cuda",
    schema="(Tensor gradient, Tensor positions, SymInt height, SymInt width, bool pads_first) -> Tensor",
)
def _max_pool_backward(gradient: Tensor, positions: Tensor, height: int, width: int, pads_first: bool) -> Tensor:
    from maskfleet.ops.triton import max_pool as kernels

    return kernels.max_pool_backward(gradient, positions, height, width, pads_first)


@_max_pool_backward.register_fake
def _(gradient: Tensor, positions: Tensor, height: int, width: int, pads_first: bool) -> Tensor:
    return _empty((*gradient.shape[:2], height, width), gradient, gradient.dtype)


def _empty(shape: tuple[int, ...], like: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=like.device, memory_format=torch.channels_last)


def _save_for_backward(ctx: Any, inputs: tuple[Tensor, bool], output: tuple[Tensor, Tensor]) -> None:
    features, ctx.pads_first = inputs
    _, positions = output
    ctx.mark_non_differentiable(positions)
    ctx.set_materialize_grads(False)
    ctx.size = tuple(features.shape[2:])
    ctx.save_for_backward(positions)


def _backward(ctx: Any, gradient: Tensor, _: Tensor | None) -> tuple[Tensor, None]:
    return _max_pool_backward(gradient, *ctx.saved_tensors, *ctx.size, ctx.pads_first), None


_max_pool.register_autograd(_backward, setup_context=_save_for_backward)
