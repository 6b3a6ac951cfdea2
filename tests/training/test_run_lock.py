"""A run directory that another process holds, and one where nothing can be held."""

from __future__ import annotations

import errno
import fcntl
import logging
import subprocess
import sys
from pathlib import Path

import pytest
from processes import ENV, LONG_S, command, prepared

from maskfleet.config.base import replaced
from maskfleet.config.run import RunConfig
from maskfleet.errors import ConfigError, TrainingError
from maskfleet.training.distributed import Ranks, Worker
from maskfleet.training.run import train
from maskfleet.training.run_lock import claimed, refused_paths

ALONE = Ranks(Worker(), None)
HOLD = """
import fcntl, sys
with open(sys.argv[1], "w") as lock:
    fcntl.flock(lock, fcntl.LOCK_EX)
    print("mine", flush=True)
    input()
"""


@pytest.mark.slow
def test_a_run_that_may_wait_starts_when_the_other_process_has_ended(tmp_path: Path, micro: RunConfig) -> None:
    run_dir = prepared(tmp_path, micro)
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(run_dir / ".lock")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "mine\n"
        argv = [*command(run_dir), "--wait", str(LONG_S)]
        with subprocess.Popen(argv, env=ENV, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
            assert process.stdout is not None
            first = process.stdout.readline()
            other.kill()
            rest, _ = process.communicate(timeout=LONG_S)
    assert "another process is training in" in first
    assert "waiting up to" in first
    assert process.returncode == 0, rest
    assert "training is done after 18 steps" in rest


def test_without_locks_it_trains_and_says_so(
    tmp_path: Path, micro: RunConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def flock(file: int, operation: int) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", flock)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):  # a run that was killed leaves nothing that would keep the next one out
            with claimed(tmp_path / "run", micro, ALONE):
                assert (tmp_path / "run" / "run.yaml").exists()
    assert caplog.text.count("is on a file system without locks") == 2


def test_who_may_not_wait_is_told_at_once_and_what_fails_inside_lets_go(tmp_path: Path, micro: RunConfig) -> None:
    with (
        claimed(tmp_path, micro, ALONE),
        pytest.raises(ConfigError, match="another process is training"),
        claimed(tmp_path, micro, ALONE),
    ):
        raise AssertionError("it was claimed twice")
    with pytest.raises(KeyError), claimed(tmp_path, micro, ALONE):
        raise KeyError
    with claimed(tmp_path, micro, ALONE):
        pass


@pytest.mark.slow
def test_a_folder_in_the_place_of_a_file_is_an_error_also_in_the_log(tmp_path: Path, micro: RunConfig) -> None:
    short = replaced(micro, {"train.epoch_schedule": ((1, None),), "eval.every_epochs": 0})
    path = tmp_path / "environment.json"
    path.mkdir()
    with pytest.raises(TrainingError, match=f"cannot use {path}: Is a directory"):
        train(short, tmp_path)
    assert f"cannot use {path}: Is a directory" in (tmp_path / "log.txt").read_text()
    path.rmdir()
    train(short, tmp_path)  # the remedy


def test_a_file_server_that_fails_is_not_called_a_wrong_path() -> None:
    with pytest.raises(OSError, match="Input/output error"), refused_paths():
        raise OSError(errno.EIO, "Input/output error", "metrics.jsonl")
