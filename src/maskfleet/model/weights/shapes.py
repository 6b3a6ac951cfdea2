"""Names and shapes of the network's tensors, as the model on the meta device has them.

The backbone's last stage is part of the backbone in a file, and of the box head in a C4 model.
"""

from __future__ import annotations

from typing import Literal

from maskfleet.config.base import replaced
from maskfleet.config.model import ModelConfig
from maskfleet.model.build import tensor_shapes

Scope = Literal["all", "backbone"]
Shape = tuple[int, ...]

_IN_BACKBONE, _IN_BOX_HEAD = "backbone.group3.", "box_heads.0.group3."


def expected_shapes(config: ModelConfig, scope: Scope = "all") -> dict[str, Shape]:
    """Names and shapes of our state dict: of the whole network, or of the backbone alone."""
    if scope == "all":
        return dict(tensor_shapes(config))
    shapes = tensor_shapes(replaced(config, {"num_categories": config.num_categories or 1}))
    return {name: shape for name, shape in shapes.items() if in_backbone(name).startswith("backbone.")}


def scope_of(config: ModelConfig) -> Scope:
    """What weights of `config` hold: the backbone alone if the number of classes is unknown."""
    return "backbone" if config.num_categories is None else "all"


def class_layers(config: ModelConfig) -> frozenset[str]:
    """Our names of the tensors whose shape depends on the number of classes."""
    shapes = tensor_shapes(config)
    others = tensor_shapes(replaced(config, {"num_categories": 2 if config.num_categories == 1 else 1}))
    return frozenset(name for name, shape in shapes.items() if others[name] != shape)


def in_backbone(name: str) -> str:
    """Our name with the last stage in the backbone, where every file but ours has it."""
    return name.replace(_IN_BOX_HEAD, _IN_BACKBONE)


def in_model(name: str, config: ModelConfig) -> str:
    """Our name with the last stage where the model of `config` has it: the inverse of `in_backbone`."""
    return name.replace(_IN_BACKBONE, _IN_BOX_HEAD) if config.architecture == "c4" else name
