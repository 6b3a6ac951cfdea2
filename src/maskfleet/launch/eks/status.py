"""The state of a job, derived from its MPIJob or Indexed Job, pods and events in the cluster."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from dataclasses import dataclass, field

from maskfleet.launch.eks.elastic.status import (
    OWNER,
    WORKER,
    elastic_state,
    fewest_workers,
    indexed_job_of,
    newest_workers,
    pods_of,
    worker_index,
    workers_tail,
)
from maskfleet.launch.eks.jobs.nodes import reasons_for_no_node
from maskfleet.launch.eks.jobs.objects import (
    condition,
    condition_text,
    containers,
    ended,
    in_order,
    seconds_since,
    tail_of,
)
from maskfleet.launch.eks.permission import if_permitted
from maskfleet.launch.eks.release import CHART, ReleaseRecord, record_of
from maskfleet.launch.job import HostStatus, JobState, JobStatus
from maskfleet.system.kube.client import Json, Kube

MPI = "kubeflow.org/v2beta1"
JOB_LABEL = "training.kubeflow.org/job-name"
ROLE_LABEL = "training.kubeflow.org/job-role"
INDEX_LABEL = "training.kubeflow.org/replica-index"
LAUNCHER = "launcher"  # role of the pod, and name of its container
MAX_EVENTS = 12
LEASE_S = 15.0  # how long the MPI operator's lease lasts; it renews it every few seconds
OPERATOR_DEAD_S = 2 * LEASE_S
_STEP = re.compile(r"(?:^|[\s:])step: (\d+)")  # a colon ends the tag of mpirun
_ASSIGNED = re.compile(r"Successfully assigned \S+ to (\S+)$")


@dataclass(frozen=True, slots=True)
class JobSnapshot:
    """All objects of a job at one moment, as the API returns them."""

    release: str
    mpijob: Json | None = None
    indexed_job: Json | None = None  # of an elastic run, instead of an MPIJob
    launcher_job: Json | None = None
    pods: list[Json] = field(default_factory=list)
    events: list[Json] = field(default_factory=list)
    claims: list[Json] = field(default_factory=list)
    nodes: list[Json] = field(default_factory=list)  # of its pods; read for explain only
    no_node: tuple[str, ...] = ()  # why Karpenter starts no node for pods without one
    record: ReleaseRecord | None = None
    tail: tuple[str, ...] = ()  # last lines of the newest launcher
    operator_silent_s: float = 0.0  # since the MPI operator renewed its lease; 0 if that is not known
    leftover: tuple[str, ...] = ()  # pods that exist though the MPIJob does not

    @property
    def job(self) -> Json | None:
        """The object that is the job."""
        return self.mpijob or self.indexed_job

    @property
    def launchers(self) -> list[Json]:
        """Pods of the launcher's attempts, oldest first."""
        return in_order(self._of_role(LAUNCHER))

    @property
    def workers(self) -> list[Json]:
        if self.indexed_job is not None:
            return newest_workers(self.pods)
        return sorted(self._of_role("worker"), key=lambda pod: int(pod["metadata"]["labels"].get(INDEX_LABEL, "0")))

    def _of_role(self, role: str) -> list[Json]:
        return [pod for pod in self.pods if pod["metadata"].get("labels", {}).get(ROLE_LABEL) == role]

    @property
    def wanted_workers(self) -> int:
        specs = (self.mpijob or {}).get("spec", {}).get("mpiReplicaSpecs", {})
        return int(specs.get("Worker", {}).get("replicas", 1))


def mpijob_of(kube: Kube, release: str) -> Json | None:
    return kube.get(kube.of_namespace("mpijobs", release, group=MPI))


def launcher_job_of(kube: Kube, release: str) -> Json | None:
    """The Job that runs the launcher."""
    return kube.get(kube.of_namespace("jobs", f"{release}-launcher", group="batch/v1"))


def operator_silence(kube: Kube) -> float | None:
    """Seconds since the MPI operator renewed its lease, by this machine's clock; None if no lease can be seen."""
    leases = if_permitted(kube.items, "/apis/coordination.k8s.io/v1/leases", fieldSelector="metadata.name=mpi-operator")
    ages = [seconds_since(one.get("spec", {}).get("renewTime") or "1970-01-01T00:00:00Z") for one in leases or []]
    return max(0.0, min(ages)) if ages else None


def leftover_pods(kube: Kube, release: str) -> list[str]:
    """Pods of the job that still exist, with their nodes: a pod on a dead node stays until the node is gone."""
    path = kube.of_namespace("pods")
    pods = [
        pod
        for label in (JOB_LABEL, OWNER)
        for pod in if_permitted(kube.items, path, labelSelector=f"{label}={release}") or []
    ]
    return [f"{pod['metadata']['name']} on {pod.get('spec', {}).get('nodeName') or 'no node'}" for pod in pods]


def take_snapshot(kube: Kube, release: str, *, with_tail: bool = True, with_nodes: bool = False) -> JobSnapshot:
    """Read all objects of the job `release`; its nodes cost a request each."""
    record = record_of(kube, release)
    snapshot = _job_and_pods(kube, release, record)
    if snapshot is None:
        return JobSnapshot(release, record=record, leftover=tuple(leftover_pods(kube, release)))
    pods = snapshot.pods
    volumes = [volume for pod in pods for volume in pod.get("spec", {}).get("volumes", [])]
    names = sorted({one["persistentVolumeClaim"]["claimName"] for one in volumes if "persistentVolumeClaim" in one})
    claims = [if_permitted(kube.get, kube.of_namespace("persistentvolumeclaims", name)) for name in names]
    events = _events(kube, snapshot, {*names})
    tail = _tail(kube, snapshot) if with_tail else ()
    hosts = sorted(_node_names(snapshot, events)) if with_nodes else []
    nodes = [if_permitted(kube.get, f"/api/v1/nodes/{name}") for name in hosts]
    return dataclasses.replace(
        snapshot,
        events=events,
        claims=[one for one in claims if one],
        nodes=[one for one in nodes if one],
        no_node=reasons_for_no_node(kube, pods),
        tail=tail,
        operator_silent_s=(operator_silence(kube) or 0.0) if snapshot.mpijob is not None else 0.0,
    )


def _job_and_pods(kube: Kube, release: str, record: ReleaseRecord | None) -> JobSnapshot | None:
    """The job, as an MPIJob or an Indexed Job, and its pods; None if there is neither."""
    mpijob = mpijob_of(kube, release)
    if mpijob is not None:
        pods = kube.items(kube.of_namespace("pods"), labelSelector=f"{JOB_LABEL}={release}")
        launcher = launcher_job_of(kube, release)
        return JobSnapshot(release, mpijob=mpijob, launcher_job=launcher, pods=pods, record=record)
    indexed = indexed_job_of(kube, release)
    if indexed is None:
        return None
    return JobSnapshot(release, indexed_job=indexed, pods=pods_of(kube, release), record=record)


def status_from(snapshot: JobSnapshot) -> JobStatus:
    """The status of a job, from a snapshot alone."""
    state, detail = _state(snapshot)
    if state is JobState.PENDING and snapshot.no_node:
        detail = f"{detail}; {snapshot.no_node[0]}"
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
        min_nodes=fewest_workers(snapshot.indexed_job) if snapshot.indexed_job is not None else None,
    )


def _state(snapshot: JobSnapshot) -> tuple[JobState, str]:
    if snapshot.indexed_job is not None:
        has_step = any(_STEP.search(line) for line in snapshot.tail)
        return elastic_state(snapshot.indexed_job, snapshot.workers, snapshot.tail, has_step=has_step)
    if snapshot.mpijob is None:
        return _without_mpijob(snapshot)
    if is_finished(snapshot.mpijob):
        failed = condition(snapshot.mpijob, "Failed")
        return (JobState.FAILED, condition_text(failed)) if failed is not None else (JobState.DONE, "")
    end = launcher_end(snapshot.launcher_job)
    if end is not None:  # Kubernetes itself ended the launcher; the operator has not recorded it in the MPIJob
        return (JobState.FAILED, condition_text(end)) if end["type"] == "Failed" else (JobState.DONE, "")
    if snapshot.mpijob["metadata"].get("deletionTimestamp"):
        return JobState.RUNNING, "is being stopped"
    if condition(snapshot.mpijob, "Suspended") or snapshot.mpijob["spec"].get("runPolicy", {}).get("suspend"):
        queue = snapshot.mpijob["metadata"].get("labels", {}).get("kueue.x-k8s.io/queue-name")
        return JobState.PENDING, f"waits in queue {queue}" if queue else "is suspended"
    if not (snapshot.mpijob.get("status", {}).get("conditions") or snapshot.pods or snapshot.launcher_job):
        return JobState.PENDING, "the MPI operator has not handled it yet"
    running = [pod for pod in snapshot.launchers if pod["status"].get("phase") == "Running"]
    ready = sum(condition(pod, "Ready") is not None for pod in snapshot.workers)
    if running:
        lost = snapshot.wanted_workers - ready
        return JobState.RUNNING, f"{lost} of {snapshot.wanted_workers} workers are not ready" if lost > 0 else ""
    has_run = condition(snapshot.mpijob, "Running") is not None
    if not snapshot.launchers or (ready < snapshot.wanted_workers and not has_run):
        return JobState.PENDING, f"{ready} of {snapshot.wanted_workers} workers are ready"
    number = attempts(snapshot)
    again = f"attempt {number} of the launcher is about to start" if number > 1 else "starts"
    return (JobState.RUNNING if has_run else JobState.PENDING), again


def _without_mpijob(snapshot: JobSnapshot) -> tuple[JobState, str]:
    record = snapshot.record
    if record is None or not record.is_of(CHART):
        return JobState.UNKNOWN, f"the cluster knows no job {snapshot.release}"
    match record.status:
        case "uninstalled" | "uninstalling":
            if snapshot.leftover:
                return JobState.CANCELLED, f"pods are not deleted yet: {', '.join(snapshot.leftover)}"
            return JobState.CANCELLED, "its files stay on the shared volume"
        case "pending-install" | "pending-upgrade":
            return JobState.PENDING, "helm is installing it"
        case "failed":
            return JobState.FAILED, f"helm could not install it: {record.description}"
        case _:
            return JobState.LOST, "its job was deleted, and not by `maskfleet cancel`; launch it again to resume"


def is_finished(mpijob: Json) -> bool:
    """Whether the operator has finished it; after an eviction it reports Failed, and yet continues."""
    over = mpijob.get("status", {}).get("completionTime") is not None
    return condition(mpijob, "Succeeded") is not None or (over and condition(mpijob, "Failed") is not None)


def launcher_end(launcher_job: Json | None) -> Json | None:
    """The condition with which the launcher's Job ended, after all its attempts; None before."""
    if launcher_job is None:
        return None
    return condition(launcher_job, "Failed") or condition(launcher_job, "Complete")


def attempts(snapshot: JobSnapshot) -> int:
    """How often the launcher was started, in new pods or restarted in the same pod; the most pods of a worker."""
    if snapshot.indexed_job is not None:
        return max(Counter(map(worker_index, snapshot.pods)).values(), default=0)
    status = (snapshot.launcher_job or {}).get("status", {})
    pods = sum(int(status.get(name, 0)) for name in ("active", "failed", "succeeded"))
    again = sum(int(one.get("restartCount", 0)) for pod in snapshot.launchers for one in containers(pod))
    return max(pods, len(snapshot.launchers)) + again


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
    for pod in reversed(snapshot.launchers or snapshot.workers):
        code = (ended(pod, LAUNCHER if snapshot.launchers else WORKER) or {}).get("exitCode")
        if code is not None:
            return int(code)
    return None


def _events(kube: Kube, snapshot: JobSnapshot, more: set[str]) -> list[Json]:
    """Events about the job and its objects, oldest first; none without permission to read them."""
    release = re.escape(snapshot.release)
    names = {snapshot.release, *more, *(pod["metadata"]["name"] for pod in snapshot.pods)}
    deleted = re.compile(
        rf"{release}-(?:worker-\d+|launcher(?:-[a-z0-9]{{5}})?|\d+-[a-z0-9]{{5}})|mpijob-{release}-\w+"
    )
    found = if_permitted(kube.items, kube.of_namespace("events"))
    if found is None:
        return []
    about = [(one, str(one.get("involvedObject", {}).get("name", ""))) for one in found]
    own = [one for one, name in about if name in names or deleted.fullmatch(name)]
    return sorted([*own, *_node_events(kube, snapshot, _node_names(snapshot, own))], key=event_time)


def _node_names(snapshot: JobSnapshot, events: list[Json]) -> set[str]:
    """Nodes of the job's pods; those of deleted pods are known from the scheduler's events."""
    scheduled = (one for one in events if one.get("reason") == "Scheduled")
    former = {match[1] for one in scheduled if (match := _ASSIGNED.search(str(one.get("message", ""))))}
    return former | {node for pod in snapshot.pods if (node := pod.get("spec", {}).get("nodeName"))}


def _node_events(kube: Kube, snapshot: JobSnapshot, nodes: set[str]) -> list[Json]:
    """Events about the job's nodes, and about those that Karpenter failed to create since its launch."""
    since = str((snapshot.job or {})["metadata"].get("creationTimestamp", ""))[:19]
    found: list[Json] = []
    for kind in ("Node", "NodeClaim"):
        # Events about cluster-scoped objects are in this namespace.
        path = "/api/v1/namespaces/default/events"
        some = if_permitted(kube.items, path, fieldSelector=f"involvedObject.kind={kind}") or []
        of_job = [one for one in some if kind == "NodeClaim" or one["involvedObject"].get("name") in nodes]
        found += [one for one in of_job if one.get("type") == "Warning" and event_time(one) >= since]
    return found


def _tail(kube: Kube, snapshot: JobSnapshot) -> tuple[str, ...]:
    """Last lines of the newest launcher that has a log, or of all elastic workers."""
    if snapshot.indexed_job is not None:
        return workers_tail(kube, snapshot.workers)
    for pod in reversed(snapshot.launchers):
        lines = tail_of(kube, pod, LAUNCHER)
        if lines is not None:
            return tuple(text for _, text in lines)
    return ()
