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
from maskfleet.model.heads.fpn import BOX_RESOLUTION
from maskfleet.model.weights.shapes import Scope, Shape, expected_shapes, in_backbone
from maskfleet.model.weights.templates import renamed

RowOrder = Literal["tensorpack", "aws"]

# The order of axes by their number; vectors stay as they are.
_OUR_AXES = {4: (3, 2, 0, 1), 2: (1, 0)}
_THEIR_AXES = {4: (2, 3, 1, 0), 2: (1, 0)}

OUTPUT_NUMBER = ":0"  # TensorFlow puts it behind the name of a variable
_LEAVES = (("W", "weight"), ("b", "bias"))
_NORM_LEAVES = (("gamma", "weight"), ("beta", "bias"), ("mean/EMA", "running_mean"), ("variance/EMA", "running_var"))

# Templates of TensorPack's scope and of our module. {norm} is bn or gn; every other field is a number.
_MODULES = (
    ("conv0", "backbone.stem.conv"),
    ("conv0/{norm}", "backbone.stem.norm"),
    ("group{group}/block{block}/conv{n}", "backbone.group{group}.{block}.conv{n}"),
    ("group{group}/block{block}/conv{n}/{norm}", "backbone.group{group}.{block}.norm{n}"),
    ("group{group}/block{block}/convshortcut", "backbone.group{group}.{block}.shortcut.conv"),
    ("group{group}/block{block}/convshortcut/{norm}", "backbone.group{group}.{block}.shortcut.norm"),
    ("fpn/lateral_1x1_c{n}", "fpn.lateral_c{n}"),
    ("fpn/posthoc_3x3_p{n}", "fpn.output_p{n}"),
    ("fpn/gn_c{n}", "fpn.lateral_norm_c{n}"),
    ("fpn/gn_p{n}", "fpn.output_norm_p{n}"),
    ("rpn/conv0", "rpn.conv"),
    ("rpn/class", "rpn.objectness"),
    ("rpn/box", "rpn.box"),
    ("maskrcnn/fcn{n}", "mask_head.conv{n}"),
    ("maskrcnn/gn{n}", "mask_head.norm{n}"),
    ("maskrcnn/deconv", "mask_head.deconv"),
    ("maskrcnn/conv", "mask_head.logits"),
)
_BOX_OUTPUTS = (("class", "class_logits"), ("box", "box_deltas"))
_BOX_LAYERS = (("gn{n}", "norm{n}"), ("conv{n}", "conv{n}"), ("fc", "fc"), ("fc6", "fc6"), ("fc7", "fc7"))


def _box_modules(layers: str, outputs: str, ours: str) -> list[tuple[str, str]]:
    """Templates of a box head whose layers, outputs and module of ours have these prefixes."""
    pairs = [(layers + theirs, ours + layer) for theirs, layer in _BOX_LAYERS]
    return pairs + [(outputs + theirs, ours + layer) for theirs, layer in _BOX_OUTPUTS]


_C4_BOXES = _box_modules("fastrcnn/", "fastrcnn/", "box_heads.0.")
_FPN_BOXES = _box_modules("fastrcnn/", "fastrcnn/outputs/", "box_heads.0.")
_CASCADE = "cascade_rcnn_stage{stage+1}"
_CASCADE_BOXES = _box_modules(f"{_CASCADE}/head/", f"{_CASCADE}/outputs/", "box_heads.{stage}.")

_IGNORED = (
    (r"learning_rate|global_step", "state of the training, not of the network"),
    (r".+/(Momentum|Adam|Adam_1)", "state of the optimiser"),
    (r"(.+/)?AccumGrad.*", "gradients added up for the next update"),
    (r"EMA/.+", "a moving average of a logged number"),
    (r"linear/[Wb]", "the ImageNet classifier"),
)


def our_name(name: str) -> str | None:
    """Our name for a TensorPack variable, the last group always in the backbone; None if the network has none."""
    name = name.removesuffix(OUTPUT_NUMBER)
    for leaf, ours in (*_LEAVES, *_NORM_LEAVES):
        if name.endswith("/" + leaf):
            modules = (*_MODULES, *_C4_BOXES, *_FPN_BOXES, *_CASCADE_BOXES)
            module = renamed(name.removesuffix("/" + leaf), modules)
            return None if module is None else f"{module}.{ours}"
    return None


def tensorpack_name(name: str, config: ModelConfig) -> str:
    """TensorPack's name for one of our tensors: the inverse of `our_name`."""
    module, _, leaf = in_backbone(name).rpartition(".")
    boxes = _CASCADE_BOXES if config.cascade else _FPN_BOXES if config.architecture == "fpn" else _C4_BOXES
    norm = "gn" if config.backbone.norm == "GN" else "bn"
    scope = renamed(module, [(ours, theirs) for theirs, ours in (*_MODULES, *boxes)], norm=norm)
    assert scope is not None, f"TensorPack has no {name}"
    leaves = {ours: theirs for theirs, ours in (_NORM_LEAVES if "norm" in module.rpartition(".")[2] else _LEAVES)}
    return f"{scope}/{leaves[leaf]}"


def ignored_reason(name: str) -> str | None:
    """Why a variable of a TensorPack file does not belong to the network; None if there is no known reason."""
    name = name.removesuffix(OUTPUT_NUMBER)
    return next((reason for pattern, reason in _IGNORED if re.fullmatch(pattern, name)), None)


def our_shape(shape: Shape) -> Shape:
    """The shape of one of TensorPack's tensors after `from_npz`."""
    return tuple(shape[axis] for axis in _OUR_AXES.get(len(shape), range(len(shape))))


def from_npz(tensor: Tensor) -> Tensor:
    """A TensorPack tensor with its axes in our order: [H, W, I, O] -> [O, I, H, W], [R, O] -> [O, R], [N] as it is.

    The same permutation turns a transposed convolution [H, W, O, I] into torch's [I, O, H, W].
    """
    return tensor.permute(tuple(_OUR_AXES.get(tensor.ndim, range(tensor.ndim))))


def rows_from_aws(weight: Tensor) -> Tensor:
    """The first fully connected layer [O, R] with columns reordered from AWS Samples' (y, x, c) to (c, y, x)."""
    side, out = BOX_RESOLUTION, weight.shape[0]
    return weight.reshape(out, side, side, -1).permute(0, 3, 1, 2).reshape(out, -1)


def rows_to_aws(weight: Tensor) -> Tensor:
    """The first fully connected layer [O, R] with columns reordered from (c, y, x) to (y, x, c)."""
    side, out = BOX_RESOLUTION, weight.shape[0]
    return weight.reshape(out, -1, side, side).permute(0, 2, 3, 1).reshape(out, -1)


def npz_arrays(
    state: Mapping[str, Tensor], config: ModelConfig, *, scope: Scope = "all", rows: RowOrder = "tensorpack"
) -> dict[str, NDArray[np.float32]]:
    """Our state dict under TensorPack's names and in its layout, equal to the last bit."""
    arrays = {}
    for name in expected_shapes(config, scope):
        tensor = state[name].detach().cpu()
        if name.endswith(".fc6.weight") and rows == "aws":
            tensor = rows_to_aws(tensor)
        tensor = tensor.permute(tuple(_THEIR_AXES.get(tensor.ndim, range(tensor.ndim))))
        arrays[tensorpack_name(name, config)] = np.ascontiguousarray(tensor.float().numpy())
    return arrays
