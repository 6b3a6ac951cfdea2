"""Which ground truth each anchor fits best, without a table of all pairs.

`maskfleet.ops.matching` describes the rule and why the overlaps are computed in double precision.

Shapes: B images, N anchors, G ground truths (padded), n blocks of anchors.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"

from __future__ import annotations

import struct

import torch
import triton
import triton.language as tl
from torch import Tensor

from maskfleet.ops.triton.nms import corners

_ANCHORS = 512  # of one program
_SIZES = ["num_truths", "num_blocks"]  # which change from batch to batch: one compilation for all


def rpn_labels(
    anchors: Tensor, boxes: Tensor, valid: Tensor, sizes: Tensor, positive_iou: float, negative_iou: float
) -> tuple[Tensor, Tensor]:
    """Labels [B, N] int8 and matches [B, N] int64 of `anchors` [N, 4] to `boxes` [B, G, 4], valid [B, G].

    Crowds aside, as `maskfleet.ops.matching.rpn_labels` has them; `sizes` [B, 2] int64 is (height, width).
    """
    batch, num_truths = valid.shape
    num_anchors = anchors.shape[0]
    labels = torch.empty(batch, num_anchors, dtype=torch.int8, device=anchors.device)
    matched = torch.empty(batch, num_anchors, dtype=torch.int64, device=anchors.device)
    if labels.numel() == 0:
        return labels, matched
    anchors, boxes, valid, sizes = anchors.contiguous(), boxes.contiguous(), valid.contiguous(), sizes.contiguous()
    num_blocks = triton.cdiv(num_anchors, _ANCHORS)
    best = torch.empty(batch, num_truths, num_blocks, dtype=torch.float64, device=anchors.device)
    shapes = (num_anchors, num_truths, num_blocks)
    grid = (num_blocks, batch)
    _match[grid](
        anchors, boxes, valid.view(torch.uint8), sizes, labels, matched, best, *shapes,
        _bits(positive_iou), _bits(negative_iou), ANCHORS=_ANCHORS, enable_fp_fusion=False,
    )  # fmt: skip
    if num_truths > 0:
        best_of_truth = best.amax(dim=2)  # [B, G]
        _raise_best[grid](
            anchors, boxes, valid.view(torch.uint8), labels, best, best_of_truth, *shapes,
            ANCHORS=_ANCHORS, enable_fp_fusion=False,
        )  # fmt: skip
    _hide_outside[grid](anchors, sizes, labels, num_anchors, ANCHORS=_ANCHORS)
    return labels, matched


def _bits(value: float) -> int:
    """The bits of a double: a kernel would take a float argument in single precision."""
    return int(struct.unpack("<q", struct.pack("<d", value))[0])


@triton.jit(do_not_specialize=_SIZES)
def _match(
    anchors, boxes, valid, sizes, labels, matched, best, num_anchors, num_truths, num_blocks,
    positive_bits, negative_bits, ANCHORS: tl.constexpr,  # noqa: N803
):  # fmt: skip
    """Label by overlap alone, -1 in between; and each truth's best overlap with this block's anchors in the image."""
    block, image = tl.program_id(0), tl.program_id(1)
    anchor = block * ANCHORS + tl.arange(0, ANCHORS)
    x1, y1, x2, y2 = corners(anchors, anchor, num_anchors)
    inside = _is_inside(x1, y1, x2, y2, sizes, image) & (anchor < num_anchors)
    best_iou = tl.full([ANCHORS], -1.0, tl.float64)
    truth_of = tl.zeros([ANCHORS], tl.int64)
    for truth in range(num_truths):
        best_here = tl.full([], -1.0, tl.float64)
        if tl.load(valid + image * num_truths + truth) != 0:
            iou = _iou(x1, y1, x2, y2, boxes + (image * num_truths + truth) * 4)
            better = iou > best_iou  # the first of equals stays
            best_iou = tl.where(better, iou, best_iou)
            truth_of = tl.where(better, truth, truth_of)
            best_here = tl.max(tl.where(inside, iou, -1.0), axis=0)
        tl.store(best + (image * num_truths + truth) * num_blocks + block, best_here)
    positive_iou = (tl.full([], 0, tl.int64) + positive_bits).to(tl.float64, bitcast=True)
    negative_iou = (tl.full([], 0, tl.int64) + negative_bits).to(tl.float64, bitcast=True)
    label = tl.where(best_iou < negative_iou, 0, tl.where(best_iou >= positive_iou, 1, -1))
    place = image.to(tl.int64) * num_anchors + anchor
    tl.store(labels + place, label.to(tl.int8), mask=anchor < num_anchors)
    tl.store(matched + place, truth_of, mask=anchor < num_anchors)


@triton.jit(do_not_specialize=_SIZES)
def _raise_best(
    anchors, boxes, valid, labels, best, best_of_truth, num_anchors, num_truths, num_blocks,
    ANCHORS: tl.constexpr,  # noqa: N803
):  # fmt: skip
    """Make the anchors that are the best of a truth positive, unless they are background."""
    block, image = tl.program_id(0), tl.program_id(1)
    anchor = block * ANCHORS + tl.arange(0, ANCHORS)
    for truth in range(num_truths):
        number = image * num_truths + truth
        wanted = tl.load(best_of_truth + number)
        # Anchors outside the image may attain it too, but stay unlabelled: the block's best inside decides.
        if (tl.load(valid + number) != 0) & (tl.load(best + number * num_blocks + block) == wanted):
            x1, y1, x2, y2 = corners(anchors, anchor, num_anchors)
            iou = _iou(x1, y1, x2, y2, boxes + number * 4)
            place = labels + image.to(tl.int64) * num_anchors + anchor
            label = tl.load(place, mask=anchor < num_anchors, other=0)
            raised = (label == -1) & (iou == wanted) & (anchor < num_anchors)
            tl.store(place, tl.full([ANCHORS], 1, tl.int8), mask=raised)


@triton.jit
def _hide_outside(anchors, sizes, labels, num_anchors, ANCHORS: tl.constexpr):  # noqa: N803
    image = tl.program_id(1)
    anchor = tl.program_id(0) * ANCHORS + tl.arange(0, ANCHORS)
    x1, y1, x2, y2 = corners(anchors, anchor, num_anchors)
    outside = ~_is_inside(x1, y1, x2, y2, sizes, image) & (anchor < num_anchors)
    place = labels + image.to(tl.int64) * num_anchors + anchor
    tl.store(place, tl.full([ANCHORS], -1, tl.int8), mask=outside)


@triton.jit
def _is_inside(x1, y1, x2, y2, sizes, image):
    height = tl.load(sizes + image * 2).to(tl.float32)
    width = tl.load(sizes + image * 2 + 1).to(tl.float32)
    return (x1 >= 0) & (y1 >= 0) & (x2 <= width) & (y2 <= height)


@triton.jit
def _iou(x1, y1, x2, y2, box):
    """IoU of anchors with one box; sides rounded to float32, their products exact in float64."""
    left, top, right, bottom = tl.load(box), tl.load(box + 1), tl.load(box + 2), tl.load(box + 3)
    overlap = _product(tl.minimum(x2, right) - tl.maximum(x1, left), tl.minimum(y2, bottom) - tl.maximum(y1, top))
    both = _product(x2 - x1, y2 - y1) + _product(right - left, bottom - top)
    return overlap / tl.maximum(both - overlap, tl.full([], 1e-9, tl.float64))


@triton.jit
def _product(width, height):
    return tl.maximum(width, 0.0).to(tl.float64) * tl.maximum(height, 0.0).to(tl.float64)
