"""The command line on the machine that launches."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cluster import Cluster
from maskfleet.launch.backend import parse_handle

ENVIRONMENT = Path(sys.executable).parent.parent


class Client:
    """The command line on the machine that launches."""

    def __init__(self, cluster: Cluster, run_file: Path) -> None:
        self.cluster, self.run_file = cluster, run_file
        self.env = {**os.environ, "HOME": str(cluster.client_home), "OMP_NUM_THREADS": "1"}
        self.env.pop("SSH_AUTH_SOCK", None)

    def __call__(self, *arguments: str, timeout_s: float = 900) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "maskfleet", *arguments],
            capture_output=True,
            text=True,
            cwd=self.cluster.folder,
            env=self.env,
            check=False,
            timeout=timeout_s,
        )

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "maskfleet", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=self.cluster.folder,
            env=self.env,
            start_new_session=True,
        )

    def options(self, *more: str) -> list[str]:
        """Options of a launch on all hosts with the environment of these tests."""
        root = json.dumps(str(self.cluster.shared))
        common = ["launch", "-c", str(self.run_file), "--on", "ssh", "--hosts", ",".join(self.cluster.names)]
        common += ["--accept-new", "--launch-set", f"run_root={root}"]
        return [*common, "--launch-set", f"environment={json.dumps(str(ENVIRONMENT))}", *more]

    def launched(self, *more: str) -> str:
        done = self(*self.options("--detach", *more))
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def status(self, handle: str) -> dict[str, Any]:
        done = self("status", handle, "--json")
        assert done.stdout, done.stderr
        return json.loads(done.stdout)

    def finish(self, handle: str, timeout_s: float = 900) -> str:
        """Follow the run until it finishes; returns its output."""
        done = self("logs", "-f", handle, timeout_s=timeout_s)
        assert self.status(handle)["state"] == "done", done.stdout + done.stderr
        return done.stdout


def run_dir_of(handle: str) -> Path:
    return Path(parse_handle(handle).path)


def until(condition: Callable[[], object], timeout_s: float = 900) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.2)
