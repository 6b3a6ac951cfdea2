"""The scalars TensorPack logs beside the losses, under its names; means over the images of a batch.

Shapes: B images, K regions, G ground truths (padded), M x M mask pixels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from maskfleet.batch import Targets
from maskfleet.config.model import ModelConfig
from maskfleet.model.features import MAX_LEVEL, MIN_LEVEL
from maskfleet.model.losses import TrainingOutputs, box_loss_scope
from maskfleet.ops.boxes import area
from maskfleet.ops.losses import box_head_metrics, mask_head_metrics, proposal_metrics, rpn_losses, rpn_metrics
from maskfleet.ops.roi_align import roi_levels


def training_metrics(outputs: TrainingOutputs, config: ModelConfig) -> dict[str, Tensor]:
    """Every scalar about one batch that is not a loss."""
    is_fpn = config.architecture == "fpn"
    with torch.no_grad():
        metrics = _rpn_metrics(outputs, config) | _sampling_metrics(outputs)
        for number, stage in enumerate(outputs.box_stages):
            regions = stage.regions
            metrics |= _scoped(
                box_loss_scope(config, number), box_head_metrics(stage.outputs.logits, regions.labels, regions.valid)
            )
            if is_fpn:
                scope = f"cascade_rcnn_stage{number + 1}/" if config.cascade else ""
                metrics |= _level_counts(f"{scope}multilevel_roi_align", regions.boxes, regions.valid, config)
        if outputs.mask is not None:
            regions = outputs.mask.regions
            if is_fpn:
                metrics |= _level_counts("multilevel_roi_align_mask", regions.boxes, regions.foreground, config)
            head = mask_head_metrics(outputs.mask.logits, outputs.mask.targets, regions.foreground)
            metrics |= _scoped("maskrcnn_loss", head)
    return metrics


def _rpn_metrics(outputs: TrainingOutputs, config: ModelConfig) -> dict[str, Tensor]:
    """Metrics of all anchors, and with a pyramid also losses, level by level."""
    rpn, targets = outputs.rpn, outputs.rpn_targets
    if config.architecture == "c4":
        return _scoped("rpn_losses", rpn_metrics(rpn.logits, targets.labels))
    metrics: dict[str, Tensor] = {}
    start = 0
    for level, count in enumerate(rpn.counts, start=MIN_LEVEL):
        part = slice(start, start + count)
        start += count
        logits, labels = rpn.logits[:, part], targets.labels[:, part]
        label_loss, box_loss = rpn_losses(
            logits, rpn.deltas[:, part], labels, targets.deltas[:, part], normalizer=config.rpn.samples_per_image
        )
        of_level = rpn_metrics(logits, labels) | {"label_loss": label_loss.mean(), "box_loss": box_loss.mean()}
        metrics |= _scoped(f"rpn_losses/level{level}", of_level)
    return metrics


def _sampling_metrics(outputs: TrainingOutputs) -> dict[str, Tensor]:
    proposals, targets, regions = outputs.proposals, outputs.targets, outputs.box_stages[0].regions
    num_valid = regions.valid.sum(dim=1).float().mean()
    num_foreground = regions.foreground.sum(dim=1).float().mean()
    metrics = proposal_metrics(proposals.boxes, proposals.valid, targets.boxes, targets.valid)
    metrics |= {"num_fg": num_foreground, "num_bg": num_valid - num_foreground}
    return _scoped("sample_fast_rcnn_targets", metrics) | {"mean_gt_box_area": _mean_area(targets)}


def _level_counts(scope: str, boxes: Tensor, valid: Tensor, config: ModelConfig) -> dict[str, Tensor]:
    """How many of the `valid` [B, K] `boxes` [B, K, 4] each pyramid level serves."""
    levels = roi_levels(boxes, min_level=MIN_LEVEL, max_level=MAX_LEVEL, aws=config.roi_align == "aws")
    return {
        f"{scope}/fpn_map_rois_to_levels/num_roi_level{level}": ((levels == level) & valid).sum(dim=1).float().mean()
        for level in range(MIN_LEVEL, MAX_LEVEL + 1)
    }


def _mean_area(targets: Targets) -> Tensor:
    """Mean box area in square pixels, per image and then over the images that have ground truth."""
    count = targets.valid.sum(dim=1)
    mean = torch.where(targets.valid, area(targets.boxes), 0.0).sum(dim=1) / count.clamp(min=1)  # [B]
    return mean.sum() / (count > 0).sum().clamp(min=1)


def _scoped(scope: str, metrics: dict[str, Tensor]) -> dict[str, Tensor]:
    return {f"{scope}/{name}": value for name, value in metrics.items()}
