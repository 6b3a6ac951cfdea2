"""Heads on one map of stride 16 (C4): the backbone's last stage runs on every region, for boxes and masks alike.

Shapes: B images, K regions per image (padded), n = B * K regions, C channels of the last stage.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from maskfleet.config.model import ModelConfig
from maskfleet.model.backbones import RegionStage
from maskfleet.model.canvas import Area
from maskfleet.model.features import Features, crop
from maskfleet.model.heads.layers import BoxOutputs, box_output_layers, box_outputs, mask_output_layers, mask_outputs

CROP_RESOLUTION = 14  # the last stage halves it


class C4BoxHead(nn.Module):
    """The backbone's last stage, an average over pixels, and the outputs."""

    def __init__(self, config: ModelConfig, stage: RegionStage) -> None:
        super().__init__()
        self.group3 = stage  # the name that checkpoints have
        self.class_logits, self.box_deltas = box_output_layers(config, stage.channels)

    def region_features(self, features: Features, boxes: Tensor, valid: Tensor) -> Tensor:
        """Features [n, C, 7, 7] of the regions `boxes` [B, K, 4], valid [B, K]; the mask head reads them too."""
        crops = crop(features, boxes, resolution=CROP_RESOLUTION)
        weight = valid.reshape(-1, 1, 1, 1).to(torch.float32)
        area = Area(mask=None, weight=weight, num_images=valid.shape[0], learning=features.learning)
        return self.group3(crops, area, area)

    def hidden(self, region_features: Tensor) -> Tensor:
        """Region features [n, C, 7, 7] -> [n, C], the input of the output layers."""
        return region_features.mean(dim=(2, 3))

    def forward(self, region_features: Tensor) -> BoxOutputs:
        return box_outputs(self.hidden(region_features), self.class_logits, self.box_deltas)


class C4MaskHead(nn.Module):
    """An upsampling of the box head's region features, and one logit per category."""

    resolution = CROP_RESOLUTION

    def __init__(self, config: ModelConfig, inputs: int) -> None:
        super().__init__()
        self.deconv, self.logits = mask_output_layers(config, inputs)

    def forward(self, region_features: Tensor, labels: Tensor) -> Tensor:
        """Mask logits [n, 14, 14] float32 of region features [n, C, 7, 7] for their `labels` [n]."""
        return mask_outputs(region_features, labels, self.deconv, self.logits)
