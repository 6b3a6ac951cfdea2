"""Backbones: modules that turn pixels into feature maps. `model/build.py` chooses one by `model.backbone.kind`."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from maskfleet.model.canvas import Area, Canvas

NUM_STAGES = 4


class RegionStage(Protocol):
    """A stage of a backbone; C4 runs one on every region. An nn.Module."""

    channels: int  # of its output

    def __call__(self, features: Tensor, before: Area, after: Area) -> Tensor:
        """Features [n, C, h, w] in area `before` -> [n, channels, h / 2, w / 2] in area `after`."""


class Backbone(Protocol):
    """What the detector needs from a backbone: an nn.Module of four stages, or of the first three for C4."""

    channels: tuple[int, ...]  # of the map of each stage
    strides: tuple[int, ...]  # of the map of each stage, in pixels: 4, 8, 16, (32)

    def __call__(self, pixels: Tensor, canvas: Canvas) -> list[Tensor]:
        """The map [B, C, h, w] of each stage for normalised `pixels` [B, 3, H, W]."""

    @property
    def last_stage(self) -> RegionStage:
        """The stage of the last map; its weights are most of the backbone's."""

    def early_maps(self, pixels: Tensor, canvas: Canvas) -> list[Tensor]:
        """The maps of all stages but the last one."""

    def region_stage(self) -> RegionStage:
        """A new module: the stage after the last one here."""
