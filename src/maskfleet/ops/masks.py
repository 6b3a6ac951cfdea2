"""Mask targets from outlines, on the device, as if the whole bitmap had been drawn and then cropped.

TensorPack draws each polygon with pycocotools on the image's canvas and samples that 0/1 bitmap bilinearly in the box.
Here only the pixels that are sampled are decided, straight from the edges. pycocotools' rule, restated: vertices are
rounded to fifths of a pixel; a side is walked one fifth at a time along its longer axis; wherever the walk steps
between fifths 5 x + 2 and 5 x + 3 it toggles column x from row ceil((v - 2) / 5) down, v being the upper of the two
steps' fifths. A pixel is inside a part if an odd number of toggles lie at or above it.

Shapes: B images, F boxes per image (padded), N = B F or a chunk of them, E edges, M edges of one instance (padded),
P parts, r target cells per side, J = 2 r pixel rows, or columns, that a box samples.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from maskfleet.batch import Outlines
from maskfleet.ops.triton import kernels_for

FIFTHS = 5  # pycocotools' sub-pixels per pixel
CANVAS_MULTIPLE = 8  # TensorPack packs mask bits in bytes
PAIRS_PER_CHUNK_CPU = 1 << 18  # (edge, column) pairs at once: keeps float64 temporaries in cache
PAIRS_PER_CHUNK_GPU = 1 << 23  # keeps them under about a gigabyte


@torch.no_grad()
def mask_targets(
    outlines: Outlines, sizes: Tensor, boxes: Tensor, matched: Tensor, valid: Tensor, *, resolution: int
) -> Tensor:
    """Soft mask targets of `boxes` [B, F, 4], 0 where not `valid` [B, F] -> [B, F, resolution, resolution] float32.

    `matched` [B, F] int64 is each box's instance, `sizes` [B, 2] each image's (height, width). Samples outside the
    image's canvas, its size rounded up to a multiple of 8, are 0.
    """
    batch, num_boxes = matched.shape
    image = torch.arange(batch, device=boxes.device)[:, None].expand(-1, num_boxes)
    canvas = (sizes + CANVAS_MULTIPLE - 1) // CANVAS_MULTIPLE * CANVAS_MULTIPLE
    extent = canvas[:, None].expand(-1, num_boxes, -1).reshape(-1, 2)  # [N, 2]
    y = _axis_samples(boxes[..., 1].reshape(-1), boxes[..., 3].reshape(-1), extent[:, 0], resolution)
    x = _axis_samples(boxes[..., 0].reshape(-1), boxes[..., 2].reshape(-1), extent[:, 1], resolution)
    start = outlines.start.gather(1, matched).reshape(-1) + image.reshape(-1) * outlines.edges.shape[1]
    count = (outlines.count.gather(1, matched) * valid).reshape(-1)
    walk = _walk(outlines.edges.reshape(-1, 4))
    if kernels_for(boxes):
        drawn: Tensor = _draw_by_kernel(
            list(walk), outlines.part.reshape(-1), start, count, list(y), list(x), outlines.max_parts
        )
        return drawn.view(batch, num_boxes, resolution, resolution)
    part = outlines.part.reshape(-1).to(torch.int64)

    budget = PAIRS_PER_CHUNK_CPU if boxes.device.type == "cpu" else PAIRS_PER_CHUNK_GPU
    chunk = max(1, budget // (outlines.max_count * 2 * resolution))
    nearby = torch.arange(outlines.max_count, device=boxes.device)
    pieces = []
    for first in range(0, batch * num_boxes, chunk):
        here = slice(first, first + chunk)
        live = nearby < count[here, None]  # [N, M]
        edge = torch.where(live, start[here, None] + nearby, 0)
        bins = _toggle_counts(
            walk.at(edge), live, part[edge], x.pixels[here], y.pixels[here], num_parts=outlines.max_parts
        )
        inside = _inside(bins, y.pixels[here])  # [N, J, J]
        pieces.append(_blend(inside, y.at(here), x.at(here)))
    if not pieces:
        return boxes.new_zeros(batch, num_boxes, resolution, resolution, dtype=torch.float32)
    return torch.cat(pieces).view(batch, num_boxes, resolution, resolution)


class _Samples(NamedTuple):
    """Where boxes are sampled along one axis."""

    pixels: Tensor  # [N, J] int64: the lower neighbours of the r samples, then the upper ones
    fraction: Tensor  # [N, r] float32, of the way from the lower to the upper neighbour
    on_canvas: Tensor  # [N, r] bool

    def at(self, here: slice) -> _Samples:
        return _Samples(*(tensor[here] for tensor in self))


class _Walk(NamedTuple):
    """Edges in fifths, turned so that the walk goes up its longer axis; float64, as pycocotools' doubles."""

    flat: Tensor  # bool, walked along x
    x: Tensor  # where the walk starts
    y: Tensor
    low: Tensor  # the range of x it covers
    high: Tensor
    slope: Tensor  # of the shorter axis

    def at(self, edge: Tensor) -> _Walk:
        return _Walk(*(tensor[edge] for tensor in self))


@torch.library.custom_op(
    "maskfleet::draw_masks",
    mutates_args=(),
    device_types="cuda",
    schema="(Tensor[] walk, Tensor part, Tensor start, Tensor count, Tensor[] y, Tensor[] x, int num_parts) -> Tensor",
)
def _draw_by_kernel(*inputs: Any) -> Tensor:
    from maskfleet.ops.triton import masks as kernels

    return kernels.mask_targets(*inputs)


@_draw_by_kernel.register_fake
def _(walk: list[Tensor], part: Tensor, *inputs: Any) -> Tensor:
    _, _, (_, fraction, _), *_ = inputs
    num_boxes, resolution = fraction.shape
    return part.new_empty(num_boxes, resolution, resolution, dtype=torch.float32)


def _axis_samples(start: Tensor, end: Tensor, extent: Tensor, resolution: int) -> _Samples:
    """Samples at start + (i + 0.5) / resolution * (end - start) - 0.5, i = 0..r-1, in pixels of `extent` [N]."""
    last = (extent - 1).to(start.dtype)
    # Grouped as TensorFlow's optimised training graph does, to fractions of the canvas and back, as its
    # crop_and_resize takes them: the same roundings give the same bits.
    spacing = (end - start) * (1.0 / resolution)
    near = (start + (spacing / 2 - 0.5)) / last
    far = near + spacing * (resolution - 1) / last
    step = (far - near) * last / max(resolution - 1, 1)
    offset = torch.arange(resolution, device=start.device, dtype=start.dtype)
    position = (near * last)[:, None] + offset * step[:, None]  # [N, r]
    on_canvas = (position >= 0) & (position <= last[:, None])
    position = torch.where(on_canvas, position, 0.0)
    lower = position.floor()
    pixels = torch.cat([lower, lower + 1], dim=1).to(torch.int64)
    return _Samples(pixels=pixels, fraction=position - lower, on_canvas=on_canvas)


def _walk(edges: Tensor) -> _Walk:
    """How pycocotools walks `edges` [E, 4] -> [E] each."""
    # Truncated, not floored: that is what a C cast does to a negative number.
    x1, y1, x2, y2 = (edges.to(torch.float64) * FIFTHS + 0.5).trunc().unbind(-1)
    width, height = (x2 - x1).abs(), (y2 - y1).abs()
    flat = width >= height
    turn = torch.where(flat, x1 > x2, y1 > y2)
    rise = torch.where(flat, y2 - y1, x2 - x1) * torch.where(turn, -1.0, 1.0)
    return _Walk(
        flat=flat,
        x=torch.where(turn, x2, x1),
        y=torch.where(turn, y2, y1),
        low=torch.minimum(x1, x2),
        high=torch.maximum(x1, x2),
        slope=rise / torch.maximum(width, height).clamp(min=1),
    )


def _toggle_counts(walk: _Walk, live: Tensor, part: Tensor, columns: Tensor, rows: Tensor, *, num_parts: int) -> Tensor:
    """How many toggles of each part fall before each sorted row, in each column -> [N, P, J, J + 1] uint8, modulo 256.

    `walk`, `live` and `part` are [N, M]; `columns` and `rows` [N, J].
    """
    num, taps = columns.shape
    toggle, crossed = _toggle_rows(walk, live, columns)  # [N, M, J]
    position = torch.searchsorted(rows.sort(dim=1).values, toggle.reshape(num, -1)).view(toggle.shape)
    box = torch.arange(num, device=columns.device)[:, None]
    column = torch.arange(taps, device=columns.device)
    line = ((box * num_parts + part) * taps)[..., None] + column  # [N, M, J]
    bins = torch.zeros(num * num_parts * taps * (taps + 1), device=columns.device, dtype=torch.uint8)
    # Only the parity counts, and it survives the wrap-around of a byte.
    bins = bins.scatter_add(0, (line * (taps + 1) + position).reshape(-1), crossed.to(torch.uint8).reshape(-1))
    return bins.view(num, num_parts, taps, taps + 1)


def _toggle_rows(walk: _Walk, live: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
    """Row from which each edge toggles each column, and whether it does -> ([N, M, J] int64, [N, M, J] bool)."""
    border = columns[:, None, :].to(torch.float64) * FIFTHS + 2  # fifths left of the toggle; one more is right of it
    crossed = live[..., None] & (walk.low[..., None] <= border) & (walk.high[..., None] > border)
    slope, flat = walk.slope[..., None], walk.flat[..., None]
    ahead = border - walk.x[..., None]
    # Along x, the upper of the two steps at the border is the second one where the walk goes up the image.
    flat_step = ahead + (slope < 0)
    # Along y, the last step before the border. It may be one too far where the border is met exactly, to be settled
    # below by the same doubles that pycocotools compares.
    steep_step = ((ahead + 0.5) / torch.where(slope == 0, 1.0, slope) + 1e-6).floor()
    step = torch.where(flat, flat_step, steep_step)
    across = torch.where(walk.flat, walk.y, walk.x)[..., None] + slope * step + 0.5
    before = (across < border + 1) == (slope > 0)
    fifths = torch.where(flat, across.trunc(), walk.y[..., None] + step - (~before).to(step.dtype))
    toggle = ((fifths + 2) / FIFTHS).floor().clamp(min=0)
    return torch.where(crossed, toggle, 0.0).to(torch.int64), crossed


def _inside(bins: Tensor, rows: Tensor) -> Tensor:
    """Whether each sampled pixel is in any part: `bins` [N, P, J, J + 1], `rows` [N, J] -> [N, J columns, J rows]."""
    taps = rows.shape[1]
    odd = bins[..., :taps].cumsum(dim=-1, dtype=torch.uint8) & 1  # [N, P, J, J], rows sorted
    rank = torch.searchsorted(rows.sort(dim=1).values, rows)
    return odd.amax(dim=1).gather(2, rank[:, None, :].expand(-1, taps, -1))


def _blend(inside: Tensor, y: _Samples, x: _Samples) -> Tensor:
    """Bilinear samples of `inside` [N, J columns, J rows] -> [N, r, r] float32."""
    resolution = y.fraction.shape[1]
    corners = inside.transpose(1, 2).to(torch.float32)  # [N, J rows, J columns]
    left, right = corners[..., :resolution], corners[..., resolution:]
    rows = left + (right - left) * x.fraction[:, None, :].to(torch.float32)
    top, bottom = rows[:, :resolution], rows[:, resolution:]
    value = top + (bottom - top) * y.fraction[:, :, None].to(torch.float32)
    return torch.where(y.on_canvas[:, :, None] & x.on_canvas[:, None, :], value, 0.0)
