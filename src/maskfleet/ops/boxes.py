"""Box geometry: area, clipping, overlap, and the (tx, ty, tw, th) code between a box and its anchor.

Shapes: B images, N boxes (padded), G ground truths (padded); `...` is any batch.
Boxes are xyxy float32 pixels; padding boxes are all zeros or anything else without area.
"""

from __future__ import annotations

import torch
from torch import Tensor

MIN_CODED_SIDE = 1e-6  # shorter sides are coded as 1 px, so that padding gives no infinity


def area(boxes: Tensor) -> Tensor:
    """Area of boxes [..., 4] -> [...]; 0 for a box whose corners are swapped."""
    width = (boxes[..., 2] - boxes[..., 0]).clamp(min=0)
    height = (boxes[..., 3] - boxes[..., 1]).clamp(min=0)
    return width * height


def clip_boxes(boxes: Tensor, sizes: Tensor) -> Tensor:
    """Boxes [B, N, 4] cut to their images, whose (height, width) are `sizes` [B, 2] -> [B, N, 4]."""
    limits = sizes.flip(-1).to(boxes.dtype).repeat(1, 2)  # [B, 4]: width, height, width, height
    return torch.minimum(boxes.clamp(min=0), limits[:, None, :])


def encode_boxes(boxes: Tensor, anchors: Tensor) -> Tensor:
    """What turns `anchors` [..., 4] into `boxes` [..., 4]: (tx, ty, tw, th) [..., 4].

    A side without length counts as 1 px, so padding is coded as some finite number.
    """
    box_center, box_size = _center_and_coded_size(boxes)
    anchor_center, anchor_size = _center_and_coded_size(anchors)
    shift = (box_center - anchor_center) / anchor_size
    scale = (box_size / anchor_size).log()
    return torch.cat([shift, scale], dim=-1)


def decode_boxes(deltas: Tensor, anchors: Tensor, *, max_log_scale: float) -> Tensor:
    """Boxes [..., 4] that `deltas` [..., 4] make of `anchors` [..., 4]; sides grow by exp(max_log_scale) at most."""
    anchor_size = anchors[..., 2:] - anchors[..., :2]
    anchor_center = (anchors[..., 2:] + anchors[..., :2]) * 0.5
    half_size = deltas[..., 2:].clamp(max=max_log_scale).exp() * anchor_size * 0.5
    center = deltas[..., :2] * anchor_size + anchor_center
    return torch.cat([center - half_size, center + half_size], dim=-1)


def pairwise_iou(a: Tensor, b: Tensor) -> Tensor:
    """IoU of every box in `a` [..., N, 4] with every box in `b` [..., G, 4] -> [..., N, G].

    Boxes without area have IoU 0 with everything.
    """
    ax1, ay1, ax2, ay2 = a[..., :, None, :].unbind(-1)  # each [..., N, 1]
    bx1, by1, bx2, by2 = b[..., None, :, :].unbind(-1)  # each [..., 1, G]
    width = (torch.minimum(ax2, bx2) - torch.maximum(ax1, bx1)).clamp(min=0)
    height = (torch.minimum(ay2, by2) - torch.maximum(ay1, by1)).clamp(min=0)
    overlap = width * height
    union = area(a)[..., :, None] + area(b)[..., None, :] - overlap
    return overlap / union.clamp(min=1e-9)


def _center_and_coded_size(boxes: Tensor) -> tuple[Tensor, Tensor]:
    """Centre and size [..., 2] of boxes [..., 4], a side shorter than MIN_CODED_SIDE given as 1."""
    size = boxes[..., 2:] - boxes[..., :2]
    return (boxes[..., 2:] + boxes[..., :2]) * 0.5, torch.where(size > MIN_CODED_SIDE, size, 1.0)
