"""The log of a job on Kubernetes: that of its launcher, across attempts, or of all pods of an elastic job."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator

from maskfleet.errors import LaunchError
from maskfleet.launch.eks.elastic.logs import ElasticFollower, worker_lines
from maskfleet.launch.eks.elastic.status import indexed_job_of
from maskfleet.launch.eks.jobs.following import Follower
from maskfleet.launch.eks.jobs.objects import ended, in_order
from maskfleet.launch.eks.jobs.pod_logs import PodLogs, unreadable
from maskfleet.launch.eks.status import (
    JOB_LABEL,
    LAUNCHER,
    ROLE_LABEL,
    is_finished,
    launcher_end,
    launcher_job_of,
    mpijob_of,
    status_from,
    take_snapshot,
)
from maskfleet.launch.job import JobHandle, JobState
from maskfleet.system.kube.client import ApiError, Json, Kube

_MPI_TAG = re.compile(r"^\[[^\],\s]*,(\d+)\]<std\w+>: ?")
_RANK = re.compile(r"^\[rank(\d+)\]: ")


def job_lines(
    kube: Kube,
    handle: JobHandle,
    *,
    follow: bool = False,
    rank: int | None = None,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[str]:
    """Lines of all pods that have logs, oldest first; with `follow`, until the job is over."""
    release, seen = handle.path, False
    if follow:
        kind = ElasticFollower if indexed_job_of(kube, release) is not None else LauncherFollower
        lines = kind(kube, release, sleep, clock).lines()
    else:
        lines = _lines_now(kube, release)
    for line in lines:
        seen = True
        text = _with_rank(line)
        if rank is None or ((match := _RANK.match(text)) is not None and int(match[1]) == rank):
            yield text
    if not seen:
        yield from _silence(kube, handle)


def lines_left(kube: Kube, release: str) -> list[str]:
    """Lines of all pods whose logs can still be read, oldest first."""
    return [_with_rank(line) for line in _lines_now(kube, release)]


def _lines_now(kube: Kube, release: str) -> Iterator[str]:
    if indexed_job_of(kube, release) is not None:
        yield from worker_lines(kube, release)
        return
    logs = PodLogs(kube, LAUNCHER)
    for pod in _launchers(kube, release):
        try:
            yield from (text for _, text in logs.read(pod))
        except ApiError as error:
            if error.status < 500:
                raise
            yield unreadable(pod, error)


def _launchers(kube: Kube, release: str) -> list[Json]:
    selector = f"{JOB_LABEL}={release},{ROLE_LABEL}={LAUNCHER}"
    return in_order(kube.items(kube.of_namespace("pods"), labelSelector=selector))


def _with_rank(line: str) -> str:
    """`line` with mpirun's tag as the rank tag that all backends use."""
    return _MPI_TAG.sub(lambda match: f"[rank{match[1]}]: ", line)


class LauncherFollower(Follower):
    """Follows an MPIJob by the log of its launcher, over all its attempts."""

    def __init__(self, kube: Kube, release: str, sleep: Callable[[float], None], clock: Callable[[], float]) -> None:
        super().__init__(PodLogs(kube, LAUNCHER), release, sleep, clock)
        self._seen: list[str] = []  # pods of the launcher
        self._complete: set[str] = set()  # those whose log was read to its end
        self._unreadable: set[str] = set()

    def ends(self) -> tuple[bool, bool]:
        job = mpijob_of(self.kube, self.release)
        launcher = launcher_job_of(self.kube, self.release) if job is not None else None
        finished = job is not None and (is_finished(job) or launcher_end(launcher) is not None)
        return finished, finished or job is None

    def pods(self) -> list[Json]:
        return _launchers(self.kube, self.release)

    def new_lines(self, pods: list[Json], *, finished: bool) -> Iterator[str]:
        for name in set(self._seen) - self._complete - {pod["metadata"]["name"] for pod in pods}:
            self._complete.add(name)
            yield f"[launch]: pod {name} of the launcher was deleted"
        for pod in pods:
            if pod["metadata"]["name"] not in self._complete:
                yield from self._pod(pod, finished=finished)

    def _pod(self, pod: Json, *, finished: bool) -> Iterator[str]:
        name, end = pod["metadata"]["name"], ended(pod, LAUNCHER)
        if name not in self._seen:
            self._seen.append(name)
            if len(self._seen) > 1:
                yield f"[launch]: attempt {len(self._seen)} of the launcher, pod {name}"
        if end is None and pod["status"].get("phase") != "Running":
            return
        try:
            yield from (text for _, text in self.logs.read(pod, follow=end is None and not finished))
        except ApiError as error:
            if error.status < 500:
                raise
            if name not in self._unreadable:  # the API responds, but the pod's node does not
                self._unreadable.add(name)
                yield unreadable(pod, error)
        if end is not None or finished:
            self._complete.add(name)
        if end is not None and end.get("exitCode") != 0:
            why = f"with code {end['exitCode']}" if "exitCode" in end else f"as {end.get('reason')}"
            yield f"[launch]: the launcher in pod {name} ended {why}"


def _silence(kube: Kube, handle: JobHandle) -> Iterator[str]:
    """Say why there is no line at all, or raise if there will be none."""
    status = status_from(take_snapshot(kube, handle.path, with_tail=False))
    if status.state is JobState.UNKNOWN:
        raise LaunchError(status.detail, remedy="check the handle, its namespace and its context")
    if status.state.is_final:
        raise LaunchError(
            f"the pods of {handle} are deleted, and their logs with them",
            remedy=f"rank 0's own log is in the run's folder: maskfleet cp {handle}/log.txt .",
        )
    yield f"[launch]: {status.state}: {status.detail}"
