"""torchvision's names, colour order and class rows for ResNets and for (mask|faster)rcnn_resnet*_fpn."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from maskfleet.model.weights.templates import renamed

COCO_ROWS = 91
"""Classes of torchvision's COCO detectors: background and every category id up to 90, ten of which COCO never used."""

_UNUSED_COCO_IDS = {12, 26, 29, 30, 45, 66, 68, 69, 71, 83}
COCO_IDS = tuple(number for number in range(1, COCO_ROWS) if number not in _UNUSED_COCO_IDS)
"""The 80 category ids of COCO, in the order of our labels 1..80."""

OUR_EPS = 1e-5
"""What our frozen norms add to the variance; torchvision's published COCO detectors add nothing."""

# Templates of torchvision's module, without the prefix of a detector's ResNet, and of ours.
_MODULES = (
    ("conv1", "backbone.stem.conv"),
    ("bn1", "backbone.stem.norm"),
    ("layer{group+1}.{block}.conv{n}", "backbone.group{group}.{block}.conv{n}"),
    ("layer{group+1}.{block}.bn{n}", "backbone.group{group}.{block}.norm{n}"),
    ("layer{group+1}.{block}.downsample.0", "backbone.group{group}.{block}.shortcut.conv"),
    ("layer{group+1}.{block}.downsample.1", "backbone.group{group}.{block}.shortcut.norm"),
    ("backbone.fpn.inner_blocks.{n-2}", "fpn.lateral_c{n}"),
    ("backbone.fpn.inner_blocks.{n-2}.0", "fpn.lateral_c{n}"),
    ("backbone.fpn.layer_blocks.{n-2}", "fpn.output_p{n}"),
    ("backbone.fpn.layer_blocks.{n-2}.0", "fpn.output_p{n}"),
    ("rpn.head.conv", "rpn.conv"),
    ("rpn.head.conv.0.0", "rpn.conv"),
    ("rpn.head.cls_logits", "rpn.objectness"),
    ("rpn.head.bbox_pred", "rpn.box"),
    ("roi_heads.box_head.fc{n}", "box_heads.0.fc{n}"),
    ("roi_heads.box_predictor.cls_score", "box_heads.0.class_logits"),
    ("roi_heads.box_predictor.bbox_pred", "box_heads.0.box_deltas"),
    ("roi_heads.mask_head.mask_fcn{n+1}", "mask_head.conv{n}"),
    ("roi_heads.mask_head.{n}.0", "mask_head.conv{n}"),
    ("roi_heads.mask_predictor.conv5_mask", "mask_head.deconv"),
    ("roi_heads.mask_predictor.mask_fcn_logits", "mask_head.logits"),
)


def our_name(name: str) -> str | None:
    """Our name for an entry of torchvision's state dict; None if it is none of the network's."""
    module, _, leaf = name.removeprefix("backbone.body.").rpartition(".")
    ours = renamed(module, _MODULES)
    return None if ours is None else f"{ours}.{leaf}"


def ignored_reason(name: str) -> str | None:
    """Why an entry is rightly left out; None if there is no such reason."""
    if name.endswith(".num_batches_tracked"):
        return "a counter that stored statistics do not need"
    return "the ImageNet classifier" if name in ("fc.weight", "fc.bias") else None


def is_second_version(names: Collection[str]) -> bool:
    """Whether these are the names of a *_fpn_v2 detector, which has batch norm in its pyramid and heads."""
    return "roi_heads.box_head.0.0.weight" in names or "backbone.fpn.inner_blocks.0.1.weight" in names


def to_our_terms(tensors: dict[str, Tensor], *, num_categories: int | None) -> list[str]:
    """Change `tensors`, under our names, to fit BGR pixels and our classes; what was changed, in words.

    torchvision reads RGB in 0..1, normalised by the mean and deviation our defaults have for 0..255; its mask head
    draws a mask for background too.
    """
    notes = ["colours reordered from RGB to BGR in the first convolution"]
    tensors["backbone.stem.conv.weight"] = tensors["backbone.stem.conv.weight"].flip(1)
    logits = tensors.get("box_heads.0.class_logits.weight")
    if logits is None:  # a ResNet alone
        return notes
    for name in ("mask_head.logits.weight", "mask_head.logits.bias"):
        if name in tensors:
            tensors[name] = tensors[name][1:]
    if len(logits) == COCO_ROWS:
        _fold_missing_eps(tensors)
        notes.append("norms rescaled: torchvision's COCO detectors divide by the bare variance, ours adds 1e-5")
        if num_categories == len(COCO_IDS):
            _keep_coco_rows(tensors)
            notes.append("91 class rows reduced to background and the 80 categories COCO uses")
    notes.append(
        "torchvision pools regions half a feature pixel off ours and rounds its anchors: fine-tune, or lose AP"
    )
    return notes


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
