"""The feature pyramid (Lin et al. 2017, Feature Pyramid Networks for Object Detection).

Shapes: B images, C channels, h x w pixels; c2..c5 come from the backbone, p2..p6 go to the heads.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import cast

from torch import Tensor, nn

from maskfleet.config.model import FpnConfig
from maskfleet.model.canvas import Area, Canvas
from maskfleet.model.initial import fan_in, fill_normal
from maskfleet.model.norm import GroupNorm
from maskfleet.ops.layers.conv_sum import adds_in_place, conv_sum, sum_of
from maskfleet.ops.layers.cut import cut_outside

LEVELS = (2, 3, 4, 5)  # level l has stride 2**l


def with_coarsest_map(maps: Sequence[Tensor]) -> list[Tensor]:
    """p2..p5 -> p2..p6: every second pixel of p5 is p6."""
    return [*maps, maps[-1][:, :, ::2, ::2]]


class Fpn(nn.Module):
    """Backbone features of four strides -> five maps of equal depth, each merged with the coarser ones."""

    def __init__(self, config: FpnConfig, inputs: Sequence[int]) -> None:
        super().__init__()
        self.has_norm = config.norm == "GN"
        for level, channels in zip(LEVELS, inputs, strict=True):
            self.add_module(f"lateral_c{level}", nn.Conv2d(channels, config.channels, 1))
            self.add_module(f"output_p{level}", nn.Conv2d(config.channels, config.channels, 3, padding=1))
            if self.has_norm:
                self.add_module(f"lateral_norm_c{level}", GroupNorm(config.channels))
                self.add_module(f"output_norm_p{level}", GroupNorm(config.channels))
        for layer in self.modules():
            if isinstance(layer, nn.Conv2d):
                fill_normal(layer, std=math.sqrt(1 / fan_in(layer)), cut=True)

    def forward(self, features: Sequence[Tensor], canvas: Canvas) -> list[Tensor]:
        """c2..c5 [B, C_l, h, w] -> p2..p6 [B, C, h, w], zero outside each image's own canvas."""
        merged: Tensor | None = None
        outputs: list[Tensor] = []
        for level, feature in reversed(list(zip(LEVELS, features, strict=True))):
            area = canvas.areas[2**level]
            if adds_in_place(feature) and not self.has_norm:
                # Zeros outside already here: an image's canvas has whole cells at every stride, so that the coarser map
                # has none outside that the finer one has inside.
                merged = self._convolved(f"lateral_c{level}", feature, coarser=merged, mask=area.mask)
                outputs.append(self._convolved(f"output_p{level}", merged, mask=area.mask))
                continue
            lateral = self._normalised(self._convolved(f"lateral_c{level}", feature), f"lateral_norm_c{level}", area)
            merged = lateral if merged is None else sum_of(lateral, None, coarser=merged)
            # Group normalisation has written zeros outside, and so have the coarser maps, which end no later.
            cut = merged if self.has_norm or area.mask is None else cut_outside(merged, area.mask)
            output = self._convolved(f"output_p{level}", cut)
            output = self._normalised(output, f"output_norm_p{level}", area)
            outputs.append(output if self.has_norm else area.cut(output))
        return with_coarsest_map(outputs[::-1])

    def _convolved(
        self, name: str, features: Tensor, *, coarser: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensor:
        layer = cast(nn.Conv2d, getattr(self, name))
        padding = layer.kernel_size[0] // 2
        return conv_sum(features, layer.weight, layer.bias, padding=padding, coarser=coarser, mask=mask)

    def _normalised(self, features: Tensor, name: str, area: Area) -> Tensor:
        return cast(GroupNorm, getattr(self, name))(features, area) if self.has_norm else features
