"""Recipes: complete run configurations, each described by its changes to another recipe or to the defaults."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from maskfleet.config.base import replaced
from maskfleet.config.model import R101_BLOCKS
from maskfleet.config.run import RunConfig
from maskfleet.errors import ConfigError

FASTER = "faster_"


@dataclass(frozen=True, slots=True)
class Recipe:
    """A recipe; `published_ap` is TensorPack's or AWS Samples' box;mask AP on COCO val2017, where known."""

    summary: str
    base: str | None  # the recipe that `changes` apply to; None for the defaults of the fields
    changes: Mapping[str, Any]
    published_ap: str = ""


_R50 = {"model.backbone.weights": "pretrained-models/ImageNet-R50-AlignPadding.npz"}
_R101 = {
    "model.backbone.blocks": R101_BLOCKS,
    "model.backbone.weights": "pretrained-models/ImageNet-R101-AlignPadding.npz",
}
_TWICE = {"train.step_schedule": (240_000, 320_000, 360_000)}
_GROUP_NORM = {
    "model.backbone.norm": "GN",
    "model.fpn.norm": "GN",
    "model.box_head.kind": "4conv1fc_gn",
    "model.mask_head.kind": "up4conv_gn",
}

_MASK_RECIPES = {
    "demo": Recipe(
        "A small Mask R-CNN that learns generated shapes from random weights in minutes on a CPU.",
        None,
        {
            "model.max_size_px": 128,
            "model.backbone.blocks": (1, 1, 1, 1),
            "model.backbone.stem_channels": 16,
            "model.backbone.norm": "GN",
            "model.backbone.freeze_at": 0,
            "model.fpn.channels": 64,
            "model.fpn.norm": "GN",
            "model.rpn.anchor_sizes": (12, 24, 48, 80, 120),
            "model.rpn.samples_per_image": 64,
            "model.rpn.train_per_level_pre_nms": 200,
            "model.rpn.train_per_level_post_nms": 200,
            "model.rpn.train_per_image": 200,
            "model.rpn.test_per_level_pre_nms": 200,
            "model.rpn.test_per_level_post_nms": 200,
            "model.rpn.test_per_image": 100,
            "model.box_head.fc_channels": 256,
            "model.box_head.samples_per_image": 64,
            "model.mask_head.channels": 64,
            "data.train": ("train",),
            "data.val": ("val",),
            "data.train_short_edge_px": (128, 128),
            "data.test_short_edge_px": 128,
            "train.images_per_gpu": 4,
            "train.base_lr": 0.04,
            "train.warmup_steps": 50,
            "train.warmup_init_lr": 0.001,
            "train.gradient_clip": 5.0,
            "train.step_schedule": None,
            "train.epoch_schedule": ((4.5, 0.1), (6, None)),
            "train.log_every_steps": 10,
            "eval.every_epochs": 2,
            "eval.images_per_gpu": 4,
        },
    ),
    "scratch": Recipe(
        "Your own data, from random weights: group normalisation, nothing frozen; schedule by the size of the set.",
        "finetune",
        _GROUP_NORM | {"model.backbone.freeze_at": 0},
    ),
    "finetune": Recipe(
        "Your own data, from a trained detector given as train.weights; the schedule follows the size of the set.",
        "r50_fpn_1x",
        {
            "model.backbone.weights": None,
            "data.train": ("auto",),
            "data.val": ("auto",),
            "train.warmup_steps": 200,
            "train.gradient_clip": 5.0,
            "train.step_schedule": None,
            "train.epoch_schedule": "auto",
        },
    ),
    "standard": Recipe(
        "TensorPack's preset: R50-FPN, 1 image per GPU, fp32, 24 epochs of COCO counted in steps.",
        None,
        {
            **_R50,
            "train.accumulate_to_images": 8,
            **_TWICE,
            "train.images_per_epoch": 120_000,
            "data.buckets": "none",
        },
        published_ap="38.9;35.4",
    ),
    "optimized": Recipe(
        "AWS Samples' preset: R50-FPN, 4 images per GPU, mixed precision, gradient clipping, 24 epochs.",
        None,
        {
            **_R50,
            "model.box_head.box_loss": "huber",
            "model.loss_mean_over": "batch",
            "model.rpn.min_size": 0.1,
            "train.images_per_gpu": 4,
            "train.precision": "auto",
            "train.base_lr": 0.0125 / 8,
            "train.base_lr_images": 1,
            "train.warmup_init_lr": 0.01 * 0.33 / 8,
            "train.gradient_clip": 0.36,
            "train.step_schedule": None,
            "train.epoch_schedule": ((16, 0.1), (20, 0.01), (24, None)),
            "train.images_per_epoch": 120_000,
            "data.buckets": "tight",
        },
        published_ap="38.3;35.1",
    ),
    "r50_fpn_1x": Recipe(
        "Mask R-CNN, ResNet-50 with a feature pyramid, 12 epochs of COCO.",
        None,
        {
            **_R50,
            "train.images_per_gpu": 2,
            "train.accumulate_to_images": 8,
            "train.precision": "auto",
        },
        published_ap="38.2;34.8",
    ),
    "r50_fpn_2x": Recipe("As r50_fpn_1x, 24 epochs.", "r50_fpn_1x", _TWICE, published_ap="38.9;35.4"),
    "r101_fpn_1x": Recipe("As r50_fpn_1x, with ResNet-101.", "r50_fpn_1x", _R101, published_ap="40.7;36.8"),
    "r101_fpn_2x": Recipe("As r50_fpn_2x, with ResNet-101.", "r50_fpn_2x", _R101),
    "r50_c4_1x": Recipe(
        "Mask R-CNN on one feature map at stride 16, ResNet-50, 12 epochs.",
        "r50_fpn_1x",
        {"model.architecture": "c4", "train.images_per_gpu": 1},
        published_ap="36.2;31.8",
    ),
    "r101_c4_1x": Recipe("As r50_c4_1x, with ResNet-101.", "r50_c4_1x", _R101, published_ap="40.1;34.6"),
    "r50_fpn_gn_2x": Recipe(
        "As r50_fpn_2x, with group normalisation everywhere and convolutional box heads; needs GN weights.",
        "r50_fpn_2x",
        _GROUP_NORM | {"model.backbone.weights": "pretrained-models/ImageNet-R50-GroupNorm32-AlignPadding.npz"},
        published_ap="40.4;36.3",
    ),
    "r50_fpn_cascade_1x": Recipe(
        "As r50_fpn_1x, with a cascade of three box heads.",
        "r50_fpn_1x",
        {"model.cascade": True},
        published_ap="41.7;36.2",
    ),
}
_FASTER_AP = {"r50_fpn_1x": "37.5", "r50_c4_1x": "35.6"}

RECIPES: dict[str, Recipe] = _MASK_RECIPES | {
    FASTER + name: Recipe(
        f"Faster R-CNN: as {name}, without masks.", name, {"model.mask": False}, published_ap=_FASTER_AP.get(name, "")
    )
    for name in _MASK_RECIPES
}


def recipe(name: str) -> RunConfig:
    """The configuration of the recipe `name`."""
    if name not in RECIPES:
        near = difflib.get_close_matches(name, RECIPES, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise ConfigError(f"there is no recipe {name!r}", remedy=f"{hint}`maskfleet config recipes` lists them all")
    base = RECIPES[name].base
    return replaced(RunConfig() if base is None else recipe(base), {"recipe": name, **RECIPES[name].changes})
