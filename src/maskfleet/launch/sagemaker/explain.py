"""Why a training job waits or failed, from what SageMaker reports and from the lines of its ranks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from maskfleet.launch.causes import Cause, causes_in, read_tables
from maskfleet.launch.explain import Explanation, explain_lines
from maskfleet.launch.job import JobState, JobStatus
from maskfleet.launch.sagemaker.services import Json

CAUSES = causes_in(read_tables(Path(__file__).with_name("causes.toml")))
_TOO_LONG = {
    "MaxRuntimeExceeded": ("run time", "The job reached launch.max_run_s.", "max_run_s"),
    "MaxWaitTimeExceeded": (
        "wait time",
        "The job and its wait for Spot capacity reached launch.max_wait_s.",
        "max_wait_s",
    ),
}
LOG_CHANNEL = "log"
ALGORITHM = "AlgorithmError"  # how SageMaker begins the reason of a container that ended with a code


def cause_of(text: str) -> Cause | None:
    """The cause that a text of SageMaker shows."""
    return next((cause for cause in CAUSES if cause.pattern.search(text)), None)


def explained(name: str, job: Json | None, status: JobStatus, lines: Iterable[str]) -> str:
    """What `maskfleet explain` prints; `lines` are those of all ranks, with their tags, if the job failed."""
    match status.state:
        case JobState.UNKNOWN:
            return f"There is no job {name} in this region.\n  → check the handle and the AWS account in use"
        case JobState.DONE:
            return "The run is done; there is nothing to explain."
        case JobState.CANCELLED:
            return f"The run was cancelled.\n  → {resume_step(job or {})}"
        case JobState.RUNNING | JobState.PENDING:
            return _unfinished(job or {}, status)
        case _:
            return f"The run is {status.state}: {status.detail}\n\n{_failure(job or {}, lines).render()}"


def resume_step(job: Json) -> str:
    """How to resume `job`: SageMaker uses each name once, but checkpoints are found by their place."""
    directory = log_directory(job)
    if directory is not None:
        return (
            "launch the same run under another --name with the same channel log: "
            f"its directory {directory} has the checkpoints"
        )
    place = job.get("CheckpointConfig", {}).get("S3Uri")
    if not place:
        return "launch it again under another --name"
    return (
        "launch the same run under another --name to resume from its last checkpoint, with "
        f"--launch-set checkpoint_uri={place}"
    )


def log_directory(job: Json) -> str | None:
    """The directory of the channel `log`, in which the run is then written instead of the folder copied to S3."""
    for channel in job.get("InputDataConfig", []):
        source = channel.get("DataSource", {}).get("FileSystemDataSource")
        if channel.get("ChannelName") == LOG_CHANNEL and source:
            return f"{source['DirectoryPath']} of {source['FileSystemId']}"
    return None


def _unfinished(job: Json, status: JobStatus) -> str:
    at = f" at step {status.step}" if status.step is not None else ""
    parts = [f"The run is {status.state}{at}: {status.detail}", *status.events[-5:]]
    message = str((job.get("SecondaryStatusTransitions") or [{}])[-1].get("StatusMessage", ""))
    cause = cause_of(f"{job.get('SecondaryStatus', '')}: {message}") if status.state is JobState.PENDING else None
    if cause is not None:
        parts.append(f"\ncause: {cause.name}. {cause.meaning}\n  → {cause.next_step}")
    return "\n".join(parts)


def _failure(job: Json, lines: Iterable[str]) -> Explanation:
    reason = str(job.get("FailureReason", ""))
    too_long = _TOO_LONG.get(job.get("SecondaryStatus", ""))
    if too_long is not None:
        name, meaning, field = too_long
        cause = Cause(name, meaning, f"raise launch.{field}, and {resume_step(job)}")
        return Explanation(cause, f"secondary status {job['SecondaryStatus']}")
    if not reason.startswith(ALGORITHM):
        cause_found = cause_of(reason)
        if cause_found is not None:
            return Explanation(cause_found, reason)
    found = explain_lines(lines)
    if not found.trace and reason:
        # No line arrived, or none shows an error: the container wrote the failing rank's words into the reason.
        said = explain_lines(_said(reason))
        found = said if said.cause is not None else replace(found, trace=_said(reason))
    return found


def _said(reason: str) -> tuple[str, ...]:
    return tuple(reason.removeprefix(f"{ALGORITHM}:").strip().splitlines())
