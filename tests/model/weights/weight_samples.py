"""Weights files to test with: every published variant, made small or whole from names and shapes alone."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from maskfleet.config.base import replaced
from maskfleet.config.model import R101_BLOCKS, ModelConfig
from maskfleet.model.weights.shapes import expected_shapes
from maskfleet.model.weights.tensorpack import npz_arrays

GOLDENS = Path(__file__).parents[2] / "goldens"

ALL_GN = {"backbone.norm": "GN", "fpn.norm": "GN", "box_head.kind": "4conv1fc_gn", "mask_head.kind": "up4conv_gn"}
VARIANTS: dict[str, dict[str, Any]] = {
    "c4_mask": {"architecture": "c4"},
    "fpn_cascade_mask": {"cascade": True},
    "fpn_gn_cascade_mask": {"cascade": True, **ALL_GN},
    "fpn_joint": {"mask": False},
    "fpn_mask": {},
    "fpn_stride1x1": {"mask": False},
    "fpn_tfpad": {"mask": False},
    "r101_c4_mask": {"architecture": "c4", "backbone.blocks": R101_BLOCKS},
    "r101_fpn_gn_cascade_mask": {"cascade": True, "backbone.blocks": R101_BLOCKS, **ALL_GN},
    "r101_fpn_mask": {"backbone.blocks": R101_BLOCKS},
    "r50_fpn_4conv1fc": {"mask": False, "box_head.kind": "4conv1fc"},
    "r50_fpn_gn_mask": ALL_GN,
    "r50_fpn_nonorm_mask": {"backbone.norm": "None"},
    "r50_fpn_syncbn_mask": {"backbone.norm": "SyncBN"},
}
"""What sets each name table of TensorPack, vars_*.json, apart from our defaults."""

SMALL = {
    "num_categories": 3,
    "backbone.stem_channels": 8,
    "backbone.blocks": (1, 2, 1, 1),
    "fpn.channels": 16,
    "box_head.fc_channels": 24,
    "box_head.conv_channels": 32,
    "mask_head.channels": 40,
    "rpn.head_channels": 48,
}


def config_of(variant: str) -> ModelConfig:
    return replaced(ModelConfig(), {"num_categories": 80} | VARIANTS[variant])


def slim_config(variant: str) -> ModelConfig:
    """A variant with all its blocks but few channels."""
    widths = {path: value for path, value in SMALL.items() if "channels" in path}
    return replaced(config_of(variant), widths)


def small_config(**changes: Any) -> ModelConfig:
    """A network of every part with all widths different; keywords are field paths with __ for the dot."""
    return replaced(ModelConfig(), SMALL | {path.replace("__", "."): value for path, value in changes.items()})


def name_table(name: str) -> dict[str, Any]:
    return json.loads((GOLDENS / f"vars_{name}.json").read_text())


def random_bits(rng: np.random.Generator, shape: list[int] | tuple[int, ...]) -> np.ndarray:
    """Finite float32 of any bit pattern below 2: both signs, denormals, and a negative zero in front."""
    bits = rng.integers(0, 2**32, size=shape, dtype=np.uint32) & np.uint32(0xBFFFFFFF)
    bits.ravel()[:2] = [0x80000000, 0x00000001][: bits.size]
    return bits.view(np.float32)


def random_state(config: ModelConfig, scope: str = "all", seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = expected_shapes(config, scope)  # type: ignore[arg-type]
    return {
        name: torch.rand(shape, generator=generator) + (0.5 if name.endswith("running_var") else -0.5)
        for name, shape in shapes.items()
    }


def write_npz(path: Path, config: ModelConfig, extra: dict[str, Any] | None = None, **options: Any) -> Path:
    """A TensorPack file of `config` with random weights."""
    np.savez(path, **npz_arrays(random_state(config), config, **options), **(extra or {}))
    return path


def write_backbone_npz(path: Path, config: ModelConfig) -> Path:
    """A file like ImageNet-R50-AlignPadding.npz: the ResNet and its classifier."""
    arrays: dict[str, Any] = npz_arrays(random_state(config, "backbone"), config, scope="backbone")
    features = list(expected_shapes(config, "backbone").values())[-1][0]
    arrays |= {"linear/W": np.ones((features, 10), np.float32), "linear/b": np.ones(10, np.float32)}
    np.savez(path, **arrays)
    return path


def torchvision_state(name: str, *, seed: int = 0) -> dict[str, Tensor]:
    """A whole state dict of torchvision's model `name` with random numbers."""
    generator = torch.Generator().manual_seed(seed)
    state = {}
    for entry, shape in name_table("torchvision")[name].items():
        tensor = torch.rand(shape, generator=generator)
        state[entry] = torch.tensor(7) if entry.endswith("num_batches_tracked") else tensor
    return state


def as_published(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """torchvision's names of today as they are in the files it published before 2022."""
    old = {}
    for name, tensor in state.items():
        name = re.sub(r"(inner|layer)_blocks\.(\d)\.0\.", r"\1_blocks.\2.", name)
        name = re.sub(r"mask_head\.(\d)\.0\.", lambda found: f"mask_head.mask_fcn{int(found[1]) + 1}.", name)
        name = name.replace("rpn.head.conv.0.0.", "rpn.head.conv.")
        if not name.endswith("num_batches_tracked"):
            old[name] = tensor
    return old
