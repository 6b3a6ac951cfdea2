"""Files like those of Detectron2's model zoo, and what Detectron2's network computes from them, step by step."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from maskfleet.batch import Images

MEAN_BGR = (103.530, 116.280, 123.675)
STD_RGB = (58.395, 57.120, 57.375)
State = dict[str, Tensor]


class Maker:
    """Tensors under Detectron2's names, with random numbers."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(0)
        self.state: State = {}

    def rand(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.generator) - 0.5

    def layer(self, name: str, *shape: int, bias: bool = True) -> None:
        self.state[f"{name}.weight"] = self.rand(*shape) / max(1, shape[1] * (shape[2] if len(shape) > 2 else 1)) ** 0.5
        if bias:
            self.state[f"{name}.bias"] = self.rand(shape[1] if name.endswith("deconv") else shape[0])

    def conv_norm(self, name: str, *shape: int) -> None:
        self.layer(name, *shape, bias=False)
        for leaf in ("weight", "bias", "running_mean", "running_var"):
            self.state[f"{name}.norm.{leaf}"] = self.rand(shape[0]) + (1 if leaf in ("weight", "running_var") else 0)

    def resnet(self, prefix: str, blocks: tuple[int, ...], stem: int = 8, last: str | None = None) -> None:
        """The groups res2 to res5; `last` is another prefix of res5."""
        self.conv_norm(f"{prefix}stem.conv1", stem, 3, 7, 7)
        inputs = stem
        for number, count in enumerate(blocks):
            inner, outer = stem << number, 4 * (stem << number)
            for block in range(count):
                name = f"{last if last is not None and number == 3 else prefix}res{number + 2}.{block}"
                self.conv_norm(f"{name}.conv1", inner, inputs, 1, 1)
                self.conv_norm(f"{name}.conv2", inner, inner, 3, 3)
                self.conv_norm(f"{name}.conv3", outer, inner, 1, 1)
                if block == 0:
                    self.conv_norm(f"{name}.shortcut", outer, inputs, 1, 1)
                inputs = outer


def fpn_state(classes: int = 3, *, cascade: bool = False, mask: bool = True) -> State:
    """A small Mask R-CNN with a feature pyramid."""
    made = Maker()
    made.resnet("backbone.bottom_up.", (1, 2, 1, 1))
    for level, channels in zip((2, 3, 4, 5), (32, 64, 128, 256), strict=True):
        made.layer(f"backbone.fpn_lateral{level}", 16, channels, 1, 1)
        made.layer(f"backbone.fpn_output{level}", 16, 16, 3, 3)
    made.layer("proposal_generator.rpn_head.conv", 16, 16, 3, 3)
    made.layer("proposal_generator.rpn_head.objectness_logits", 3, 16, 1, 1)
    made.layer("proposal_generator.rpn_head.anchor_deltas", 12, 16, 1, 1)
    for stage in (".0", ".1", ".2") if cascade else ("",):
        made.layer(f"roi_heads.box_head{stage}.fc1", 24, 16 * 49)
        made.layer(f"roi_heads.box_head{stage}.fc2", 24, 24)
        made.layer(f"roi_heads.box_predictor{stage}.cls_score", classes + 1, 24)
        made.layer(f"roi_heads.box_predictor{stage}.bbox_pred", 4 if cascade else 4 * classes, 24)
    if mask:
        for number in range(4):
            made.layer(f"roi_heads.mask_head.mask_fcn{number + 1}", 40, 16 if number == 0 else 40, 3, 3)
        made.layer("roi_heads.mask_head.deconv", 40, 40, 2, 2)
        made.layer("roi_heads.mask_head.predictor", classes, 40, 1, 1)
    return made.state


def c4_state(classes: int = 3) -> State:
    """A small Mask R-CNN on one map, whose last group is in the heads."""
    made = Maker()
    made.resnet("backbone.", (1, 2, 1, 1), last="roi_heads.")
    made.layer("proposal_generator.rpn_head.conv", 128, 128, 3, 3)
    made.layer("proposal_generator.rpn_head.objectness_logits", 15, 128, 1, 1)
    made.layer("proposal_generator.rpn_head.anchor_deltas", 60, 128, 1, 1)
    made.layer("roi_heads.box_predictor.cls_score", classes + 1, 256)
    made.layer("roi_heads.box_predictor.bbox_pred", 4 * classes, 256)
    made.layer("roi_heads.mask_head.deconv", 256, 40, 2, 2)
    made.layer("roi_heads.mask_head.predictor", classes, 40, 1, 1)
    return made.state


def write_pkl(path: Path, state: State, author: str = "Detectron2 Model Zoo", protocol: int = 4, **extra: Any) -> Path:
    """A pickle as the model zoo has it: arrays under `model`, and who made it."""
    arrays = {name: tensor.numpy() for name, tensor in state.items()}
    path.write_bytes(pickle.dumps({"model": arrays, "__author__": author, **extra}, protocol=protocol))
    return path


def conv_norm(x: Tensor, state: State, name: str, *, stride: int = 1, relu: bool = True) -> Tensor:
    """A convolution without bias, Detectron2's FrozenBatchNorm2d, and ReLU."""
    weight = state[f"{name}.weight"]
    x = F.conv2d(x, weight, stride=stride, padding=weight.shape[-1] // 2)
    norm = {leaf: state[f"{name}.norm.{leaf}"] for leaf in ("weight", "bias", "running_mean", "running_var")}
    scale = norm["weight"] * (norm["running_var"] + 1e-5).rsqrt()
    x = x * scale[:, None, None] + (norm["bias"] - norm["running_mean"] * scale)[:, None, None]
    return F.relu(x) if relu else x


def group(x: Tensor, state: State, name: str, *, stride: int, stride_1x1: bool) -> Tensor:
    """One of res2 to res5."""
    block = 0
    while f"{name}.{block}.conv1.weight" in state:
        of_block, step = f"{name}.{block}", stride if block == 0 else 1
        inner = conv_norm(x, state, f"{of_block}.conv1", stride=step if stride_1x1 else 1)
        inner = conv_norm(inner, state, f"{of_block}.conv2", stride=1 if stride_1x1 else step)
        inner = conv_norm(inner, state, f"{of_block}.conv3", relu=False)
        shortcut = conv_norm(x, state, f"{of_block}.shortcut", stride=step, relu=False) if block == 0 else x
        x, block = F.relu(inner + shortcut), block + 1
    return x


def resnet(pixels: Tensor, state: State, prefix: str, *, groups: int = 4, stride_1x1: bool = True) -> list[Tensor]:
    """Normalized pixels -> res2 to res5."""
    x = F.max_pool2d(conv_norm(pixels, state, f"{prefix}stem.conv1", stride=2), 3, stride=2, padding=1)
    found = []
    for number in range(groups):
        x = group(x, state, f"{prefix}res{number + 2}", stride=1 if number == 0 else 2, stride_1x1=stride_1x1)
        found.append(x)
    return found


def pyramid(stages: list[Tensor], state: State) -> list[Tensor]:
    """p2 to p6."""
    above, found = None, []
    for level in (5, 4, 3, 2):
        name = f"backbone.fpn_lateral{level}"
        x = F.conv2d(stages[level - 2], state[f"{name}.weight"], state[f"{name}.bias"])
        above = x if above is None else x + F.interpolate(above, scale_factor=2, mode="nearest")
        name = f"backbone.fpn_output{level}"
        found.insert(0, F.conv2d(above, state[f"{name}.weight"], state[f"{name}.bias"], padding=1))
    return [*found, F.max_pool2d(found[-1], 1, stride=2)]


def rpn(feature: Tensor, state: State) -> tuple[Tensor, Tensor]:
    """Objectness and deltas of one map."""
    head = "proposal_generator.rpn_head"
    hidden = F.relu(F.conv2d(feature, state[f"{head}.conv.weight"], state[f"{head}.conv.bias"], padding=1))
    outputs = [
        F.conv2d(hidden, state[f"{head}.{name}.weight"], state[f"{head}.{name}.bias"])
        for name in ("objectness_logits", "anchor_deltas")
    ]
    return outputs[0], outputs[1]


def linear(x: Tensor, state: State, name: str) -> Tensor:
    return F.linear(x, state[f"{name}.weight"], state[f"{name}.bias"])


def box_head(crops: Tensor, state: State, stage: str = "") -> tuple[Tensor, Tensor]:
    """Class scores, the background last, and deltas of the other classes, from crops [n, C, 7, 7]."""
    hidden = F.relu(linear(crops.flatten(1), state, f"roi_heads.box_head{stage}.fc1"))
    hidden = F.relu(linear(hidden, state, f"roi_heads.box_head{stage}.fc2"))
    outputs = [linear(hidden, state, f"roi_heads.box_predictor{stage}.{name}") for name in ("cls_score", "bbox_pred")]
    return outputs[0], outputs[1]


def mask_head(crops: Tensor, state: State, convs: int = 4) -> Tensor:
    """A mask per class from crops [n, C, r, r]."""
    head = "roi_heads.mask_head"
    for number in range(convs):
        name = f"{head}.mask_fcn{number + 1}"
        crops = F.relu(F.conv2d(crops, state[f"{name}.weight"], state[f"{name}.bias"], padding=1))
    up = F.conv_transpose2d(crops, state[f"{head}.deconv.weight"], state[f"{head}.deconv.bias"], stride=2)
    return F.conv2d(F.relu(up), state[f"{head}.predictor.weight"], state[f"{head}.predictor.bias"])


def an_image() -> Tensor:
    return torch.randint(0, 256, (1, 3, 64, 96), generator=torch.Generator().manual_seed(1)).float()


def as_images(pixels: Tensor) -> Images:
    return Images(pixels, torch.tensor([[64, 96]]))


def expect_close(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=2e-4, atol=2e-5 * float(theirs.abs().max()))
