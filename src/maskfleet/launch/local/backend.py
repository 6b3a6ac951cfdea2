"""This machine: torchrun under a supervisor, in the foreground or detached; several runs side by side."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

from maskfleet.config.launch import LocalLaunch
from maskfleet.config.load import RUN_FILE
from maskfleet.errors import LaunchError
from maskfleet.launch.explain import explain_job
from maskfleet.launch.job import JobHandle, JobSpec, JobState, JobStatus, Rendered
from maskfleet.launch.supervise.job_files import Host, Job, JobFolder
from maskfleet.launch.supervise.prepare import JOB_FILE, place, refuse_running
from maskfleet.launch.supervise.status import log_lines, status_of, stop
from maskfleet.system.process import Shell


class LocalBackend:
    """Runs a job on this machine, in RUNS/NAME."""

    def __init__(self, launch: LocalLaunch, *, run: Shell, runs: Path = Path("runs"), cwd: Path | None = None) -> None:
        self._launch, self._run = launch, run
        self._cwd = cwd or Path.cwd()
        self._runs = self._cwd / runs

    def render(self, job: JobSpec) -> Rendered:
        run_dir = self._runs / job.name
        plan = Job(
            name=job.name,
            starter="torchrun",
            hosts=(Host("localhost", job.slots[0]),),
            min_nodes=1,
            max_restarts=job.max_restarts,
            port=0,
            cwd=str(self._cwd),
            env={},
        )
        command = (sys.executable, "-m", "maskfleet.launch.supervise.supervisor", str(run_dir), "0")
        return Rendered(job.name, {RUN_FILE: job.run_yaml, JOB_FILE: plan.to_json()}, (command,))

    def submit(self, rendered: Rendered) -> JobHandle:
        run_dir = self._runs / rendered.name
        refuse_running(run_dir)
        try:
            place(run_dir, rendered.files)
            log = JobFolder(run_dir).host(0) / "supervisor.log"
            log.parent.mkdir(exist_ok=True)
            self._run.detach(rendered.commands[0], cwd=self._cwd, log=log, env=os.environ)
        except OSError as error:
            raise LaunchError(
                f"cannot write to {run_dir}: {error.strerror}",
                remedy="free some room, or launch from another folder: runs go to ./runs",
            ) from error
        return JobHandle("local", "", str(run_dir))

    def status(self, handle: JobHandle) -> JobStatus:
        return status_of(Path(handle.path))

    def logs(self, handle: JobHandle, *, follow: bool = False, rank: int | None = None) -> Iterator[str]:
        return log_lines(_known(handle), follow=follow, rank=rank)

    def cancel(self, handle: JobHandle) -> None:
        run_dir = Path(handle.path)
        if status_of(run_dir).state is JobState.UNKNOWN:
            return
        JobFolder(run_dir).ask_cancel()
        left = stop(run_dir, 0)
        if left:
            raise LaunchError(f"processes {left} cannot be killed", remedy="they hang in the kernel: look at the disk")

    def explain(self, handle: JobHandle) -> str:
        return explain_job(_known(handle))


def _known(handle: JobHandle) -> Path:
    run_dir = Path(handle.path)
    JobFolder(run_dir).job()
    return run_dir
