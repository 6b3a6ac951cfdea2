"""The scalars TensorPack logs beside the losses, under its names; means over the images of a batch.

Shapes: B images, N anchors, P proposals, K regions, G ground truths (padded), M x M mask pixels.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from maskfleet.config.model import ModelConfig
from maskfleet.model.features import MAX_LEVEL, MIN_LEVEL
from maskfleet.model.losses import TrainingOutputs, box_loss_scope
from maskfleet.model.regions import Regions
from maskfleet.ops.boxes import area
from maskfleet.ops.losses import box_head_metrics, mask_head_metrics, proposal_metrics, rpn_losses, rpn_metrics
from maskfleet.ops.roi_align import roi_levels


class HeadResults(NamedTuple):
    """Regions and logits of one box head, or of the mask head."""

    boxes: Tensor  # [B, K, 4]
    labels: Tensor  # [B, K]
    valid: Tensor  # [B, K]
    foreground: Tensor  # [B, K]
    logits: Tensor  # [B, K, num_class], or [B, K, M, M]


class StepResults(NamedTuple):
    """What the metrics of a batch are computed from.

    The compiled step returns it, so that metrics are no part of what is compiled, and only the steps that log them
    compute them. Tuples, because torch 2.11 cannot return dataclasses with slots from a compiled function.
    """

    rpn_logits: Tensor  # [B, N]
    rpn_deltas: Tensor  # [B, N, 4]
    rpn_labels: Tensor  # [B, N]
    rpn_target_deltas: Tensor  # [B, N, 4]
    anchor_counts: tuple[int, ...]  # of each map
    proposals: Tensor  # [B, P, 4]
    proposals_valid: Tensor  # [B, P]
    truths: Tensor  # [B, G, 4]
    truths_valid: Tensor  # [B, G]
    box_heads: tuple[HeadResults, ...]
    mask_head: HeadResults | None
    mask_targets: Tensor | None  # [B, K, M, M]


def step_results(outputs: TrainingOutputs) -> StepResults:
    """What `training_metrics` needs of `outputs`, without gradients."""
    rpn, targets, proposals, mask = outputs.rpn, outputs.rpn_targets, outputs.proposals, outputs.mask
    return StepResults(
        rpn_logits=rpn.logits.detach(),
        rpn_deltas=rpn.deltas.detach(),
        rpn_labels=targets.labels,
        rpn_target_deltas=targets.deltas,
        anchor_counts=rpn.counts,
        proposals=proposals.boxes.detach(),
        proposals_valid=proposals.valid,
        truths=outputs.targets.boxes,
        truths_valid=outputs.targets.valid,
        box_heads=tuple(_head_results(stage.regions, stage.outputs.logits) for stage in outputs.box_stages),
        mask_head=None if mask is None else _head_results(mask.regions, mask.logits),
        mask_targets=None if mask is None else mask.targets,
    )


@torch.no_grad()
def training_metrics(results: StepResults, config: ModelConfig) -> dict[str, Tensor]:
    """Every scalar about one batch that is not a loss."""
    is_fpn = config.architecture == "fpn"
    metrics = _rpn_metrics(results, config) | _sampling_metrics(results)
    for number, head in enumerate(results.box_heads):
        metrics |= _scoped(box_loss_scope(config, number), box_head_metrics(head.logits, head.labels, head.valid))
        if is_fpn:
            scope = f"cascade_rcnn_stage{number + 1}/" if config.cascade else ""
            metrics |= _level_counts(f"{scope}multilevel_roi_align", head.boxes, head.valid, config)
    mask = results.mask_head
    if mask is not None:
        assert results.mask_targets is not None
        if is_fpn:
            metrics |= _level_counts("multilevel_roi_align_mask", mask.boxes, mask.foreground, config)
        metrics |= _scoped("maskrcnn_loss", mask_head_metrics(mask.logits, results.mask_targets, mask.foreground))
    return metrics


def _head_results(regions: Regions, logits: Tensor) -> HeadResults:
    return HeadResults(regions.boxes.detach(), regions.labels, regions.valid, regions.foreground, logits.detach())


def _rpn_metrics(results: StepResults, config: ModelConfig) -> dict[str, Tensor]:
    """Metrics of all anchors, and with a pyramid also losses, level by level."""
    if config.architecture == "c4":
        return _scoped("rpn_losses", rpn_metrics(results.rpn_logits, results.rpn_labels))
    metrics: dict[str, Tensor] = {}
    start = 0
    for level, count in enumerate(results.anchor_counts, start=MIN_LEVEL):
        part = slice(start, start + count)
        start += count
        logits, labels = results.rpn_logits[:, part], results.rpn_labels[:, part]
        label_loss, box_loss = rpn_losses(
            logits,
            results.rpn_deltas[:, part],
            labels,
            results.rpn_target_deltas[:, part],
            normalizer=config.rpn.samples_per_image,
        )
        of_level = rpn_metrics(logits, labels) | {"label_loss": label_loss.mean(), "box_loss": box_loss.mean()}
        metrics |= _scoped(f"rpn_losses/level{level}", of_level)
    return metrics


def _sampling_metrics(results: StepResults) -> dict[str, Tensor]:
    truths, truths_valid, head = results.truths, results.truths_valid, results.box_heads[0]
    num_valid = head.valid.sum(dim=1).float().mean()
    num_foreground = head.foreground.sum(dim=1).float().mean()
    metrics = proposal_metrics(results.proposals, results.proposals_valid, truths, truths_valid)
    metrics |= {"num_fg": num_foreground, "num_bg": num_valid - num_foreground}
    return _scoped("sample_fast_rcnn_targets", metrics) | {"mean_gt_box_area": _mean_area(truths, truths_valid)}


def _level_counts(scope: str, boxes: Tensor, valid: Tensor, config: ModelConfig) -> dict[str, Tensor]:
    """How many of the `valid` [B, K] `boxes` [B, K, 4] each pyramid level serves."""
    levels = roi_levels(boxes, min_level=MIN_LEVEL, max_level=MAX_LEVEL, aws=config.roi_align == "aws")
    return {
        f"{scope}/fpn_map_rois_to_levels/num_roi_level{level}": ((levels == level) & valid).sum(dim=1).float().mean()
        for level in range(MIN_LEVEL, MAX_LEVEL + 1)
    }


def _mean_area(boxes: Tensor, valid: Tensor) -> Tensor:
    """Mean area in square pixels of the `valid` [B, G] `boxes` [B, G, 4], per image and then over images with any."""
    count = valid.sum(dim=1)
    mean = torch.where(valid, area(boxes), 0.0).sum(dim=1) / count.clamp(min=1)  # [B]
    return mean.sum() / (count > 0).sum().clamp(min=1)


def _scoped(scope: str, metrics: dict[str, Tensor]) -> dict[str, Tensor]:
    return {f"{scope}/{name}": value for name, value in metrics.items()}
