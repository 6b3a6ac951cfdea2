"""Builds the model from its configuration: the one place where backbone, pyramid and heads are put together."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from maskfleet.config.model import ModelConfig
from maskfleet.errors import ConfigError
from maskfleet.model.backbones import NUM_STAGES, Backbone
from maskfleet.model.backbones.resnet import ResNet
from maskfleet.model.fpn import LEVELS, Fpn
from maskfleet.model.heads.c4 import C4BoxHead, C4MaskHead
from maskfleet.model.heads.fpn import CASCADE_STAGES, FpnBoxHead, FpnMaskHead
from maskfleet.model.initial import kernels_left_empty
from maskfleet.model.mask_rcnn import MaskRCNN
from maskfleet.model.rpn import Rpn

BACKBONES: dict[str, Callable[..., Backbone]] = {
    "resnet": ResNet,
}
"""`model.backbone.kind` -> a module made from the section `model.backbone` and `num_stages`."""

NUM_LEVELS = len(LEVELS) + 1  # maps of the pyramid


def build_mask_rcnn(config: ModelConfig) -> MaskRCNN:
    """The model that `config` describes, with random weights drawn from torch's global generator.

    The initial values follow TensorPack's rules, with one exception: every gamma starts at 1 (0 at the end of a
    block), where TensorPack's backbone without weights starts with Glorot-uniform noise around 0.
    """
    _check(config)
    return _fpn_model(config) if config.architecture == "fpn" else _c4_model(config)


@functools.lru_cache(maxsize=16)
def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor in the state dict of `config`'s model, without memory for their values."""
    with torch.device("meta"), _without_initial_values():
        return {name: tuple(tensor.shape) for name, tensor in build_mask_rcnn(config).state_dict().items()}


def mask_rcnn_with(config: ModelConfig, tensors: Mapping[str, Tensor]) -> MaskRCNN:
    """The model that `config` describes with the values of `tensors`, its whole state dict.

    Drawing random values for 44 million weights first would take seconds.
    """
    with _without_initial_values():
        model = build_mask_rcnn(config)
    model.load_state_dict(tensors)
    return model


@contextmanager
def _without_initial_values() -> Iterator[None]:
    with _WithoutInit(), kernels_left_empty():
        yield


class _WithoutInit(TorchFunctionMode):
    """Skips `nn.init`: values do not exist on the meta device, and torch would import a second of code for them."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (nn.init.normal_, nn.init.uniform_, nn.init.kaiming_uniform_):
            return kwargs["tensor"]
        return func(*args, **(kwargs or {}))


def _fpn_model(config: ModelConfig) -> MaskRCNN:
    """Feature pyramid, one box head or a cascade of them, and a mask head with crops of its own."""
    backbone = _backbone(config, num_stages=NUM_STAGES)
    fpn = Fpn(config.fpn, backbone.channels)
    rpn = Rpn(config, config.fpn.channels)
    num_heads = CASCADE_STAGES if config.cascade else 1
    box_heads = [FpnBoxHead(config, config.fpn.channels) for _ in range(num_heads)]
    mask_head = FpnMaskHead(config, config.fpn.channels) if config.mask else None
    return MaskRCNN(config, backbone=backbone, fpn=fpn, rpn=rpn, box_heads=box_heads, mask_head=mask_head)


def _c4_model(config: ModelConfig) -> MaskRCNN:
    """One map of stride 16; the backbone's last stage runs on each region."""
    backbone = _backbone(config, num_stages=NUM_STAGES - 1)
    rpn = Rpn(config, backbone.channels[-1])
    stage = backbone.region_stage()
    box_head = C4BoxHead(config, stage)
    mask_head = C4MaskHead(config, stage.channels) if config.mask else None
    return MaskRCNN(config, backbone=backbone, fpn=None, rpn=rpn, box_heads=[box_head], mask_head=mask_head)


def _backbone(config: ModelConfig, *, num_stages: int) -> Any:
    return BACKBONES[config.backbone.kind](config.backbone, num_stages=num_stages)


def _check(config: ModelConfig) -> None:
    if config.num_categories is None:
        raise ConfigError(
            "model.num_categories is not set, so the model does not know how many categories to tell apart",
            remedy="set model.num_categories, or build it from data whose annotation file lists them",
        )
    if config.architecture == "fpn" and len(config.fpn.anchor_strides) != NUM_LEVELS:
        raise ConfigError(
            f"model.fpn.anchor_strides has {len(config.fpn.anchor_strides)} levels, but the pyramid has {NUM_LEVELS}",
            remedy=f"give {NUM_LEVELS} strides and {NUM_LEVELS} model.rpn.anchor_sizes",
        )
