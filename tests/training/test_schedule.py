"""Rates and lengths, worked by hand from TensorPack's and AWS Samples' rules."""

from __future__ import annotations

import pytest

from maskfleet.config.base import replaced
from maskfleet.config.recipes import recipe
from maskfleet.config.run import RunConfig, TrainConfig
from maskfleet.errors import ConfigError
from maskfleet.training.schedule import Schedule, auto_epochs, schedule_for


def tensorpack(num_gpus: int, **changes: object) -> Schedule:
    """TensorPack's default 1x schedule: 1 image a GPU, epochs of 500 steps."""
    fields = {
        "train.accumulate_to_images": 8,
        "train.steps_per_epoch": 500,
        **{f"train.{k}": v for k, v in changes.items()},
    }
    return schedule_for(replaced(RunConfig(), fields).train, world_size=num_gpus, steps_per_pass=999)


def test_one_x_on_8_gpus_drops_after_240_and_320_epochs_and_ends_after_360() -> None:
    schedule = tensorpack(8)
    assert schedule.drops == ((240 * 500, 0.1), (320 * 500, pytest.approx(0.01)))
    assert schedule.total_steps == 360 * 500
    assert schedule.steps_per_update == 1
    assert schedule.full_lr == pytest.approx(0.01)
    assert schedule.lr_at(119_999) == pytest.approx(0.01)
    assert schedule.lr_at(120_000) == pytest.approx(0.001)
    assert schedule.lr_at(160_000) == pytest.approx(0.0001)


def test_16_gpus_take_half_the_steps_at_twice_the_rate() -> None:
    schedule = tensorpack(16)
    assert schedule.total_steps == 180 * 500
    assert schedule.full_lr == pytest.approx(0.02)
    assert schedule.warmup_start_lr == pytest.approx(1e-5)  # 1e-5 * min(8/16, 1) * 16/8


def test_4_gpus_add_up_two_steps_and_take_twice_as_many() -> None:
    schedule = tensorpack(4)
    assert schedule.total_steps == 720 * 500
    assert schedule.steps_per_update == 2
    assert schedule.full_lr == pytest.approx(0.01)
    assert [schedule.updates_after(step) for step in range(4)] == [False, True, False, True]


def test_decays_fall_on_whole_epochs_when_their_length_is_given() -> None:
    # 120000 * 8/3 = 320000 steps is not reached by whole epochs of 7000: 45 epochs.
    schedule = tensorpack(3, steps_per_epoch=7000)
    assert schedule.drops[0][0] == 45 * 7000
    assert schedule.total_steps == (180_000 * 8 // 3 // 7000) * 7000


def test_warm_up_is_linear_in_steps_and_ends_at_the_full_rate() -> None:
    schedule = tensorpack(8)
    assert schedule.lr_at(0) == pytest.approx(1e-5)
    assert schedule.lr_at(500) == pytest.approx(1e-5 + 0.5 * (0.01 - 1e-5))
    assert schedule.lr_at(999) == pytest.approx(1e-5 + 0.999 * (0.01 - 1e-5))
    assert schedule.lr_at(1000) == pytest.approx(0.01)


def test_aws_samples_on_32_gpus_of_4_images() -> None:
    schedule = schedule_for(recipe("optimized").train, world_size=32, steps_per_pass=1)
    assert schedule.steps_per_epoch == 120_000 // 128
    assert schedule.full_lr == pytest.approx(0.0015625 * 128)
    assert schedule.warmup_start_lr == pytest.approx(0.0033)
    assert schedule.drops == ((16 * 937, 0.1), (20 * 937, 0.01))
    assert schedule.total_steps == 24 * 937


def test_an_epoch_is_a_pass_over_the_data_unless_told_otherwise() -> None:
    train = TrainConfig(step_schedule=None, epoch_schedule=((2.5, 0.1), (3, None)))
    schedule = schedule_for(train, world_size=1, steps_per_pass=10)
    assert (schedule.steps_per_epoch, schedule.total_steps, schedule.drops) == (10, 30, ((25, 0.1),))
    assert [schedule.epochs_done(steps) for steps in (0, 9, 10, 19, 20)] == [0, 0, 1, 1, 2]


def test_the_last_step_moves_the_weights_even_in_the_middle_of_an_update() -> None:
    train = TrainConfig(step_schedule=None, epoch_schedule=((1, None),), accumulate_to_images=4)
    schedule = schedule_for(train, world_size=1, steps_per_pass=6)
    assert [schedule.updates_after(step) for step in range(6)] == [False, False, False, True, False, True]


def test_warm_up_takes_at_most_half_of_a_short_run() -> None:
    train = TrainConfig(step_schedule=None, epoch_schedule=((1, None),))
    assert schedule_for(train, world_size=1, steps_per_pass=20).warmup_steps == 10


def test_a_schedule_that_ends_before_it_begins_is_refused() -> None:
    train = TrainConfig(step_schedule=(1,), steps_per_epoch=500)
    with pytest.raises(ConfigError, match="ends before the first step"):
        schedule_for(train, world_size=8, steps_per_pass=500)


def test_auto_goes_through_small_sets_often_and_large_ones_12_times() -> None:
    assert auto_epochs(100)[-1] == (200.0, None)
    assert auto_epochs(1000) == ((90.0, 0.1), (pytest.approx(110.4), 0.01), (120.0, None))
    assert auto_epochs(118_000)[-1] == (12.0, None)
    schedule = schedule_for(recipe("finetune").train, world_size=1, steps_per_pass=500)
    assert schedule.total_steps == 120 * 500
    assert schedule.steps_per_update == 4


def test_epochs_and_steps_scale_the_whole_schedule() -> None:
    train = TrainConfig(step_schedule=None, epoch_schedule=((16, 0.1), (20, 0.01), (24, None)), epochs=6)
    schedule = schedule_for(train, world_size=1, steps_per_pass=100)
    assert (schedule.total_steps, schedule.drops) == (600, ((400, 0.1), (500, 0.01)))
    train = TrainConfig(step_schedule=(120_000, 160_000, 180_000), steps=90)
    schedule = schedule_for(train, world_size=1, steps_per_pass=7)
    assert schedule.total_steps == 90
    assert [step for step, _ in schedule.drops] == [60, 80]
    auto = schedule_for(
        TrainConfig(step_schedule=None, epoch_schedule="auto", epochs=2), world_size=1, steps_per_pass=50
    )
    assert auto.total_steps == 100
    with pytest.raises(ValueError, match="set only one"):
        TrainConfig(epochs=1, steps=1)


def test_a_cosine_falls_from_the_full_rate_after_the_warm_up_to_zero() -> None:
    train = TrainConfig(decay="cosine", steps=1100, warmup_steps=100, base_lr=0.02, images_per_gpu=8)
    schedule = schedule_for(train, world_size=1, steps_per_pass=10)
    assert schedule.lr_at(99) < schedule.lr_at(100) == pytest.approx(0.02)
    assert schedule.lr_at(350) == pytest.approx(0.02 * (1 + 0.5**0.5) / 2)  # a quarter of the way: cos 45 degrees
    assert schedule.lr_at(600) == pytest.approx(0.01)
    assert schedule.lr_at(1100) == pytest.approx(0.0)
    assert schedule.lr_at(2000) == pytest.approx(0.0)
