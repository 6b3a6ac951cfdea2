"""The state of an elastic job, from its Indexed Job and pods."""

from __future__ import annotations

import re

from maskfleet.launch.eks.jobs.objects import condition, condition_text, in_order, tail_of
from maskfleet.launch.eks.release import LABEL, OURS
from maskfleet.launch.job import JobState
from maskfleet.system.kube.client import Json, Kube

OWNER = "batch.kubernetes.io/job-name"
INDEX = "batch.kubernetes.io/job-completion-index"
WORKER = "worker"  # name of the container
QUEUE = "kueue.x-k8s.io/queue-name"
_FAILED = re.compile(r"\[launch\]: the run is failed: (.+)")


def indexed_job_of(kube: Kube, release: str) -> Json | None:
    """The Indexed Job of an elastic run; None if there is none, or it is not maskfleet's."""
    job = kube.get(kube.of_namespace("jobs", release, group="batch/v1"))
    if job is None or job["metadata"].get("labels", {}).get(LABEL) != OURS:
        return None
    return job if job["spec"].get("completionMode") == "Indexed" else None


def pods_of(kube: Kube, release: str) -> list[Json]:
    """All pods of the Indexed Job, also those that failed and were replaced."""
    return in_order(kube.items(kube.of_namespace("pods"), labelSelector=f"{OWNER}={release}"))


def worker_index(pod: Json) -> int:
    labels, annotations = pod["metadata"].get("labels", {}), pod["metadata"].get("annotations", {})
    return int(labels.get(INDEX) or annotations.get(INDEX) or 0)


def newest_workers(pods: list[Json]) -> list[Json]:
    """The newest pod of each number, in order."""
    newest = {worker_index(pod): pod for pod in in_order(pods)}
    return [newest[index] for index in sorted(newest)]


def fewest_workers(job: Json) -> int:
    """With how many workers the run continues."""
    rules = job["spec"].get("successPolicy", {}).get("rules", [])
    return int(rules[0]["succeededCount"]) if rules else int(job["spec"].get("completions", 1))


def end_of(job: Json) -> Json | None:
    """The condition with which the Job ended, or is about to as soon as its last pods are gone; None before."""
    kinds = ("Failed", "Complete", "FailureTarget", "SuccessCriteriaMet")
    return next((one for kind in kinds if (one := condition(job, kind)) is not None), None)


def is_failure(end: Json) -> bool:
    """Whether the condition with which a Job ended says that it failed."""
    return end["type"] in ("Failed", "FailureTarget")


def elastic_state(job: Json, workers: list[Json], tail: tuple[str, ...], *, has_step: bool) -> tuple[JobState, str]:
    """State and detail of an elastic job; `has_step` tells that it has trained."""
    end = end_of(job)
    if end is not None:
        if not is_failure(end):
            return JobState.DONE, ""
        said = [match[1] for line in tail if (match := _FAILED.search(line))]
        return JobState.FAILED, said[-1] if said else condition_text(end)
    if job["metadata"].get("deletionTimestamp"):
        return JobState.RUNNING, "is being stopped"
    if job["spec"].get("suspend"):
        queue = job["metadata"].get("labels", {}).get(QUEUE)
        return JobState.PENDING, f"waits in queue {queue}" if queue else "is suspended"
    running = sum(pod["status"].get("phase") == "Running" for pod in workers)
    wanted, fewest = int(job["spec"].get("completions", 1)), fewest_workers(job)
    if running >= fewest:
        return JobState.RUNNING, f"continues with {running} of {wanted} workers" if running < wanted else ""
    if has_step:
        return JobState.RUNNING, f"waits for workers: {running} of {wanted} run, and it needs {fewest}"
    return JobState.PENDING, f"{running} of {wanted} workers run, and it needs {fewest}"


def workers_tail(kube: Kube, workers: list[Json]) -> tuple[str, ...]:
    """Last lines of all workers, in the order of time: any of them may have rank 0."""
    tails = [tail_of(kube, pod, WORKER) or [] for pod in workers]
    return tuple(text for _, text in sorted(one for tail in tails for one in tail))
