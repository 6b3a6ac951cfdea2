"""What the network computes for a training batch, and the losses of it under TensorPack's names.

Shapes: B images, N anchors, K sampled regions, F foreground regions (all padded), M x M mask pixels.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from maskfleet.batch import Targets
from maskfleet.config.model import ModelConfig
from maskfleet.model.heads.layers import BoxOutputs
from maskfleet.model.regions import Regions
from maskfleet.model.rpn import Proposals, RpnOutputs, RpnTargets
from maskfleet.ops.losses import box_head_losses, mask_head_loss, rpn_losses


@dataclass(frozen=True, slots=True)
class BoxStage:
    """One box head on its regions."""

    regions: Regions  # [B, K]
    region_features: Tensor  # [B * K, C, r, r], what the head read
    outputs: BoxOutputs  # [B, K, ...]
    target_deltas: Tensor  # [B, K, 4], multiplied by the box weights


@dataclass(frozen=True, slots=True)
class MaskStage:
    """The mask head on the foreground regions."""

    regions: Regions  # [B, F]
    logits: Tensor  # [B, F, M, M]
    targets: Tensor  # [B, F, M, M]


@dataclass(frozen=True, slots=True)
class TrainingOutputs:
    """Everything that losses and metrics of one batch are computed from."""

    targets: Targets
    rpn: RpnOutputs
    rpn_targets: RpnTargets
    proposals: Proposals
    box_stages: tuple[BoxStage, ...]  # one, or three of a cascade
    mask: MaskStage | None


def training_losses(outputs: TrainingOutputs, config: ModelConfig) -> dict[str, Tensor]:
    """The terms of the training loss, each a scalar."""
    losses = _rpn_losses(outputs, config)
    for number, stage in enumerate(outputs.box_stages):
        losses |= _box_losses(stage, box_loss_scope(config, number), config)
    if outputs.mask is not None:
        foreground = outputs.mask.regions.foreground
        mask_loss = mask_head_loss(outputs.mask.logits, outputs.mask.targets, foreground)
        losses["maskrcnn_loss/maskrcnn_loss"] = _mean(mask_loss, foreground.sum(dim=1), config)
    return losses


def box_loss_scope(config: ModelConfig, stage: int) -> str:
    """TensorPack's name scope for the losses and metrics of box head `stage`."""
    return f"cascade_loss_stage{stage + 1}/fastrcnn_losses" if config.cascade else "fastrcnn_losses"


def _rpn_losses(outputs: TrainingOutputs, config: ModelConfig) -> dict[str, Tensor]:
    label_loss, box_loss = rpn_losses(
        outputs.rpn.logits,
        outputs.rpn.deltas,
        outputs.rpn_targets.labels,
        outputs.rpn_targets.deltas,
        normalizer=config.rpn.samples_per_image,
    )
    return {"rpn_losses/label_loss": label_loss.mean(), "rpn_losses/box_loss": box_loss.mean()}


def _box_losses(stage: BoxStage, scope: str, config: ModelConfig) -> dict[str, Tensor]:
    regions = stage.regions
    label_loss, box_loss = box_head_losses(
        stage.outputs.logits,
        stage.outputs.deltas,
        regions.labels,
        regions.valid,
        stage.target_deltas,
        huber=config.box_head.box_loss == "huber",
    )
    counts = regions.valid.sum(dim=1)
    return {
        f"{scope}/label_loss": _mean(label_loss, counts, config),
        f"{scope}/box_loss": _mean(box_loss, counts, config),
    }


def _mean(loss: Tensor, counts: Tensor, config: ModelConfig) -> Tensor:
    """Mean of `loss` [B], itself a mean over `counts` [B] regions: over images, or over all regions of the batch."""
    if config.loss_mean_over == "image":
        return loss.mean()
    return (loss * counts).sum() / counts.sum().clamp(min=1)
