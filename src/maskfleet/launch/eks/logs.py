"""The log of a job on Kubernetes: that of its launcher, across attempts, lost connections and restarts."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Generator, Iterator
from datetime import UTC, datetime

from maskfleet.errors import LaunchError
from maskfleet.launch.eks.explain import reason_of
from maskfleet.launch.eks.status import (
    JOB_LABEL,
    LAUNCHER,
    ROLE_LABEL,
    ended,
    is_finished,
    mpijob_of,
    status_from,
    take_snapshot,
)
from maskfleet.launch.job import JobHandle, JobState
from maskfleet.system.kube.client import ApiError, Json, Kube

POLL_S = 2.0
EXPLAIN_S = 15.0  # between checks why a job waits
GIVE_UP_S = 900.0  # after this long without an answer the API will not come back by itself
_MPI_TAG = re.compile(r"^\[[^\],\s]*,(\d+)\]<std\w+>: ?")
_RANK = re.compile(r"^\[rank(\d+)\]: ")
_STAMP = re.compile(r"^(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:\.(\d+))?(Z|[+-]\d\d:\d\d) ?(.*)$", re.DOTALL)


def launcher_lines(
    kube: Kube,
    handle: JobHandle,
    *,
    follow: bool = False,
    rank: int | None = None,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[str]:
    """Lines of all attempts, oldest first; with `follow`, until the job is over."""
    reader = _Reader(kube, handle.path)
    lines = _Follower(reader, sleep, clock).lines() if follow else reader.all_lines()
    seen = False
    for line in lines:
        seen = True
        text = _with_rank(line)
        if rank is None or ((match := _RANK.match(text)) is not None and int(match[1]) == rank):
            yield text
    if not seen:
        yield from _silence(kube, handle)


def lines_left(kube: Kube, release: str) -> list[str]:
    """Lines of all attempts whose logs can still be read, oldest first."""
    reader, found = _Reader(kube, release), []
    for pod in reader.pods():
        try:
            found += [_with_rank(line) for line in reader.read(pod)]
        except ApiError as error:
            found.append(f"[launch]: the log of pod {pod['metadata']['name']} cannot be read: {error.what}")
    return found


def _with_rank(line: str) -> str:
    """`line` with mpirun's tag as the rank tag that all backends use."""
    return _MPI_TAG.sub(lambda match: f"[rank{match[1]}]: ", line)


class _Reader:
    """Reads each line of each pod once, across several requests."""

    def __init__(self, kube: Kube, release: str) -> None:
        self.kube, self.release = kube, release
        self._last: dict[str, tuple[str, int]] = {}  # by pod and attempt: stamp of the last line, lines with that stamp

    def pods(self) -> list[Json]:
        """Pods of the launcher, oldest first."""
        selector = f"{JOB_LABEL}={self.release},{ROLE_LABEL}={LAUNCHER}"
        found = self.kube.items(self.kube.of_namespace("pods"), labelSelector=selector)
        return sorted(found, key=lambda pod: str(pod["metadata"].get("creationTimestamp", "")))

    def all_lines(self) -> Iterator[str]:
        for pod in self.pods():
            yield from self.read(pod)

    def read(self, pod: Json, *, follow: bool = False) -> Iterator[str]:
        """New lines of `pod`; a restarted container has the log of its previous instance, too."""
        name = pod["metadata"]["name"]
        own = [one for one in pod.get("status", {}).get("containerStatuses", []) if one["name"] == LAUNCHER]
        restarts = int(own[0].get("restartCount", 0)) if own else 0
        if restarts and f"{name}/{restarts - 1}" not in self._last:
            yield from self._stream(name, f"{name}/{restarts - 1}", previous="true")
        yield from self._stream(name, f"{name}/{restarts}", **({"follow": "true"} if follow else {}))

    def _stream(self, name: str, key: str, **params: str) -> Iterator[str]:
        last, equal = self._last.get(key, ("", 0))
        # sinceTime has whole seconds only: lines of the last second come again and are skipped here.
        since = {"sinceTime": f"{last[:19]}Z"} if last else {}
        path = self.kube.of_namespace("pods", name, "log")
        passed = 0
        try:
            for line in self.kube.lines(path, container=LAUNCHER, timestamps="true", **params, **since):
                stamp, text = split_stamp(line)
                if stamp < last:
                    continue
                if stamp == last:
                    passed += 1
                    if passed <= equal:
                        continue
                    equal = passed
                else:
                    last, equal, passed = stamp, 1, 1
                self._last[key] = (last, equal)
                yield text
        except ApiError as error:
            if error.status not in (400, 404):  # it has not started yet, or was deleted
                raise


class _Follower:
    """Follows a job until it is over, across attempts of the launcher, API restarts and lost connections."""

    def __init__(self, reader: _Reader, sleep: Callable[[float], None], clock: Callable[[], float]) -> None:
        self._reader, self._sleep, self._clock = reader, sleep, clock
        self._seen: list[str] = []  # pods of the launcher
        self._complete: set[str] = set()  # those whose log was read to its end
        self._unreadable: set[str] = set()
        self._connected = False  # whether the API has ever answered
        self._silent_since: float | None = None
        self._last_explanation, self._explained_at = "", -EXPLAIN_S

    def lines(self) -> Iterator[str]:
        is_over = False
        while not is_over:
            try:
                is_over = yield from self._round()
            except ApiError as error:
                if not self._connected or (error.status not in (0, 429) and error.status < 500):
                    raise
                yield from self._tolerate(error)
            if not is_over:
                self._sleep(POLL_S)

    def _tolerate(self, error: ApiError) -> Iterator[str]:
        """Report once that the API does not answer; raise after GIVE_UP_S."""
        now = self._clock()
        if self._silent_since is None:
            self._silent_since = now
            yield f"[launch]: {error.what}; the job continues, and so will this log when the cluster answers again"
        elif now - self._silent_since > GIVE_UP_S:
            raise error

    def _round(self) -> Generator[str, None, bool]:
        """Read all new lines; returns whether the job is over."""
        job = mpijob_of(
            self._reader.kube, self._reader.release
        )  # read before the logs, so that no line before the end is missed
        pods = self._reader.pods()
        self._connected = True
        if self._silent_since is not None:
            self._silent_since = None
            yield "[launch]: the cluster answers again"
        finished = job is not None and is_finished(job)
        for name in set(self._seen) - self._complete - {pod["metadata"]["name"] for pod in pods}:
            self._complete.add(name)
            yield f"[launch]: pod {name} of the launcher was deleted"
        for pod in pods:
            if pod["metadata"]["name"] not in self._complete:
                yield from self._pod(pod, finished=finished)
        is_over = finished or job is None
        if not is_over and not any(pod["status"].get("phase") == "Running" for pod in pods):
            yield from self._waiting()
        return is_over

    def _pod(self, pod: Json, *, finished: bool) -> Iterator[str]:
        name, end = pod["metadata"]["name"], ended(pod)
        if name not in self._seen:
            self._seen.append(name)
            if len(self._seen) > 1:
                yield f"[launch]: attempt {len(self._seen)} of the launcher, pod {name}"
        if end is None and pod["status"].get("phase") != "Running":
            return
        try:
            yield from self._reader.read(pod, follow=end is None and not finished)
        except ApiError as error:
            if error.status < 500:
                raise
            if name not in self._unreadable:  # the API responds, but the pod's node does not
                self._unreadable.add(name)
                yield f"[launch]: the log of pod {name} cannot be read: {error.what}"
        if end is not None or finished:
            self._complete.add(name)
        if end is not None and end.get("exitCode") != 0:
            why = f"with code {end['exitCode']}" if "exitCode" in end else f"as {end.get('reason')}"
            yield f"[launch]: the launcher in pod {name} ended {why}"

    def _waiting(self) -> Iterator[str]:
        """Say why the job waits, at most every EXPLAIN_S and only if that has changed."""
        if self._clock() - self._explained_at < EXPLAIN_S:
            return
        self._explained_at = self._clock()
        snapshot = take_snapshot(self._reader.kube, self._reader.release, with_tail=False)
        status, reason = status_from(snapshot), reason_of(snapshot)
        text = f"{status.state}: {status.detail}" if status.detail else str(status.state)
        if reason is not None:
            text += f" ({reason[0].name}: {reason[0].meaning})"
        if text != self._last_explanation:
            self._last_explanation = text
            yield f"[launch]: {text}"


def split_stamp(line: str) -> tuple[str, str]:
    """(time stamp in UTC with nine decimals, which sorts by time; the line without it)."""
    match = _STAMP.match(line)
    if match is None:
        return "", line
    moment, fraction, zone, text = match.groups()
    if zone not in ("Z", "+00:00"):
        moment = datetime.fromisoformat(moment + zone).astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S")
    return f"{moment}.{(fraction or '').ljust(9, '0')[:9]}", text


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
