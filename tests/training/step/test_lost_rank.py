"""A rank of a compiled run dies; a stand-in replaces CUDA graphs, and SyncBN makes ranks wait in mid-step."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from processes import ENV, LONG_S, losses, rank_of, same_weights, wait_for_checkpoints, wait_for_step

from maskfleet.config.base import replaced
from maskfleet.config.launch import LocalLaunch
from maskfleet.config.run import RunConfig
from maskfleet.launch.local.backend import LocalBackend
from maskfleet.launch.supervise.prepare import write_job_files
from maskfleet.launch.supervise.processes import job_id, processes_of
from maskfleet.launch.supervise.status import log_lines

RANKS, DYING = 3, 1
CHANGES = {
    "model.backbone.norm": "SyncBN",
    "train.compile": True,
    "train.images_per_gpu": 1,
    "train.ema_decay": 0.9,
    "train.steps_per_epoch": 4,
    "train.epoch_schedule": ((8, None),),  # 32 steps: a busy machine may kill the rank later than intended
    "train.peer_timeout_s": 60.0,
    "eval.every_epochs": 0,
}


@contextmanager
def supervised(folder: Path, config: RunConfig) -> Iterator[tuple[Path, subprocess.Popen[str]]]:
    """A run directory, and its supervisor, which keeps three ranks alive and with which they die."""
    backend = LocalBackend(LocalLaunch(ranks=RANKS), cwd=folder)
    rendered = backend.render(backend.job(config, name="run"))
    run_dir = folder / "runs" / "run"
    write_job_files(run_dir, rendered.files)
    argv = [sys.executable, str(Path(__file__).with_name("rerun_supervisor.py")), str(run_dir)]
    process = subprocess.Popen(argv, env=ENV, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        yield run_dir, process
    finally:
        process.kill()
        process.communicate()


def process_of(run_dir: Path, rank: int) -> int:
    """The process of a rank, without those of its loader."""
    pids = [pid for pid in processes_of(job_id(run_dir)) if rank_of(pid) == rank]
    [found] = [pid for pid in pids if b"rerun_train.py" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    return found


@pytest.mark.slow
def test_after_a_rank_died_a_compiled_run_is_restarted_and_ends_with_the_same_bits(
    tmp_path: Path, micro: RunConfig
) -> None:
    config = replaced(micro, CHANGES)
    with supervised(tmp_path / "undisturbed", config) as (undisturbed, process):
        assert process.communicate(timeout=LONG_S)[0] == ""
    with supervised(tmp_path / "disturbed", config) as (run_dir, process):
        wait_for_checkpoints(process, run_dir, 1)
        wait_for_step(process, run_dir, 6)
        os.kill(process_of(run_dir, DYING), signal.SIGKILL)
        process.communicate(timeout=LONG_S)
    lines = list(log_lines(run_dir))
    log = "\n".join(lines)
    assert process.returncode == 0, log
    for survivor in {*range(RANKS)} - {DYING}:
        named = [line for line in lines if f"rank {survivor} lost another rank" in line]
        assert any(f"no answer from rank {DYING} on localhost" in line for line in named), log
    assert "resuming after step" in log
    assert log.count("compiled the step for images of 64 x 64") == 2, log  # before and after the restart
    assert "eager" not in log
    assert losses(run_dir) == losses(undisturbed)
    assert same_weights(run_dir, undisturbed)
