"""The command line as users start it, in a folder with data and a run file."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from maskfleet.launch.supervise.processes import job_id, processes_of

ENV = {**os.environ, "OMP_NUM_THREADS": "1"}


class Workshop:
    """A folder with data, a run file, and the command line in it."""

    def __init__(self, folder: Path, run_file: Path) -> None:
        self.folder, self.run_file = folder, run_file

    def __call__(self, *arguments: str, timeout_s: float = 240) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "maskfleet", *arguments],
            capture_output=True,
            text=True,
            cwd=self.folder,
            env=ENV,
            check=False,
            timeout=timeout_s,
        )

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "maskfleet", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=self.folder,
            env=ENV,
        )

    def launched(self, *arguments: str) -> str:
        """Handle of a detached launch."""
        done = self("launch", "-c", str(self.run_file), "--detach", *arguments)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def status(self, handle: str) -> dict[str, object]:
        return json.loads(self("status", handle, "--json").stdout)


def until(condition: Callable[[], object], timeout_s: float = 240) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.1)


def ranks_of(run_dir: Path) -> list[int]:
    """Process ids of the ranks of the job in `run_dir`, found as every process of a job is."""
    return [pid for pid in processes_of(job_id(run_dir)) if b"\0RANK=" in Path(f"/proc/{pid}/environ").read_bytes()]
