"""Layers that the heads of FPN and C4 share, and what they compute.

Shapes: n regions of all images together (padded), C channels, r x r bins of a region's features, M x M mask pixels.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from maskfleet.config.model import ModelConfig
from maskfleet.model.initial import fill_normal
from maskfleet.ops.layers.conv import aligned_outputs
from maskfleet.ops.layers.conv_sum import adds_in_place, sum_of


@dataclass(frozen=True, slots=True)
class BoxOutputs:
    """What a box head computes for each region."""

    logits: Tensor  # [..., num_class] float32, class 0 is background
    deltas: Tensor  # [..., num_class, 4] float32, or [..., 1, 4] for all classes; multiplied by the box weights


def box_output_layers(config: ModelConfig, inputs: int) -> tuple[nn.Linear, nn.Linear]:
    """Class logits, and box deltas of every class (with background) or, in a cascade, one for all classes."""
    assert config.num_categories is not None
    num_class = config.num_categories + 1
    logits = nn.Linear(inputs, num_class)
    deltas = nn.Linear(inputs, 4 if config.cascade else num_class * 4)
    fill_normal(logits, std=0.01)
    fill_normal(deltas, std=0.001)
    return logits, deltas


def box_outputs(hidden: Tensor, class_logits: nn.Linear, box_deltas: nn.Linear) -> BoxOutputs:
    """Run the layers of `box_output_layers` on `hidden` [n, C]."""
    num_class, num_deltas = class_logits.out_features, box_deltas.out_features
    if hidden.is_cuda:
        # One product instead of two, of a width that fits tensor cores: num_class alone is usually odd.
        kernel, bias = aligned_outputs((class_logits.weight, box_deltas.weight), (class_logits.bias, box_deltas.bias))
        both = F.linear(hidden, kernel, bias).float()
        logits, deltas = both[:, :num_class], both[:, num_class : num_class + num_deltas]
    else:
        logits, deltas = class_logits(hidden).float(), box_deltas(hidden).float()
    return BoxOutputs(logits=logits, deltas=deltas.reshape(deltas.shape[0], -1, 4))


def flat_linear(maps: Tensor, layer: nn.Linear, *, channels_last: bool) -> Tensor:
    """`layer` on all values of each of `maps` [n, C, r, r] -> [n, outputs].

    Its weights are in the order (C, r, r). With `channels_last`, which is how a GPU has the maps in memory, they are
    brought into the order of the maps, which are many times larger and need no copy then, nor does their gradient.
    """
    if not channels_last:
        outputs: Tensor = layer(maps.flatten(1))
        return outputs
    kernel = layer.weight.view(-1, *maps.shape[1:]).permute(0, 2, 3, 1).flatten(1)
    return F.linear(maps.permute(0, 2, 3, 1).flatten(1), kernel, layer.bias)


def mask_output_layers(config: ModelConfig, inputs: int) -> tuple[nn.ConvTranspose2d, nn.Conv2d]:
    """The upsampling to M x M pixels, and one logit per category."""
    assert config.num_categories is not None
    channels = config.mask_head.channels
    deconv = nn.ConvTranspose2d(inputs, channels, 2, stride=2)
    logits = nn.Conv2d(channels, config.num_categories, 1)
    # TensorFlow takes the kernel's last axis, here the inputs, as the outputs.
    fill_normal(deconv, std=math.sqrt(2 / (inputs * 4)))
    fill_normal(logits, std=0.001)
    return deconv, logits


def mask_outputs(features: Tensor, labels: Tensor, deconv: nn.ConvTranspose2d, logits: nn.Conv2d) -> Tensor:
    """Mask logits [n, M, M] float32 of `features` [n, C, r, r] for their `labels` [n], 1..num_categories.

    Only the label's channel is computed. Label 0 (padding) gets logits 0.
    """
    hidden = _upsampled_by(deconv, features)  # [n, C, M, M]
    number, _, height, width = hidden.shape
    # A product with ones and zeros selects rows exactly and, unlike indexing, has a gradient that is a product too.
    category = torch.arange(1, logits.out_channels + 1, device=labels.device)
    chosen = (labels[:, None] == category).to(logits.weight.dtype)  # [n, num_categories]
    kernels = chosen @ logits.weight.flatten(1)  # [n, C]
    assert logits.bias is not None
    pixels = hidden.permute(0, 2, 3, 1).reshape(number, height * width, -1)
    # Eager mode would write the products of the sum to memory; a CPU keeps the bits it had.
    as_sum = hidden.is_cuda and torch.compiler.is_compiling()
    scores = pixel_scores(pixels, kernels, as_sum=as_sum).view(number, height, width).float()
    return scores + (chosen @ logits.bias).float()[:, None, None]


def pixel_scores(pixels: Tensor, kernels: Tensor, *, as_sum: bool) -> Tensor:
    """Product of each of a region's `pixels` [n, P, C] with the `kernels` [n, C] of the region -> [n, P].

    `as_sum` computes it in float32 as products and a sum, for a compiler that makes one pass of them: the forward pass
    includes ReLU before it, and the gradient of `pixels`, an outer product, includes the gradient of ReLU. As a matrix
    product, its inner size of 1 fits no aligned kernel. The gradient of `kernels` is a sum over P then, in float32 too.
    """
    if not as_sum:
        return torch.bmm(pixels, kernels[:, :, None]).squeeze(2)
    wide = torch.promote_types(pixels.dtype, torch.float32)
    return (pixels.to(wide) * kernels.to(wide)[:, None, :]).sum(dim=2)


def _upsampled_by(deconv: nn.ConvTranspose2d, features: Tensor) -> Tensor:
    """relu(deconv(features)) [n, C, M, M] of `features` [n, C, r, r]."""
    if not adds_in_place(features):
        return F.relu_(deconv(features))
    outputs = F.conv_transpose2d(features, deconv.weight, None, stride=deconv.stride)
    return sum_of(outputs, deconv.bias, relu=True)
