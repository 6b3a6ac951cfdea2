"""Heads that classify a region and refine its box.

Shapes: n regions of all images together (padded), C channels, r x r bins of a crop.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from maskfleet.config.model import ModelConfig
from maskfleet.model.backbones.resnet import EXPANSION, make_group, run_group
from maskfleet.model.canvas import Area
from maskfleet.model.initial import clear_bias, fan_in, fan_out, plain_normal, scaled_cut_normal, scaled_normal
from maskfleet.model.norm import GroupNorm
from maskfleet.ops.conv import aligned_outputs, conv_relu, fuses

FPN_RESOLUTION = 7
C4_RESOLUTION = 14
NUM_CONVS = 4


@dataclass(frozen=True, slots=True)
class BoxOutputs:
    """What a box head says about each region."""

    logits: Tensor  # [n, num_class] float32, class 0 is background
    deltas: Tensor  # [n, num_class, 4] float32, or [n, 1, 4] shared by all classes; times the box weights


class TwoFcHead(nn.Module):
    """Two fully connected layers."""

    resolution = FPN_RESOLUTION

    def __init__(self, config: ModelConfig, inputs: int) -> None:
        super().__init__()
        width = config.box_head.fc_channels
        self.fc6 = _linear(inputs * FPN_RESOLUTION**2, width)
        self.fc7 = _linear(width, width)
        self.class_logits, self.box_deltas = _output_layers(config, width)

    def trunk(self, crops: Tensor, area: Area) -> Tensor:
        """Crops [n, C, 7, 7] -> hidden [n, width]."""
        return F.relu_(self.fc7(F.relu_(self.fc6(crops.flatten(1)))))

    def outputs(self, hidden: Tensor) -> BoxOutputs:
        return _outputs(hidden, self.class_logits, self.box_deltas)


class ConvFcHead(nn.Module):
    """Four convolutions, each with ReLU and then, perhaps, GN; and one fully connected layer."""

    resolution = FPN_RESOLUTION

    def __init__(self, config: ModelConfig, inputs: int) -> None:
        super().__init__()
        self.has_norm = config.box_head.kind == "4conv1fc_gn"
        channels, width = config.box_head.conv_channels, config.box_head.fc_channels
        add_convs(self, inputs, channels, has_norm=self.has_norm)
        self.fc = _linear(channels * FPN_RESOLUTION**2, width)
        self.class_logits, self.box_deltas = _output_layers(config, width)

    def trunk(self, crops: Tensor, area: Area) -> Tensor:
        """Crops [n, C, 7, 7] -> hidden [n, width]."""
        return F.relu_(self.fc(run_convs(self, crops, has_norm=self.has_norm).flatten(1)))

    def outputs(self, hidden: Tensor) -> BoxOutputs:
        return _outputs(hidden, self.class_logits, self.box_deltas)


class Conv5Head(nn.Module):
    """The last group of the ResNet, run on each region (C4)."""

    resolution = C4_RESOLUTION

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.group3 = make_group(config.backbone, 3)
        self.class_logits, self.box_deltas = _output_layers(config, conv5_channels(config))

    def trunk(self, crops: Tensor, area: Area) -> Tensor:
        """Crops [n, C, 14, 14] -> hidden [n, 2 C, 7, 7], which the mask head reads too."""
        return run_group(self.group3, crops, area, area)

    def outputs(self, hidden: Tensor) -> BoxOutputs:
        return _outputs(hidden.mean(dim=(2, 3)), self.class_logits, self.box_deltas)


BoxHead = TwoFcHead | ConvFcHead | Conv5Head


def make_box_head(config: ModelConfig, inputs: int) -> BoxHead:
    """The head that `config` asks for, on crops of `inputs` channels."""
    if config.architecture == "c4":
        return Conv5Head(config)
    match config.box_head.kind:
        case "2fc":
            return TwoFcHead(config, inputs)
        case "4conv1fc" | "4conv1fc_gn":
            return ConvFcHead(config, inputs)


def conv5_channels(config: ModelConfig) -> int:
    return config.backbone.stem_channels * 8 * EXPANSION


def add_convs(head: nn.Module, inputs: int, channels: int, *, has_norm: bool) -> None:
    """Give `head` the layers conv0..conv3 (and norm0..norm3) that `run_convs` runs."""
    for number in range(NUM_CONVS):
        conv = nn.Conv2d(inputs, channels, 3, padding=1)
        scaled_normal(conv.weight, fan=fan_out(conv.weight), scale=2.0)
        clear_bias(conv)
        head.add_module(f"conv{number}", conv)
        if has_norm:
            head.add_module(f"norm{number}", GroupNorm(channels))
        inputs = channels


def run_convs(head: nn.Module, crops: Tensor, *, has_norm: bool) -> Tensor:
    """Crops [n, C, r, r] through the layers of `add_convs`; GN comes after ReLU, as in TensorPack."""
    for number in range(NUM_CONVS):
        conv = cast(nn.Conv2d, getattr(head, f"conv{number}"))
        assert conv.bias is not None
        crops = conv_relu(crops, conv.weight, conv.bias, padding=1) if fuses(crops) else F.relu_(conv(crops))
        if has_norm:
            crops = cast(GroupNorm, getattr(head, f"norm{number}"))(crops)
    return crops


def scaled_gradient(value: Tensor, scale: float) -> Tensor:
    """`value` itself, whose gradient is multiplied by `scale` on the way back."""
    return cast(Tensor, _ScaledGradient.apply(value, scale))  # type: ignore[no-untyped-call]


class _ScaledGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.scale, None


def _linear(inputs: int, outputs: int) -> nn.Linear:
    layer = nn.Linear(inputs, outputs)
    scaled_cut_normal(layer.weight, fan=fan_in(layer.weight), scale=1.0)
    clear_bias(layer)
    return layer


def _output_layers(config: ModelConfig, inputs: int) -> tuple[nn.Linear, nn.Linear]:
    """Class logits, and box code of every class (background too) or, in a cascade, of all classes together."""
    assert config.num_categories is not None
    num_class = config.num_categories + 1
    logits = nn.Linear(inputs, num_class)
    deltas = nn.Linear(inputs, 4 if config.cascade else num_class * 4)
    plain_normal(logits, std=0.01)
    plain_normal(deltas, std=0.001)
    return logits, deltas


def _outputs(hidden: Tensor, class_logits: nn.Linear, box_deltas: nn.Linear) -> BoxOutputs:
    num_class, num_deltas = class_logits.out_features, box_deltas.out_features
    if hidden.is_cuda:
        # One product instead of two, of a width that tensor cores take: num_class alone is usually odd.
        kernel, bias = aligned_outputs((class_logits.weight, box_deltas.weight), (class_logits.bias, box_deltas.bias))
        both = F.linear(hidden, kernel, bias).float()
        logits, deltas = both[:, :num_class], both[:, num_class : num_class + num_deltas]
    else:
        logits, deltas = class_logits(hidden).float(), box_deltas(hidden).float()
    return BoxOutputs(logits=logits, deltas=deltas.reshape(deltas.shape[0], -1, 4))
