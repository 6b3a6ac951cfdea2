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
from maskfleet.ops.conv import upsampled

LEVELS = (2, 3, 4, 5)  # level l has stride 2**l


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
            lateral = self._normalised(self._conv(f"lateral_c{level}")(feature), f"lateral_norm_c{level}", area)
            merged = lateral if merged is None else lateral + upsampled(merged)
            output = self._conv(f"output_p{level}")(area.cut(merged))
            outputs.append(area.cut(self._normalised(output, f"output_norm_p{level}", area)))
        outputs.reverse()
        return [*outputs, outputs[-1][:, :, ::2, ::2]]

    def _conv(self, name: str) -> nn.Conv2d:
        return cast(nn.Conv2d, getattr(self, name))

    def _normalised(self, features: Tensor, name: str, area: Area) -> Tensor:
        return cast(GroupNorm, getattr(self, name))(features, area) if self.has_norm else features
