"""The log of an elastic job: the lines of all its pods, in the order of time."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from maskfleet.launch.eks.elastic.status import WORKER, end_of, indexed_job_of, pods_of, worker_index
from maskfleet.launch.eks.jobs.following import Follower
from maskfleet.launch.eks.jobs.objects import condition, ended
from maskfleet.launch.eks.jobs.pod_logs import PodLogs, Stamped, unreadable
from maskfleet.system.kube.client import ApiError, Json, Kube


def worker_lines(kube: Kube, release: str) -> Iterator[str]:
    """Lines of all pods that can be read; one whose node does not answer is named."""
    logs, lines, dead = PodLogs(kube, WORKER), list[Stamped](), []
    for pod in pods_of(kube, release):
        try:
            lines += logs.read(pod)
        except ApiError as error:
            if error.status < 500:
                raise
            dead.append(unreadable(pod, error))
    yield from dead
    yield from (text for _, text in sorted(lines, key=lambda line: line[0]))


class ElasticFollower(Follower):
    """Follows the pods of an Indexed Job: each round reads what is new in all of them."""

    def __init__(self, kube: Kube, release: str, sleep: Callable[[float], None], clock: Callable[[], float]) -> None:
        super().__init__(PodLogs(kube, WORKER), release, sleep, clock)
        self._newest: dict[int, str] = {}  # number of the worker to its newest pod
        self._complete: set[str] = set()  # pods whose log was read to its end
        self._unreadable: set[str] = set()

    def ends(self) -> tuple[bool, bool]:
        job = indexed_job_of(self.kube, self.release)
        finished = job is not None and end_of(job) is not None
        return finished, finished or job is None

    def pods(self) -> list[Json]:
        return pods_of(self.kube, self.release)

    def new_lines(self, pods: list[Json], *, finished: bool) -> Iterator[str]:
        for name in set(self._newest.values()) - self._complete - {pod["metadata"]["name"] for pod in pods}:
            self._complete.add(name)
            if not finished:
                yield f"[launch]: pod {name} was deleted"
        lines: list[Stamped] = []
        notes: list[str] = []
        for pod in pods:
            if pod["metadata"]["name"] not in self._complete:
                notes += self._arrival(pod)
                lines += self._of_pod(pod, notes)
        yield from (text for _, text in sorted(lines, key=lambda line: line[0]))
        yield from notes

    def _arrival(self, pod: Json) -> Iterator[str]:
        index, name = worker_index(pod), pod["metadata"]["name"]
        before = self._newest.get(index)
        self._newest[index] = name
        if before not in (None, name):
            yield f"[launch]: pod {name} takes the place of {before} as worker {index}"

    def _of_pod(self, pod: Json, notes: list[str]) -> list[Stamped]:
        """New lines of one pod; what happened to it is added to `notes`."""
        name, end = pod["metadata"]["name"], ended(pod, WORKER)
        if end is None and pod["status"].get("phase") != "Running":
            return []
        lines: list[Stamped] = []
        try:
            lines += self.logs.read(pod)
        except ApiError as error:
            if error.status < 500:
                raise
            if name not in self._unreadable:  # the API responds, but the pod's node does not
                self._unreadable.add(name)
                notes.append(unreadable(pod, error))
        if end is not None:
            self._complete.add(name)
            if end.get("exitCode") != 0:
                notes.append(_ended(pod, end))
        return lines


def _ended(pod: Json, end: Json) -> str:
    lost = condition(pod, "DisruptionTarget")
    reason = lost.get("reason") if lost is not None else end.get("reason")
    how = f"with code {end['exitCode']}" if "exitCode" in end else f"as {reason}"
    why = f" ({reason})" if "exitCode" in end and reason not in (None, "Error") else ""
    return f"[launch]: worker {worker_index(pod)} in pod {pod['metadata']['name']} ended {how}{why}"
