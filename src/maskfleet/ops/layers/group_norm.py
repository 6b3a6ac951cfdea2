"""Group normalisation of each feature map over its own pixels, with the sum and the ReLU after it.

Shapes: n feature maps, C channels in G groups, h x w pixels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from maskfleet.ops.layers.relu import needs_gradient
from maskfleet.ops.triton import kernels_for

EPSILON = 1e-5


def group_norm(
    features: Tensor,
    weight: Tensor,
    bias: Tensor,
    num_groups: int,
    *,
    mask: Tensor | None = None,
    residual: Tensor | None = None,
    relu: bool = False,
) -> Tensor:
    """relu(normalised `features` * weight + bias + residual), 0 where `mask` is 0 -> [n, C, h, w] like `features`.

    `weight` and `bias` are [C], `residual` is [n, C, h, w]. Mean and biased variance of a group are over the pixels
    where `mask` [n, 1, h, w] is not 0; no other pixel of `features`, `residual` or the gradient matters. A map without
    such pixels gives zeros. Half precision is summed in float32.
    """
    affine = (weight, bias, num_groups)
    return shared_group_norm(features, *affine, mask=mask, residual=residual, relu=relu, readers=1)[0]


def shared_group_norm(
    features: Tensor,
    weight: Tensor,
    bias: Tensor,
    num_groups: int,
    *,
    mask: Tensor | None = None,
    residual: Tensor | None = None,
    relu: bool = False,
    readers: int,
) -> tuple[Tensor, ...]:
    """The result of `group_norm` once for each of its 1 to 3 `readers`: tensors that share memory.

    If each reader takes its own one, the pass over memory that computes the gradient before ReLU also adds up theirs.
    """
    if kernels_for(features) and features.dtype != torch.float64:
        residual = None if residual is None else residual.to(features.dtype)
        inputs = (features, weight, bias, residual, mask, num_groups, relu)
        if readers > 1 and needs_gradient(features, weight, bias, residual):
            shared: tuple[Tensor, ...] = _SharedGroupNorm.apply(*inputs, readers)  # type: ignore[no-untyped-call]
            return shared
        return (_group_norm(*inputs)[0],) * readers
    outputs = _normalised(features.to(weight.dtype), weight, bias, num_groups, mask).to(features.dtype)
    if residual is not None:
        outputs = outputs + residual
    if relu:
        outputs = F.relu_(outputs)
    return (outputs if mask is None else outputs * mask.to(outputs.dtype),) * readers


def _normalised(features: Tensor, weight: Tensor, bias: Tensor, num_groups: int, mask: Tensor | None) -> Tensor:
    """Group normalisation in plain torch; what is outside of `mask` is undefined."""
    if mask is None:
        # not F.group_norm, which refuses groups of one value: they become the bias, as with a mask
        return torch.group_norm(features, num_groups, weight, bias, EPSILON)
    maps, channels, height, width = features.shape
    grouped = features.reshape(maps, num_groups, -1, height, width)  # [n, G, C/G, h, w]
    mask = mask[:, :, None]  # [n, 1, 1, h, w]
    count = mask.sum(dim=(2, 3, 4), keepdim=True).clamp(min=1) * grouped.shape[2]
    centred = grouped - (grouped * mask).sum(dim=(2, 3, 4), keepdim=True) / count
    variance = (centred * centred * mask).sum(dim=(2, 3, 4), keepdim=True) / count
    normal = (centred * (variance + EPSILON).rsqrt()).reshape(maps, channels, height, width)
    return normal * weight[:, None, None] + bias[:, None, None]


_FORWARD = "(Tensor features, Tensor weight, Tensor bias, Tensor? residual, Tensor? mask, int num_groups, bool relu)"
_BACKWARD = "(Tensor[] gradients, Tensor features, Tensor weight, Tensor bias, Tensor statistics, Tensor? mask, "
_BACKWARD += "Tensor? outputs, bool relu, bool separate)"


@torch.library.custom_op(
    "maskfleet::group_norm", mutates_args=(), device_types="cuda", schema=f"{_FORWARD} -> (Tensor, Tensor)"
)
def _group_norm(
    features: Tensor,
    weight: Tensor,
    bias: Tensor,
    residual: Tensor | None,
    mask: Tensor | None,
    num_groups: int,
    relu: bool,
) -> tuple[Tensor, Tensor]:
    """The result and the statistics [3, n, G] that its gradient needs."""
    from maskfleet.ops.triton import group_norm as kernels

    return kernels.group_norm(features, weight, bias, residual, mask, num_groups, EPSILON, relu)


@_group_norm.register_fake
def _(features: Tensor, weight: Tensor, bias: Tensor, *inputs: Any) -> tuple[Tensor, Tensor]:
    *_, num_groups, _ = inputs
    return _map_like(features), features.new_empty(3, features.shape[0], num_groups, dtype=torch.float32)


@torch.library.custom_op(
    "maskfleet::group_norm_backward",
    mutates_args=(),
    device_types="cuda",
    schema=f"{_BACKWARD} -> (Tensor, Tensor, Tensor)",
)
def _group_norm_backward(*inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the features, of bias and weight [2, C], and if `separate` of the sum before ReLU, else nothing."""
    from maskfleet.ops.triton import group_norm as kernels

    to_features, to_parameters, to_sum = kernels.group_norm_backward(*inputs)
    return to_features, to_parameters, to_features.new_empty(0) if to_sum is None else to_sum


@_group_norm_backward.register_fake
def _(gradients: Sequence[Tensor], features: Tensor, *inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
    *_, separate = inputs
    to_parameters = features.new_empty(2, features.shape[1], dtype=torch.float32)
    return _map_like(features), to_parameters, _map_like(features) if separate else features.new_empty(0)


def _map_like(features: Tensor) -> Tensor:
    return torch.empty(features.shape, dtype=features.dtype, device=features.device, memory_format=torch.channels_last)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    features, weight, bias, residual, mask, _, ctx.relu = inputs
    outputs, statistics = output
    # Without a residual the features tell where ReLU cut the outputs off: two reads less.
    needs_outputs = ctx.relu and residual is not None
    ctx.save_for_backward(features, weight, bias, statistics, mask, outputs if needs_outputs else None)


def _save_for_operator(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    _save_for_backward(ctx, inputs, output)


def _gradients(ctx: Any, gradients: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
    features, weight, bias, statistics, mask, outputs = ctx.saved_tensors
    wants_residual = ctx.needs_input_grad[3]
    separate = len(gradients) > 1 or (wants_residual and (ctx.relu or mask is not None))
    to_features, to_parameters, to_sum = _group_norm_backward(
        list(gradients), features, weight, bias, statistics, mask, outputs, ctx.relu, separate
    )
    to_bias, to_weight = to_parameters.to(weight.dtype).unbind()
    to_residual = (to_sum if separate else gradients[0]) if wants_residual else None
    return to_features, to_weight, to_bias, to_residual, None, None, None


def _backward(ctx: Any, gradient: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    return _gradients(ctx, (gradient,))


_group_norm.register_autograd(_backward, setup_context=_save_for_operator)


class _SharedGroupNorm(torch.autograd.Function):
    """The operator with several results; an operator's own results may not share memory."""

    @staticmethod
    def forward(
        ctx: Any,
        features: Tensor,
        weight: Tensor,
        bias: Tensor,
        residual: Tensor | None,
        mask: Tensor | None,
        num_groups: int,
        relu: bool,
        readers: int,
    ) -> tuple[Tensor, ...]:
        inputs = (features, weight, bias, residual, mask, num_groups, relu)
        outputs, statistics = _group_norm(*inputs)
        _save_for_backward(ctx, inputs, (outputs, statistics))
        return tuple(outputs.view_as(outputs) for _ in range(readers))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return *_gradients(ctx, gradients), None
