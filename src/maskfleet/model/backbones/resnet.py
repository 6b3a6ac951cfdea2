"""ResNet (He et al. 2015, Deep Residual Learning), padded and normalised as in TensorPack.

Shapes: B images, n feature maps (images or regions), C channels, h x w pixels.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import cast

import torch.nn.functional as F
from torch import Tensor, nn

from maskfleet.config.model import BackboneConfig
from maskfleet.model.canvas import Area, Canvas
from maskfleet.model.initial import fan_out, fill_normal
from maskfleet.model.norm import Conv, ConvNorm, make_norm
from maskfleet.ops.conv import conv7_by_blocks, fuses

EXPANSION = 4  # outputs of a block, as a multiple of its inner channels
STEM_STRIDE = 4


class ResNet(nn.Module):
    """Stem and the first `num_stages` groups of a ResNet."""

    def __init__(self, config: BackboneConfig, *, num_stages: int) -> None:
        super().__init__()
        self.config = config
        self.stem = Stem(config)
        for number in range(num_stages):
            self.add_module(f"group{number}", Group(config, number))
        self.channels = tuple(self.group(number).channels for number in range(num_stages))
        self.strides = tuple(STEM_STRIDE << number for number in range(num_stages))
        if config.freeze_affine and self.stem.norm is not None:
            freeze(self.stem.norm.parameters())
        if config.freeze_at >= 1:
            freeze(self.stem.parameters())
        if config.freeze_at >= 2:
            freeze(self.group(0).parameters())

    def group(self, number: int) -> Group:
        return cast(Group, getattr(self, f"group{number}"))

    def region_stage(self) -> Group:
        """A new group, the one after the last here."""
        return Group(self.config, len(self.channels))

    def forward(self, pixels: Tensor, canvas: Canvas) -> list[Tensor]:
        """Features of normalised `pixels` [B, 3, H, W] after each group -> [B, C, h, w] at strides 4, 8, 16, (32).

        Values outside an image's own canvas are undefined.
        """
        features = self.stem(pixels, canvas)
        outputs = []
        before = canvas.areas[STEM_STRIDE]
        for number, stride in enumerate(self.strides):
            after = canvas.areas[stride]
            features = self.group(number)(features, before, after)
            outputs.append(features)
            before = after
        return outputs


class Stem(nn.Module):
    """7x7 convolution and 3x3 max pooling, each of stride 2."""

    def __init__(self, config: BackboneConfig) -> None:
        super().__init__()
        channels = config.stem_channels
        self.conv = Conv(3, channels, 7, stride=2, tf_pad=config.tf_pad_mode)
        self.norm = make_norm(config.norm, channels, frozen=config.freeze_at >= 1)
        fill_normal(self.conv, std=math.sqrt(2 / fan_out(self.conv)), cut=True)

    def forward(self, pixels: Tensor, canvas: Canvas) -> Tensor:
        """Features [B, C, H/4, W/4] of `pixels` [B, 3, H, W], which are 0 outside each image."""
        area = canvas.areas[2]
        layer = ConvNorm(self.conv, self.norm)
        if pixels.is_cuda and self.conv.pads_evenly(pixels) and layer.folds(area):
            features = F.relu_(conv7_by_blocks(pixels, *layer.folded()))
        else:
            features = layer(pixels, area, relu=True)
        height, width = features.shape[2] // 2, features.shape[3] // 2
        if self.conv.tf_pad:
            return F.max_pool2d(F.pad(area.cut(features), (0, 1, 0, 1)), 3, stride=2)
        # Features are not negative, so torch's padding (minus infinity) and TensorPack's (zero) give the same maximum.
        return F.max_pool2d(features, 3, stride=2, padding=1)[:, :, :height, :width]


class Group(nn.ModuleList):
    """The blocks of group `number`, 0..3; the first block changes the channels and (except in group 0) the stride."""

    def __init__(self, config: BackboneConfig, number: int) -> None:
        super().__init__()
        inner = config.stem_channels << number
        inputs = config.stem_channels if number == 0 else EXPANSION * inner // 2
        self.channels = EXPANSION * inner
        frozen = number == 0 and config.freeze_at >= 2
        for block in range(config.blocks[number]):
            stride = 2 if number > 0 and block == 0 else 1
            self.append(Bottleneck(config, inputs, inner, stride=stride, frozen=frozen))
            inputs = self.channels
        if config.freeze_affine:
            freeze(parameter for name, parameter in self.named_parameters() if "norm" in name)

    def forward(self, features: Tensor, before: Area, after: Area) -> Tensor:
        """Features [n, C, h, w] in area `before` -> [n, C', h', w'] in area `after`."""
        for block in self:
            features = block(features, before, after)
            before = after
        return features


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions beside a shortcut."""

    def __init__(self, config: BackboneConfig, inputs: int, inner: int, *, stride: int, frozen: bool) -> None:
        super().__init__()
        outputs = EXPANSION * inner
        first, second = (stride, 1) if config.stride_1x1 else (1, stride)
        self.strides_first = first == 2
        self.conv1 = Conv(inputs, inner, 1, stride=first)
        self.norm1 = make_norm(config.norm, inner, frozen=frozen)
        self.conv2 = Conv(inner, inner, 3, stride=second, tf_pad=config.tf_pad_mode)
        self.norm2 = make_norm(config.norm, inner, frozen=frozen)
        self.conv3 = Conv(inner, outputs, 1)
        self.norm3 = make_norm(config.norm, outputs, frozen=frozen)
        self.shortcut = Shortcut(config, inputs, outputs, stride=stride, frozen=frozen) if inputs != outputs else None
        for conv in (self.conv1, self.conv2, self.conv3):
            fill_normal(conv, std=math.sqrt(2 / fan_out(conv)), cut=True)
        # A new block passes on its shortcut unchanged.
        nn.init.zeros_(self.conv3.weight if self.norm3 is None else self.norm3.weight)

    def forward(self, features: Tensor, before: Area, after: Area) -> Tensor:
        """Features [n, C, h, w] in area `before` -> [n, C', h', w'] in area `after`."""
        between = after if self.strides_first else before
        inner = ConvNorm(self.conv1, self.norm1)(features, between, relu=True, mask=self.conv2.reads_outside)
        inner = ConvNorm(self.conv2, self.norm2)(inner, after, relu=True)
        residual, bias = features, None
        if self.shortcut is not None:
            shortcut = ConvNorm(self.shortcut.conv, self.shortcut.norm)
            if fuses(inner):
                residual, bias = shortcut.without_bias(features, after)
            else:
                residual = shortcut(features, after)
        return ConvNorm(self.conv3, self.norm3)(inner, after, residual=residual, extra_bias=bias, relu=True)


class Shortcut(nn.Module):
    """The 1x1 convolution that gives a block's input the shape of its output; the block runs it."""

    def __init__(self, config: BackboneConfig, inputs: int, outputs: int, *, stride: int, frozen: bool) -> None:
        super().__init__()
        self.conv = Conv(inputs, outputs, 1, stride=stride)
        self.norm = make_norm(config.norm, outputs, frozen=frozen)
        fill_normal(self.conv, std=math.sqrt(2 / fan_out(self.conv)), cut=True)


def freeze(parameters: Iterable[nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.requires_grad_(False)
