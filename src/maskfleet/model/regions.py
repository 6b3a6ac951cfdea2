"""Regions that train the heads: sampled proposals and their ground truth.

Shapes: B images, P proposals, G ground truths, K regions (all padded).
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from maskfleet.batch import Targets
from maskfleet.config.model import BoxHeadConfig
from maskfleet.model.rpn import Proposals
from maskfleet.ops.boxes import area
from maskfleet.ops.matching import match_rois
from maskfleet.ops.sampling import hash_uniform, sample_rois

REGION_STREAM = 1  # stream of random numbers
FIRST_TRUTH_KEY = 1 << 20  # proposals have their rank as key, which stays below


@dataclass(frozen=True, slots=True)
class Regions:
    """Boxes and the ground truth each belongs to."""

    boxes: Tensor  # [B, K, 4]; 0 for padding
    labels: Tensor  # [B, K] int64, 0 = background or padding
    matched: Tensor  # [B, K] int64, ground truth that fits best
    valid: Tensor  # [B, K] bool

    def first(self, count: int) -> Regions:
        """The first `count` slots."""
        return Regions(self.boxes[:, :count], self.labels[:, :count], self.matched[:, :count], self.valid[:, :count])

    @property
    def foreground(self) -> Tensor:
        return self.valid & (self.labels > 0)


@torch.no_grad()
def sample_regions(proposals: Proposals, targets: Targets, seed: Tensor, config: BoxHeadConfig) -> Regions:
    """Random regions among the proposals and the ground truths themselves: foreground first, then background."""
    num_proposals, num_truths = proposals.boxes.shape[1], targets.boxes.shape[1]
    batch, device = proposals.boxes.shape[0], proposals.boxes.device
    best_iou, matched = match_rois(proposals.boxes, proposals.valid, targets.boxes, targets.valid)
    truth = torch.arange(num_truths, device=device)
    keys = torch.cat([torch.arange(num_proposals, device=device), FIRST_TRUTH_KEY + truth])
    boxes = torch.cat([proposals.boxes, targets.boxes], dim=1)  # [B, P + G, 4]
    sampled = sample_rois(
        torch.cat([best_iou, targets.valid.to(best_iou.dtype)], dim=1),
        torch.cat([matched, truth.expand(batch, -1)], dim=1),
        torch.cat([proposals.valid, targets.valid], dim=1),
        hash_uniform(seed, keys, stream=REGION_STREAM),
        num_samples=config.samples_per_image,
        positive_fraction=config.positive_fraction,
        foreground_iou=config.foreground_iou,
        fill_with_foreground=config.fill_with_foreground,
    )
    picked = boxes.gather(1, sampled.index[..., None].expand(-1, -1, 4))
    labels = targets.labels.gather(1, sampled.matched)
    return Regions(
        boxes=torch.where(sampled.valid[..., None], picked, 0.0),
        labels=torch.where(sampled.foreground, labels, 0),
        matched=sampled.matched,
        valid=sampled.valid,
    )


@torch.no_grad()
def relabelled(boxes: Tensor, valid: Tensor, targets: Targets, *, foreground_iou: float) -> Regions:
    """`boxes` [B, K, 4], valid [B, K], labelled with another IoU threshold; those without area become padding."""
    valid = valid & (area(boxes) > 0)
    best_iou, matched = match_rois(boxes, valid, targets.boxes, targets.valid)
    foreground = valid & (best_iou >= foreground_iou)
    labels = torch.where(foreground, targets.labels.gather(1, matched), 0)
    return Regions(boxes=torch.where(valid[..., None], boxes, 0.0), labels=labels, matched=matched, valid=valid)


def matched_boxes(regions: Regions, targets: Targets) -> Tensor:
    """Ground truth box [B, K, 4] of each region."""
    return targets.boxes.gather(1, regions.matched[..., None].expand(-1, -1, 4))


def at_least_one(targets: Targets) -> Targets:
    """`targets`, with one padding instance if it has none: `gather` needs at least one element."""
    if targets.boxes.shape[1] > 0:
        return targets
    outlines = targets.outlines
    if outlines is not None:
        outlines = dataclasses.replace(
            outlines, start=F.pad(outlines.start, (0, 1)), count=F.pad(outlines.count, (0, 1))
        )
    return dataclasses.replace(
        targets,
        boxes=F.pad(targets.boxes, (0, 0, 0, 1)),
        labels=F.pad(targets.labels, (0, 1)),
        valid=F.pad(targets.valid, (0, 1)),
        outlines=outlines,
    )
