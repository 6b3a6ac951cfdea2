"""What the objects of a job in the cluster say: conditions, states of containers, time stamps."""

from __future__ import annotations

import re
from datetime import UTC, datetime

from maskfleet.system.kube.client import ApiError, Json, Kube

_STAMP = re.compile(r"^(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:\.(\d+))?(Z|[+-]\d\d:\d\d) ?(.*)$", re.DOTALL)
_TAIL = 200


def condition(thing: Json, kind: str) -> Json | None:
    """The condition `kind` of `thing` if it is true."""
    for one in thing.get("status", {}).get("conditions", []):
        if one["type"] == kind and one["status"] == "True":
            assert isinstance(one, dict)
            return one
    return None


def condition_text(one: Json) -> str:
    """Reason and message of a condition."""
    return ": ".join(part for part in (one.get("reason"), str(one.get("message", "")).rstrip(": ")) if part)


def containers(pod: Json) -> list[Json]:
    """States of all containers, init containers first."""
    status = pod.get("status", {})
    return [*status.get("initContainerStatuses", []), *status.get("containerStatuses", [])]


def ended(pod: Json, container: str) -> Json | None:
    """How `container` of a pod ended; None while it runs."""
    for one in pod.get("status", {}).get("containerStatuses", []):
        if one["name"] == container and "terminated" in one.get("state", {}):
            terminated = one["state"]["terminated"]
            assert isinstance(terminated, dict)
            return terminated
    if pod.get("status", {}).get("phase") in ("Failed", "Succeeded"):
        return {"reason": pod["status"].get("reason", pod["status"]["phase"])}
    return None


def in_order(pods: list[Json]) -> list[Json]:
    """The oldest first."""
    return sorted(pods, key=lambda pod: str(pod["metadata"].get("creationTimestamp", "")))


def seconds_since(stamp: str) -> float:
    """Seconds since a time stamp of the API."""
    return (datetime.now(UTC) - datetime.fromisoformat(stamp)).total_seconds()


def split_stamp(line: str) -> tuple[str, str]:
    """(time stamp in UTC with nine decimals, which sorts by time; the line without it)."""
    match = _STAMP.match(line)
    if match is None:
        return "", line
    moment, fraction, zone, text = match.groups()
    if zone not in ("Z", "+00:00"):
        moment = datetime.fromisoformat(moment + zone).astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S")
    return f"{moment}.{(fraction or '').ljust(9, '0')[:9]}", text


def tail_of(kube: Kube, pod: Json, container: str) -> list[tuple[str, str]] | None:
    """(time stamp, text) of a container's last lines; None if there is no log, or it cannot be read."""
    path = kube.of_namespace("pods", pod["metadata"]["name"], "log")
    try:
        lines = list(kube.lines(path, container=container, tailLines=str(_TAIL), timestamps="true"))
    except ApiError:
        return None  # it has not started, its node is lost, or reading logs is not permitted: the state needs no log
    return [split_stamp(line) for line in lines]
