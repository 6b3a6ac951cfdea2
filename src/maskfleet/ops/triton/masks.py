"""Mask targets from outlines: one program per box, which walks only the edges of its own instance.

`maskfleet.ops.masks` describes the rule; its double precision arithmetic is repeated here operation by operation.

Shapes: N boxes of all images, E edges of all images, r target cells per side, J = 2 r pixel rows, or columns, of a box.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

_PARTS = 32  # told apart in one pass: the bits of a word


def mask_targets(
    walk: Sequence[Tensor],
    part: Tensor,
    start: Tensor,
    count: Tensor,
    y: Sequence[Tensor],
    x: Sequence[Tensor],
    num_parts: int,
) -> Tensor:
    """Targets [N, r, r] float32 of boxes whose instances have the edges start..start + count [N] of all [E].

    `walk` is flat (bool), x, y, low, high and slope (float64) of every edge, `part` [E] its part, below `num_parts`.
    `y` and `x` are the pixels [N, J] int64, fraction [N, r] float32 and on_canvas [N, r] bool of the samples.
    """
    y_pixels, y_fraction, y_on_canvas = (tensor.contiguous() for tensor in y)
    x_pixels, x_fraction, x_on_canvas = (tensor.contiguous() for tensor in x)
    num_boxes, resolution = y_fraction.shape
    targets = torch.empty(num_boxes, resolution, resolution, dtype=torch.float32, device=part.device)
    if targets.numel() == 0:
        return targets
    flat, *numbers = (tensor.contiguous() for tensor in walk)
    _draw[(num_boxes,)](
        flat.view(torch.uint8),
        *numbers,
        part.contiguous(),
        start.contiguous(),
        count.contiguous(),
        y_pixels,
        x_pixels,
        y_fraction,
        x_fraction,
        y_on_canvas.view(torch.uint8),
        x_on_canvas.view(torch.uint8),
        targets,
        resolution,
        triton.cdiv(num_parts, _PARTS),
        SIDE=triton.next_power_of_2(resolution),
        enable_fp_fusion=False,
    )
    return targets


@triton.jit
def _draw(
    flat, walk_x, walk_y, low, high, slope, part, starts, counts, y_pixels, x_pixels,
    y_fraction, x_fraction, y_on_canvas, x_on_canvas, targets, resolution, part_groups, SIDE: tl.constexpr,  # noqa: N803
):  # fmt: skip
    """One box. A word per pixel holds the parity of each part: whether an odd number of its toggles lie at or above."""
    box = tl.program_id(0)
    side = tl.arange(0, SIDE)
    here = side < resolution
    taps = box * 2 * resolution + side
    top = tl.load(y_pixels + taps, mask=here, other=0)
    bottom = tl.load(y_pixels + taps + resolution, mask=here, other=0)
    left = tl.load(x_pixels + taps, mask=here, other=0)
    right = tl.load(x_pixels + taps + resolution, mask=here, other=0)
    # Fifths of a pixel left of where a column toggles.
    left_border, right_border = left.to(tl.float64) * 5 + 2, right.to(tl.float64) * 5 + 2
    reach = tl.max(tl.where(here, right_border, -1.0), axis=0)
    start = tl.load(starts + box)
    count = tl.load(counts + box)

    top_left, top_right = tl.zeros([SIDE, SIDE], tl.int1), tl.zeros([SIDE, SIDE], tl.int1)
    bottom_left, bottom_right = tl.zeros([SIDE, SIDE], tl.int1), tl.zeros([SIDE, SIDE], tl.int1)
    for group in range(part_groups):
        odd_tl, odd_tr = tl.zeros([SIDE, SIDE], tl.int32), tl.zeros([SIDE, SIDE], tl.int32)
        odd_bl, odd_br = tl.zeros([SIDE, SIDE], tl.int32), tl.zeros([SIDE, SIDE], tl.int32)
        for edge in range(start, start + count):
            edge_low, edge_high = tl.load(low + edge), tl.load(high + edge)
            number = tl.load(part + edge).to(tl.int32)
            if (edge_low <= reach) & (edge_high > edge_low) & (number // 32 == group):
                bit = 1 << (number % 32)
                is_flat, edge_slope = tl.load(flat + edge) != 0, tl.load(slope + edge)
                edge_x, edge_y = tl.load(walk_x + edge), tl.load(walk_y + edge)
                row, crossed = _toggle(left_border, edge_low, edge_high, edge_x, edge_y, edge_slope, is_flat)
                odd_tl ^= tl.where(crossed[None, :] & (row[None, :] <= top[:, None]), bit, 0)
                odd_bl ^= tl.where(crossed[None, :] & (row[None, :] <= bottom[:, None]), bit, 0)
                row, crossed = _toggle(right_border, edge_low, edge_high, edge_x, edge_y, edge_slope, is_flat)
                odd_tr ^= tl.where(crossed[None, :] & (row[None, :] <= top[:, None]), bit, 0)
                odd_br ^= tl.where(crossed[None, :] & (row[None, :] <= bottom[:, None]), bit, 0)
        top_left, top_right = top_left | (odd_tl != 0), top_right | (odd_tr != 0)
        bottom_left, bottom_right = bottom_left | (odd_bl != 0), bottom_right | (odd_br != 0)

    y_part = tl.load(y_fraction + box * resolution + side, mask=here, other=0.0)[:, None]
    x_part = tl.load(x_fraction + box * resolution + side, mask=here, other=0.0)[None, :]
    above = _between(top_left, top_right, x_part)
    below = _between(bottom_left, bottom_right, x_part)
    value = above + (below - above) * y_part
    y_counts = tl.load(y_on_canvas + box * resolution + side, mask=here, other=0) != 0
    x_counts = tl.load(x_on_canvas + box * resolution + side, mask=here, other=0) != 0
    value = tl.where(y_counts[:, None] & x_counts[None, :], value, 0.0)
    place = (box * resolution + side[:, None]) * resolution + side[None, :]
    tl.store(targets + place, value, mask=here[:, None] & here[None, :])


@triton.jit
def _toggle(border, low, high, x, y, slope, is_flat):
    """Row from which an edge toggles each column, and whether it does."""
    crossed = (low <= border) & (high > border)
    ahead = border - x
    flat_step = ahead + tl.where(slope < 0, 1.0, 0.0)
    steep_step = tl.floor((ahead + 0.5) / tl.where(slope == 0, 1.0, slope) + _double(1e-6))
    step = tl.where(is_flat, flat_step, steep_step)
    across = tl.where(is_flat, y, x) + slope * step + 0.5
    before = (across < border + 1) == (slope > 0)
    fifths = tl.where(is_flat, _truncated(across), y + step - tl.where(before, 0.0, 1.0))
    row = tl.maximum(tl.floor((fifths + 2) / 5), 0.0)
    return tl.where(crossed, row, 0.0).to(tl.int64), crossed


@triton.jit
def _double(value: tl.constexpr):
    return tl.full([], value, tl.float64)


@triton.jit
def _truncated(value):
    return tl.where(value < 0, tl.ceil(value), tl.floor(value))


@triton.jit
def _between(left, right, part):
    left, right = left.to(tl.float32), right.to(tl.float32)
    return left + (right - left) * part
