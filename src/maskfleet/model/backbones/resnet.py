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
from maskfleet.model.backbones import NUM_STAGES
from maskfleet.model.canvas import Area, Canvas
from maskfleet.model.initial import fan_out, fill_normal
from maskfleet.model.norm import Conv, ConvNorm, GroupNorm, make_norm
from maskfleet.ops.layers.conv import conv7_by_blocks, fuses
from maskfleet.ops.layers.conv_sum import adds_in_place, sum_of
from maskfleet.ops.layers.max_pool import max_pool

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

    @property
    def last_stage(self) -> Group:
        return self.group(len(self.channels) - 1)

    def forward(self, pixels: Tensor, canvas: Canvas) -> list[Tensor]:
        """Features of normalised `pixels` [B, 3, H, W] after each group -> [B, C, h, w] at strides 4, 8, 16, (32).

        Values outside an image's own canvas are undefined.
        """
        early = self._early_maps(pixels, canvas, readers_of_last=self._readers)
        before, after = (canvas.areas[stride] for stride in self.strides[-2:])
        last = self.last_stage.shared(early[-1], before, after, readers=1)
        return [features[-1] for features in (*early, last)]

    def early_maps(self, pixels: Tensor, canvas: Canvas) -> list[Tensor]:
        """`forward` without the last group."""
        return [features[-1] for features in self._early_maps(pixels, canvas, readers_of_last=1)]

    @property
    def _readers(self) -> int:
        """How many layers read the map of a group: two of the next group, and the pyramid, which C4 does not have."""
        return 3 if len(self.channels) == NUM_STAGES else 2

    def _early_maps(self, pixels: Tensor, canvas: Canvas, *, readers_of_last: int) -> list[tuple[Tensor, ...]]:
        """The maps of all groups but the last one, each as often as layers read it: see `Group.shared`."""
        features: tuple[Tensor, ...] = (self.stem(pixels, canvas),)
        outputs = []
        before = canvas.areas[STEM_STRIDE]
        for number, stride in enumerate(self.strides[:-1]):
            after = canvas.areas[stride]
            readers = self._readers if number < len(self.strides) - 2 else readers_of_last
            features = self.group(number).shared(features, before, after, readers=readers)
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
        by_blocks = pixels.is_cuda and self.conv.pads_evenly(pixels)
        if by_blocks and layer.folds(area) and adds_in_place(pixels):
            kernel, bias = layer.folded()
            return pooled_with_bias_and_relu(conv7_by_blocks(pixels, kernel, None), bias)
        if by_blocks and layer.folds(area):
            features = F.relu_(conv7_by_blocks(pixels, *layer.folded()))
        elif by_blocks and isinstance(self.norm, GroupNorm):
            features = self.norm(conv7_by_blocks(pixels, self.conv.weight, None), area, relu=True)
        else:
            features = layer(pixels, area, relu=True)
        # Features are not negative, so TensorPack's padding, zeros, gives the same maxima.
        if self.conv.tf_pad:
            return max_pool(area.cut(features), pads_first=False)
        return max_pool(features, pads_first=True)


def pooled_with_bias_and_relu(features: Tensor, bias: Tensor) -> Tensor:
    """Maxima of `features` [B, C, h, w] plus `bias` [C] after ReLU, in 3 x 3 pixels -> [B, C, h / 2, w / 2].

    Both keep the order of values, so the maximum comes first, and they change a quarter of the pixels. Rounding keeps
    it too: the result is the same to the last bit.
    """
    return sum_of(max_pool(features, pads_first=True), bias, relu=True)


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
        return self.shared((features,), before, after, readers=1)[0]

    def shared(self, features: tuple[Tensor, ...], before: Area, after: Area, *, readers: int) -> tuple[Tensor, ...]:
        """The result once for each of its `readers`; `features` once for each of theirs, or only once.

        Where the tensors of a tuple share memory, one pass of the backward computation adds up their gradients.
        """
        for number, block in enumerate(self):
            within = 2 if number < len(self) - 1 else readers  # the next block has two
            features = cast(Bottleneck, block).shared(features, before, after, readers=within)
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
        return self.shared((features,), before, after, readers=1)[0]

    def shared(self, features: tuple[Tensor, ...], before: Area, after: Area, *, readers: int) -> tuple[Tensor, ...]:
        """As `Group.shared`. The first of the `features` is for the convolutions, the second for the shortcut."""
        to_convs, to_shortcut = features[0], features[min(1, len(features) - 1)]
        between = after if self.strides_first else before
        inner = ConvNorm(self.conv1, self.norm1)(to_convs, between, relu=True, mask=self.conv2.reads_outside)
        inner = ConvNorm(self.conv2, self.norm2)(inner, after, relu=True)
        residual, bias = to_shortcut, None
        if self.shortcut is not None:
            shortcut = ConvNorm(self.shortcut.conv, self.shortcut.norm)
            if fuses(inner):
                residual, bias = shortcut.without_bias(to_shortcut, after)
            else:
                residual = shortcut(to_shortcut, after)
        last = ConvNorm(self.conv3, self.norm3)
        return last.shared(inner, after, residual=residual, extra_bias=bias, relu=True, readers=readers)


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
