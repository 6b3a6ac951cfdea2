"""Amazon SageMaker: a run is a training job; its log is in CloudWatch, its model in S3."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from functools import cached_property
from pathlib import Path
from typing import Self

from maskfleet.config.base import replaced
from maskfleet.config.launch import SageMakerLaunch
from maskfleet.config.run import RunConfig
from maskfleet.errors import LaunchError
from maskfleet.launch.backend import Backend
from maskfleet.launch.files.transfer import Report, RunFiles, ignore
from maskfleet.launch.findings import Finding
from maskfleet.launch.instances import INSTANCES, Instance, instance_named
from maskfleet.launch.job import JobHandle, JobSpec, JobState, JobStatus, Rendered, job_for
from maskfleet.launch.sagemaker.doctor import examine, refuse_unfit
from maskfleet.launch.sagemaker.explain import cause_of, explained, resume_step
from maskfleet.launch.sagemaker.files import job_files
from maskfleet.launch.sagemaker.logs import FIRST_HOST, PERMISSIONS, LogReader, job_lines
from maskfleet.launch.sagemaker.request import REQUEST_FILE, data_in_channel, training_request
from maskfleet.launch.sagemaker.services import NAMES, Json, Services, asking, is_denied, job_of, launch_of
from maskfleet.launch.sagemaker.stack import with_stack
from maskfleet.launch.sagemaker.status import describe_job, host_of, state_of, status_from, stop_job
from maskfleet.system.aws import aws_exceptions, code_of

MAX_LINES = 500_000  # of a log, the last ones, that `explain` reads


class SageMakerBackend(Backend):
    """Runs a job as a SageMaker training job in a region."""

    def __init__(
        self,
        launch: SageMakerLaunch,
        *,
        nodes: int | None = None,
        known: Mapping[str, Instance] = INSTANCES,
        services: Callable[[str | None], Services] = Services,
    ) -> None:
        launch = launch if nodes is None else replaced(launch, {"nodes": nodes})
        self._connect, self._section = services, launch
        self.slots = (max(1, instance_named(launch.instance, known).gpus),) * launch.nodes

    @cached_property
    def _services(self) -> Services:
        return self._connect(self._section.region)

    @cached_property
    def _launch(self) -> SageMakerLaunch:
        """The launch section, completed by its stack."""
        return with_stack(self._section, self._services) if self._section.stack else self._section

    @classmethod
    def for_handle(cls, handle: JobHandle) -> Self:
        return cls(launch_of(handle))

    @classmethod
    def handle_path(cls, path: str) -> str:
        return path.strip("/")

    def job(self, run: RunConfig, *, name: str | None = None) -> JobSpec:
        run = data_in_channel(run, self._launch)
        return job_for(run, slots=self.slots, name=name, max_restarts=self._launch.retries, rule=NAMES)

    def render(self, job: JobSpec) -> Rendered:
        """The body of the CreateTrainingJob request, as it is sent."""
        return Rendered(job.name, {REQUEST_FILE: f"{json.dumps(training_request(job, self._launch))}\n"}, ())

    def submit(self, rendered: Rendered) -> JobHandle:
        handle = JobHandle("sagemaker", self._services.region, rendered.name)
        existing = describe_job(self._services, rendered.name)
        if existing is not None:
            raise _in_use(handle, existing)
        refuse_unfit(self._services, self._launch)
        request: Json = json.loads(rendered.files[REQUEST_FILE])
        permissions = "sagemaker:CreateTrainingJob and AddTags, and iam:PassRole on the role of the job"
        with asking(f"start job {rendered.name}", permissions=permissions):
            try:
                self._services.client("sagemaker").create_training_job(**request)
            except aws_exceptions() as error:
                refusal = _refusal(handle, error)
                if refusal is None:
                    raise
                raise refusal from error
        return handle

    def status(self, handle: JobHandle) -> JobStatus:
        name = job_of(handle)
        job = describe_job(self._services, name)
        if job is None:
            return status_from(name, None)
        streams: list[str] = []
        tail: list[tuple[int, str]] = []
        try:
            with asking(f"read the log of {name}", permissions=PERMISSIONS, service="CloudWatch Logs"):
                reader = LogReader(self._services, name, give_up_s=0.0)  # a status is about now
                streams = reader.streams()
                # A stream's name ends with its time, so that the last one is that of the newest start.
                first = sorted(one for one in streams if host_of(one) == FIRST_HOST)
                tail = reader.tail(first[-1]) if first else []
        except LaunchError as error:
            return status_from(name, job, streams, tail, trouble=f"step unknown: {error.what}")
        return status_from(name, job, streams, tail)

    def logs(self, handle: JobHandle, *, follow: bool = False, rank: int | None = None) -> Iterator[str]:
        yield from job_lines(self._services, job_of(handle), follow=follow, rank=rank)

    def cancel(self, handle: JobHandle) -> None:
        """Stop the job; its ranks have 120 s to save a checkpoint, which SageMaker then copies to S3."""
        name = job_of(handle)
        job = describe_job(self._services, name)
        if job is not None and not state_of(job).is_final and job["TrainingJobStatus"] != "Stopping":
            stop_job(self._services, name)

    def explain(self, handle: JobHandle) -> str:
        name = job_of(handle)
        status = self.status(handle)
        job = describe_job(self._services, name)
        lines: list[str] = []
        if status.state is JobState.FAILED:
            with asking(f"read the log of {name}", permissions=PERMISSIONS, service="CloudWatch Logs"):
                kept = deque((line.tagged() for line in LogReader(self._services, name).all_lines()), maxlen=MAX_LINES)
                lines = list(kept)
        return explained(name, job, status, lines)

    def doctor(self, *, folder: Path, data: str | None) -> list[Finding]:
        return examine(self._services, self._launch)

    def files(
        self, handle: JobHandle, *, writable: bool = False, is_file: bool = False, report: Report = ignore
    ) -> AbstractContextManager[RunFiles]:
        return job_files(self._services, handle, is_file=is_file)


def _in_use(handle: JobHandle, job: Json) -> LaunchError:
    """SageMaker keeps a job for ever, and its name with it."""
    state = state_of(job)
    if not state.is_final:
        follow = f"follow it with `maskfleet logs -f {handle}`, cancel it, or choose another --name"
        return LaunchError(f"{handle} is {state} already", remedy=follow)
    remedy = "choose another --name" if state is JobState.DONE else resume_step(job)
    return LaunchError(f"{handle} is {state}, and SageMaker uses each name only once", remedy=remedy)


def _refusal(handle: JobHandle, error: Exception) -> LaunchError | None:
    """Why SageMaker did not take the request, if it says so in a way that we know."""
    if code_of(error) == "ResourceInUse":
        return LaunchError(
            f"someone started {handle} at the same moment",
            remedy=f"`maskfleet status {handle}` shows it; or choose another --name",
        )
    cause = None if is_denied(error) else cause_of(f"{code_of(error)}: {error}")
    if cause is None:
        return None
    return LaunchError(f"SageMaker refused {handle}. {cause.meaning}\n{error}", remedy=cause.next_step)
