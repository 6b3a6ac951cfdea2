"""Where each image ends inside a padded feature map, so that padding does not change any result.

TensorPack runs one image at a time on a canvas of its own. A batch shares one larger canvas, so every layer that mixes
neighbouring pixels must see zeros outside an image's own canvas, and every statistic must exclude the outside.

Shapes: B images on one H x W canvas, h x w feature map, n maps of all images together (n = B, or B * K regions).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

STRIDES = (1, 2, 4, 8, 16, 32, 64)
MIN_SIDE_PX = 16  # one cell of the map at stride 16, the coarsest that c4 has


def canvas_side(side: int, divisor: int) -> int:
    """`side` padded to a multiple of `divisor` that has at least one cell at stride 16."""
    return max(-(-side // divisor) * divisor, MIN_SIDE_PX)


@dataclass(frozen=True, slots=True)
class Area:
    """The valid pixels of a set of feature maps."""

    mask: Tensor | None  # [n, 1, h, w] float32, 0 outside the image's own canvas; None if all pixels are inside
    weight: Tensor | None  # [n, 1, h or 1, w or 1] float32, 0 for pixels that statistics exclude; None includes all
    num_images: int  # B; the n maps are B runs of equal length
    learning: bool  # whether statistics come from this batch (and update the moving average) or are the stored ones

    def cut(self, features: Tensor) -> Tensor:
        """`features` [n, C, h, w] with zeros outside."""
        return features if self.mask is None else features * self.mask.to(features.dtype)


@dataclass(frozen=True, slots=True)
class Canvas:
    """The valid areas of a batch at every stride of the network."""

    extents: dict[int, Tensor]  # stride -> [B, 2] int64, (height, width) of each image's own feature map
    areas: dict[int, Area]  # stride -> the valid pixels of its map


def canvas_of(sizes: Tensor, *, height: int, width: int, divisor: int, learning: bool) -> Canvas:
    """The canvas of images of `sizes` [B, 2] in a batch of `height` x `width` pixels.

    An image alone would be padded to a multiple of `divisor`. Every layer of stride 2 drops an odd last row, except
    the coarsest map, which is every second pixel of the one before.
    """
    extent = (sizes + divisor - 1) // divisor * divisor
    fills = (extent[:, 0] == height) & (extent[:, 1] == width)
    whole = host_value(fills.all()) == 1
    extents, areas = {}, {}
    for stride in STRIDES:
        if stride > 1:
            odd = 1 if stride == STRIDES[-1] else 0
            extent, height, width = (extent + odd) // 2, (height + odd) // 2, (width + odd) // 2
        mask = None if whole else inside(extent, height=height, width=width)[:, None].to(torch.float32)
        extents[stride] = extent
        areas[stride] = Area(mask=mask, weight=mask, num_images=len(sizes), learning=learning)
    return Canvas(extents, areas)


def inside(extent: Tensor, *, height: int, width: int) -> Tensor:
    """True for the cells of a height x width map that lie within each `extent` [B, 2] -> [B, h, w] bool."""
    row = torch.arange(height, device=extent.device)
    column = torch.arange(width, device=extent.device)
    return (row < extent[:, :1])[:, :, None] & (column < extent[:, 1:])[:, None, :]


def host_value(value: Tensor) -> int | None:
    """The number in `value` [] where reading it is free (eager mode on a CPU), else None.

    The only way in which data may control Python inside a step: it lets a CPU skip work on padding. Callers must give
    the same numbers when it returns None, as on a GPU and under torch.compile, where a read would stall the device.
    """
    if torch.compiler.is_compiling() or value.device.type != "cpu":
        return None
    return int(value)


def slots_in_use(valid: Tensor) -> int:
    """How many leading slots of `valid` [B, K] contain all True entries: K unless `host_value` can tell; never 0."""
    num_slots = valid.shape[1]
    last = (valid * torch.arange(1, num_slots + 1, device=valid.device)).amax() if valid.numel() else valid.sum()
    known = host_value(last)
    return num_slots if known is None else max(known, min(1, num_slots))
