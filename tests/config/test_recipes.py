"""Recipes against the figures of TensorPack and AWS Samples."""

from __future__ import annotations

import pytest

from maskfleet.config.fields import walk_fields
from maskfleet.config.launch import EksLaunch, LocalLaunch, SageMakerChannel, SageMakerLaunch, SshLaunch
from maskfleet.config.recipes import RECIPES, recipe
from maskfleet.config.run import RunConfig


def test_there_is_a_faster_twin_of_every_mask_recipe() -> None:
    mask = {name for name in RECIPES if not name.startswith("faster_")}
    assert {
        "demo",
        "standard",
        "optimized",
        "r50_fpn_1x",
        "r50_fpn_2x",
        "r101_fpn_1x",
        "r101_fpn_2x",
        "r50_c4_1x",
    } <= mask
    assert {"r101_c4_1x", "r50_fpn_gn_2x", "r50_fpn_cascade_1x"} <= mask
    for name in mask:
        assert recipe(name).model.mask
        assert not recipe(f"faster_{name}").model.mask


def test_standard_is_the_tensorpack_preset() -> None:
    run = recipe("standard")
    assert run.train.images_per_gpu == 1
    assert run.train.step_schedule == (240_000, 320_000, 360_000)
    assert (run.train.base_lr, run.train.base_lr_images) == (0.01, 8)
    assert run.train.precision == "fp32"
    assert run.train.gradient_clip == 0
    assert run.model.box_head.box_loss == "l1"


def test_optimized_is_the_aws_samples_preset() -> None:
    run = recipe("optimized")
    assert run.train.images_per_gpu == 4
    assert run.train.epoch_schedule == ((16, 0.1), (20, 0.01), (24, None))
    assert run.train.base_lr * 8 == 0.0125
    assert run.train.warmup_init_lr * 8 == pytest.approx(0.0033)
    assert run.train.gradient_clip == 0.36
    assert run.train.precision == "auto"
    assert run.model.box_head.box_loss == "huber"


def test_r101_has_23_blocks_in_its_third_group() -> None:
    assert recipe("r101_fpn_2x").model.backbone.blocks == (3, 4, 23, 3)
    assert recipe("r101_c4_1x").model.architecture == "c4"


def test_fpn_rounds_the_longest_side_up_and_c4_does_not() -> None:
    assert recipe("r50_fpn_1x").model.canvas_max_px == 1344
    assert recipe("r50_c4_1x").model.canvas_max_px == 1333


def test_every_field_has_a_sentence_of_help() -> None:
    sections = (RunConfig, LocalLaunch, SshLaunch, SageMakerLaunch, SageMakerChannel, EksLaunch)
    helpless = [
        f"{section.__name__}.{f.path}" for section in sections for f in walk_fields(section) if not f.help.endswith(".")
    ]
    assert helpless == []
