"""Converts a weights file to a complete state dict, and writes it in another format."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from maskfleet.config.model import ModelConfig
from maskfleet.errors import WeightsError
from maskfleet.model.build import build_mask_rcnn
from maskfleet.model.weights.content import Source
from maskfleet.model.weights.files import WeightsFile, save_tensorpack, save_weights
from maskfleet.model.weights.load import OnClassMismatch, fit
from maskfleet.model.weights.report import LoadReport
from maskfleet.model.weights.shapes import Scope

_FRESH_SEED = 0


def whole_state(
    file: WeightsFile, config: ModelConfig, *, source: Source = "auto", reinit_heads: bool = False
) -> tuple[dict[str, Tensor], LoadReport]:
    """Every tensor of `config`'s network from `file`; the ResNet alone if the number of classes is unknown.

    With `reinit_heads`, layers that the file has for another number of classes, or a mask head that it lacks, get
    new random values, always the same ones.
    """
    scope: Scope = "backbone" if config.num_categories is None else "all"
    mismatch: OnClassMismatch = "reinit" if reinit_heads else "error"
    fitted = fit(file, config, scope=scope, source=source, on_class_mismatch=mismatch)
    if fitted.report.complete:
        return fitted.tensors, fitted.report
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_FRESH_SEED)
        fresh = build_mask_rcnn(config).state_dict()
    return fresh | fitted.tensors, fitted.report


def check_target(path: Path) -> None:
    """An error if no weights can be written to a file of this name."""
    if path.suffix not in (".safetensors", ".npz"):
        raise WeightsError(
            f"{path} does not say by its suffix in which format to write",
            remedy="end it in .safetensors (ours, with the configuration inside) or .npz (TensorPack)",
        )


def write(path: Path, state: dict[str, Tensor], config: ModelConfig, categories: tuple[str, ...] = ()) -> None:
    """Write a state dict in the format that the suffix of `path` names."""
    check_target(path)
    if path.suffix == ".npz":
        save_tensorpack(path, state, config)
    else:
        save_weights(path, state, config, categories)
