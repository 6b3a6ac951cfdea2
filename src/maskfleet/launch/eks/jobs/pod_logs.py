"""The logs of a job's pods: each line of each container once, across several requests."""

from __future__ import annotations

from collections.abc import Iterator

from maskfleet.launch.eks.jobs.objects import split_stamp
from maskfleet.system.kube.client import ApiError, Json, Kube

Stamped = tuple[str, str]  # time stamp, text


class PodLogs:
    """Reads the lines of one container of several pods."""

    def __init__(self, kube: Kube, container: str) -> None:
        self.kube, self.container = kube, container
        self._last: dict[str, tuple[str, int]] = {}  # by pod and attempt: stamp of the last line, lines with that stamp

    def read(self, pod: Json, *, follow: bool = False) -> Iterator[Stamped]:
        """New lines of `pod`; a restarted container has the log of its previous instance, too."""
        name = pod["metadata"]["name"]
        own = [one for one in pod.get("status", {}).get("containerStatuses", []) if one["name"] == self.container]
        restarts = int(own[0].get("restartCount", 0)) if own else 0
        if restarts and f"{name}/{restarts - 1}" not in self._last:
            yield from self._stream(name, f"{name}/{restarts - 1}", previous="true")
        yield from self._stream(name, f"{name}/{restarts}", **({"follow": "true"} if follow else {}))

    def _stream(self, name: str, key: str, **params: str) -> Iterator[Stamped]:
        last, equal = self._last.get(key, ("", 0))
        # sinceTime has whole seconds only: lines of the last second come again and are skipped here.
        since = {"sinceTime": f"{last[:19]}Z"} if last else {}
        path = self.kube.of_namespace("pods", name, "log")
        passed = 0
        try:
            for line in self.kube.lines(path, container=self.container, timestamps="true", **params, **since):
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
                yield stamp, text
        except ApiError as error:
            if error.status not in (400, 404):  # it has not started yet, or was deleted
                raise


def unreadable(pod: Json, error: ApiError) -> str:
    """The line that stands for the log of a pod whose node does not answer."""
    return f"[launch]: the log of pod {pod['metadata']['name']} cannot be read: {error.what}"
