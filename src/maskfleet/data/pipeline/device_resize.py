"""The resize, crop and flip of `geometry.place_image` on the GPU, so that a worker only decodes.

Shapes: B images, h0 x w0 the padded source, H x W the canvas.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from maskfleet.batch import map_tensors
from maskfleet.ops.triton import kernels_for


@dataclass(frozen=True, slots=True)
class BatchGeometry:
    """The geometry of each image of a batch (see `geometry.Geometry`) and their common canvas."""

    source: Tensor  # [B, 2] int64 (height, width)
    resized: Tensor  # [B, 2] int64
    offset: Tensor  # [B, 2] int64 (y, x)
    flip: Tensor  # [B] bool
    canvas: tuple[int, int]

    def to(self, device: torch.device | str) -> BatchGeometry:
        return map_tensors(self, lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> BatchGeometry:
        return map_tensors(self, lambda tensor: tensor.pin_memory())


def resize_on_device(pixels: Tensor, sizes: Tensor, geometry: BatchGeometry) -> Tensor:
    """Source `pixels` uint8 [B, 3, h0, w0] -> canvases uint8 [B, 3, H, W], each image of `sizes` [B, 2] top left.

    Samples as OpenCV's INTER_LINEAR does: centres at half pixels, the border repeated. OpenCV interpolates with
    11-bit weights, so a value may differ by one.
    """
    if kernels_for(pixels):
        from maskfleet.ops.triton.resize import resize

        moves = (geometry.source, geometry.resized, geometry.offset, geometry.flip)
        # Triton launches kernels on the current GPU, which is another one if a program has models on several.
        with torch.cuda.device(pixels.device):
            return resize(pixels, sizes, *moves, canvas=geometry.canvas)
    height, width = geometry.canvas
    rows = torch.arange(height, device=pixels.device)[None]  # [1, H]
    columns = torch.arange(width, device=pixels.device)[None]  # [1, W]
    visible = (rows < sizes[:, :1])[:, :, None] & (columns < sizes[:, 1:])[:, None, :]  # [B, H, W]
    columns = torch.where(geometry.flip[:, None], sizes[:, 1:] - 1 - columns, columns)  # [B, W]
    top, bottom, down = _taps(rows + geometry.offset[:, :1], geometry.source[:, :1], geometry.resized[:, :1])
    left, right, across = _taps(columns + geometry.offset[:, 1:], geometry.source[:, 1:], geometry.resized[:, 1:])
    image = torch.arange(len(pixels), device=pixels.device)[:, None]
    source = pixels.permute(0, 2, 3, 1)  # [B, h0, w0, 3], the memory layout of the worker
    # One axis after the other: half the time of both at once.
    near, far = source[image, :, left].float(), source[image, :, right].float()  # [B, W, h0, 3]
    wide = torch.lerp(near, far, across[:, :, None, None]).transpose(1, 2).contiguous()  # [B, h0, W, 3]
    moved = torch.lerp(wide[image, top], wide[image, bottom], down[:, :, None, None])  # [B, H, W, 3]
    moved = torch.where(visible[..., None], (moved + 0.5).floor(), 0.0).to(torch.uint8)
    return moved.permute(0, 3, 1, 2)


def _taps(position: Tensor, source: Tensor, resized: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The two source pixels that each target pixel lies between, and the weight of the second -> three [B, n]."""
    centre = (position + 0.5) * (source.double() / resized) - 0.5
    last = (source - 1).double()
    centre = torch.minimum(centre.clamp(min=0), last)
    first = centre.floor()
    return first.long(), torch.minimum(first + 1, last).long(), (centre - first).float()
