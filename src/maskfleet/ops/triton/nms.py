"""Greedy suppression in two launches: who strikes whom, as bits; then each row settles its boxes in order.

Shapes: M rows of N boxes by descending score, W = N / 32 words of bits, rounded up.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BITS = 32  # of a word
_STRIKERS = 64  # boxes whose strikes one program finds


def nms_keep(boxes: Tensor, valid: Tensor, threshold: float) -> Tensor:
    """Which boxes [M, N, 4] of the `valid` [M, N] suppression keeps -> [M, N] bool; see `maskfleet.ops.nms`."""
    rows, num_boxes = valid.shape
    keep = torch.empty_like(valid, dtype=torch.bool, memory_format=torch.contiguous_format)
    if keep.numel() == 0:
        return keep
    boxes, valid = boxes.to(torch.float32).contiguous(), valid.contiguous()
    num_words = triton.cdiv(num_boxes, _BITS)
    words = torch.empty(rows, num_boxes, num_words, dtype=torch.int32, device=boxes.device)
    grid = (num_words, triton.cdiv(num_boxes, _STRIKERS), rows)
    # Fused multiply-add would round differently from the CPU and keep other boxes.
    _strike_words[grid](boxes, words, num_boxes, num_words, threshold, _STRIKERS, enable_fp_fusion=False)
    _settle[(rows,)](
        words, valid.view(torch.uint8), keep.view(torch.uint8), num_boxes, num_words, triton.next_power_of_2(num_words)
    )
    return keep


@triton.jit
def _strike_words(boxes, words, num_boxes, num_words, threshold, STRIKERS: tl.constexpr):  # noqa: N803
    """Bit b of words[m, a, w]: whether box `a` strikes the later box 32 w + b. Words before `a` stay unwritten."""
    word, row = tl.program_id(0), tl.program_id(2).to(tl.int64)
    first = tl.program_id(1) * STRIKERS
    if word * 32 + 31 > first:
        a = first + tl.arange(0, STRIKERS)
        b = word * 32 + tl.arange(0, 32)
        ax1, ay1, ax2, ay2 = corners(boxes + row * num_boxes * 4, a, num_boxes)
        bx1, by1, bx2, by2 = corners(boxes + row * num_boxes * 4, b, num_boxes)
        a_area = tl.maximum(ax2 - ax1, 0.0) * tl.maximum(ay2 - ay1, 0.0)
        b_area = tl.maximum(bx2 - bx1, 0.0) * tl.maximum(by2 - by1, 0.0)
        width = tl.maximum(tl.minimum(ax2[:, None], bx2[None, :]) - tl.maximum(ax1[:, None], bx1[None, :]), 0.0)
        height = tl.maximum(tl.minimum(ay2[:, None], by2[None, :]) - tl.maximum(ay1[:, None], by1[None, :]), 0.0)
        overlap = width * height
        union = tl.maximum(a_area[:, None] + b_area[None, :] - overlap, 1e-9)
        strikes = (tl.div_rn(overlap, union) > threshold) & (b[None, :] > a[:, None]) & (b[None, :] < num_boxes)
        bits = tl.sum(strikes.to(tl.int32) << tl.arange(0, 32)[None, :], axis=1)
        tl.store(words + (row * num_boxes + a) * num_words + word, bits, mask=a < num_boxes)


@triton.jit
def corners(boxes, index, num_boxes):
    """x1, y1, x2, y2 of the boxes `index`; 0 beyond the last box."""
    here = index < num_boxes
    x1 = tl.load(boxes + index * 4, mask=here, other=0.0)
    y1 = tl.load(boxes + index * 4 + 1, mask=here, other=0.0)
    x2 = tl.load(boxes + index * 4 + 2, mask=here, other=0.0)
    y2 = tl.load(boxes + index * 4 + 3, mask=here, other=0.0)
    return x1, y1, x2, y2


@triton.jit
def _settle(words, valid, keep, num_boxes, num_words, WORDS: tl.constexpr):  # noqa: N803
    """One row: word by word, boxes settle in order, and those that stay strike all later words at once."""
    row = tl.program_id(0).to(tl.int64)
    words += row * num_boxes * num_words
    lane, column = tl.arange(0, 32), tl.arange(0, WORDS)
    struck = tl.zeros([WORDS], tl.int32)
    for word in range(num_words):
        box = word * 32 + lane
        here = tl.load(valid + row * num_boxes + box, mask=box < num_boxes, other=0).to(tl.int32)
        live = tl.sum(here << lane, axis=0) & ~tl.sum(tl.where(column == word, struck, 0), axis=0)
        for bit in tl.static_range(32):
            striker = word * 32 + bit
            strikes = tl.load(words + striker * num_words + word, mask=striker < num_boxes, other=0)
            live = live & ~tl.where(((live >> bit) & 1) != 0, strikes, 0)
        alive = (live >> lane) & 1
        tl.store(keep + row * num_boxes + box, alive.to(tl.uint8), mask=box < num_boxes)
        later = (column[None, :] > word) & (column[None, :] < num_words) & (alive[:, None] != 0)
        strikes = tl.load(words + box[:, None] * num_words + column[None, :], mask=later, other=0)
        struck = struck | tl.reduce(strikes, 0, _either)


@triton.jit
def _either(a, b):
    return a | b
