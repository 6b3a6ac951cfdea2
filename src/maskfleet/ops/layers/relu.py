"""The gradient of ReLU with what surrounds it in a network: the sum of its readers' gradients, the bias's gradient.

Shapes: n maps, C channels, h x w pixels.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def needs_gradient(*inputs: Tensor | None) -> bool:
    """Whether an operation on `inputs` has a backward pass."""
    return torch.is_grad_enabled() and any(one is not None and one.requires_grad for one in inputs)


@torch.library.custom_op(
    "maskfleet::relu_backward",
    mutates_args=(),
    device_types="cuda",
    schema="(Tensor[] gradients, Tensor outputs, bool sums) -> (Tensor, Tensor)",
)
def relu_backward(gradients: Sequence[Tensor], outputs: Tensor, sums: bool) -> tuple[Tensor, Tensor]:
    """The sum of 1 to 3 `gradients` of `outputs` [n, C, h, w] where these are positive, else 0; and its sums.

    With `sums` those over all pixels [C] in float32, else nothing. One pass over memory.
    """
    from maskfleet.ops.triton import relu as kernels

    masked, total = kernels.relu_backward(gradients, outputs, sums)
    return masked, outputs.new_empty(0, dtype=torch.float32) if total is None else total


@relu_backward.register_fake
def _(gradients: Sequence[Tensor], outputs: Tensor, sums: bool) -> tuple[Tensor, Tensor]:
    masked = torch.empty(outputs.shape, dtype=outputs.dtype, device=outputs.device, memory_format=torch.channels_last)
    return masked, outputs.new_empty(outputs.shape[1] if sums else 0, dtype=torch.float32)
