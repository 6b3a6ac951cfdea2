"""Heads on a feature pyramid: the box heads crop 7 x 7 bins of a region, the mask head 14 x 14.

Shapes: B images, K regions per image (padded), n = B * K regions, C channels, r x r bins of a crop.
"""

from __future__ import annotations

import math
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from maskfleet.config.model import ModelConfig
from maskfleet.model.features import Features, crop, joint_crops
from maskfleet.model.heads.layers import (
    BoxOutputs,
    box_output_layers,
    box_outputs,
    flat_linear,
    mask_output_layers,
    mask_outputs,
)
from maskfleet.model.initial import fan_in, fan_out, fill_normal
from maskfleet.model.norm import GroupNorm
from maskfleet.ops.layers.conv import conv_relu

BOX_RESOLUTION = 7
MASK_RESOLUTION = 14
NUM_CONVS = 4
CASCADE_STAGES = 3


class FpnBoxHead(nn.Module):
    """Two fully connected layers, or four convolutions (with ReLU, then optionally GN) and one; then the outputs."""

    def __init__(self, config: ModelConfig, inputs: int) -> None:
        super().__init__()
        self.roi_align = config.roi_align
        self.cascade = config.cascade
        self.kind = config.box_head.kind
        width = config.box_head.fc_channels
        if self.kind == "2fc":
            self.fc6 = _linear(inputs * BOX_RESOLUTION**2, width)
            self.fc7 = _linear(width, width)
        else:
            channels = config.box_head.conv_channels
            add_convs(self, inputs, channels, has_norm=self.kind == "4conv1fc_gn")
            self.fc = _linear(channels * BOX_RESOLUTION**2, width)
        self.class_logits, self.box_deltas = box_output_layers(config, width)

    def region_features(self, features: Features, boxes: Tensor, valid: Tensor) -> Tensor:
        """Crops [n, C, 7, 7] of `features` inside `boxes` [B, K, 4]."""
        crops = crop(features, boxes, resolution=BOX_RESOLUTION, aws=self.roi_align == "aws")
        if self.cascade and torch.is_grad_enabled():
            # Three stages read the same maps; each contributes a third (Cai and Vasconcelos 2018, Cascade R-CNN).
            crops = scaled_gradient(crops, 1 / CASCADE_STAGES)
        return crops

    def hidden(self, region_features: Tensor) -> Tensor:
        """Crops [n, C, 7, 7] -> [n, width], the input of the output layers."""
        if self.kind == "2fc":
            flat = flat_linear(region_features, self.fc6, channels_last=region_features.is_cuda)
            return F.relu_(self.fc7(F.relu_(flat)))
        convolved = run_convs(self, region_features, has_norm=self.kind == "4conv1fc_gn")
        return F.relu_(flat_linear(convolved, self.fc, channels_last=convolved.is_cuda))

    def forward(self, region_features: Tensor) -> BoxOutputs:
        return box_outputs(self.hidden(region_features), self.class_logits, self.box_deltas)


class FpnMaskHead(nn.Module):
    """Four convolutions (each with ReLU, then optionally GN), an upsampling, and one logit per category."""

    resolution = 2 * MASK_RESOLUTION

    def __init__(self, config: ModelConfig, inputs: int) -> None:
        super().__init__()
        self.roi_align = config.roi_align
        self.has_norm = config.mask_head.kind == "up4conv_gn"
        add_convs(self, inputs, config.mask_head.channels, has_norm=self.has_norm)
        self.deconv, self.logits = mask_output_layers(config, config.mask_head.channels)

    def region_features(self, features: Features, boxes: Tensor) -> Tensor:
        """Crops [n, C, 14, 14] of `features` inside `boxes` [B, K, 4]."""
        return crop(features, boxes, resolution=MASK_RESOLUTION, aws=self.roi_align == "aws")

    def forward(self, region_features: Tensor, labels: Tensor) -> Tensor:
        """Mask logits [n, 28, 28] float32 of crops [n, C, 14, 14] for their `labels` [n]."""
        convolved = run_convs(self, region_features, has_norm=self.has_norm)
        return mask_outputs(convolved, labels, self.deconv, self.logits)


def joint_region_features(
    box_head: FpnBoxHead, mask_head: FpnMaskHead, features: Features, *, boxes: Tensor, mask_boxes: Tensor
) -> tuple[Tensor, Tensor]:
    """`region_features` of `box_head` inside `boxes` and of `mask_head` inside `mask_boxes`, both [B, K, 4].

    On a GPU the backward pass is faster than that of two calls: it clears, fills and reads one sum per cell.
    """
    assert not box_head.cascade, "the gradient of a cascade's crops is scaled"
    aws = box_head.roi_align == "aws"
    of_boxes, of_masks = joint_crops(
        features, (boxes, mask_boxes), resolutions=(BOX_RESOLUTION, MASK_RESOLUTION), aws=aws
    )
    return of_boxes, of_masks


def add_convs(head: nn.Module, inputs: int, channels: int, *, has_norm: bool) -> None:
    """Give `head` the layers conv0..conv3 (and norm0..norm3) that `run_convs` runs."""
    for number in range(NUM_CONVS):
        conv = nn.Conv2d(inputs, channels, 3, padding=1)
        fill_normal(conv, std=math.sqrt(2 / fan_out(conv)))
        head.add_module(f"conv{number}", conv)
        if has_norm:
            head.add_module(f"norm{number}", GroupNorm(channels))
        inputs = channels


def run_convs(head: nn.Module, crops: Tensor, *, has_norm: bool) -> Tensor:
    """Crops [n, C, r, r] through the layers of `add_convs`; GN comes after ReLU, as in TensorPack."""
    for number in range(NUM_CONVS):
        conv = cast(nn.Conv2d, getattr(head, f"conv{number}"))
        assert conv.bias is not None
        crops = conv_relu(crops, conv.weight, conv.bias)
        if has_norm:
            crops = cast(GroupNorm, getattr(head, f"norm{number}"))(crops)
    return crops


def scaled_gradient(value: Tensor, scale: float) -> Tensor:
    """`value` itself, whose gradient is multiplied by `scale` in the backward pass."""
    return cast(Tensor, _ScaledGradient.apply(value, scale))  # type: ignore[no-untyped-call]


class _ScaledGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.scale, None


def _linear(inputs: int, outputs: int) -> nn.Linear:
    layer = nn.Linear(inputs, outputs)
    fill_normal(layer, std=math.sqrt(1 / fan_in(layer)), cut=True)
    return layer
