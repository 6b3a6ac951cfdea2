"""Recipes: functions that return a complete RunConfig. A recipe derives from another by changing its fields."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass

from maskfleet.config.base import replaced
from maskfleet.config.model import R101_BLOCKS
from maskfleet.config.run import RunConfig
from maskfleet.errors import ConfigError

R50_WEIGHTS = "pretrained-models/ImageNet-R50-AlignPadding.npz"
R101_WEIGHTS = "pretrained-models/ImageNet-R101-AlignPadding.npz"
FASTER = "faster_"


def standard() -> RunConfig:
    """TensorPack's preset: R50-FPN, 1 image per GPU, fp32, 24 epochs of COCO counted in steps."""
    return replaced(
        RunConfig(),
        {
            "recipe": "standard",
            "model.backbone.weights": R50_WEIGHTS,
            "train.accumulate_to_images": 8,
            "train.step_schedule": (240_000, 320_000, 360_000),
            "train.images_per_epoch": 120_000,
            "data.buckets": "none",
        },
    )


def optimized() -> RunConfig:
    """AWS Samples' preset: R50-FPN, 4 images per GPU, mixed precision, gradient clipping, 24 epochs."""
    return replaced(
        RunConfig(),
        {
            "recipe": "optimized",
            "model.backbone.weights": R50_WEIGHTS,
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
    )


def r50_fpn_1x() -> RunConfig:
    """Mask R-CNN, ResNet-50 with a feature pyramid, 12 epochs of COCO."""
    return replaced(
        RunConfig(),
        {
            "recipe": "r50_fpn_1x",
            "model.backbone.weights": R50_WEIGHTS,
            "train.images_per_gpu": 2,
            "train.accumulate_to_images": 8,
            "train.precision": "auto",
        },
    )


def r50_fpn_2x() -> RunConfig:
    """As r50_fpn_1x, 24 epochs."""
    return _twice(r50_fpn_1x(), "r50_fpn_2x")


def r101_fpn_1x() -> RunConfig:
    """As r50_fpn_1x, with ResNet-101."""
    return _r101(r50_fpn_1x(), "r101_fpn_1x")


def r101_fpn_2x() -> RunConfig:
    """As r50_fpn_2x, with ResNet-101."""
    return _r101(r50_fpn_2x(), "r101_fpn_2x")


def r50_c4_1x() -> RunConfig:
    """Mask R-CNN on one feature map at stride 16, ResNet-50, 12 epochs."""
    return replaced(r50_fpn_1x(), {"recipe": "r50_c4_1x", "model.architecture": "c4", "train.images_per_gpu": 1})


def r101_c4_1x() -> RunConfig:
    """As r50_c4_1x, with ResNet-101."""
    return _r101(r50_c4_1x(), "r101_c4_1x")


def r50_fpn_gn_2x() -> RunConfig:
    """As r50_fpn_2x, with group normalisation everywhere and convolutional box heads; needs GN weights."""
    return replaced(
        r50_fpn_2x(),
        {
            "recipe": "r50_fpn_gn_2x",
            "model.backbone.norm": "GN",
            "model.backbone.weights": "pretrained-models/ImageNet-R50-GroupNorm32-AlignPadding.npz",
            "model.fpn.norm": "GN",
            "model.box_head.kind": "4conv1fc_gn",
            "model.mask_head.kind": "up4conv_gn",
        },
    )


def r50_fpn_cascade_1x() -> RunConfig:
    """As r50_fpn_1x, with a cascade of three box heads."""
    return replaced(r50_fpn_1x(), {"recipe": "r50_fpn_cascade_1x", "model.cascade": True})


def finetune() -> RunConfig:
    """Your own data, from a trained detector given as train.weights; the schedule follows the size of the set."""
    return replaced(
        r50_fpn_1x(),
        {
            "recipe": "finetune",
            "model.backbone.weights": None,
            "data.train": ("auto",),
            "data.val": ("auto",),
            "train.warmup_steps": 200,
            "train.gradient_clip": 5.0,
            "train.step_schedule": None,
            "train.epoch_schedule": "auto",
        },
    )


def scratch() -> RunConfig:
    """Your own data, from random weights: group normalisation, nothing frozen; schedule by the size of the set."""
    return replaced(
        finetune(),
        {
            "recipe": "scratch",
            "model.backbone.norm": "GN",
            "model.backbone.freeze_at": 0,
            "model.fpn.norm": "GN",
            "model.box_head.kind": "4conv1fc_gn",
            "model.mask_head.kind": "up4conv_gn",
        },
    )


def demo() -> RunConfig:
    """A small Mask R-CNN that learns generated shapes from random weights in minutes on a CPU."""
    return replaced(
        RunConfig(),
        {
            "recipe": "demo",
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
    )


@dataclass(frozen=True, slots=True)
class Recipe:
    """A recipe; `published_ap` is TensorPack's or AWS Samples' box;mask AP on COCO val2017, where known."""

    build: Callable[[], RunConfig]
    published_ap: str = ""


_MASK_RECIPES: dict[str, Recipe] = {
    "demo": Recipe(demo),
    "scratch": Recipe(scratch),
    "finetune": Recipe(finetune),
    "standard": Recipe(standard, "38.9;35.4"),
    "optimized": Recipe(optimized, "38.3;35.1"),
    "r50_fpn_1x": Recipe(r50_fpn_1x, "38.2;34.8"),
    "r50_fpn_2x": Recipe(r50_fpn_2x, "38.9;35.4"),
    "r101_fpn_1x": Recipe(r101_fpn_1x, "40.7;36.8"),
    "r101_fpn_2x": Recipe(r101_fpn_2x),
    "r50_c4_1x": Recipe(r50_c4_1x, "36.2;31.8"),
    "r101_c4_1x": Recipe(r101_c4_1x, "40.1;34.6"),
    "r50_fpn_gn_2x": Recipe(r50_fpn_gn_2x, "40.4;36.3"),
    "r50_fpn_cascade_1x": Recipe(r50_fpn_cascade_1x, "41.7;36.2"),
}
_FASTER_AP = {"r50_fpn_1x": "37.5", "r50_c4_1x": "35.6"}


def _faster(name: str) -> Recipe:
    mask_recipe = _MASK_RECIPES[name].build

    def build() -> RunConfig:
        return replaced(mask_recipe(), {"recipe": FASTER + name, "model.mask": False})

    build.__doc__ = f"Faster R-CNN: as {name}, without masks."
    return Recipe(build, _FASTER_AP.get(name, ""))


RECIPES: dict[str, Recipe] = _MASK_RECIPES | {FASTER + name: _faster(name) for name in _MASK_RECIPES}


def recipe(name: str) -> RunConfig:
    """The configuration of the recipe `name`."""
    if name not in RECIPES:
        near = difflib.get_close_matches(name, RECIPES, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise ConfigError(f"there is no recipe {name!r}", remedy=f"{hint}`maskfleet config recipes` lists them all")
    return RECIPES[name].build()


def _twice(run: RunConfig, name: str) -> RunConfig:
    return replaced(run, {"recipe": name, "train.step_schedule": (240_000, 320_000, 360_000)})


def _r101(run: RunConfig, name: str) -> RunConfig:
    return replaced(run, {"recipe": name, "model.backbone.blocks": R101_BLOCKS, "model.backbone.weights": R101_WEIGHTS})
