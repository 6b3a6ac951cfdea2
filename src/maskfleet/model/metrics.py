"""The scalars TensorPack logs beside the losses, under its names; means over the images of a batch.

Shapes: B images, K regions, G ground truths (padded), M x M mask pixels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from maskfleet.batch import Targets
from maskfleet.model.box_head import BoxOutputs
from maskfleet.model.features import MAX_LEVEL, MIN_LEVEL, crop_levels
from maskfleet.model.regions import Regions
from maskfleet.model.rpn import Proposals, RpnOutputs, RpnTargets
from maskfleet.ops.boxes import area
from maskfleet.ops.losses import box_head_metrics, mask_head_metrics, proposal_metrics, rpn_losses, rpn_metrics


class Scores:
    """Collects scalars while the losses are computed.

    `torch.no_grad` stands inside the methods: torch.compile does not see through it as a decorator of theirs.
    """

    def __init__(self) -> None:
        self.values: dict[str, Tensor] = {}

    def add_rpn(self, outputs: RpnOutputs, targets: RpnTargets, *, normalizer: int, by_level: bool) -> None:
        with torch.no_grad():
            start = 0
            for number, count in enumerate(outputs.counts):
                part = slice(start, start + count)
                start += count
                logits, labels = outputs.logits[:, part], targets.labels[:, part]
                scope = f"rpn_losses/level{MIN_LEVEL + number}" if by_level else "rpn_losses"
                self._add(scope, rpn_metrics(logits, labels))
                if by_level:
                    label_loss, box_loss = rpn_losses(
                        logits, outputs.deltas[:, part], labels, targets.deltas[:, part], normalizer=normalizer
                    )
                    self._add(scope, {"label_loss": label_loss.mean(), "box_loss": box_loss.mean()})

    def add_sampling(self, proposals: Proposals, targets: Targets, regions: Regions) -> None:
        with torch.no_grad():
            num_valid = regions.valid.sum(dim=1).float().mean()
            num_foreground = regions.foreground.sum(dim=1).float().mean()
            metrics = proposal_metrics(proposals.boxes, proposals.valid, targets.boxes, targets.valid)
            metrics |= {"num_fg": num_foreground, "num_bg": num_valid - num_foreground}
            self._add("sample_fast_rcnn_targets", metrics)
            self.values["mean_gt_box_area"] = _mean_area(targets)

    def add_box_head(self, outputs: BoxOutputs, regions: Regions, *, scope: str) -> None:
        with torch.no_grad():
            self._add(scope, box_head_metrics(outputs.logits, regions.labels, regions.valid))

    def add_mask_head(self, logits: Tensor, targets: Tensor, valid: Tensor) -> None:
        with torch.no_grad():
            self._add("maskrcnn_loss", mask_head_metrics(logits, targets, valid))

    def add_levels(self, boxes: Tensor, valid: Tensor, *, scope: str, aws: bool) -> None:
        """How many of the `valid` [B, K] `boxes` [B, K, 4] each pyramid level serves."""
        with torch.no_grad():
            levels = crop_levels(boxes, aws=aws) + MIN_LEVEL
            for level in range(MIN_LEVEL, MAX_LEVEL + 1):
                count = ((levels == level) & valid).sum(dim=1).float().mean()
                self.values[f"{scope}/fpn_map_rois_to_levels/num_roi_level{level}"] = count

    def _add(self, scope: str, metrics: dict[str, Tensor]) -> None:
        self.values |= {f"{scope}/{name}": value for name, value in metrics.items()}


def _mean_area(targets: Targets) -> Tensor:
    """Mean over images with ground truth of its mean area, in square pixels."""
    count = targets.valid.sum(dim=1)
    mean = torch.where(targets.valid, area(targets.boxes), 0.0).sum(dim=1) / count.clamp(min=1)  # [B]
    return mean.sum() / (count > 0).sum().clamp(min=1)
