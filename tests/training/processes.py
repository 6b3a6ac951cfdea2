"""Training as users start it: in separate processes."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from maskfleet.config.base import replaced
from maskfleet.config.load import write_run_file
from maskfleet.config.run import RunConfig
from maskfleet.model.weights.checkpoint import CheckpointFolder
from maskfleet.training.output.metrics import read_metrics

WALL_CLOCK = (
    "time",
    "images_per_s",
    "data_wait_s",
    "memory_mib",
    "checkpoint_s",
    "evaluation_s",
    "evaluation_detect_s",
    "evaluation_score_s",
)
ENV = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
LONG_S = 900  # longer than anything takes, even on a busy machine


def prepared(run_dir: Path, config: RunConfig) -> Path:
    """`run_dir` with the run file of `config`."""
    write_run_file(run_dir, config)
    return run_dir


def command(run_dir: Path, ranks: int = 1) -> list[str]:
    module = ["-m", "maskfleet", "train", str(run_dir)]
    return [sys.executable, *module] if ranks == 1 else as_ranks(ranks, run_dir, module)


def as_ranks(count: int, run_dir: Path, arguments: Sequence[str]) -> list[str]:
    """The command that runs Python with `arguments` as `count` ranks."""
    script = str(Path(__file__).with_name("start_ranks.py"))
    return [sys.executable, script, str(count), str(run_dir / ".ranks"), *arguments]


def start(run_dir: Path, ranks: int = 1, env: Mapping[str, str] = ENV) -> subprocess.Popen[str]:
    """Training in a process group of its own."""
    return subprocess.Popen(
        command(run_dir, ranks),
        env=dict(env),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def finish(run_dir: Path, ranks: int = 1) -> str:
    """Train to the end; returns what was printed."""
    process = start(run_dir, ranks)
    output, _ = process.communicate(timeout=LONG_S)
    assert process.returncode == 0, output
    return output


def ends_like_one_left_alone(stopped: Path, config: RunConfig, left_alone: Path) -> None:
    """Check that a run of `config` that was stopped continues with the same bits: train three steps more and compare.

    Runs that are to be stopped last for thousands of steps: on a busy machine a signal may come late.
    """
    last = CheckpointFolder(stopped / "checkpoints").steps()[-1]
    for run_dir in (stopped, left_alone):
        finish(prepared(run_dir, replaced(config, {"train.steps": last + 3})))
    assert losses(stopped)[-1]["step"] == last + 3
    assert losses(stopped) == losses(left_alone)
    assert same_weights(stopped, left_alone)


def copy_of_first_checkpoint(finished: Path, target: Path) -> Path:
    """`finished`, a run directory, as it was right after its oldest checkpoint, apart from later metrics."""
    shutil.copytree(finished, target)
    (target / "model.safetensors").unlink()
    store = CheckpointFolder(target / "checkpoints")
    for step in store.steps()[1:]:
        for file in (target / "checkpoints").glob(f"{store.path(step).stem}.*"):
            file.unlink()
    return target


def wait_for_step(process: subprocess.Popen[str], run_dir: Path, step: int) -> None:
    """Until metrics.jsonl shows `step`."""
    _wait(process, lambda: any(record["step"] >= step for record in read_metrics(run_dir)), f"step {step}")


def wait_for_checkpoints(process: subprocess.Popen[str], run_dir: Path, count: int) -> None:
    """Until `count` are complete: they are written in the background, and a slow disk may be steps behind."""
    store = CheckpointFolder(run_dir / "checkpoints")
    _wait(process, lambda: len(store.steps()) >= count, f"checkpoint {count}")


def _wait(process: subprocess.Popen[str], reached: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + LONG_S
    while time.monotonic() < deadline:
        ended = process.poll() is not None  # checked first: what it did before it exited counts
        if reached():
            return
        if ended:
            output, _ = process.communicate()
            raise AssertionError(f"ended with {process.returncode} before {what}:\n{output}")
        time.sleep(0.01)
    kill_group(process)
    raise AssertionError(f"{what} was not reached in {LONG_S} s")


def kill_group(process: subprocess.Popen[str]) -> None:
    """kill -9 for the process and all its children."""
    with contextlib.suppress(ProcessLookupError):  # all of them have exited already
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def losses(run_dir: Path) -> list[dict[str, Any]]:
    """metrics.jsonl without the values that depend on the wall clock."""
    return [
        {name: value for name, value in record.items() if name not in WALL_CLOCK} for record in read_metrics(run_dir)
    ]


def weights(run_dir: Path) -> dict[str, torch.Tensor]:
    return load_file(run_dir / "model.safetensors")


def same_weights(one: Path, other: Path) -> bool:
    first, second = weights(one), weights(other)
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def children_of(process_id: int) -> list[int]:
    """Process ids below `process_id`, at any depth."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rsplit(")", 1)[1].split()
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has just exited
        if int(fields[1]) == process_id:
            child = int(stat.parent.name)
            found += [child, *children_of(child)]
    return found


def is_running(process_id: int) -> bool:
    """Whether the process has not exited; one that only waits for its parent to read its exit code has."""
    try:
        return Path(f"/proc/{process_id}/stat").read_text().rsplit(")", 1)[1].split()[0] not in ("Z", "X")
    except (FileNotFoundError, ProcessLookupError):
        return False


def rank_of(process_id: int, name: str = "RANK") -> int | None:
    """The rank a process was started as, from its environment."""
    try:
        environment = Path(f"/proc/{process_id}/environ").read_bytes().split(b"\0")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None
    values = dict(item.partition(b"=")[::2] for item in environment)
    return int(values[name.encode()]) if name.encode() in values else None


def as_json(value: object) -> str:
    return json.dumps(value, indent=1)
