"""Detectron2's names, colours and class rows for ResNets and for Faster, Mask and Cascade R-CNN.

Detectron2's detectors start from MSRA's ResNets: BGR pixels minus their mean, not divided by a deviation, and strides
in the first 1x1 convolution of a group. Those that start from torchvision's ResNets divide, read RGB, and have the
strides in the 3x3 convolution; their files say so by `pixel_std` or `__author__`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from maskfleet.config.model import ModelConfig
from maskfleet.model.weights.templates import renamed

_PREFIXES = ("backbone.bottom_up.", "backbone.", "roi_heads.", "")
_RESNET = (
    ("stem.conv1", "backbone.stem.conv"),
    ("stem.conv1.norm", "backbone.stem.norm"),
    ("res{group+2}.{block}.conv{n}", "backbone.group{group}.{block}.conv{n}"),
    ("res{group+2}.{block}.conv{n}.norm", "backbone.group{group}.{block}.norm{n}"),
    ("res{group+2}.{block}.shortcut", "backbone.group{group}.{block}.shortcut.conv"),
    ("res{group+2}.{block}.shortcut.norm", "backbone.group{group}.{block}.shortcut.norm"),
)
_DETECTOR = (
    ("backbone.fpn_lateral{n}", "fpn.lateral_c{n}"),
    ("backbone.fpn_output{n}", "fpn.output_p{n}"),
    ("proposal_generator.rpn_head.conv", "rpn.conv"),
    ("proposal_generator.rpn_head.objectness_logits", "rpn.objectness"),
    ("proposal_generator.rpn_head.anchor_deltas", "rpn.box"),
    ("roi_heads.box_predictor.cls_score", "box_heads.0.class_logits"),
    ("roi_heads.box_predictor.bbox_pred", "box_heads.0.box_deltas"),
    ("roi_heads.box_predictor.{stage}.cls_score", "box_heads.{stage}.class_logits"),
    ("roi_heads.box_predictor.{stage}.bbox_pred", "box_heads.{stage}.box_deltas"),
    ("roi_heads.mask_head.mask_fcn{n+1}", "mask_head.conv{n}"),
    ("roi_heads.mask_head.deconv", "mask_head.deconv"),
    ("roi_heads.mask_head.predictor", "mask_head.logits"),
)
_FULLY_CONNECTED = {"fc1": "fc6", "fc2": "fc7"}
MSRA_SETTINGS = {"backbone.stride_1x1": True}
"""How networks that start from MSRA's ResNets differ; their shapes do not show it."""


def our_name(name: str) -> str | None:
    """Our name for an entry, the last group always in the backbone; None if the network has none."""
    module, _, leaf = name.rpartition(".")
    for prefix in _PREFIXES:
        ours = renamed(module.removeprefix(prefix), _RESNET) if module.startswith(prefix) else None
        if ours is not None:
            return f"{ours}.{leaf}"
    parts = module.split(".")
    if parts[:2] == ["roi_heads", "box_head"] and parts[-1] in _FULLY_CONNECTED:
        stage = "0" if len(parts) == 3 else parts[2]
        return f"box_heads.{stage}.{_FULLY_CONNECTED[parts[-1]]}.{leaf}" if stage.isdecimal() else None
    ours = renamed(module, _DETECTOR)
    return None if ours is None else f"{ours}.{leaf}"


def ignored_reason(name: str) -> str | None:
    """Why an entry is rightly left out; None if there is no such reason."""
    if name.endswith(".num_batches_tracked"):
        return "a counter that stored statistics do not need"
    if "anchor_generator.cell_anchors" in name:
        return "anchors, which our model computes"
    if name in ("pixel_mean", "pixel_std"):
        return "taken into account in the first convolution"
    return "the ImageNet classifier" if name in ("stem.fc.weight", "stem.fc.bias") else None


def is_detectron2(names: Collection[str]) -> bool:
    """Whether these names are Detectron2's."""
    return any(f"{prefix}stem.conv1.weight" in names for prefix in _PREFIXES) and any(
        f"{prefix}res2.0.conv1.weight" in names for prefix in _PREFIXES
    )


def has_norm_in_heads(names: Collection[str]) -> bool:
    """Whether a detector's heads have norms, which Detectron2 puts before the ReLU and our heads behind it."""
    return any(name.startswith("roi_heads.") and ".norm." in name and ".res5." not in name for name in names)


def starts_from_msra(tensors: Mapping[str, Tensor], author: str) -> bool:
    """Whether the ResNet is MSRA's, whose pixels are not divided by a deviation."""
    deviation = tensors.get("pixel_std")
    return bool((deviation == 1).all()) if deviation is not None else author != "torchvision"


def to_our_terms(tensors: dict[str, Tensor], file_tensors: Mapping[str, Tensor], author: str) -> list[str]:
    """Change `tensors`, under our names, to fit our pixels and class rows; what was changed, in words.

    Detectron2 has the background as last class, and no box deltas for it.
    """
    notes = []
    stem = tensors["backbone.stem.conv.weight"]
    if starts_from_msra(file_tensors, author):
        # Our model divides each colour by its deviation; the weights for it grow by as much.
        deviation = torch.tensor(ModelConfig().pixel_std_rgb[::-1], dtype=torch.float64)
        tensors["backbone.stem.conv.weight"] = (stem.double() * deviation[:, None, None]).float()
        notes.append("first convolution scaled: Detectron2 does not divide pixels by a standard deviation")
    elif _reads_rgb(file_tensors, author):
        tensors["backbone.stem.conv.weight"] = stem.flip(1)
        notes.append("colours reordered from RGB to BGR in the first convolution")
    stages = [name for name in tensors if name.endswith(".class_logits.weight")]
    for name in stages:
        _reorder_classes(tensors, name.removesuffix(".class_logits.weight"))
    if stages:
        notes.append("class rows reordered: Detectron2 has the background last, and no box deltas for it")
        notes.append("Detectron2 takes more samples per bin in large regions: fine-tune, or lose a little AP")
    return notes


def _reads_rgb(file_tensors: Mapping[str, Tensor], author: str) -> bool:
    mean = file_tensors.get("pixel_mean")
    return bool(mean.flatten()[0] > mean.flatten()[-1]) if mean is not None else author == "torchvision"


def _reorder_classes(tensors: dict[str, Tensor], stage: str) -> None:
    for leaf in ("weight", "bias"):
        logits, deltas = f"{stage}.class_logits.{leaf}", f"{stage}.box_deltas.{leaf}"
        if logits in tensors:
            tensors[logits] = tensors[logits].roll(1, dims=0)
        if deltas in tensors and len(tensors[deltas]) > 4:  # those of a cascade are for all classes
            rows = tensors[deltas]
            tensors[deltas] = torch.cat([rows.new_zeros(4, *rows.shape[1:]), rows])
