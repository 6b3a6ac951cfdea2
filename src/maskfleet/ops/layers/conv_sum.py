"""A convolution, its bias, a sum with a coarser map and zeros outside of the image, without gradients in two passes.

torch adds the bias of a convolution on a GPU in a pass over memory of its own, and so is each operation after it.
torch.compile merges them; detection that is recorded without compiling needs the kernel used here.

Shapes: n maps, C input and O output channels, h x w pixels, k x k kernel.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from maskfleet.ops.layers.conv import upsampled
from maskfleet.ops.layers.exporting import is_exporting
from maskfleet.ops.triton import kernels_for


def adds_in_place(features: Tensor) -> bool:
    """Whether a convolution of `features` leaves its bias to `sum_of`: a GPU that needs no gradient, not compiled."""
    merges = torch.compiler.is_compiling() or is_exporting()
    return kernels_for(features) and not torch.is_grad_enabled() and not merges


def conv_sum(
    features: Tensor,
    kernel: Tensor,
    bias: Tensor | None,
    *,
    padding: int = 0,
    coarser: Tensor | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """features * kernel + bias + `coarser` with every pixel doubled both ways, 0 where `mask` is 0 -> [n, O, h, w].

    `features` [n, C, h, w], `kernel` [O, C, k, k], `bias` [O], `coarser` [n, O, h / 2, w / 2], `mask` [n, 1, h, w].
    """
    if adds_in_place(features):
        outputs = F.conv2d(features, kernel, None, padding=padding)
        return sum_of(outputs, bias, coarser=coarser, mask=mask)
    outputs = F.conv2d(features, kernel, bias, padding=padding)
    return sum_of(outputs, None, coarser=coarser, mask=mask)


def sum_of(
    outputs: Tensor,
    bias: Tensor | None,
    *,
    coarser: Tensor | None = None,
    mask: Tensor | None = None,
    relu: bool = False,
) -> Tensor:
    """The sum of `outputs` [n, O, h, w], `bias` and `coarser`, then ReLU, 0 where `mask` is 0; see `conv_sum`.

    May overwrite `outputs`, which must be of use to nobody else.
    """
    layout = torch.channels_last
    maps = [outputs] if coarser is None else [outputs, coarser]
    if adds_in_place(outputs) and all(one.is_contiguous(memory_format=layout) for one in maps):
        from maskfleet.ops.triton import cut as kernels

        kernels.add(outputs, bias, coarser, mask, relu=relu)
        return outputs
    if bias is not None:
        outputs = outputs + bias.to(outputs.dtype)[:, None, None]
    if coarser is not None:
        outputs = outputs + upsampled(coarser)
    if relu:
        outputs = F.relu_(outputs)
    return outputs if mask is None else outputs * mask.to(outputs.dtype)
