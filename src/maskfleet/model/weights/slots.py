"""Every tensor of the network: our name, its shape, and TensorPack's name and layout for it.

Worked out from the configuration alone, so that a file can be judged without building a network.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from maskfleet.config.model import ModelConfig
from maskfleet.errors import ConfigError

Layout = Literal["conv", "deconv", "fc", "fc_of_map", "vector"]
Scope = Literal["all", "backbone"]
Shape = tuple[int, ...]

BOX_MAP_SIZE = 7
"""Height and width of the region features that enter the first fully connected layer."""

_STAGES = 3
_NORM_PARTS = {"weight": "gamma", "bias": "beta", "running_mean": "mean/EMA", "running_var": "variance/EMA"}


@dataclass(frozen=True, slots=True)
class Slot:
    """One tensor of the network."""

    name: str  # in our state dict
    npz: str  # in a TensorPack file
    layout: Layout  # how TensorPack orders the axes
    shape: Shape  # in our state dict


def slots(config: ModelConfig, scope: Scope = "all") -> list[Slot]:
    """The tensors of the whole network, or of the ResNet alone, in the order they are used."""
    found = list(_backbone(config))
    if scope == "backbone":
        return found
    classes = _num_categories(config) + 1
    if config.architecture == "fpn":
        found += _fpn(config)
    found += _rpn(config)
    found += _box_heads(config, classes)
    if config.mask:
        found += _mask_head(config, classes)
    return found


def expected_shapes(config: ModelConfig, scope: Scope = "all") -> dict[str, Shape]:
    """Our state dict's names and shapes."""
    return {slot.name: slot.shape for slot in slots(config, scope)}


def tensorpack_names(config: ModelConfig, scope: Scope = "all") -> list[tuple[str, str, Layout]]:
    """(TensorPack name, our name, TensorPack's layout) of every tensor."""
    return [(slot.npz, slot.name, slot.layout) for slot in slots(config, scope)]


def class_layers(config: ModelConfig) -> frozenset[str]:
    """Our names of the tensors whose shape follows from the number of classes."""
    modules = [f"box_heads.{stage}.class_logits" for stage in range(_STAGES if config.cascade else 1)]
    if not config.cascade:
        modules.append("box_heads.0.box_deltas")
    if config.mask:
        modules.append("mask_head.logits")
    return frozenset(f"{module}.{part}" for module in modules for part in ("weight", "bias"))


def _num_categories(config: ModelConfig) -> int:
    if config.num_categories is None:
        raise ConfigError(
            "model.num_categories is not known, so neither are the shapes of the heads",
            remedy="set model.num_categories to the number of object classes without background",
        )
    return config.num_categories


def _backbone(config: ModelConfig) -> Iterator[Slot]:
    """The ResNet; without a pyramid its last group belongs to the box head."""
    norm, stem = config.backbone.norm, config.backbone.stem_channels
    yield Slot("backbone.stem.conv.weight", "conv0/W", "conv", (stem, 3, 7, 7))
    yield from _norm("backbone.stem.norm", "conv0", norm, stem)
    in_channels = stem
    for group, blocks in enumerate(config.backbone.blocks):
        width = stem * 2**group
        room = "box_heads.0" if group == 3 and config.architecture == "c4" else "backbone"
        for block in range(blocks):
            ours, npz = f"{room}.group{group}.{block}", f"group{group}/block{block}"
            shapes = [(width, in_channels, 1, 1), (width, width, 3, 3), (4 * width, width, 1, 1)]
            for number, shape in enumerate(shapes, start=1):
                yield Slot(f"{ours}.conv{number}.weight", f"{npz}/conv{number}/W", "conv", shape)
                yield from _norm(f"{ours}.norm{number}", f"{npz}/conv{number}", norm, shape[0])
            if block == 0:
                shortcut = f"{npz}/convshortcut"
                yield Slot(f"{ours}.shortcut.conv.weight", f"{shortcut}/W", "conv", (4 * width, in_channels, 1, 1))
                yield from _norm(f"{ours}.shortcut.norm", shortcut, norm, 4 * width)
            in_channels = 4 * width


def _fpn(config: ModelConfig) -> Iterator[Slot]:
    channels = config.fpn.channels
    for level in range(2, 6):
        in_channels = config.backbone.stem_channels * 2**level
        yield from _conv(f"fpn.lateral_c{level}", f"fpn/lateral_1x1_c{level}", (channels, in_channels, 1, 1))
        yield from _conv(f"fpn.output_p{level}", f"fpn/posthoc_3x3_p{level}", (channels, channels, 3, 3))
        if config.fpn.norm == "GN":
            yield from _affine(f"fpn.lateral_norm_c{level}", f"fpn/gn_c{level}", channels)
            yield from _affine(f"fpn.output_norm_p{level}", f"fpn/gn_p{level}", channels)


def _rpn(config: ModelConfig) -> Iterator[Slot]:
    if config.architecture == "fpn":
        in_channels = channels = config.fpn.channels
        anchors = len(config.rpn.anchor_ratios)
    else:
        in_channels, channels = 16 * config.backbone.stem_channels, config.rpn.head_channels
        anchors = len(config.rpn.anchor_ratios) * len(config.rpn.anchor_sizes)
    yield from _conv("rpn.conv", "rpn/conv0", (channels, in_channels, 3, 3))
    yield from _conv("rpn.objectness", "rpn/class", (anchors, channels, 1, 1))
    yield from _conv("rpn.box", "rpn/box", (4 * anchors, channels, 1, 1))


def _box_heads(config: ModelConfig, classes: int) -> Iterator[Slot]:
    if config.architecture == "c4":
        features = 32 * config.backbone.stem_channels
        yield from _linear("box_heads.0.class_logits", "fastrcnn/class", (classes, features))
        yield from _linear("box_heads.0.box_deltas", "fastrcnn/box", (4 * classes, features))
        return
    for stage in range(_STAGES if config.cascade else 1):
        ours = f"box_heads.{stage}"
        scope = f"cascade_rcnn_stage{stage + 1}" if config.cascade else "fastrcnn"
        yield from _box_layers(config, ours, f"{scope}/head" if config.cascade else scope)
        features = config.box_head.fc_channels
        deltas = 4 if config.cascade else 4 * classes
        yield from _linear(f"{ours}.class_logits", f"{scope}/outputs/class", (classes, features))
        yield from _linear(f"{ours}.box_deltas", f"{scope}/outputs/box", (deltas, features))


def _box_layers(config: ModelConfig, ours: str, npz: str) -> Iterator[Slot]:
    """What stands between the region features and the outputs of one box head."""
    channels, width = config.fpn.channels, config.box_head.fc_channels
    if config.box_head.kind == "2fc":
        shape = (width, channels * BOX_MAP_SIZE**2)
        yield Slot(f"{ours}.fc6.weight", f"{npz}/fc6/W", "fc_of_map", shape)
        yield Slot(f"{ours}.fc6.bias", f"{npz}/fc6/b", "vector", (width,))
        yield from _linear(f"{ours}.fc7", f"{npz}/fc7", (width, width))
        return
    for number in range(4):
        shape4 = (config.box_head.conv_channels, channels, 3, 3)
        yield from _conv(f"{ours}.conv{number}", f"{npz}/conv{number}", shape4)
        channels = config.box_head.conv_channels
        if config.box_head.kind == "4conv1fc_gn":
            yield from _affine(f"{ours}.norm{number}", f"{npz}/gn{number}", channels)
    # AWS Samples runs its convolutional heads channels first, so its rows are ordered as TensorPack's: plain fc.
    yield from _linear(f"{ours}.fc", f"{npz}/fc", (width, channels * BOX_MAP_SIZE**2))


def _mask_head(config: ModelConfig, classes: int) -> Iterator[Slot]:
    channels = config.mask_head.channels
    if config.architecture == "c4":
        in_channels = 32 * config.backbone.stem_channels
    else:
        in_channels = config.fpn.channels
        for number in range(4):
            yield from _conv(f"mask_head.conv{number}", f"maskrcnn/fcn{number}", (channels, in_channels, 3, 3))
            in_channels = channels
            if config.mask_head.kind == "up4conv_gn":
                yield from _affine(f"mask_head.norm{number}", f"maskrcnn/gn{number}", channels)
    yield Slot("mask_head.deconv.weight", "maskrcnn/deconv/W", "deconv", (in_channels, channels, 2, 2))
    yield Slot("mask_head.deconv.bias", "maskrcnn/deconv/b", "vector", (channels,))
    yield from _conv("mask_head.logits", "maskrcnn/conv", (classes - 1, channels, 1, 1))


def _conv(ours: str, npz: str, shape: tuple[int, int, int, int]) -> Iterator[Slot]:
    yield Slot(f"{ours}.weight", f"{npz}/W", "conv", shape)
    yield Slot(f"{ours}.bias", f"{npz}/b", "vector", (shape[0],))


def _linear(ours: str, npz: str, shape: tuple[int, int]) -> Iterator[Slot]:
    yield Slot(f"{ours}.weight", f"{npz}/W", "fc", shape)
    yield Slot(f"{ours}.bias", f"{npz}/b", "vector", (shape[0],))


def _norm(ours: str, npz: str, norm: str, channels: int) -> Iterator[Slot]:
    match norm:
        case "FreezeBN" | "SyncBN":
            for part, theirs in _NORM_PARTS.items():
                yield Slot(f"{ours}.{part}", f"{npz}/bn/{theirs}", "vector", (channels,))
        case "GN":
            yield from _affine(ours, f"{npz}/gn", channels)


def _affine(ours: str, npz: str, channels: int) -> Iterator[Slot]:
    yield Slot(f"{ours}.weight", f"{npz}/gamma", "vector", (channels,))
    yield Slot(f"{ours}.bias", f"{npz}/beta", "vector", (channels,))
