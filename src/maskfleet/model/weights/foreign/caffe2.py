"""Caffe2's names of MSRA's ResNets, `R-50.pkl` and `R-101.pkl` of Detectron2's zoo, as Detectron2's.

Their batch norms are folded: a scale and an offset per channel, and no statistics. Detectron2 gives them a mean of 0
and a variance that becomes 1 with what its norms add to it; so do we. From there on the file is one of Detectron2's.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from maskfleet.model.weights.templates import renamed
from maskfleet.model.weights.torchvision import OUR_EPS

AUTHOR = "Caffe2"  # as Detectron2 calls it
_STEM, _BLOCK = "res_conv1_bn_s", "res2_0_branch2a_w"
_CONVOLUTIONS = (
    ("conv1", "stem.conv1"),
    ("res{group}_{block}_branch1", "res{group}.{block}.shortcut"),
    ("res{group}_{block}_branch2a", "res{group}.{block}.conv1"),
    ("res{group}_{block}_branch2b", "res{group}.{block}.conv2"),
    ("res{group}_{block}_branch2c", "res{group}.{block}.conv3"),
)
_CLASSIFIERS = ("pred", "fc1000")
_NORM_LEAVES = {"s": "weight", "b": "bias", "rm": "running_mean", "riv": "running_var"}


def is_resnet(names: Collection[str]) -> bool:
    """Whether these are the names of a ResNet alone."""
    is_known = all(_theirs(name) is not None or _ignored_reason(name) is not None for name in names)
    return is_known and "conv1_w" in names and _STEM in names and _BLOCK in names


def as_detectron2(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """A ResNet's tensors under Detectron2's names, with statistics; and why which others are left out."""
    found: dict[str, Tensor] = {}
    ignored: dict[str, str] = {}
    for name, tensor in tensors.items():
        theirs, reason = _theirs(name), _ignored_reason(name)
        if theirs is not None:
            found[theirs] = tensor
        elif reason is not None:
            ignored[name] = reason
    for name in [name for name in found if name.endswith(".norm.weight")]:
        module = name.removesuffix(".weight")
        found.setdefault(f"{module}.running_mean", torch.zeros_like(found[name]))
        found.setdefault(f"{module}.running_var", torch.ones_like(found[name]) - OUR_EPS)
    return found, ignored


def _theirs(name: str) -> str | None:
    """Detectron2's name for an entry; None if its network has none."""
    module, _, leaf = name.rpartition("_")
    if module in _CLASSIFIERS and leaf in ("w", "b"):
        return f"stem.fc.{'weight' if leaf == 'w' else 'bias'}"
    if module == "res_conv1_bn":
        module = "conv1_bn"
    convolution = renamed(module.removesuffix("_bn"), _CONVOLUTIONS)
    if convolution is None:
        return None
    if module.endswith("_bn"):
        return f"{convolution}.norm.{_NORM_LEAVES[leaf]}" if leaf in _NORM_LEAVES else None
    return f"{convolution}.weight" if leaf == "w" else None


def _ignored_reason(name: str) -> str | None:
    if name.endswith("_momentum"):
        return "state of the optimiser"
    if name.endswith("_b") and renamed(name.removesuffix("_b"), _CONVOLUTIONS) is not None:
        return "a bias that the norm behind the convolution replaces"
    return None
