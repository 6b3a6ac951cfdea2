"""The head that draws a mask inside each region (He et al. 2017, Mask R-CNN, section 3).

Shapes: n regions of all images together (padded), C channels, r x r bins of a crop, M x M mask pixels (M = 2 r).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from maskfleet.config.model import ModelConfig
from maskfleet.model.box_head import add_convs, run_convs
from maskfleet.model.initial import clear_bias, plain_normal, scaled_normal

FPN_CROP = 14
C4_CROP = 7  # side of the box head's features, which C4 reads


class MaskHead(nn.Module):
    """Four convolutions (none for C4), an upsampling, and one logit a category."""

    def __init__(self, config: ModelConfig, inputs: int) -> None:
        super().__init__()
        assert config.num_categories is not None
        channels = config.mask_head.channels
        self.has_convs = config.architecture == "fpn"
        self.has_norm = self.has_convs and config.mask_head.kind == "up4conv_gn"
        self.resolution = 2 * (FPN_CROP if self.has_convs else C4_CROP)
        if self.has_convs:
            add_convs(self, inputs, channels, has_norm=self.has_norm)
            inputs = channels
        self.deconv = nn.ConvTranspose2d(inputs, channels, 2, stride=2)
        self.logits = nn.Conv2d(channels, config.num_categories, 1)
        # TensorFlow reads the kernel's last axis, here the inputs, as what fans out.
        scaled_normal(self.deconv.weight, fan=inputs * 4, scale=2.0)
        clear_bias(self.deconv)
        plain_normal(self.logits, std=0.001)

    def forward(self, crops: Tensor, labels: Tensor) -> Tensor:
        """Mask logits [n, M, M] float32 of crops [n, C, r, r] for their `labels` [n], 1..num_categories.

        Only the label's channel is computed. Label 0 (padding) gets logits 0.
        """
        if self.has_convs:
            crops = run_convs(self, crops, has_norm=self.has_norm)
        hidden = F.relu_(self.deconv(crops))  # [n, C, M, M]
        number, _, height, width = hidden.shape
        # A product with ones and zeros picks rows exactly and, unlike indexing, has a gradient that is a product too.
        category = torch.arange(1, self.logits.out_channels + 1, device=labels.device)
        chosen = (labels[:, None] == category).to(self.logits.weight.dtype)  # [n, num_categories]
        kernels = chosen @ self.logits.weight.flatten(1)  # [n, C]
        assert self.logits.bias is not None
        pixels = hidden.permute(0, 2, 3, 1).reshape(number, height * width, -1)
        scores = torch.bmm(pixels, kernels[:, :, None]).view(number, height, width).float()
        return scores + (chosen @ self.logits.bias).float()[:, None, None]
