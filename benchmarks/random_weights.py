"""Random weights in a file, for runs whose result does not matter; frozen layers need some to start from."""

from __future__ import annotations

from pathlib import Path

import torch

from maskfleet.config.model import ModelConfig
from maskfleet.model.build import build_mask_rcnn
from maskfleet.model.weights import Labels, save_weights


def save_random_weights(path: Path, config: ModelConfig, labels: Labels | None = None) -> Path:
    """Write weights whose masks fill their boxes, which gives as many runs a column as trained ones; returns `path`."""
    torch.manual_seed(0)
    state = build_mask_rcnn(config).state_dict()
    for name, value in state.items():
        if name.startswith("mask_head.logits"):
            # Not 0: a GPU needs less power, and so computes faster, where gradients are zeros.
            value.fill_(2.0) if name.endswith("bias") else value.mul_(0.01)
    save_weights(path, state, config, labels)
    return path
