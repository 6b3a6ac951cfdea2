"""Runs of `maskfleet train` that benchmarks start as a user does, watch, and stop."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from maskfleet.training.output.measurement import parsed_line
from run_figures import Switch

METRICS, OUTPUT = "metrics.jsonl", "output.txt"
STOP_S = 60.0  # to save a checkpoint after SIGTERM
SWITCHED = re.compile(r"the steps are compiled from now on; switching took (\d+) s")
STAYS_EAGER = re.compile(r"would not pay|cannot be compiled|is not compiled")
# A model of a few thousand weights, to try a benchmark on a CPU.
SMALL: dict[str, Any] = {
    "model.max_size_px": 64,
    "model.backbone.stem_channels": 8,
    "model.fpn.channels": 16,
    "model.rpn.anchor_sizes": (8.0, 16.0, 32.0, 48.0, 64.0),
    "model.box_head.fc_channels": 32,
    "model.mask_head.channels": 16,
    "data.train_short_edge_px": (64, 64),
    "data.num_workers": 0,
    "model.rpn.train_per_level_pre_nms": 40,
    "model.rpn.train_per_level_post_nms": 40,
    "model.rpn.train_per_image": 40,
    "model.box_head.samples_per_image": 16,
    "data.test_short_edge_px": 64,
    "model.rpn.test_per_level_pre_nms": 40,
    "model.rpn.test_per_level_post_nms": 40,
    "model.rpn.test_per_image": 40,
}


class StartedRun:
    """A process that trains in `run_dir`; leaving its context stops it. Its output is in RUN_DIR/output.txt."""

    def __init__(self, command: Sequence[str], run_dir: Path, env: Mapping[str, str] = os.environ) -> None:
        run_dir.mkdir(parents=True, exist_ok=True)
        self.run_dir = run_dir
        self.started_at = time.time()
        self._clock_at = time.monotonic()
        with (run_dir / OUTPUT).open("w") as output:
            self.process = subprocess.Popen(
                command, env=dict(env), stdout=output, stderr=output, start_new_session=True
            )

    def __enter__(self) -> StartedRun:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def seconds(self) -> float:
        """Since the start of the process."""
        return time.monotonic() - self._clock_at

    @property
    def is_running(self) -> bool:
        return self.process.poll() is None

    @property
    def output(self) -> str:
        return (self.run_dir / OUTPUT).read_text(errors="replace")

    @property
    def num_lines(self) -> int:
        """Lines of metrics.jsonl so far."""
        metrics = self.run_dir / METRICS
        return metrics.read_bytes().count(b"\n") if metrics.exists() else 0

    def lines(self) -> list[dict[str, float]]:
        """The complete lines of metrics.jsonl so far."""
        metrics = self.run_dir / METRICS
        complete = metrics.read_bytes().rpartition(b"\n")[0] if metrics.exists() else b""
        return [line for line in map(parsed_line, complete.splitlines()) if line is not None]

    def keep(self, folder: Path) -> None:
        """Copy metrics and output to `folder`."""
        folder.mkdir(parents=True, exist_ok=True)
        for name in (METRICS, OUTPUT):
            if (self.run_dir / name).exists():
                shutil.copy(self.run_dir / name, folder / name)

    def stop(self) -> None:
        """Ask the process to save and end, and kill it and all that it started if it does not within a minute."""
        if self.is_running:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


class SwitchWatch:
    """Notices in the output of a run when its steps become compiled ones."""

    def __init__(self) -> None:
        self.switch: Switch | None = None

    def look(self, output: str) -> None:
        """Look for the message; the time of the switch is that of the first look which finds it."""
        if self.switch is None and (found := SWITCHED.search(output)):
            self.switch = Switch(time.time(), float(found[1]))


def is_settled(output: str) -> bool:
    """Whether a run that compiles in the background has reached its full speed, compiled or not."""
    return bool(SWITCHED.search(output) or STAYS_EAGER.search(output))


def as_sets(fields: Mapping[str, Any]) -> list[str]:
    """Options of the command line for `fields`."""
    return [part for name, value in fields.items() for part in ("--set", f"{name}={json.dumps(value)}")]
