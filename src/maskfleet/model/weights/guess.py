"""Which network a file's names and shapes belong to."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from typing import Any, Literal

from pydantic import ValidationError

from maskfleet.config.base import replaced
from maskfleet.config.model import R50_BLOCKS, R101_BLOCKS, BackboneConfig, ModelConfig
from maskfleet.model.weights import tensorpack, torchvision
from maskfleet.model.weights.foreign import detectron2
from maskfleet.model.weights.shapes import Shape, in_backbone

Dialect = Literal["tensorpack", "torchvision", "detectron2", "maskfleet"]

OUR_NAME: dict[Dialect, Callable[[str], str | None]] = {
    "tensorpack": tensorpack.our_name,
    "torchvision": torchvision.our_name,
    "detectron2": detectron2.our_name,
    "maskfleet": in_backbone,
}
"""Our name for an entry of a file, the last ResNet group in the backbone; None if our networks have none."""

STEM = "backbone.stem.conv.weight"
_GROUP = re.compile(r"(?:backbone|box_heads\.0)\.group([0-3])\.(\d+)\.")


def dialect_of(names: Collection[str]) -> Dialect | None:
    """Whose names these are, by the first convolution, which every file of weights has."""
    if "conv0/W" in names or f"conv0/W{tensorpack.OUTPUT_NUMBER}" in names:
        return "tensorpack"
    if STEM in names:
        return "maskfleet"
    if "backbone.body.conv1.weight" in names or {"conv1.weight", "layer1.0.conv1.weight"} <= set(names):
        return "torchvision"
    return "detectron2" if detectron2.is_detectron2(names) else None


def our_shapes(shapes: Mapping[str, Shape]) -> dict[str, Shape]:
    """A file's names and shapes as ours; entries that none of our networks has are left out.

    The last ResNet group is always in the backbone, and torchvision's 91 COCO rows are the 81 that are used.
    """
    dialect = dialect_of(shapes)
    if dialect is None:
        return {}
    ours: dict[str, Shape] = {}
    for name, shape in shapes.items():
        our_name = OUR_NAME[dialect](name)
        if our_name is not None:
            ours[our_name] = tensorpack.our_shape(shape) if dialect == "tensorpack" else shape
    logits = "box_heads.0.class_logits.weight"
    if dialect == "torchvision" and ours.get(logits, ())[:1] == (torchvision.COCO_ROWS,):
        ours[logits] = (len(torchvision.COCO_IDS) + 1, *ours[logits][1:])
    return ours


def guess_config(shapes: Mapping[str, Shape]) -> ModelConfig | None:
    """The network whose weights have these names and shapes, in any dialect; None if it is none of ours.

    `num_categories` is None for a ResNet alone. What shapes do not show (anchors, strides, losses, FreezeBN or
    SyncBN) is at its default.
    """
    ours = our_shapes(shapes)
    if STEM not in ours:
        return None
    try:
        return replaced(ModelConfig(), _backbone_facts(ours) | _detector_facts(ours))
    except (KeyError, IndexError, ValidationError):
        # A tensor that every one of our networks has is absent, or has a shape that none of ours has.
        return None


def describe(config: ModelConfig) -> str:
    """A network in a few words: 'R101 fpn Mask R-CNN, cascade, GN, 80 classes'."""
    words = [_backbone_words(config.backbone)]
    norm = {"FreezeBN": "batch norm", "SyncBN": "batch norm", "GN": "GN", "None": "no norm"}[config.backbone.norm]
    if config.num_categories is None:
        return f"{words[0]} backbone, {norm}"
    words[0] += f" {config.architecture} {'Mask' if config.mask else 'Faster'} R-CNN"
    if config.cascade:
        words.append("cascade")
    words.append(norm)
    if config.architecture == "fpn" and config.box_head.kind != "2fc":
        words.append(f"{config.box_head.kind} head")
    return ", ".join([*words, f"{config.num_categories} classes"])


def _backbone_words(backbone: BackboneConfig) -> str:
    if backbone.kind != "resnet":
        return backbone.kind
    other = f"ResNet {','.join(map(str, backbone.blocks))}"
    depth = {R50_BLOCKS: "R50", R101_BLOCKS: "R101"}.get(backbone.blocks, other)
    return depth if backbone.stem_channels == 64 else f"{depth} with {backbone.stem_channels} channels"


def _backbone_facts(shapes: Mapping[str, Shape]) -> dict[str, Any]:
    blocks = [0, 0, 0, 0]
    for name in shapes:
        match = _GROUP.match(name)
        if match is not None:
            group, block = int(match[1]), int(match[2])
            blocks[group] = max(blocks[group], block + 1)
    stem = shapes[STEM][0]
    if shapes["backbone.group0.0.conv2.weight"][0] != stem or "backbone.group0.0.conv3.weight" not in shapes:
        raise KeyError("not bottleneck blocks of the published width")
    norm = "None"
    if "backbone.stem.norm.weight" in shapes:
        norm = "FreezeBN" if "backbone.stem.norm.running_mean" in shapes else "GN"
    return {"backbone.blocks": tuple(blocks), "backbone.stem_channels": stem, "backbone.norm": norm}


def _detector_facts(shapes: Mapping[str, Shape]) -> dict[str, Any]:
    if "box_heads.0.class_logits.weight" not in shapes:
        return {}
    fpn = "fpn.lateral_c2.weight" in shapes
    facts: dict[str, Any] = {
        "architecture": "fpn" if fpn else "c4",
        "num_categories": shapes["box_heads.0.class_logits.weight"][0] - 1,
        "mask": "mask_head.logits.weight" in shapes,
    }
    if facts["mask"]:
        facts["mask_head.channels"] = shapes["mask_head.deconv.weight"][1]
    defaults = ModelConfig().rpn
    anchors = len(defaults.anchor_ratios) * (1 if fpn else len(defaults.anchor_sizes))
    if shapes["rpn.objectness.weight"][0] != anchors:
        raise KeyError("another number of anchors, of unknown ratios")
    if not fpn:
        if "box_heads.0.fc6.weight" in shapes:
            raise KeyError("a dilated last group, as Detectron2's DC5")
        return facts | {"rpn.head_channels": shapes["rpn.conv.weight"][0]}
    return facts | _pyramid_facts(shapes)


def _pyramid_facts(shapes: Mapping[str, Shape]) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "fpn.channels": shapes["fpn.lateral_c2.weight"][0],
        "fpn.norm": "GN" if "fpn.lateral_norm_c2.weight" in shapes else "None",
        "cascade": "box_heads.1.class_logits.weight" in shapes,
        "box_head.fc_channels": shapes["box_heads.0.class_logits.weight"][1],
        "mask_head.kind": "up4conv_gn" if "mask_head.norm0.weight" in shapes else "up4conv",
    }
    if "box_heads.0.conv0.weight" in shapes:
        facts["box_head.conv_channels"] = shapes["box_heads.0.conv0.weight"][0]
        facts["box_head.kind"] = "4conv1fc_gn" if "box_heads.0.norm0.weight" in shapes else "4conv1fc"
    return facts
