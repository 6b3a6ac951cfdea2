"""Signals stop a run after a save, and nothing that it started outlives it."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from processes import (
    LONG_S,
    children_of,
    ends_like_one_left_alone,
    is_running,
    kill_group,
    prepared,
    start,
    wait_for_step,
)

from maskfleet.config.base import replaced
from maskfleet.config.run import RunConfig


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_to_the_whole_process_group_spares_the_loader_and_saves(
    number: signal.Signals, code: int, tmp_path: Path, micro: RunConfig
) -> None:
    """The weights are updated every third step, with loader processes."""
    changes = {"train.accumulate_to_images": 6, "train.warmup_steps": 2, "train.epoch_schedule": ((4000, None),)}
    config = replaced(micro, {"data.num_workers": 2, **changes})
    stopped = prepared(tmp_path / "stopped", config)
    process = start(stopped)
    wait_for_step(process, stopped, 4)
    os.killpg(process.pid, number)
    output, _ = process.communicate(timeout=LONG_S)
    assert process.returncode == code, output
    assert "stopping after this step, saving" in output
    assert "everything is saved" in output
    ends_like_one_left_alone(stopped, config, tmp_path / "left alone")


@pytest.mark.slow
def test_nothing_is_left_of_a_rank_that_was_killed(tmp_path: Path, micro: RunConfig) -> None:
    run_dir = prepared(tmp_path, replaced(micro, {"data.num_workers": 2, "train.epoch_schedule": ((10_000, None),)}))
    process = start(run_dir)
    wait_for_step(process, run_dir, 2)
    children = children_of(process.pid)
    assert len(children) >= 4, "two workers, their fork server and multiprocessing's resource tracker"
    process.kill()
    process.wait()
    deadline = time.monotonic() + LONG_S  # it takes a second
    while any(map(is_running, children)) and time.monotonic() < deadline:
        time.sleep(0.05)
    left = [child for child in children if is_running(child)]
    kill_group(process)
    assert not left
