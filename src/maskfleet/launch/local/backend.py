"""This machine: ranks under a detached supervisor; several runs can run side by side."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import ClassVar, Self

from maskfleet.config.launch import LocalLaunch
from maskfleet.config.load import RUN_FILE
from maskfleet.config.run import RunConfig
from maskfleet.errors import LaunchError
from maskfleet.launch.backend import Backend, NotebookOptions
from maskfleet.launch.explain import explain_job
from maskfleet.launch.files.transfer import Report, RunFiles, ignore
from maskfleet.launch.findings import Finding
from maskfleet.launch.instances import INSTANCES, Instance
from maskfleet.launch.job import JobHandle, JobSpec, JobState, JobStatus, Rendered, job_for
from maskfleet.launch.local.doctor import examine
from maskfleet.launch.local.files import run_files
from maskfleet.launch.supervise.job_files import Host, Job, JobFolder
from maskfleet.launch.supervise.prepare import JOB_FILE, refuse_running, write_job_files
from maskfleet.launch.supervise.status import log_lines, remove_persisted, status_of, stop, tell_notes
from maskfleet.system.process import Shell, run_command


class LocalBackend(Backend):
    """Runs a job on this machine, in ./runs/NAME."""

    cancels_on_interrupt: ClassVar[bool] = True

    def __init__(
        self,
        launch: LocalLaunch,
        *,
        nodes: int | None = None,
        known: Mapping[str, Instance] = INSTANCES,
        run: Shell = run_command,
        cwd: Path | None = None,
    ) -> None:
        if nodes not in (None, 1):
            raise LaunchError(f"--nodes {nodes} does not go with --on local", remedy="use --on ssh for more machines")
        self._launch, self._run = launch, run
        self._cwd = cwd or Path.cwd()
        self.slots = (launch.ranks or max(1, gpus_here() if launch.gpus is None else launch.gpus),)

    @classmethod
    def for_handle(cls, handle: JobHandle) -> Self:
        return cls(LocalLaunch())

    def job(self, run: RunConfig, *, name: str | None = None) -> JobSpec:
        return job_for(run, slots=self.slots, name=name, max_restarts=self._launch.max_restarts)

    def render(self, job: JobSpec) -> Rendered:
        run_dir = self._run_dir(job.name)
        hosts = (Host("localhost", job.slots[0]),)
        plan = Job(job.name, "supervisor", hosts, 1, max_restarts=job.max_restarts, port=0, cwd=str(self._cwd))
        command = (sys.executable, "-m", "maskfleet.launch.supervise.supervisor", str(run_dir), "0")
        persist = (sys.executable, "-m", "maskfleet.launch.supervise.status", str(run_dir), "persist", "0")
        commands = (persist, command) if self._launch.persist else (command,)
        return Rendered(job.name, {RUN_FILE: job.run_yaml, JOB_FILE: plan.to_json()}, commands)

    def submit(self, rendered: Rendered) -> JobHandle:
        run_dir = self._run_dir(rendered.name)
        refuse_running(run_dir)
        try:
            write_job_files(run_dir, rendered.files)
            log = JobFolder(run_dir).host(0) / "supervisor.log"
            log.parent.mkdir(exist_ok=True)
            for before in rendered.commands[:-1]:
                done = self._run(before)
                if done.code != 0:
                    raise LaunchError(done.err.strip(), remedy="fix that, or launch without --persist")
                tell_notes(done.out)
            self._run.detach(rendered.commands[-1], cwd=self._cwd, log=log, env=os.environ)
        except OSError as error:
            raise LaunchError(
                f"cannot write to {run_dir}: {error.strerror}",
                remedy="free disk space, or launch from another folder: runs go to ./runs",
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
        try:
            JobFolder(run_dir).request_cancel()
            left = stop(run_dir, 0)
            remove_persisted(run_dir, 0)
        except OSError as error:
            raise LaunchError(
                f"cannot cancel {run_dir}: {error.filename or 'it'}: {error.strerror}",
                remedy="check the disk space and whose files they are, then cancel again",
            ) from error
        if left:
            raise LaunchError(f"processes {left} cannot be killed", remedy="they hang in the kernel: check the disk")

    def explain(self, handle: JobHandle) -> str:
        return explain_job(_known(handle))

    def doctor(self, *, folder: Path, data: str | None) -> list[Finding]:
        return examine(folder)

    def files(
        self, handle: JobHandle, *, writable: bool = False, is_file: bool = False, report: Report = ignore
    ) -> AbstractContextManager[RunFiles]:
        return nullcontext(run_files(handle))

    def notebook(self, handle: JobHandle, options: NotebookOptions) -> None:
        from maskfleet.launch.local.notebook import serve

        serve(
            Path(handle.path),
            port=options.port,
            on_ready=lambda servers: options.show(servers.jupyter_url, servers.tensorboard_url),
        )

    def stop_notebook(self, handle: JobHandle) -> str:
        raise LaunchError("a notebook on this machine ends by itself", remedy="press Ctrl-C where it runs")

    def _run_dir(self, name: str) -> Path:
        return self._cwd / "runs" / name


def gpus_here() -> int:
    """GPUs of this machine, as the kernel lists them; does not import torch."""
    folder = Path("/proc/driver/nvidia/gpus")
    return len(list(folder.iterdir())) if folder.is_dir() else 0


def _known(handle: JobHandle) -> Path:
    run_dir = Path(handle.path)
    if not JobFolder(run_dir).exists():
        raise LaunchError(f"there is no job in {run_dir}", remedy="check the handle; `maskfleet launch` prints it")
    return run_dir
