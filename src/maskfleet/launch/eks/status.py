"""The state of a job, derived from its MPIJob, launcher, pods and events in the cluster."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from datetime import UTC, datetime

from maskfleet.launch.eks.permission import if_permitted
from maskfleet.launch.eks.release import CHART, ReleaseRecord, record_of
from maskfleet.launch.job import HostStatus, JobState, JobStatus
from maskfleet.system.kube.client import ApiError, Json, Kube

MPI = "kubeflow.org/v2beta1"
JOB_LABEL = "training.kubeflow.org/job-name"
ROLE_LABEL = "training.kubeflow.org/job-role"
INDEX_LABEL = "training.kubeflow.org/replica-index"
LAUNCHER = "launcher"  # role of the pod, and name of its container
MAX_EVENTS = 12
_STEP = re.compile(r"(?:^|[\s:])step: (\d+)")  # a colon ends the tag of mpirun
_TAIL = 200


@dataclass(frozen=True, slots=True)
class JobSnapshot:
    """All objects of a job at one moment, as the API returns them."""

    release: str
    mpijob: Json | None = None
    launcher_job: Json | None = None
    pods: list[Json] = field(default_factory=list)
    events: list[Json] = field(default_factory=list)
    claims: list[Json] = field(default_factory=list)
    record: ReleaseRecord | None = None
    tail: tuple[str, ...] = ()  # last lines of the newest launcher

    @property
    def launchers(self) -> list[Json]:
        """Pods of the launcher's attempts, oldest first."""
        return sorted(self._of_role(LAUNCHER), key=lambda pod: str(pod["metadata"].get("creationTimestamp", "")))

    @property
    def workers(self) -> list[Json]:
        return sorted(self._of_role("worker"), key=lambda pod: int(pod["metadata"]["labels"].get(INDEX_LABEL, "0")))

    def _of_role(self, role: str) -> list[Json]:
        return [pod for pod in self.pods if pod["metadata"].get("labels", {}).get(ROLE_LABEL) == role]

    @property
    def wanted_workers(self) -> int:
        specs = (self.mpijob or {}).get("spec", {}).get("mpiReplicaSpecs", {})
        return int(specs.get("Worker", {}).get("replicas", 1))


def mpijob_of(kube: Kube, release: str) -> Json | None:
    return kube.get(kube.of_namespace("mpijobs", release, group=MPI))


def take_snapshot(kube: Kube, release: str, *, with_tail: bool = True) -> JobSnapshot:
    """Read all objects of the job `release`."""
    mpijob = mpijob_of(kube, release)
    record = record_of(kube, release)
    if mpijob is None:
        return JobSnapshot(release, record=record)
    pods = kube.items(kube.of_namespace("pods"), labelSelector=f"{JOB_LABEL}={release}")
    launcher = kube.get(kube.of_namespace("jobs", f"{release}-launcher", group="batch/v1"))
    snapshot = JobSnapshot(release, mpijob, launcher, pods, record=record)
    volumes = [volume for pod in pods for volume in pod.get("spec", {}).get("volumes", [])]
    names = sorted({one["persistentVolumeClaim"]["claimName"] for one in volumes if "persistentVolumeClaim" in one})
    claims = [if_permitted(kube.get, kube.of_namespace("persistentvolumeclaims", name)) for name in names]
    events = _events(kube, snapshot, {*names})
    tail = _tail(kube, snapshot) if with_tail else ()
    return JobSnapshot(release, mpijob, launcher, pods, events, [one for one in claims if one], record, tail)


def status_from(snapshot: JobSnapshot) -> JobStatus:
    """The status of a job, from a snapshot alone."""
    state, detail = _state(snapshot)
    steps = [int(match[1]) for line in snapshot.tail if (match := _STEP.search(line))]
    failed = state is JobState.FAILED
    return JobStatus(
        state,
        detail,
        step=steps[-1] if steps else None,
        exit_code=_exit_code(snapshot) if failed else (0 if state is JobState.DONE else None),
        restarts=max(0, attempts(snapshot) - 1),
        hosts=tuple(_host(pod) for pod in snapshot.workers),
        events=tuple(event_text(event) for event in snapshot.events[-MAX_EVENTS:]),
    )


def _state(snapshot: JobSnapshot) -> tuple[JobState, str]:
    if snapshot.mpijob is None:
        return _without_mpijob(snapshot)
    if is_finished(snapshot.mpijob):
        failed = condition(snapshot.mpijob, "Failed")
        return (JobState.FAILED, _words(failed)) if failed is not None else (JobState.DONE, "")
    if snapshot.mpijob["metadata"].get("deletionTimestamp"):
        return JobState.RUNNING, "is being stopped"
    if condition(snapshot.mpijob, "Suspended") or snapshot.mpijob["spec"].get("runPolicy", {}).get("suspend"):
        queue = snapshot.mpijob["metadata"].get("labels", {}).get("kueue.x-k8s.io/queue-name")
        return JobState.PENDING, f"waits in queue {queue}" if queue else "is suspended"
    if not snapshot.mpijob.get("status", {}).get("conditions"):
        return JobState.PENDING, "the MPI operator has not handled it yet"
    running = [pod for pod in snapshot.launchers if pod["status"].get("phase") == "Running"]
    ready = sum(condition(pod, "Ready") is not None for pod in snapshot.workers)
    if running:
        lost = snapshot.wanted_workers - ready
        return JobState.RUNNING, f"{lost} of {snapshot.wanted_workers} workers are not ready" if lost > 0 else ""
    if snapshot.launchers:
        number = attempts(snapshot)
        again = f"attempt {number} of the launcher is about to start" if number > 1 else "starts"
        return (JobState.RUNNING if condition(snapshot.mpijob, "Running") else JobState.PENDING), again
    return JobState.PENDING, f"{ready} of {snapshot.wanted_workers} workers are ready"


def _without_mpijob(snapshot: JobSnapshot) -> tuple[JobState, str]:
    record = snapshot.record
    if record is None or not record.chart.endswith(CHART):
        return JobState.UNKNOWN, f"the cluster knows no job {snapshot.release}"
    match record.status:
        case "uninstalled" | "uninstalling":
            return JobState.CANCELLED, "its files stay on the shared volume"
        case "pending-install" | "pending-upgrade":
            return JobState.PENDING, "helm is installing it"
        case "failed":
            return JobState.FAILED, f"helm could not install it: {record.description}"
        case _:
            return JobState.LOST, "its MPIJob was deleted, and not by `maskfleet cancel`; launch it again to resume"


def is_finished(mpijob: Json) -> bool:
    """Whether the operator has finished it; after an eviction it reports Failed, and yet continues."""
    over = mpijob.get("status", {}).get("completionTime") is not None
    return condition(mpijob, "Succeeded") is not None or (over and condition(mpijob, "Failed") is not None)


def condition(thing: Json, kind: str) -> Json | None:
    """The condition `kind` of `thing` if it is true."""
    for one in thing.get("status", {}).get("conditions", []):
        if one["type"] == kind and one["status"] == "True":
            assert isinstance(one, dict)
            return one
    return None


def attempts(snapshot: JobSnapshot) -> int:
    """How often the launcher was started, in new pods or restarted in the same pod."""
    status = (snapshot.launcher_job or {}).get("status", {})
    pods = sum(int(status.get(name, 0)) for name in ("active", "failed", "succeeded"))
    again = sum(int(one.get("restartCount", 0)) for pod in snapshot.launchers for one in containers(pod))
    return max(pods, len(snapshot.launchers)) + again


def containers(pod: Json) -> list[Json]:
    """States of all containers, init containers first."""
    status = pod.get("status", {})
    return [*status.get("initContainerStatuses", []), *status.get("containerStatuses", [])]


def ended(pod: Json) -> Json | None:
    """How the launcher's container ended; None while it runs."""
    for one in pod.get("status", {}).get("containerStatuses", []):
        if one["name"] == LAUNCHER and "terminated" in one.get("state", {}):
            terminated = one["state"]["terminated"]
            assert isinstance(terminated, dict)
            return terminated
    if pod.get("status", {}).get("phase") in ("Failed", "Succeeded"):
        return {"reason": pod["status"].get("reason", pod["status"]["phase"])}
    return None


def event_text(event: Json) -> str:
    """One event on one line."""
    about = event["involvedObject"]
    count = f" ({event['count']} times)" if int(event.get("count") or 1) > 1 else ""
    kind, name = about.get("kind", "").lower(), about.get("name", "")
    message = " ".join(str(event.get("message", "")).split())
    return f"{event_time(event)} {kind} {name}: {event.get('reason', '')}: {message}{count}"


def event_time(event: Json) -> str:
    series = event.get("series") or {}
    stamp = event.get("lastTimestamp") or series.get("lastObservedTime") or event.get("eventTime")
    return str(stamp or event["metadata"].get("creationTimestamp") or "")[:19]


def seconds_since(stamp: str) -> float:
    """Seconds since a time stamp of the API."""
    return (datetime.now(UTC) - datetime.fromisoformat(stamp)).total_seconds()


def _host(pod: Json) -> HostStatus:
    status = pod.get("status", {})
    state, detail = str(status.get("phase", "unknown")).lower(), ""
    for one in containers(pod):
        waiting = one.get("state", {}).get("waiting") or {}
        terminated = one.get("state", {}).get("terminated") or {}
        if waiting.get("reason") or terminated.get("reason"):
            state = waiting.get("reason") or terminated["reason"]
            detail = waiting.get("message") or terminated.get("message") or ""
    unscheduled = next((one for one in status.get("conditions", []) if one.get("reason") == "Unschedulable"), None)
    if unscheduled is not None and status.get("phase") == "Pending":
        state, detail = "unschedulable", unscheduled.get("message", "")
    if status.get("reason"):
        state, detail = status["reason"], status.get("message", "")
    if pod["metadata"].get("deletionTimestamp"):
        state = "terminating"
    node = pod.get("spec", {}).get("nodeName")
    parts = [f"on {node}" if node else "", " ".join(str(detail).split())]
    return HostStatus(pod["metadata"]["name"], state, "  ".join(part for part in parts if part))


def _exit_code(snapshot: JobSnapshot) -> int | None:
    for pod in reversed(snapshot.launchers):
        code = (ended(pod) or {}).get("exitCode")
        if code is not None:
            return int(code)
    return None


def _words(one: Json) -> str:
    return ": ".join(part for part in (one.get("reason"), str(one.get("message", "")).rstrip(": ")) if part)


def _events(kube: Kube, snapshot: JobSnapshot, more: set[str]) -> list[Json]:
    """Events about the job and its objects, oldest first; none without permission to read them."""
    release = re.escape(snapshot.release)
    names = {snapshot.release, *more, *(pod["metadata"]["name"] for pod in snapshot.pods)}
    deleted = re.compile(rf"{release}-(?:worker-\d+|launcher(?:-[a-z0-9]{{5}})?)|mpijob-{release}-\w+")
    found = if_permitted(kube.items, kube.of_namespace("events"))
    if found is None:
        return []
    about = [(one, str(one.get("involvedObject", {}).get("name", ""))) for one in found]
    own = [one for one, name in about if name in names or deleted.fullmatch(name)]
    return sorted([*own, *_node_events(kube, snapshot)], key=event_time)


def _node_events(kube: Kube, snapshot: JobSnapshot) -> list[Json]:
    """Events about the nodes of the job's pods, and about nodes that Karpenter failed to create since its launch."""
    nodes = {pod.get("spec", {}).get("nodeName") for pod in snapshot.pods}
    since = str((snapshot.mpijob or {})["metadata"].get("creationTimestamp", ""))[:19]
    found: list[Json] = []
    for kind in ("Node", "NodeClaim"):
        # Events about cluster-scoped objects are in this namespace.
        path = "/api/v1/namespaces/default/events"
        some = if_permitted(kube.items, path, fieldSelector=f"involvedObject.kind={kind}") or []
        of_job = [one for one in some if kind == "NodeClaim" or one["involvedObject"].get("name") in nodes]
        found += [one for one in of_job if one.get("type") == "Warning" and event_time(one) >= since]
    return found


def _tail(kube: Kube, snapshot: JobSnapshot) -> tuple[str, ...]:
    """Last lines of the newest launcher that has a log."""
    for pod in reversed(snapshot.launchers):
        path = kube.of_namespace("pods", pod["metadata"]["name"], "log")
        try:
            return tuple(kube.lines(path, container=LAUNCHER, tailLines=_TAIL))
        except ApiError:
            continue  # it has not started, its node is lost, or reading logs is not permitted: the state needs no log
    return ()
