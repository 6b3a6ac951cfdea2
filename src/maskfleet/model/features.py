"""Feature maps of a batch, and crops of them.

Shapes: B images, K boxes per image (padded), C channels, h x w one map, r bins per side of a crop.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from maskfleet.ops.roi_align import joint_roi_align, roi_levels

MIN_LEVEL, MAX_LEVEL = 2, 5  # the pyramid levels that boxes are read from


@dataclass(frozen=True, slots=True)
class Features:
    """What the heads read: p2..p6 of a pyramid, or the one map of C4."""

    maps: tuple[Tensor, ...]  # [B, C, h, w] each, finest first, 0 outside each image's own canvas
    extents: tuple[Tensor, ...]  # [B, 2] int64 each, (height, width) of each image's own map
    strides: tuple[int, ...]  # pixels of the image per cell of each map
    sizes: Tensor  # [B, 2] int64, (height, width) of each image in pixels
    learning: bool  # whether batch statistics are taken from this batch


def crop(features: Features, boxes: Tensor, *, resolution: int, aws: bool = False) -> Tensor:
    """Features inside each of `boxes` [B, K, 4] -> [B * K, C, r, r]; `aws`: one sample per bin, no half-pixel."""
    (crops,) = joint_crops(features, [boxes], resolutions=[resolution], aws=aws)
    return crops


def joint_crops(
    features: Features, boxes: Sequence[Tensor], *, resolutions: Sequence[int], aws: bool = False
) -> list[Tensor]:
    """`crop` of several lists of `boxes`, each with its resolution, in one operator on a GPU."""
    num_maps = min(len(features.maps), MAX_LEVEL - MIN_LEVEL + 1)
    crops = joint_roi_align(
        features.maps[:num_maps],
        boxes,
        features.extents[:num_maps],
        strides=features.strides[:num_maps],
        levels=[_map_numbers(of_list, num_maps=num_maps, aws=aws) for of_list in boxes],
        resolutions=resolutions,
        samples=1 if aws else 2,
        half_pixel=not aws,
    )
    return [of_list.flatten(0, 1) for of_list in crops]


def _map_numbers(boxes: Tensor, *, num_maps: int, aws: bool) -> Tensor:
    """Which map each of `boxes` [B, K, 4] is read from -> [B, K] int64, 0 is the first map."""
    if num_maps == 1:
        return torch.zeros_like(boxes[..., 0], dtype=torch.int64)
    return roi_levels(boxes, min_level=MIN_LEVEL, max_level=MAX_LEVEL, aws=aws) - MIN_LEVEL
