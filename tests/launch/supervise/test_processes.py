"""Killing the processes of a job: those of the next generation are spared where mpirun starts them over SSH."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from maskfleet.launch.supervise.commands import mpirun
from maskfleet.launch.supervise.job_files import Endpoint, Host, Job, JobFolder
from maskfleet.launch.supervise.processes import JOB_VARIABLE, job_id, kill_all
from maskfleet.launch.supervise.supervisor import Supervisor
from maskfleet.system.rank_variables import ATTEMPT

JOB = Job("a", "mpirun", (Host("127.0.0.1", 1), Host("127.0.0.1", 1)), 1, 3, 0, "~")


@pytest.fixture
def daemons(tmp_path: Path) -> Iterator[dict[str, subprocess.Popen[bytes]]]:
    """Processes of the job in `tmp_path` by their attempt; one does not say which it belongs to."""
    started = {}
    for attempt in ("", "6", "7", "8", "10"):
        env = {**os.environ, JOB_VARIABLE: job_id(tmp_path)} | ({ATTEMPT: attempt} if attempt else {})
        started[attempt] = subprocess.Popen(["sleep", "600"], env=env)
    yield started
    for process in started.values():
        process.kill()
        process.wait()


def running(daemons: dict[str, subprocess.Popen[bytes]]) -> list[str]:
    return [attempt for attempt, process in daemons.items() if process.poll() is None]


def test_all_processes_of_the_job_are_killed(tmp_path: Path, daemons: dict[str, subprocess.Popen[bytes]]) -> None:
    assert kill_all(job_id(tmp_path)) == []
    assert running(daemons) == []


def test_a_host_that_follows_kills_nothing_of_the_next_generation(
    tmp_path: Path, daemons: dict[str, subprocess.Popen[bytes]]
) -> None:
    folder = JobFolder(tmp_path)
    folder.host(1).mkdir(parents=True)
    folder.write_job(JOB)
    follower = Supervisor(tmp_path, 1)
    follower.leadership.generation = 7
    folder.write_endpoint(Endpoint(8, 0, "127.0.0.1", members=[0, 1]))  # and mpirun there has started daemons here
    follower._follow_leader()
    assert running(daemons) == ["8", "10"]


def test_the_daemons_of_mpirun_tell_their_generation(tmp_path: Path) -> None:
    hosts = {0: "10.0.0.1", 1: "10.0.0.2"}
    argv = mpirun(JOB, tmp_path, tmp_path, hosts=hosts, endpoint=Endpoint(8, 0, "10.0.0.1"), store=tmp_path / "store")
    agent = argv[argv.index("orte_launch_agent") + 1]
    assert agent == f"env {JOB_VARIABLE}={job_id(tmp_path)} {ATTEMPT}=8 orted"
