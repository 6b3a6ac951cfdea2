"""The state of a training job, from what SageMaker and CloudWatch report about it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import UTC, datetime

from maskfleet.launch.job import HostStatus, JobState, JobStatus
from maskfleet.launch.sagemaker.services import Json, Services, asking, is_transient
from maskfleet.system.aws import aws_exceptions, code_of

MAX_EVENTS = 12
TOO_LONG = ("MaxRuntimeExceeded", "MaxWaitTimeExceeded")
_STARTED = ("Training", "Uploading")
_RESTARTED = ("Interrupted", "Restarting")
_STEP = re.compile(r"(?:^|\s)step: (\d+)")
_EXIT_CODE = re.compile(r"[Ee]xit code:? (\d{1,3})\b")


def describe_job(services: Services, name: str) -> Json | None:
    """What SageMaker reports about the job; None if there is none of this name."""
    with asking(f"describe job {name}", permissions="sagemaker:DescribeTrainingJob"):
        return read_job(services, name)


def read_job(services: Services, name: str) -> Json | None:
    """As `describe_job`, with boto3's own errors, for a caller that asks again."""
    try:
        return dict(services.client("sagemaker").describe_training_job(TrainingJobName=name))
    except aws_exceptions() as error:
        if is_absent(error):
            return None
        raise


def is_absent(error: Exception) -> bool:
    """Whether SageMaker says that there is no such job; it has no code of its own for that."""
    return code_of(error) == "ResourceNotFound" or (
        code_of(error) == "ValidationException" and "not found" in str(error).lower()
    )


def state_of(job: Json) -> JobState:
    """Our state for that of SageMaker."""
    match job["TrainingJobStatus"]:
        case "Completed":
            return JobState.DONE
        case "Failed":
            return JobState.FAILED
        case "Stopped" | "Deleting":
            # SageMaker stops jobs that exceed a limit; they have not done what they were launched for.
            return JobState.FAILED if job.get("SecondaryStatus") in TOO_LONG else JobState.CANCELLED
        case "Stopping":
            return JobState.RUNNING
        case _:
            return JobState.RUNNING if job.get("SecondaryStatus") in _STARTED else JobState.PENDING


def status_from(
    name: str, job: Json | None, streams: Sequence[str] = (), tail: Sequence[tuple[int, str]] = (), trouble: str = ""
) -> JobStatus:
    """The status of `job`; `streams` are its log streams, `tail` the last (time in ms, line) of its first host.

    `trouble` says why the log could not be read, if so.
    """
    if job is None:
        return JobStatus(JobState.UNKNOWN, f"there is no job {name} in this region")
    state = state_of(job)
    transitions = job.get("SecondaryStatusTransitions", [])
    step, stamp = _last_step(tail)
    age_s = (datetime.now(UTC).timestamp() - stamp / 1000) if stamp and not state.is_final else None
    found = _EXIT_CODE.search(job.get("FailureReason", ""))
    return JobStatus(
        state,
        detail=detail_of(job),
        step=step,
        exit_code=int(found[1]) if found and int(found[1]) else None,
        restarts=sum(one["Status"] in _RESTARTED for one in transitions),
        hosts=tuple(_hosts(job, streams)),
        events=(*(event_text(one) for one in transitions[-MAX_EVENTS:]), *([trouble] if trouble else [])),
        step_age_s=max(0.0, age_s) if age_s is not None else None,
        min_nodes=job["ResourceConfig"].get("InstanceCount"),
    )


def detail_of(job: Json) -> str:
    """One line about the state: the failure's first line, or what SageMaker says it is doing."""
    if job.get("FailureReason"):
        return str(job["FailureReason"]).splitlines()[0]
    words = [str(job.get("SecondaryStatus", job["TrainingJobStatus"]))]
    last = (job.get("SecondaryStatusTransitions") or [{}])[-1].get("StatusMessage")
    if last:
        words.append(" ".join(str(last).split()))
    if job["TrainingJobStatus"] in ("Completed", "Stopped") and job.get("BillableTimeInSeconds"):
        words.append(f"{job['BillableTimeInSeconds']} s of each instance are billed")
    return ", ".join(words)


def event_text(transition: Json) -> str:
    """A change of the job's secondary status, for people."""
    start = transition["StartTime"].astimezone(UTC)
    message = " ".join(str(transition.get("StatusMessage", "")).split())
    return f"{start:%Y-%m-%d %H:%M:%S} {transition['Status']}{f': {message}' if message else ''}"


def host_of(stream: str) -> str:
    """The host, such as `algo-1`, whose lines are in the log stream JOB/algo-1-TIME."""
    return "-".join(stream.rpartition("/")[2].split("-")[:2])


def _hosts(job: Json, streams: Sequence[str]) -> list[HostStatus]:
    started = {host_of(stream) for stream in streams}
    resources = job["ResourceConfig"]
    names = [f"algo-{number + 1}" for number in range(resources.get("InstanceCount", 1))]
    kind = resources.get("InstanceType", "")
    return [HostStatus(name, "started" if name in started else "not started", kind) for name in names]


def _last_step(tail: Sequence[tuple[int, str]]) -> tuple[int | None, int | None]:
    """(step, time in ms) of the newest line with a step."""
    for stamp, line in reversed(tail):
        match = _STEP.search(line)
        if match:
            return int(match[1]), stamp
    return None, None


def stop_job(services: Services, name: str) -> None:
    """Ask SageMaker to stop the job; it gets SIGTERM, and 120 s to save. A job that has ended stays as it is."""
    with asking(f"stop job {name}", permissions="sagemaker:StopTrainingJob"):
        try:
            services.client("sagemaker").stop_training_job(TrainingJobName=name)
        except aws_exceptions() as error:
            # It ended, or someone else stopped it, after it was described.
            if code_of(error) != "ValidationException" or is_transient(error):
                raise
