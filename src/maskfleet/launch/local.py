"""This machine: torchrun under a supervisor, in the foreground or detached; several runs side by side."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

from maskfleet.config.launch import LocalLaunch
from maskfleet.config.load import RUN_FILE, load, write_run_file
from maskfleet.errors import LaunchError
from maskfleet.launch.explain import explain_job
from maskfleet.launch.job import JobHandle, JobSpec, JobState, JobStatus, Rendered
from maskfleet.launch.jobdir import LAUNCH, Host, Job, JobFolder, write_whole
from maskfleet.launch.report import log_lines, status_of, stop
from maskfleet.launch.shell import Shell

JOB_FILE = f"{LAUNCH}/job.json"


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
            python=sys.executable,
            cwd=str(self._cwd),
            env={},
        )
        command = (sys.executable, "-m", "maskfleet.launch.supervisor", str(run_dir), "0")
        return Rendered(job.name, {RUN_FILE: job.run_yaml, JOB_FILE: plan.to_json()}, (command,))

    def submit(self, rendered: Rendered) -> JobHandle:
        run_dir = self._runs / rendered.name
        if status_of(run_dir).state in (JobState.RUNNING, JobState.PENDING):
            raise LaunchError(
                f"{run_dir} is running already", remedy="follow it with `maskfleet logs`, or choose another --name"
            )
        try:
            place(run_dir, rendered)
            log = JobFolder(run_dir).host(0) / "supervisor.log"
            log.parent.mkdir(exist_ok=True)
            self._run.detach(rendered.commands[0], cwd=self._cwd, log=log, env=os.environ)
        except OSError as error:
            raise LaunchError(
                f"cannot write to {run_dir}: {error.strerror}", remedy="free some room, or use another --runs folder"
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
        JobFolder(run_dir).write_outcome("cancelled", 143)
        if left:
            raise LaunchError(f"processes {left} cannot be killed", remedy="they hang in the kernel: look at the disk")

    def explain(self, handle: JobHandle) -> str:
        return explain_job(_known(handle))


def place(run_dir: Path, rendered: Rendered) -> None:
    """Put the files of a job into its run directory; where the same run is there already, how it ended is forgotten."""
    run_file = run_dir / RUN_FILE
    run_dir.mkdir(parents=True, exist_ok=True)
    for name, content in rendered.files.items():
        if name == RUN_FILE and run_file.exists():
            draft = run_dir / f"{RUN_FILE}.new"
            draft.write_text(content, encoding="utf-8")
            try:
                write_run_file(run_dir, load(draft))
            finally:
                draft.unlink()
            continue
        path = run_dir / name
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, content)
    for stale in ("outcome.json", "cancel", "endpoint.json"):
        (run_dir / LAUNCH / stale).unlink(missing_ok=True)
    for beat in (run_dir / LAUNCH).glob("host-*/beat.json"):
        beat.unlink()


def _known(handle: JobHandle) -> Path:
    run_dir = Path(handle.path)
    JobFolder(run_dir).job()
    return run_dir
