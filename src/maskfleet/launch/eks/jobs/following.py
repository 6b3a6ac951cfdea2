"""Follows a job until it is over, across pods that come and go, API restarts and lost connections."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator

from maskfleet.launch.eks.explain import reason_of
from maskfleet.launch.eks.jobs.pod_logs import PodLogs
from maskfleet.launch.eks.status import status_from, take_snapshot
from maskfleet.system.kube.client import ApiError, Json, Kube

POLL_S = 2.0
EXPLAIN_S = 15.0  # between checks why a job waits
GIVE_UP_S = 900.0  # after this long without an answer the API will not come back by itself


class Follower(ABC):
    """The lines of a job as they appear; a subclass knows its objects and how their pods are read."""

    def __init__(self, logs: PodLogs, release: str, sleep: Callable[[float], None], clock: Callable[[], float]) -> None:
        self.logs, self.release = logs, release
        self._sleep, self._clock = sleep, clock
        self._connected = False  # whether the API has ever answered
        self._silent_since: float | None = None
        self._last_explanation, self._explained_at = "", -EXPLAIN_S

    @property
    def kube(self) -> Kube:
        return self.logs.kube

    @abstractmethod
    def ends(self) -> tuple[bool, bool]:
        """Whether the job has finished, and whether it is over: finished or gone."""

    @abstractmethod
    def pods(self) -> list[Json]:
        """The pods that have logs, oldest first."""

    @abstractmethod
    def new_lines(self, pods: list[Json], *, finished: bool) -> Iterator[str]:
        """What the pods wrote since the last time, and what happened to them."""

    def lines(self) -> Iterator[str]:
        """All lines until the job is over."""
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
        # Read before the logs, so that no line before the end is missed.
        finished, is_over = self.ends()
        pods = self.pods()
        self._connected = True
        if self._silent_since is not None:
            self._silent_since = None
            yield "[launch]: the cluster answers again"
        yield from self.new_lines(pods, finished=finished)
        if not is_over and not any(pod["status"].get("phase") == "Running" for pod in pods):
            yield from self._waiting()
        return is_over

    def _waiting(self) -> Iterator[str]:
        """Say why the job waits, at most every EXPLAIN_S and only if that has changed."""
        if self._clock() - self._explained_at < EXPLAIN_S:
            return
        self._explained_at = self._clock()
        snapshot = take_snapshot(self.kube, self.release, with_tail=False)
        status, reason = status_from(snapshot), reason_of(snapshot)
        text = f"{status.state}: {status.detail}" if status.detail else str(status.state)
        if reason is not None:
            text += f" ({reason[0].name}: {reason[0].meaning})"
        if text != self._last_explanation:
            self._last_explanation = text
            yield f"[launch]: {text}"
