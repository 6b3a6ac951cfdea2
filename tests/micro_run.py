"""A run small enough to be trained many times: 64-pixel images, a network of a few thousand weights."""

from __future__ import annotations

from pathlib import Path

import pytest

from maskfleet.config.base import replaced
from maskfleet.config.recipes import recipe
from maskfleet.config.run import RunConfig
from maskfleet.data.synthetic.dataset import make_shapes

MICRO = {
    "model.max_size_px": 64,
    "model.backbone.stem_channels": 8,
    "model.fpn.channels": 16,
    "model.rpn.anchor_sizes": (8.0, 16.0, 32.0, 48.0, 64.0),
    "model.rpn.samples_per_image": 32,
    "model.rpn.train_per_level_pre_nms": 40,
    "model.rpn.train_per_level_post_nms": 40,
    "model.rpn.train_per_image": 40,
    "model.rpn.test_per_level_pre_nms": 40,
    "model.rpn.test_per_level_post_nms": 40,
    "model.rpn.test_per_image": 20,
    "model.box_head.fc_channels": 32,
    "model.box_head.samples_per_image": 16,
    "model.mask_head.channels": 16,
    "data.train_short_edge_px": (64, 64),
    "data.test_short_edge_px": 64,
    "data.num_workers": 0,
    "train.images_per_gpu": 2,
    "train.warmup_steps": 4,
    "train.epoch_schedule": ((2, 0.1), (3, None)),
    "train.log_every_steps": 1,
    "eval.every_epochs": 2,
    "checkpoint.every_epochs": 1,
}


@pytest.fixture(scope="session")
def shapes_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A set of 12 training and 5 validation images in two categories."""
    root = tmp_path_factory.mktemp("shapes") / "set"
    make_shapes(root, num_train=12, num_val=5, height=(64, 64), width=(64, 64), num_categories=2, max_objects=3, seed=3)
    return root


@pytest.fixture(scope="session")
def micro(shapes_root: Path) -> RunConfig:
    """18 steps of 2 images, evaluated twice."""
    return replaced(recipe("demo"), {**MICRO, "data.root": str(shapes_root)})
