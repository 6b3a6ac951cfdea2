"""TensorPack's own numbers, and the weights and images they were made from, which a few lines of numpy make again.

The rules are those under which the golden files were recorded: a weight is random numbers seeded by its name, an image
is a sum of waves. `load_tensorpack` puts such weights, by their TensorPack names, into one of our models.
"""

from __future__ import annotations

import functools
import json
import re
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from maskfleet.batch import Batch, Images, Targets
from maskfleet.config.model import ModelConfig
from maskfleet.model.build import build_mask_rcnn
from maskfleet.model.mask_rcnn import MaskRCNN
from maskfleet.ops.outlines import bitmap_edges, pack_outlines

GOLDENS = Path(__file__).parent.parent / "goldens"

GAINS = {
    r"fpn/lateral_1x1_c[2345]/W": 0.3,
    r"rpn/class/W": 0.4,
    r"rpn/box/W": 0.05,
    r"outputs/class/W": 0.5,
    r"fastrcnn/class/W": 0.5,
    r"outputs/box/W": 0.35,
    r"fastrcnn/box/W": 0.35,
    r"maskrcnn/conv/W": 0.5,
}

# Our name -> TensorPack's, in order; the first pattern that matches wins.
NAMES = [
    (r"backbone\.stem\.conv\.weight", r"conv0/W"),
    (r"backbone\.stem\.norm\.(\w+)", r"conv0/NORM/\1"),
    (r"(?:backbone|box_heads\.0)\.group(\d)\.(\d+)\.shortcut\.conv\.weight", r"group\1/block\2/convshortcut/W"),
    (r"(?:backbone|box_heads\.0)\.group(\d)\.(\d+)\.shortcut\.norm\.(\w+)", r"group\1/block\2/convshortcut/NORM/\3"),
    (r"(?:backbone|box_heads\.0)\.group(\d)\.(\d+)\.conv(\d)\.weight", r"group\1/block\2/conv\3/W"),
    (r"(?:backbone|box_heads\.0)\.group(\d)\.(\d+)\.norm(\d)\.(\w+)", r"group\1/block\2/conv\3/NORM/\4"),
    (r"fpn\.lateral_norm_(c\d)\.(\w+)", r"fpn/gn_\1/GN/\2"),
    (r"fpn\.output_norm_(p\d)\.(\w+)", r"fpn/gn_\1/GN/\2"),
    (r"fpn\.lateral_(c\d)\.(\w+)", r"fpn/lateral_1x1_\1/\2"),
    (r"fpn\.output_(p\d)\.(\w+)", r"fpn/posthoc_3x3_\1/\2"),
    (r"rpn\.conv\.(\w+)", r"rpn/conv0/\1"),
    (r"rpn\.objectness\.(\w+)", r"rpn/class/\1"),
    (r"rpn\.box\.(\w+)", r"rpn/box/\1"),
    (r"box_heads\.(\d)\.class_logits\.(\w+)", r"HEAD\1/OUTPUTS/class/\2"),
    (r"box_heads\.(\d)\.box_deltas\.(\w+)", r"HEAD\1/OUTPUTS/box/\2"),
    (r"box_heads\.(\d)\.norm(\d)\.(\w+)", r"HEAD\1/TRUNK/gn\2/GN/\3"),
    (r"box_heads\.(\d)\.(fc6|fc7|fc|conv\d)\.(\w+)", r"HEAD\1/TRUNK/\2/\3"),
    (r"mask_head\.norm(\d)\.(\w+)", r"maskrcnn/gn\1/GN/\2"),
    (r"mask_head\.conv(\d)\.(\w+)", r"maskrcnn/fcn\1/\2"),
    (r"mask_head\.deconv\.(\w+)", r"maskrcnn/deconv/\1"),
    (r"mask_head\.logits\.(\w+)", r"maskrcnn/conv/\1"),
]
NORM_PARTS = {"weight": "gamma", "bias": "beta", "running_mean": "mean/EMA", "running_var": "variance/EMA"}


def golden(name: str) -> dict[str, np.ndarray]:
    with np.load(GOLDENS / f"{name}.npz", allow_pickle=False) as arrays:
        return dict(arrays)


def golden_json(name: str) -> Any:
    return json.loads((GOLDENS / f"{name}.json").read_text())


@functools.cache
def weight(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """The value of TensorPack variable `name` in every golden, in TensorPack's layout."""
    rng = np.random.RandomState(zlib.crc32(name.encode()))
    parts = name.split("/")
    if name.endswith("mean/EMA"):
        value = 0.1 * rng.randn(*shape)
    elif name.endswith("variance/EMA"):
        value = 0.5 + rng.rand(*shape)
    elif parts[-1] == "gamma":
        value = 1 + 0.1 * rng.randn(*shape)
        if len(parts) >= 3 and parts[-3] == "conv3":
            value = value * 0.3
    elif parts[-1] == "beta":
        value = 0.1 * rng.randn(*shape)
    elif parts[-1] == "b":
        value = 0.05 * rng.randn(*shape)
    else:
        fan_in = shape[0] if len(shape) == 2 else shape[3] if parts[-2] == "deconv" else int(np.prod(shape[:3]))
        gain = next((gain for suffix, gain in GAINS.items() if re.search(suffix + "$", name)), 1.0)
        value = rng.randn(*shape) * np.sqrt(2 / fan_in) * gain
    return value.astype(np.float32)


def image(height: int, width: int, seed: float) -> np.ndarray:
    """The image of every golden: [height, width, 3] float32, BGR, 0..255."""
    y = np.arange(height, dtype=np.float64)[:, None, None]
    x = np.arange(width, dtype=np.float64)[None, :, None]
    c = np.arange(3, dtype=np.float64)
    value = np.sin(0.045 * x * (1 + 0.3 * c) + 0.9 * seed) * np.cos(0.06 * y - 0.5 * c + 0.37 * seed)
    value = value + 0.6 * np.sin(0.23 * x + 0.19 * y + 1.7 * c + seed)
    value = value + 0.5 * np.sign(np.sin(0.031 * x - 0.05 * y + 0.8 * seed)) * np.cos(0.02 * (x + y) + c)
    return np.clip(127.5 + 60 * value, 0, 255).astype(np.float32)


def golden_images(spec: np.ndarray) -> Images:
    """The one image that `image_spec` of a golden names."""
    height, width, seed = (int(number) for number in spec)
    pixels = torch.from_numpy(image(height, width, float(seed))).permute(2, 0, 1)[None].contiguous()
    return Images(pixels=pixels, sizes=torch.tensor([[height, width]]))


def golden_batch(arrays: dict[str, np.ndarray]) -> Batch:
    """The image and ground truth of a training golden."""
    masks = np.unpackbits(arrays["gt_masks_packed"], axis=-1).astype(bool)
    boxes = torch.from_numpy(arrays["gt_boxes"].astype(np.float32))[None]
    targets = Targets(
        boxes=boxes,
        labels=torch.from_numpy(arrays["gt_labels"].astype(np.int64))[None],
        valid=torch.ones(boxes.shape[:2], dtype=torch.bool),
        crowd_boxes=torch.zeros(1, 0, 4),
        crowd_valid=torch.zeros(1, 0, dtype=torch.bool),
        outlines=pack_outlines([[bitmap_edges(mask) for mask in masks]], num_instances=len(masks)),
    )
    return Batch(golden_images(arrays["image_spec"]), targets, seed=torch.tensor([1]), image_ids=torch.tensor([1]))


@functools.cache
def golden_model(config: ModelConfig) -> MaskRCNN:
    """Our model with the weights of the goldens; made once for each config."""
    torch.manual_seed(0)
    model = build_mask_rcnn(config)
    load_tensorpack(model, config)
    return model


def load_tensorpack(model: nn.Module, config: ModelConfig) -> None:
    """Fill every tensor of `model` by the weight rule."""
    state = {}
    for ours, tensor in model.state_dict().items():
        name = tensorpack_name(ours, config)
        state[ours] = to_torch(weight(name, npz_shape(name, tensor)), name)
    model.load_state_dict(state)


def tensorpack_name(ours: str, config: ModelConfig) -> str:
    """TensorPack's name of our tensor `ours`."""
    for pattern, template in NAMES:
        if match := re.fullmatch(pattern, ours):
            return _finish_name(match.expand(template), config)
    raise KeyError(ours)


def _finish_name(name: str, config: ModelConfig) -> str:
    scope, last = name.rsplit("/", 1)
    parts = NORM_PARTS if scope.endswith(("/NORM", "/GN")) else {"weight": "W", "bias": "b"}
    last = parts.get(last, last)
    norm = "gn" if config.backbone.norm == "GN" else "bn"
    name = f"{scope}/{last}".replace("/NORM/", f"/{norm}/").replace("/GN/", "/")
    if head := re.match(r"HEAD(\d)/", name):
        stage = int(head[1]) + 1
        root = f"cascade_rcnn_stage{stage}" if config.cascade else "fastrcnn"
        name = name.replace(head[0], root + "/")
        name = name.replace("/TRUNK/", "/head/" if config.cascade else "/")
        name = name.replace("/OUTPUTS/", "/outputs/" if config.architecture == "fpn" else "/")
    return name


def npz_shape(name: str, tensor: Tensor) -> tuple[int, ...]:
    """Shape of the npz array that our `tensor` is loaded from."""
    shape = tuple(tensor.shape)
    if len(shape) == 4:
        return (*shape[2:], shape[1], shape[0])
    return shape[::-1]


def to_torch(array: np.ndarray, name: str) -> Tensor:
    """An npz array in our layout."""
    if array.ndim == 4:
        array = array.transpose(3, 2, 0, 1)
    return torch.from_numpy(np.ascontiguousarray(array.T if array.ndim == 2 else array))


def to_npz(tensor: Tensor) -> np.ndarray:
    """Our tensor (or its gradient) in npz layout."""
    array = tensor.detach().numpy()
    if array.ndim == 4:
        return array.transpose(2, 3, 1, 0)
    return array.T if array.ndim == 2 else array


def worst(actual: Tensor | np.ndarray, expected: np.ndarray) -> float:
    """Largest difference, as a share of the largest expected value."""
    actual = actual.detach().numpy() if isinstance(actual, Tensor) else actual
    assert actual.shape == expected.shape, (actual.shape, expected.shape)
    if expected.size == 0:
        return 0.0
    return float(np.abs(actual.astype(np.float64) - expected).max() / max(np.abs(expected).max(), 1e-12))
