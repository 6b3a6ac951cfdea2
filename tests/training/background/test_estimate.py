"""When compiling pays, by hand: 90 s in the background and 28 s to switch per canvas."""

from __future__ import annotations

import pytest

from maskfleet.training.background.estimate import compile_estimate, switch_estimate


def test_short_runs_do_not_compile() -> None:
    # 40 epochs of 80 images in steps of 8 images: 400 steps of 0.11 s are over before two canvases are compiled.
    short = compile_estimate(canvases=2, side_by_side=2, steps_left=400, eager_step_s=0.11)
    assert not short.pays
    assert short.saved_s == -56.0


def test_long_runs_compile_and_the_gain_is_half_of_the_eager_time_that_is_left() -> None:
    long = compile_estimate(canvases=2, side_by_side=2, steps_left=10_000, eager_step_s=0.32)
    assert long.pays
    assert long.saved_s == pytest.approx((3200 - 90) / 2 - 56)


def test_canvases_that_do_not_compile_side_by_side_take_longer() -> None:
    estimates = [
        compile_estimate(canvases=6, side_by_side=count, steps_left=1, eager_step_s=1.0) for count in (6, 4, 1)
    ]
    assert [estimate.compile_s for estimate in estimates] == [90.0, 180.0, 540.0]


def test_once_compiled_only_the_switch_counts() -> None:
    assert switch_estimate(canvases=1, steps_left=141, eager_step_s=0.4).pays
    assert not switch_estimate(canvases=1, steps_left=139, eager_step_s=0.4).pays
