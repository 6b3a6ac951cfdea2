"""The losses of the RPN, the box head and the mask head, one number per image, and the metrics logged beside them.

Shapes: B images, N anchors, P proposals, G ground truths, K sampled regions, F foreground regions (all padded),
M x M mask pixels. A batch's loss is the mean over its images. What is masked out adds 0 and gets a gradient of 0.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from maskfleet.ops.boxes import pairwise_iou

RPN_BETA = 1 / 9  # where the RPN's box loss turns from square to linear
RPN_METRIC_THRESHOLDS = (0.5, 0.2, 0.1)
RECALL_IOUS = (0.3, 0.5)


def rpn_losses(
    logits: Tensor, deltas: Tensor, labels: Tensor, target_deltas: Tensor, *, normalizer: int
) -> tuple[Tensor, Tensor]:
    """Objectness loss [B] and box loss [B] of logits [B, N], deltas [B, N, 4], labels [B, N] in {-1, 0, 1}.

    Sums over the labelled (the positive) anchors, divided by `normalizer` however many there are; the box loss is
    smooth L1 with beta 1/9 against `target_deltas` [B, N, 4].
    """
    label_loss = F.binary_cross_entropy_with_logits(
        logits.float(), (labels == 1).to(torch.float32), reduction="none"
    )  # [B, N]
    label_loss = torch.where(labels >= 0, label_loss, 0.0)
    difference = torch.where((labels == 1)[..., None], deltas.float() - target_deltas, 0.0)
    box_loss = F.smooth_l1_loss(difference, torch.zeros_like(difference), beta=RPN_BETA, reduction="none")
    return label_loss.sum(dim=-1) / normalizer, box_loss.sum(dim=(-2, -1)) / normalizer


def box_head_losses(
    logits: Tensor, deltas: Tensor, labels: Tensor, valid: Tensor, target_deltas: Tensor, *, huber: bool
) -> tuple[Tensor, Tensor]:
    """Category loss [B] and box loss [B] of logits [B, K, num_class], labels [B, K] (0 background), valid [B, K].

    `deltas` are [B, K, num_class, 4], or [B, K, 1, 4] if all categories share them; `target_deltas` [B, K, 4] carry
    the regression weights. The box loss is L1, or Huber with delta 1, of the foreground. Both are divided by the
    number of valid regions of the image, background included.
    """
    labels = torch.where(valid, labels, 0)
    label_loss = F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="none").view(labels.shape)
    label_loss = torch.where(valid, label_loss, 0.0)
    difference = torch.where((labels > 0)[..., None], _of_label(deltas, labels).float() - target_deltas, 0.0)
    zero = torch.zeros_like(difference)
    box_loss = F.huber_loss(difference, zero, reduction="none") if huber else difference.abs()
    denominator = valid.sum(dim=-1).clamp(min=1)
    return label_loss.sum(dim=-1) / denominator, box_loss.sum(dim=(-2, -1)) / denominator


def mask_head_loss(logits: Tensor, targets: Tensor, valid: Tensor) -> Tensor:
    """Mean cross entropy [B] over the pixels of the valid [B, F] masks; logits [B, F, M, M] of the gt's category.

    Targets [B, F, M, M] are shares in [0, 1], not thresholded.
    """
    loss = F.binary_cross_entropy_with_logits(logits.float(), targets.float(), reduction="none").mean(dim=(-2, -1))
    return _mean_over(loss, valid)


def rpn_metrics(logits: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """Counts, and precision and recall at a few thresholds, of one level's logits [B, N] and labels [B, N]."""
    probability = logits.detach().float().sigmoid()
    positive = labels == 1
    num_positive = positive.sum(dim=-1)  # [B]
    metrics = {
        "num_valid_anchor": (labels >= 0).sum(dim=-1).float().mean(),
        "num_pos_anchor": num_positive.float().mean(),
    }
    for threshold in RPN_METRIC_THRESHOLDS:
        predicted = (probability > threshold) & (labels >= 0)
        num_correct = (predicted & positive).sum(dim=-1)
        precision = _ratio(num_correct, predicted.sum(dim=-1), placeholder=0.5)
        metrics[f"label_metrics/precision_th{threshold}"] = precision.mean()
        metrics[f"label_metrics/recall_th{threshold}"] = _ratio(num_correct, num_positive, placeholder=0.5).mean()
    return metrics


def box_head_metrics(logits: Tensor, labels: Tensor, valid: Tensor) -> dict[str, Tensor]:
    """Accuracy over all regions, over foreground, and the share of foreground taken for background.

    Logits [B, K, num_class], labels [B, K], valid [B, K].
    """
    predicted = logits.detach().argmax(dim=-1)  # [B, K]
    foreground = valid & (labels > 0)
    num_foreground = foreground.sum(dim=-1)
    correct = valid & (predicted == labels)
    missed = foreground & (predicted == 0)
    return {
        "num_fg_label": num_foreground.float().mean(),
        "label_metrics/accuracy": _ratio(correct.sum(dim=-1), valid.sum(dim=-1)).mean(),
        "label_metrics/fg_accuracy": _ratio((correct & foreground).sum(dim=-1), num_foreground).mean(),
        "label_metrics/false_negative": _ratio(missed.sum(dim=-1), num_foreground).mean(),
    }


def mask_head_metrics(logits: Tensor, targets: Tensor, valid: Tensor) -> dict[str, Tensor]:
    """Share of mask pixels that are right, right and positive, and positive in the target; shapes of mask_head_loss."""
    predicted, truth = logits.detach() > 0, targets > 0.5
    return {
        "accuracy": _mean_over((predicted == truth).float().mean(dim=(-2, -1)), valid).mean(),
        "pos_accuracy": _mean_over((predicted & truth).float().mean(dim=(-2, -1)), valid).mean(),
        "fg_pixel_ratio": _mean_over(truth.float().mean(dim=(-2, -1)), valid).mean(),
    }


def proposal_metrics(boxes: Tensor, boxes_valid: Tensor, gt: Tensor, gt_valid: Tensor) -> dict[str, Tensor]:
    """How well the proposals [B, P, 4], valid [B, P], cover the ground truths [B, G, 4], valid [B, G].

    Ground truths must not be among the proposals. Images without ground truth do not count.
    """
    iou = torch.where(boxes_valid[:, :, None], pairwise_iou(boxes.detach(), gt), 0.0)  # [B, P, G]
    best = F.pad(iou, (0, 0, 0, 1)).amax(dim=1)  # [B, G]; the row of zeros stands in for no proposal at all
    has_gt = gt_valid.any(dim=-1)[None]  # [1, B]
    metrics = {"proposal_metrics/best_iou_per_gt": _mean_over(_mean_over(best, gt_valid)[None], has_gt)[0]}
    for threshold in RECALL_IOUS:
        recall = _mean_over((best >= threshold).float(), gt_valid)
        metrics[f"proposal_metrics/recall_iou{threshold}"] = _mean_over(recall[None], has_gt)[0]
    return metrics


def _of_label(deltas: Tensor, labels: Tensor) -> Tensor:
    """The deltas [B, K, 4] of each region's own label, from [B, K, num_class, 4]; the only ones, from [B, K, 1, 4]."""
    if deltas.shape[2] == 1:
        return deltas[:, :, 0]
    return deltas.gather(2, labels[:, :, None, None].expand(-1, -1, 1, 4))[:, :, 0]


def _mean_over(values: Tensor, valid: Tensor) -> Tensor:
    """Mean of the valid [B, N] among values [B, N] -> [B]; 0, with a gradient, where there are none."""
    return torch.where(valid, values, 0.0).sum(dim=-1) / valid.sum(dim=-1).clamp(min=1)


def _ratio(numerator: Tensor, denominator: Tensor, *, placeholder: float = 0.0) -> Tensor:
    """numerator / denominator, or `placeholder` where the denominator is 0."""
    return torch.where(denominator > 0, numerator / denominator.clamp(min=1), placeholder)
