"""Which ground truth an anchor or a region of interest belongs to.

Shapes: B images, N anchors, P regions (padded), G ground truths (padded), C crowd regions (padded).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from maskfleet.ops.boxes import pairwise_iou
from maskfleet.ops.triton import kernels_for

_GTS_AT_ONCE = 8  # ground truths that rpn_labels compares with all anchors together: bounds its memory, fits a cache


def rpn_labels(
    anchors: Tensor,
    boxes: Tensor,
    valid: Tensor,
    sizes: Tensor,
    crowd_boxes: Tensor,
    crowd_valid: Tensor,
    *,
    positive_iou: float,
    negative_iou: float,
    crowd_overlap: float,
) -> tuple[Tensor, Tensor]:
    """Labels [B, N] int8 of `anchors` [N, 4] (1 object, 0 background, -1 neither) and the gt [B, N] int64 of each.

    `boxes` [B, G, 4], `valid` [B, G], `crowd_boxes` [B, C, 4], `crowd_valid` [B, C]; `sizes` [B, 2] is (height, width)
    without padding. Anchors that leave the image are -1. Of the others, those with the highest IoU of some gt (all, if
    several tie) and those with an IoU of at least `positive_iou` are 1; then those below `negative_iou` with every gt
    are 0, even the best of a gt; last, those of which more than `crowd_overlap` lies in a crowd are -1.
    """
    if kernels_for(anchors):
        labels, matched = _labels_by_kernel(anchors, boxes, valid, sizes, positive_iou, negative_iou)
    else:
        labels, matched = _labels(anchors, boxes, valid, sizes, positive_iou=positive_iou, negative_iou=negative_iou)
    if crowd_boxes.shape[1] > 0 and crowd_overlap < 1:  # no share of an anchor exceeds 1
        labels = torch.where(_in_crowd(anchors, crowd_boxes, crowd_valid, crowd_overlap), -1, labels).to(torch.int8)
    return labels, matched


def match_rois(boxes: Tensor, boxes_valid: Tensor, gt: Tensor, gt_valid: Tensor) -> tuple[Tensor, Tensor]:
    """Best IoU [B, P] and first gt that has it [B, P] int64, for `boxes` [B, P, 4] among `gt` [B, G, 4].

    IoU 0 and gt 0 where the box is padding or the image has no gt.
    """
    if gt.shape[1] == 0:
        return torch.zeros_like(boxes[..., 0]), torch.zeros_like(boxes[..., 0], dtype=torch.int64)
    pair_valid = boxes_valid[:, :, None] & gt_valid[:, None, :]
    iou = torch.where(pair_valid, pairwise_iou(boxes, gt), 0.0)
    best_iou, matched = iou.max(dim=-1)
    return best_iou, matched


def _labels(
    anchors: Tensor, boxes: Tensor, valid: Tensor, sizes: Tensor, *, positive_iou: float, negative_iou: float
) -> tuple[Tensor, Tensor]:
    """`rpn_labels` without crowds."""
    inside = _inside_image(anchors, sizes)  # [B, N]
    best_iou, matched, is_best = _best_matches(anchors, boxes, valid, inside)
    positive = is_best | (best_iou >= positive_iou)
    labels = torch.where(positive, 1, -1)
    labels = torch.where(best_iou < negative_iou, 0, labels)
    return torch.where(inside, labels, -1).to(torch.int8), matched


@torch.library.custom_op(
    "maskfleet::rpn_labels",
    mutates_args=(),
    device_types="cuda",
    schema="(Tensor anchors, Tensor boxes, Tensor valid, Tensor sizes, float positive_iou, float negative_iou)"
    " -> (Tensor, Tensor)",
)
def _labels_by_kernel(*inputs: Any) -> tuple[Tensor, Tensor]:
    from maskfleet.ops.triton import matching as kernels

    return kernels.rpn_labels(*inputs)


@_labels_by_kernel.register_fake
def _(anchors: Tensor, boxes: Tensor, valid: Tensor, *inputs: Any) -> tuple[Tensor, Tensor]:
    shape = (valid.shape[0], anchors.shape[0])
    return anchors.new_empty(shape, dtype=torch.int8), anchors.new_empty(shape, dtype=torch.int64)


def _inside_image(anchors: Tensor, sizes: Tensor) -> Tensor:
    """Whether each of `anchors` [N, 4] lies wholly in images of `sizes` [B, 2] -> [B, N]."""
    x1, y1, x2, y2 = anchors.unbind(dim=-1)
    height, width = sizes[:, 0, None], sizes[:, 1, None]
    return (x1 >= 0) & (y1 >= 0) & (x2 <= width) & (y2 <= height)


def _best_matches(anchors: Tensor, boxes: Tensor, valid: Tensor, inside: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """For each anchor: best IoU (-1 without gt), its gt, and whether it is among the best of some gt; all [B, N]."""
    best_iou = torch.full(inside.shape, -1.0, dtype=torch.float64, device=anchors.device)
    matched = torch.zeros(inside.shape, dtype=torch.int64, device=anchors.device)
    is_best = torch.zeros_like(inside)
    anchor_area = _exact_area(anchors)
    for start in range(0, boxes.shape[1], _GTS_AT_ONCE):
        part = boxes[:, start : start + _GTS_AT_ONCE]  # [B, g, 4]
        part_valid = valid[:, start : start + _GTS_AT_ONCE, None]  # [B, g, 1]
        overlap = _exact_overlap(part, anchors)  # [B, g, N]
        union = (anchor_area + _exact_area(part)[:, :, None] - overlap).clamp(min=1e-9)
        iou = torch.where(part_valid, overlap / union, -1.0)
        best_of_gt = torch.where(inside[:, None, :], iou, -1.0).amax(dim=2, keepdim=True)  # [B, g, 1]
        is_best = is_best | ((iou == best_of_gt) & part_valid).any(dim=1)
        part_iou, part_matched = iou.max(dim=1)
        better = part_iou > best_iou  # the first of equals stays
        best_iou = torch.where(better, part_iou, best_iou)
        matched = torch.where(better, part_matched + start, matched)
    return best_iou, torch.where(best_iou >= 0, matched, 0), is_best


def _in_crowd(anchors: Tensor, crowd_boxes: Tensor, crowd_valid: Tensor, crowd_overlap: float) -> Tensor:
    """Whether more than `crowd_overlap` of each anchor lies in one of the crowds -> [B, N]."""
    share = _exact_overlap(crowd_boxes, anchors) / _exact_area(anchors)  # [B, C, N]
    return ((share > crowd_overlap) & crowd_valid[:, :, None]).any(dim=1)


# "The highest IoU of some gt" is tested by equality, and a compiler may compute an IoU twice, with and without
# fused multiply-add. The product of two float32 is exact in float64, so fusing changes nothing here: equal stays equal.


def _exact_overlap(boxes: Tensor, anchors: Tensor) -> Tensor:
    """Common area [B, G, N] float64 of `boxes` [B, G, 4] and `anchors` [N, 4]; the sides are rounded to float32."""
    x1, y1, x2, y2 = boxes[..., None].unbind(dim=2)  # each [B, G, 1]
    width = torch.minimum(x2, anchors[:, 2]) - torch.maximum(x1, anchors[:, 0])
    height = torch.minimum(y2, anchors[:, 3]) - torch.maximum(y1, anchors[:, 1])
    return width.clamp(min=0).to(torch.float64) * height.clamp(min=0).to(torch.float64)


def _exact_area(boxes: Tensor) -> Tensor:
    """Area [...] float64 of boxes [..., 4]; the sides are rounded to float32."""
    size = (boxes[..., 2:] - boxes[..., :2]).clamp(min=0).to(torch.float64)
    return size[..., 0] * size[..., 1]
