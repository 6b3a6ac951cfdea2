"""ResNet (He et al. 2015, Deep Residual Learning), padded and normalised as TensorPack does.

Shapes: B images, n feature maps (images or regions), C channels, h x w pixels.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

import torch.nn.functional as F
from torch import Tensor, nn

from maskfleet.config.model import BackboneConfig
from maskfleet.model.canvas import Area, Canvas
from maskfleet.model.initial import fan_out, scaled_cut_normal
from maskfleet.model.norm import (
    BatchNorm,
    Conv,
    GroupNorm,
    conv_norm,
    conv_norm_add_relu,
    conv_norm_relu,
    folds,
    make_norm,
)
from maskfleet.ops.conv import conv7_by_blocks, fuses

Norm = BatchNorm | GroupNorm | None
EXPANSION = 4  # a block puts out this many times its inner channels


class ResNet(nn.Module):
    """Stem and the first `num_groups` groups of a ResNet."""

    def __init__(self, config: BackboneConfig, *, num_groups: int) -> None:
        super().__init__()
        self.num_groups = num_groups
        self.stem = Stem(config)
        for group in range(num_groups):
            self.add_module(f"group{group}", make_group(config, group))
        if config.freeze_affine and self.stem.norm is not None:
            freeze(self.stem.norm.parameters())
        if config.freeze_at >= 1:
            freeze(self.stem.parameters())
        if config.freeze_at >= 2:
            freeze(self.group(0).parameters())

    def group(self, number: int) -> nn.ModuleList:
        return cast(nn.ModuleList, getattr(self, f"group{number}"))

    def forward(self, pixels: Tensor, canvas: Canvas) -> list[Tensor]:
        """Features of normalised `pixels` [B, 3, H, W] after each group -> [B, C, h, w] at strides 4, 8, 16, (32).

        What lies outside an image's own canvas has no meaning.
        """
        features = self.stem(pixels, canvas)
        outputs = []
        stride = 4
        for number in range(self.num_groups):
            before = canvas.areas[stride]
            stride = group_stride(number) * stride
            features = run_group(self.group(number), features, before, canvas.areas[stride])
            outputs.append(features)
        return outputs


class Stem(nn.Module):
    """7x7 convolution and 3x3 maximum, each of stride 2."""

    def __init__(self, config: BackboneConfig) -> None:
        super().__init__()
        channels = config.stem_channels
        self.tf_pad = config.tf_pad_mode
        self.conv = Conv(3, channels, 7, stride=2, tf_pad=config.tf_pad_mode)
        self.norm = make_norm(config.norm, channels, frozen=config.freeze_at >= 1)
        scaled_cut_normal(self.conv.weight, fan=fan_out(self.conv.weight), scale=2.0)

    def forward(self, pixels: Tensor, canvas: Canvas) -> Tensor:
        """Features [B, C, H/4, W/4] of `pixels` [B, 3, H, W], which are 0 outside each image."""
        features = F.relu_(self._convolved(pixels, canvas.areas[2]))
        height, width = features.shape[2] // 2, features.shape[3] // 2
        if self.tf_pad:
            return F.max_pool2d(F.pad(canvas.areas[2].cut(features), (0, 1, 0, 1)), 3, stride=2)
        # Features are not negative, so torch's padding (minus infinity) and TensorPack's (zero) give the same maximum.
        return F.max_pool2d(features, 3, stride=2, padding=1)[:, :, :height, :width]

    def _convolved(self, pixels: Tensor, area: Area) -> Tensor:
        is_even = pixels.shape[2] % 2 == 0 and pixels.shape[3] % 2 == 0
        if pixels.is_cuda and is_even and not self.tf_pad and folds(self.norm, area):
            scale, offset = self.norm.stored_affine()
            return conv7_by_blocks(pixels, self.conv.weight * scale[:, None, None, None], offset)
        return conv_norm(pixels, self.conv, self.norm, area)


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions beside a shortcut."""

    def __init__(self, config: BackboneConfig, inputs: int, channels: int, *, stride: int, frozen: bool) -> None:
        super().__init__()
        outputs = EXPANSION * channels
        first, second = (stride, 1) if config.stride_1x1 else (1, stride)
        self.strides_first = first == 2
        self.conv1 = Conv(inputs, channels, 1, stride=first)
        self.norm1 = make_norm(config.norm, channels, frozen=frozen)
        self.conv2 = Conv(channels, channels, 3, stride=second, tf_pad=config.tf_pad_mode)
        self.norm2 = make_norm(config.norm, channels, frozen=frozen)
        self.conv3 = Conv(channels, outputs, 1)
        self.norm3 = make_norm(config.norm, outputs, frozen=frozen)
        self.shortcut = Shortcut(config, inputs, outputs, stride=stride, frozen=frozen) if inputs != outputs else None
        for conv in (self.conv1, self.conv2, self.conv3):
            scaled_cut_normal(conv.weight, fan=fan_out(conv.weight), scale=2.0)
        # A block starts as its shortcut.
        nn.init.zeros_(self.conv3.weight if self.norm3 is None else self.norm3.weight)

    def forward(self, features: Tensor, before: Area, after: Area) -> Tensor:
        """Features [n, C, h, w] in area `before` -> [n, C', h', w'] in area `after`."""
        between = after if self.strides_first else before
        is_cut = self.conv2.reads_outside
        inner = conv_norm_relu(features, self.conv1, self.norm1, between, is_cut=is_cut)
        inner = conv_norm_relu(inner, self.conv2, self.norm2, after)
        if folds(self.norm3, after) and fuses(inner):
            residual, offset = (
                (features, None) if self.shortcut is None else self.shortcut.without_offset(features, after)
            )
            return conv_norm_add_relu(inner, self.conv3, self.norm3, residual, offset)
        outer = conv_norm(inner, self.conv3, self.norm3, after)
        return F.relu_(outer + (features if self.shortcut is None else self.shortcut(features, after)))


class Shortcut(nn.Module):
    """1x1 convolution that brings a block's input to its output's shape."""

    def __init__(self, config: BackboneConfig, inputs: int, outputs: int, *, stride: int, frozen: bool) -> None:
        super().__init__()
        self.conv = Conv(inputs, outputs, 1, stride=stride)
        self.norm = make_norm(config.norm, outputs, frozen=frozen)
        scaled_cut_normal(self.conv.weight, fan=fan_out(self.conv.weight), scale=2.0)

    def forward(self, features: Tensor, after: Area) -> Tensor:
        return conv_norm(features, self.conv, self.norm, after)

    def without_offset(self, features: Tensor, after: Area) -> tuple[Tensor, Tensor | None]:
        """The shortcut but for an offset [C] that is still to be added; None if nothing is missing."""
        if not folds(self.norm, after):
            return self(features, after), None
        scale, offset = self.norm.stored_affine()
        return self.conv.with_kernel(features, self.conv.weight * scale[:, None, None, None], None), offset


def make_group(config: BackboneConfig, number: int) -> nn.ModuleList:
    """The blocks of group `number`, 0..3; the first one changes channels and (but for group 0) stride."""
    channels = config.stem_channels << number
    inputs = config.stem_channels if number == 0 else EXPANSION * channels // 2
    frozen = number == 0 and config.freeze_at >= 2
    blocks = nn.ModuleList()
    for block in range(config.blocks[number]):
        stride = group_stride(number) if block == 0 else 1
        blocks.append(Bottleneck(config, inputs, channels, stride=stride, frozen=frozen))
        inputs = EXPANSION * channels
    if config.freeze_affine:
        freeze(p for name, p in blocks.named_parameters() if "norm" in name)
    return blocks


def run_group(blocks: nn.ModuleList, features: Tensor, before: Area, after: Area) -> Tensor:
    """Features [n, C, h, w] in area `before`, through the blocks, into area `after`."""
    for block in blocks:
        features = block(features, before, after)
        before = after
    return features


def group_stride(number: int) -> int:
    return 1 if number == 0 else 2


def freeze(parameters: Iterable[nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.requires_grad_(False)
