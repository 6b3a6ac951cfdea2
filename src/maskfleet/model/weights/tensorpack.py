"""TensorPack's names and layouts, which AWS Samples shares but for the rows of one matrix.

Shapes: I channels in, O channels out, H x W kernel, R rows of a fully connected layer, C channels of a region's map.
TensorPack stores convolutions [H, W, I, O], transposed ones [H, W, O, I] and fully connected layers [R, O].
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from maskfleet.config.model import ModelConfig
from maskfleet.model.weights.slots import BOX_MAP_SIZE, Scope, Shape, slots

RowOrder = Literal["tensorpack", "aws"]

_LEAVES = {
    "W": "weight",
    "b": "bias",
    "gamma": "weight",
    "beta": "bias",
    "mean/EMA": "running_mean",
    "variance/EMA": "running_var",
}
_MODULES = (
    (r"conv0", r"backbone.stem.conv"),
    (r"conv0/[bg]n", r"backbone.stem.norm"),
    (r"group(\d)/block(\d+)/conv([123])", r"backbone.group\1.\2.conv\3"),
    (r"group(\d)/block(\d+)/conv([123])/[bg]n", r"backbone.group\1.\2.norm\3"),
    (r"group(\d)/block(\d+)/convshortcut", r"backbone.group\1.\2.shortcut.conv"),
    (r"group(\d)/block(\d+)/convshortcut/[bg]n", r"backbone.group\1.\2.shortcut.norm"),
    (r"fpn/lateral_1x1_c(\d)", r"fpn.lateral_c\1"),
    (r"fpn/posthoc_3x3_p(\d)", r"fpn.output_p\1"),
    (r"fpn/gn_c(\d)", r"fpn.lateral_norm_c\1"),
    (r"fpn/gn_p(\d)", r"fpn.output_norm_p\1"),
    (r"rpn/conv0", r"rpn.conv"),
    (r"rpn/class", r"rpn.objectness"),
    (r"rpn/box", r"rpn.box"),
    (r"maskrcnn/fcn(\d)", r"mask_head.conv\1"),
    (r"maskrcnn/gn(\d)", r"mask_head.norm\1"),
    (r"maskrcnn/deconv", r"mask_head.deconv"),
    (r"maskrcnn/conv", r"mask_head.logits"),
)
_BOX_HEAD = re.compile(r"(?:fastrcnn|cascade_rcnn_stage(?P<stage>[123])/(?:head|outputs))/(?:outputs/)?(?P<layer>\w+)")
_BOX_LAYERS = (
    (r"class", r"class_logits"),
    (r"box", r"box_deltas"),
    (r"gn(\d)", r"norm\1"),
    (r"(fc|fc6|fc7|conv\d)", r"\1"),
)
_IGNORED = (
    (r"learning_rate|global_step", "state of the training, not of the network"),
    (r".+/(Momentum|Adam|Adam_1)", "the optimiser's memory"),
    (r"(.+/)?AccumGrad.*", "gradients added up for the next update"),
    (r"EMA/.+", "a moving average of a logged number"),
    (r"linear/[Wb]", "the ImageNet classifier"),
)


def plain_name(name: str) -> str:
    """`name` without the output number that TensorFlow puts behind a variable."""
    return name.removesuffix(":0")


def our_name(name: str) -> str | None:
    """Our name for a TensorPack variable, the last group always in the backbone; None if the network has none."""
    for leaf, ours in _LEAVES.items():
        if name.endswith("/" + leaf):
            module = _our_module(name.removesuffix("/" + leaf))
            return None if module is None else f"{module}.{ours}"
    return None


def ignored_reason(name: str) -> str | None:
    """Why a variable of a TensorPack file is rightly left out; None if there is no such reason."""
    return next((reason for pattern, reason in _IGNORED if re.fullmatch(pattern, name)), None)


def our_shape(shape: Shape) -> Shape:
    """The shape of one of TensorPack's tensors after `from_npz`."""
    match shape:
        case (height, width, third, fourth):
            return (fourth, third, height, width)
        case (rows, columns):
            return (columns, rows)
    return shape


def from_npz(tensor: Tensor) -> Tensor:
    """A TensorPack tensor with its axes in our order: [H, W, I, O] -> [O, I, H, W], [R, O] -> [O, R], [N] as it is.

    The same permutation turns a transposed convolution [H, W, O, I] into torch's [I, O, H, W].
    """
    match tensor.ndim:
        case 4:
            return tensor.permute(3, 2, 0, 1)
        case 2:
            return tensor.T
    return tensor


def rows_from_aws(weight: Tensor) -> Tensor:
    """The first fully connected layer [O, R] with columns reordered from AWS Samples' (y, x, c) to (c, y, x)."""
    side, out = BOX_MAP_SIZE, weight.shape[0]
    return weight.reshape(out, side, side, -1).permute(0, 3, 1, 2).reshape(out, -1)


def rows_to_aws(weight: Tensor) -> Tensor:
    """The first fully connected layer [O, R] with columns reordered from (c, y, x) to (y, x, c)."""
    side, out = BOX_MAP_SIZE, weight.shape[0]
    return weight.reshape(out, -1, side, side).permute(0, 2, 3, 1).reshape(out, -1)


def npz_arrays(
    state: Mapping[str, Tensor], config: ModelConfig, *, scope: Scope = "all", rows: RowOrder = "tensorpack"
) -> dict[str, NDArray[np.float32]]:
    """Our state dict under TensorPack's names and in its layout, bit by bit the same numbers."""
    arrays = {}
    for slot in slots(config, scope):
        tensor = state[slot.name].detach().cpu()
        if slot.layout == "fc_of_map" and rows == "aws":
            tensor = rows_to_aws(tensor)
        match slot.layout:
            case "conv" | "deconv":
                tensor = tensor.permute(2, 3, 1, 0)
            case "fc" | "fc_of_map":
                tensor = tensor.T
        arrays[slot.npz] = np.ascontiguousarray(tensor.float().numpy())
    return arrays


def _our_module(module: str) -> str | None:
    head = _BOX_HEAD.fullmatch(module)
    if head is not None:
        layer = _replaced(head["layer"], _BOX_LAYERS)
        return None if layer is None else f"box_heads.{int(head['stage'] or 1) - 1}.{layer}"
    return _replaced(module, _MODULES)


def _replaced(text: str, patterns: tuple[tuple[str, str], ...]) -> str | None:
    """`text` rewritten by the first pattern that matches all of it."""
    for pattern, replacement in patterns:
        found = re.fullmatch(pattern, text)
        if found is not None:
            return found.expand(replacement)
    return None
