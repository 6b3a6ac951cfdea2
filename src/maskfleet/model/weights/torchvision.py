"""torchvision's names, colour order and class rows for ResNets and for (mask|faster)rcnn_resnet*_fpn.

Shapes: N classes with background.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

import torch
from torch import Tensor

COCO_ROWS = 91
"""Classes of torchvision's COCO detectors: background and every category id up to 90, ten of which COCO never used."""

_UNUSED_COCO_IDS = {12, 26, 29, 30, 45, 66, 68, 69, 71, 83}
COCO_IDS = tuple(number for number in range(1, COCO_ROWS) if number not in _UNUSED_COCO_IDS)
"""The 80 category ids of COCO, in the order of our labels 1..80."""

OUR_EPS = 1e-5
"""What our frozen norms add to the variance; torchvision's published COCO detectors add nothing."""

_BODY = re.compile(r"(?:backbone\.body\.)?(?P<rest>(?:conv1|bn1|layer\d)\..+)")
_BLOCK = re.compile(r"layer([1-4])\.(\d+)\.(conv[123]|bn[123]|downsample\.[01])\.(\w+)")
_FPN = re.compile(r"backbone\.fpn\.(inner|layer)_blocks\.([0-3])\.(?:0\.)?(weight|bias)")
_MASK = re.compile(r"roi_heads\.mask_head\.(?:mask_fcn([1-4])|([0-3])\.0)\.(weight|bias)")
_HEADS = {
    "rpn.head.conv": "rpn.conv",
    "rpn.head.conv.0.0": "rpn.conv",
    "rpn.head.cls_logits": "rpn.objectness",
    "rpn.head.bbox_pred": "rpn.box",
    "roi_heads.box_head.fc6": "box_heads.0.fc6",
    "roi_heads.box_head.fc7": "box_heads.0.fc7",
    "roi_heads.box_predictor.cls_score": "box_heads.0.class_logits",
    "roi_heads.box_predictor.bbox_pred": "box_heads.0.box_deltas",
    "roi_heads.mask_predictor.conv5_mask": "mask_head.deconv",
    "roi_heads.mask_predictor.mask_fcn_logits": "mask_head.logits",
}
_PART = {"conv": "conv", "bn": "norm"}


def our_name(name: str) -> str | None:
    """Our name for an entry of torchvision's state dict; None if it is none of the network's."""
    body = _BODY.fullmatch(name)
    if body is not None:
        return _our_body_name(body["rest"])
    level = _FPN.fullmatch(name)
    if level is not None:
        kind = "lateral_c" if level[1] == "inner" else "output_p"
        return f"fpn.{kind}{int(level[2]) + 2}.{level[3]}"
    mask = _MASK.fullmatch(name)
    if mask is not None:
        number = int(mask[1]) - 1 if mask[1] else int(mask[2])
        return f"mask_head.conv{number}.{mask[3]}"
    module, _, leaf = name.rpartition(".")
    return f"{_HEADS[module]}.{leaf}" if module in _HEADS else None


def ignored_reason(name: str) -> str | None:
    """Why an entry is rightly left out; None if there is no such reason."""
    if name.endswith(".num_batches_tracked"):
        return "a counter that stored statistics do not need"
    return "the ImageNet classifier" if name in ("fc.weight", "fc.bias") else None


def is_second_version(names: Collection[str]) -> bool:
    """Whether these are the names of a *_fpn_v2 detector, which has batch norm in its pyramid and heads."""
    return "roi_heads.box_head.0.0.weight" in names or "backbone.fpn.inner_blocks.0.1.weight" in names


def num_rows(tensors: Mapping[str, Tensor]) -> int | None:
    """N, under our names and in torchvision's numbers; None for a ResNet alone."""
    logits = tensors.get("box_heads.0.class_logits.weight")
    return None if logits is None else logits.shape[0]


def in_our_terms(tensors: Mapping[str, Tensor], *, num_categories: int | None) -> tuple[dict[str, Tensor], list[str]]:
    """`tensors` under our names -> the same for BGR pixels and our classes, and what was changed, in words.

    torchvision reads RGB in 0..1, normalised by the mean and deviation our defaults have for 0..255; its mask head
    draws a mask for background too.
    """
    ours, notes = dict(tensors), ["colours reordered from RGB to BGR in the first convolution"]
    ours["backbone.stem.conv.weight"] = ours["backbone.stem.conv.weight"].flip(1)
    rows = num_rows(tensors)
    if rows is None:
        return ours, notes
    for part in ("weight", "bias"):
        name = f"mask_head.logits.{part}"
        if name in ours:
            ours[name] = ours[name][1:]
    if rows == COCO_ROWS:
        _fold_missing_eps(ours)
        notes.append("norms rescaled: torchvision's COCO detectors divide by the bare variance, ours adds 1e-5")
        if num_categories == len(COCO_IDS):
            _keep_coco_rows(ours)
            notes.append("91 class rows reduced to background and the 80 categories COCO uses")
    notes.append(
        "torchvision pools regions half a feature pixel off ours and rounds its anchors: fine-tune, or lose AP"
    )
    return ours, notes


def _our_body_name(rest: str) -> str | None:
    stem, _, leaf = rest.partition(".")
    if stem in ("conv1", "bn1"):
        return f"backbone.stem.{_PART[stem[:-1]]}.{leaf}"
    block = _BLOCK.fullmatch(rest)
    if block is None:
        return None
    ours = f"backbone.group{int(block[1]) - 1}.{block[2]}"
    if block[3].startswith("downsample"):
        return f"{ours}.shortcut.{'conv' if block[3].endswith('0') else 'norm'}.{block[4]}"
    return f"{ours}.{_PART[block[3][:-1]]}{block[3][-1]}.{block[4]}"


def _fold_missing_eps(tensors: dict[str, Tensor]) -> None:
    """Scale each norm's weight so that sqrt(variance + eps) divides as much as sqrt(variance) did."""
    for name in [name for name in tensors if name.endswith(".running_var")]:
        variance = tensors[name].double()
        scale = torch.where(variance > 0, ((variance + OUR_EPS) / variance).sqrt(), 1.0)
        weight = name.replace(".running_var", ".weight")
        if weight in tensors:
            tensors[weight] = (tensors[weight].double() * scale).float()


def _keep_coco_rows(tensors: dict[str, Tensor]) -> None:
    classes = torch.tensor([0, *COCO_IDS])
    rows = {
        "box_heads.0.class_logits": classes,
        "box_heads.0.box_deltas": (classes[:, None] * 4 + torch.arange(4)).flatten(),
        "mask_head.logits": classes[1:] - 1,
    }
    for module, kept in rows.items():
        for name in (f"{module}.weight", f"{module}.bias"):
            if name in tensors and tensors[name].shape[0] > kept.max():
                tensors[name] = tensors[name][kept]
