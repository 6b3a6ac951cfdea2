"""Whole runs that start eagerly and switch to compiled steps, on the CPU with a stand-in for the compiler."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from processes import ENV, LONG_S, as_ranks, copy_of_first_checkpoint, losses, prepared

from maskfleet.config.base import replaced
from maskfleet.config.run import RunConfig
from maskfleet.inference.device import CACHE_VARIABLE
from maskfleet.model.weights.checkpoint import CheckpointFolder
from maskfleet.training.run import _when_compiled

SCRIPT = Path(__file__).with_name("later_train.py")
CHANGES = {"train.images_per_gpu": 1, "eval.every_epochs": 0, "train.steps_per_epoch": 6}


def output_of(arguments: list[str], run_dir: Path, ranks: int) -> str:
    argv = as_ranks(ranks, run_dir, arguments) if ranks > 1 else [sys.executable, *arguments]
    env = ENV | {CACHE_VARIABLE: os.environ[CACHE_VARIABLE]}  # that of the fixture: ENV is older
    done = subprocess.run(argv, env=env, check=False, timeout=LONG_S, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_switches_on_all_ranks_and_resumes_compiled(tmp_path: Path, micro: RunConfig, ranks: int) -> None:
    config = replaced(micro, CHANGES)
    eager = prepared(tmp_path / "eager", config)
    output_of(["-m", "maskfleet", "train", str(eager)], eager, ranks)
    later = prepared(tmp_path / "later", config)
    output = output_of([str(SCRIPT), "train", str(later)], later, ranks)
    assert "compiling the step in the background" in output
    assert "the steps are compiled from now on" in output
    seen, expected = losses(later), losses(eager)
    assert [one["step"] for one in seen] == [one["step"] for one in expected]
    costs = [one["total_cost"] for one in expected]  # in another memory layout, which rounds differently
    assert [one["total_cost"] for one in seen] == pytest.approx(costs, rel=1e-4)
    again = copy_of_first_checkpoint(later, tmp_path / "again")
    first = CheckpointFolder(again / "checkpoints").newest()
    assert first is not None
    assert first.numbers["compiled"] is True
    output = output_of([str(SCRIPT), "train", str(again)], again, ranks)
    assert "compiled the step for images of" in output
    assert "in the background" not in output
    assert losses(again) == seen  # which includes the metrics of the steps that were repeated


def test_when_the_step_is_compiled(micro: RunConfig) -> None:
    gpu = torch.device("cuda")
    auto = replaced(micro, {"train.compile": "auto", "data.buckets": "orientation"})
    assert _when_compiled(auto, gpu, resumes_compiled=False) == "later"
    assert _when_compiled(auto, gpu, resumes_compiled=True) == "first"
    assert _when_compiled(auto, torch.device("cpu"), resumes_compiled=True) == "never"
    assert _when_compiled(replaced(auto, {"data.buckets": "none"}), gpu, resumes_compiled=False) == "never"
    for value, when in ((True, "first"), (False, "never")):
        assert _when_compiled(replaced(auto, {"train.compile": value}), gpu, resumes_compiled=False) == when
