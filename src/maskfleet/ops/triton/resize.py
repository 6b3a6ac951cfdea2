"""Images resized, cropped and flipped onto their canvas in one pass: each pixel of the canvas is written once.

Shapes: B images, h0 x w0 the padded source, H x W the canvas.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_COLUMNS = 256  # of one program, in one row


def resize(
    pixels: Tensor,
    sizes: Tensor,
    source: Tensor,
    resized: Tensor,
    offset: Tensor,
    flip: Tensor,
    canvas: tuple[int, int],
) -> Tensor:
    """Canvases uint8 [B, 3, H, W] of source `pixels` uint8 [B, 3, h0, w0], both channels last.

    `maskfleet.data.pipeline.device_resize` describes the rule; `flip` is [B] bool, the others [B, 2] int64.
    """
    height, width = canvas
    pixels = pixels.contiguous(memory_format=torch.channels_last)
    outputs = torch.empty(len(pixels), height, width, 3, dtype=torch.uint8, device=pixels.device)
    geometry = torch.cat([sizes, source, resized, offset, flip[:, None].to(torch.int64)], dim=1)  # [B, 9]
    if outputs.numel() > 0:
        grid = (triton.cdiv(width, _COLUMNS), height, len(pixels))
        _resize[grid](
            pixels, geometry, outputs, *pixels.shape[2:], height, width, COLUMNS=_COLUMNS, enable_fp_fusion=False
        )
    return outputs.permute(0, 3, 1, 2)


@triton.jit(do_not_specialize=["rows", "columns", "height", "width"])  # one compilation for all batches
def _resize(pixels, geometry, outputs, rows, columns, height, width, COLUMNS: tl.constexpr):  # noqa: N803
    """One row of one canvas, COLUMNS pixels of it."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    row, image = tl.program_id(1), tl.program_id(2)
    of_image = geometry + image * 9
    visible_rows, visible_columns = tl.load(of_image), tl.load(of_image + 1)
    is_visible = (row < visible_rows) & (column < visible_columns)
    flipped = tl.load(of_image + 8) != 0
    moved_column = tl.where(flipped, visible_columns - 1 - column, column.to(tl.int64))
    top, bottom, down = _taps(row + tl.load(of_image + 6), tl.load(of_image + 2), tl.load(of_image + 4))
    left, right, across = _taps(moved_column + tl.load(of_image + 7), tl.load(of_image + 3), tl.load(of_image + 5))
    first = pixels + image.to(tl.int64) * rows * columns * 3
    target = outputs + ((image.to(tl.int64) * height + row) * width + column) * 3
    for channel in tl.static_range(3):
        upper = _between(first + (top * columns) * 3 + channel, left, right, across, is_visible)
        lower = _between(first + (bottom * columns) * 3 + channel, left, right, across, is_visible)
        value = tl.floor(_lerp(upper, lower, down) + 0.5)
        value = tl.where(is_visible, value, 0.0).to(tl.uint8)
        tl.store(target + channel, value, mask=column < width)


@triton.jit
def _taps(position, source, resized):
    """The two source pixels that a target pixel lies between, and the weight of the second."""
    centre = (position.to(tl.float64) + 0.5) * (source.to(tl.float64) / resized.to(tl.float64)) - 0.5
    last = source - 1
    centre = tl.minimum(tl.maximum(centre, 0.0), last.to(tl.float64))
    first = tl.floor(centre)
    return first.to(tl.int64), tl.minimum(first.to(tl.int64) + 1, last), (centre - first).to(tl.float32)


@triton.jit
def _between(line, left, right, across, is_visible):
    """Pixels of a source line, interpolated between `left` and `right`."""
    near = tl.load(line + left * 3, mask=is_visible, other=0).to(tl.float32)
    far = tl.load(line + right * 3, mask=is_visible, other=0).to(tl.float32)
    return _lerp(near, far, across)


@triton.jit
def _lerp(first, second, weight):
    """As torch.lerp computes it, exact at both ends."""
    step = second - first
    return tl.where(weight < 0.5, first + weight * step, second - step * (1.0 - weight))
