"""TensorPack's names and layouts, which AWS Samples shares but for the rows of one matrix.

Shapes: I channels in, O channels out, H x W kernel, R rows of a fully connected layer, C channels of a region's map.
TensorPack stores convolutions [H, W, I, O], transposed ones [H, W, O, I] and fully connected layers [R, O].
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from maskfleet.config.model import ModelConfig
from maskfleet.model.heads.fpn import BOX_RESOLUTION
from maskfleet.model.weights.shapes import Scope, Shape, expected_shapes, in_backbone

RowOrder = Literal["tensorpack", "aws"]

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
_BOX_LAYERS = (
    ("class", "class_logits"),
    ("box", "box_deltas"),
    ("gn{n}", "norm{n}"),
    ("conv{n}", "conv{n}"),
    ("fc", "fc"),
    ("fc6", "fc6"),
    ("fc7", "fc7"),
)
_BOX_SCOPE = re.compile(r"(?:fastrcnn|cascade_rcnn_stage(?P<stage>[123])/(?:head|outputs))/(?:outputs/)?(?P<layer>\w+)")
_BOX_MODULE = re.compile(r"box_heads\.(?P<stage>\d)\.(?P<layer>\w+)")
_IGNORED = (
    (r"learning_rate|global_step", "state of the training, not of the network"),
    (r".+/(Momentum|Adam|Adam_1)", "state of the optimiser"),
    (r"(.+/)?AccumGrad.*", "gradients added up for the next update"),
    (r"EMA/.+", "a moving average of a logged number"),
    (r"linear/[Wb]", "the ImageNet classifier"),
)


def plain_name(name: str) -> str:
    """`name` without the output number that TensorFlow puts behind a variable."""
    return name.removesuffix(":0")


def our_name(name: str) -> str | None:
    """Our name for a TensorPack variable, the last group always in the backbone; None if the network has none."""
    for leaf, ours in (*_LEAVES, *_NORM_LEAVES):
        if name.endswith("/" + leaf):
            module = _our_module(name.removesuffix("/" + leaf))
            return None if module is None else f"{module}.{ours}"
    return None


def tensorpack_name(name: str, config: ModelConfig) -> str:
    """TensorPack's name for one of our tensors: the inverse of `our_name`."""
    module, _, leaf = in_backbone(name).rpartition(".")
    scope = _their_scope(module, config)
    assert scope is not None, f"TensorPack has no {name}"
    leaves = {ours: theirs for theirs, ours in (_NORM_LEAVES if "norm" in module.rpartition(".")[2] else _LEAVES)}
    return f"{scope}/{leaves[leaf]}"


def ignored_reason(name: str) -> str | None:
    """Why a variable of a TensorPack file does not belong to the network; None if there is no known reason."""
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
        match tensor.ndim:
            case 4:
                tensor = tensor.permute(2, 3, 1, 0)
            case 2:
                tensor = tensor.T
        arrays[tensorpack_name(name, config)] = np.ascontiguousarray(tensor.float().numpy())
    return arrays


def _our_module(scope: str) -> str | None:
    box_head = _BOX_SCOPE.fullmatch(scope)
    if box_head is None:
        return _renamed(scope, _MODULES)
    layer = _renamed(box_head["layer"], _BOX_LAYERS)
    return None if layer is None else f"box_heads.{int(box_head['stage'] or 1) - 1}.{layer}"


def _their_scope(module: str, config: ModelConfig) -> str | None:
    box_head = _BOX_MODULE.fullmatch(module)
    if box_head is None:
        norm = "gn" if config.backbone.norm == "GN" else "bn"
        return _renamed(module, [(ours, theirs) for theirs, ours in _MODULES], norm=norm)
    layer = _renamed(box_head["layer"], [(ours, theirs) for theirs, ours in _BOX_LAYERS])
    if layer in ("class", "box") and config.architecture == "fpn":
        layer = f"outputs/{layer}"
    elif config.cascade:
        layer = f"head/{layer}"
    return f"cascade_rcnn_stage{int(box_head['stage']) + 1}/{layer}" if config.cascade else f"fastrcnn/{layer}"


def _renamed(text: str, templates: Iterable[tuple[str, str]], **fields: str) -> str | None:
    """`text` rewritten by the first pair of templates whose left side matches all of it; None if there is none."""
    for left, right in templates:
        match = _pattern(left).fullmatch(text)
        if match is not None:
            return right.format(**fields, **match.groupdict())
    return None


@functools.cache
def _pattern(template: str) -> re.Pattern[str]:
    """A template as a regular expression: {norm} matches bn or gn, every other field a number."""
    escaped = template.replace(".", r"\.").replace("{norm}", "[bg]n")
    return re.compile(re.sub(r"{(\w+)}", r"(?P<\1>\\d+)", escaped))
