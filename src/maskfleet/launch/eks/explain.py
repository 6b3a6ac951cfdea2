"""Why a job on Kubernetes waits or failed, from what the API reports about it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from maskfleet.launch.causes import Cause, causes_in, read_tables
from maskfleet.launch.eks.elastic.status import WORKER, worker_index
from maskfleet.launch.eks.jobs.objects import condition, containers, ended, seconds_since
from maskfleet.launch.eks.status import (
    LAUNCHER,
    LEASE_S,
    OPERATOR_DEAD_S,
    JobSnapshot,
    event_text,
    is_finished,
    launcher_end,
)
from maskfleet.launch.explain import SYMPTOMS, Explanation, explain_lines
from maskfleet.launch.job import JobState, JobStatus
from maskfleet.system.kube.client import Json

_FIND_OPERATOR = "see `kubectl get deploy -A | grep mpi-operator`; deploy/helm/mpi-operator installs it"
TAKEN_UP_S = 30.0  # a running operator has set conditions on a new job by then
_CAUSES = {group: causes_in(rows) for group, rows in read_tables(Path(__file__).with_name("causes.toml")).items()}
_OOM_KILLED = re.compile(r"^(?:\[rank\d+\]: )?(?:worker \S+|the rank) was OOMKilled")  # as pod.py of the chart prints
_OUT_OF_MEMORY = Cause(
    "host memory",
    "A worker was killed: it exceeded its memory limit.",
    "lower data.num_workers, take more memory (launch.memory_gib) or a larger --instance",
)

ROOT_CAUSES = (_OUT_OF_MEMORY.name, "gpu broken")  # the ranks only report what follows from them
_NO_OFFERING = "no offering"
_LAUNCH_FAILED = ("no capacity", "account limit", "spot role", "not offered", "no address")

Seen = tuple[Cause, str]  # a cause and the line that shows it


def reason_of(snapshot: JobSnapshot) -> Seen | None:
    """The cause that shows in the cluster, with its evidence; None if only the logs of the ranks can tell."""
    return _suspended(snapshot) or _memory(snapshot) or _stuck(snapshot) or _operator(snapshot)


def _suspended(snapshot: JobSnapshot) -> Seen | None:
    job = snapshot.job
    if job is None or not (job["spec"].get("suspend") or job["spec"].get("runPolicy", {}).get("suspend")):
        return None
    field = "runPolicy.suspend" if snapshot.mpijob is not None else "suspend"
    queue = job["metadata"].get("labels", {}).get("kueue.x-k8s.io/queue-name")
    if not queue:
        cause = Cause(
            "suspended",
            "The job is suspended, and nothing is set to resume it.",
            f"set {field} to false, or cancel and launch it again",
        )
        return cause, f"{field} is true"
    said = (line for line in _lines(snapshot) if re.search(r"QuotaReserved|Pending|Inadmissible|couldn't assign", line))
    cause = Cause(
        "queued",
        f"Kueue holds the job in queue {queue} until quota is available.",
        f"wait, or look at `kubectl get workloads` and `kubectl describe localqueue {queue}`",
    )
    return cause, " ".join(next(said, f"{field} is true, queue {queue}").split())


def _memory(snapshot: JobSnapshot) -> Seen | None:
    for pod in snapshot.pods:
        for one in containers(pod):
            for state in (one.get("state", {}), one.get("lastState", {})):
                if state.get("terminated", {}).get("reason") == "OOMKilled":
                    limit = _memory_limit(pod, one["name"])
                    cause = Cause(
                        _OUT_OF_MEMORY.name,
                        f"The {one['name']} was killed: it exceeded its memory limit{limit}.",
                        _OUT_OF_MEMORY.next_step,
                    )
                    code = state["terminated"].get("exitCode")
                    return cause, f"pod {pod['metadata']['name']}: {one['name']} OOMKilled, exit code {code}"
    return None


def _memory_in_log(lines: list[str]) -> Seen | None:
    """The same of a worker that is deleted by now: the launcher asked it before, and its log stays (pod.py)."""
    found = next((line for line in lines if _OOM_KILLED.search(line)), None)
    return (_OUT_OF_MEMORY, found) if found is not None else None


def _stuck(snapshot: JobSnapshot) -> Seen | None:
    lines = list(_lines(snapshot))
    is_over = snapshot.job is not None and any(condition(snapshot.job, one) for one in ("Succeeded", "Complete"))
    if is_over or not (any(pod["status"].get("phase") == "Pending" for pod in snapshot.pods) or not snapshot.pods):
        return _first(lines, "node", "container", "refused", "ended")
    return (
        _first(lines, "container", "refused", "volume", "node", "ended")
        # The latest event about capacity counts; the scheduler's repeated events about full nodes tell less.
        or _capacity(lines)
        or _first(lines, "no_node")
    )


def _capacity(lines: list[str]) -> Seen | None:
    """The latest reason; after a failed launch Karpenter reports only that the type is not to be had for now."""
    found = [reason for line in lines if (reason := _first([line], "capacity")) is not None]
    if found and found[0][0].name == _NO_OFFERING:
        return next((one for one in found if one[0].name in _LAUNCH_FAILED), found[0])
    return found[0] if found else None


def _first(lines: list[str], *groups: str) -> Seen | None:
    """The first cause of `groups` whose pattern matches any of `lines`."""
    for cause in (cause for group in groups for cause in _CAUSES[group]):
        found = next((line for line in lines if cause.pattern.search(line)), None)
        if found is not None:
            return cause, " ".join(found.split())
    return None


def _operator(snapshot: JobSnapshot) -> Seen | None:
    job = snapshot.mpijob
    if job is None or is_finished(job) or launcher_end(snapshot.launcher_job) is not None:
        return None
    if snapshot.operator_silent_s > OPERATOR_DEAD_S:
        cause = Cause(
            "no operator",
            "The MPI operator does not run: it starts no worker and no new attempt until it is back.",
            _FIND_OPERATOR,
        )
        return cause, f"its lease was renewed {snapshot.operator_silent_s:.0f} s ago and lasts {LEASE_S:.0f} s"
    if job.get("status", {}).get("conditions") or snapshot.pods:
        return None
    age_s = seconds_since(job["metadata"]["creationTimestamp"])
    if age_s < TAKEN_UP_S:
        return None
    cause = Cause(
        "no operator",
        "No operator has handled the job since it was created: the MPI operator is not running.",
        _FIND_OPERATOR,
    )
    return cause, f"MPIJob {snapshot.release} has no conditions {age_s:.0f} s after it was created"


def _lines(snapshot: JobSnapshot) -> Iterator[str]:
    """What the API reports about the job, as `object reason: message`; current states come before events."""
    for claim in snapshot.claims:
        phase = claim.get("status", {}).get("phase")
        if phase not in (None, "Bound"):
            yield f"claim {claim['metadata']['name']} is {phase}: unbound immediate PersistentVolumeClaims"
    for node in snapshot.nodes:  # as the node monitoring agent of EKS reports broken GPUs
        for one in node.get("status", {}).get("conditions", []):
            if one["type"] == "AcceleratedHardwareReady" and one["status"] == "False":
                yield f"node {node['metadata']['name']} {one.get('reason', '')}: {one.get('message', '')}"
    for pod in reversed(snapshot.pods):
        yield from _pod_lines(pod)
        yield from _failed_init(pod)
    yield from snapshot.no_node
    for thing in (snapshot.job, snapshot.launcher_job):
        for one in (thing or {}).get("status", {}).get("conditions", []):
            if one["type"] == "Failed" and one["status"] == "True":
                yield f"{(thing or {}).get('kind', 'job')} {one.get('reason', '')}: {one.get('message', '')}"
    for event in reversed(snapshot.events):
        about = event["involvedObject"]
        yield f"{about.get('kind', '')} {about.get('name', '')} {event.get('reason', '')}: {event.get('message', '')}"


def _pod_lines(pod: Json) -> Iterator[str]:
    name, status = pod["metadata"]["name"], pod.get("status", {})
    if status.get("reason"):
        yield f"pod {name} {status['reason']}: {status.get('message', '')}"
    for one in status.get("conditions", []):
        wrong = one["type"] == "DisruptionTarget" and one["status"] == "True"
        if wrong or one.get("reason") == "Unschedulable":
            yield f"pod {name} {one.get('reason', '')}: {one.get('message', '')}"
    for one in containers(pod):
        for state in (one.get("state", {}), one.get("lastState", {})):
            for kind in ("waiting", "terminated"):
                found = state.get(kind) or {}
                if found.get("reason") not in (None, "Error", "Completed", "ContainerCreating", "PodInitializing"):
                    yield f"pod {name} {one['name']} {found['reason']}: {found.get('message', '')}"


def _failed_init(pod: Json) -> Iterator[str]:
    """Init containers that failed, as in a launcher whose workers did not start."""
    for one in pod.get("status", {}).get("initContainerStatuses", []):
        terminated = one.get("state", {}).get("terminated") or {}
        if terminated.get("exitCode", 0) != 0:
            yield f"pod {pod['metadata']['name']} {one['name']} ended with code {terminated['exitCode']}"


def _memory_limit(pod: Json, name: str) -> str:
    specs = pod.get("spec", {}).get("containers", [])
    limit = next(
        (one.get("resources", {}).get("limits", {}).get("memory") for one in specs if one["name"] == name), None
    )
    return f" ({limit})" if limit else ""


def pod_ends(snapshot: JobSnapshot) -> list[str]:
    """How each attempt of the launcher, or each elastic worker, ended; oldest first."""
    if snapshot.indexed_job is not None:
        ends = [(f"worker {worker_index(pod)}", pod, ended(pod, WORKER)) for pod in snapshot.pods]
    else:
        numbered = enumerate(snapshot.launchers, start=1)
        ends = [(f"attempt {number}", pod, ended(pod, LAUNCHER)) for number, pod in numbered]
    lines = []
    for who, pod, end in ends:
        if end is not None:
            code = f" with code {end['exitCode']}" if "exitCode" in end else ""
            lost = condition(pod, "DisruptionTarget")
            reason = lost.get("reason") if lost is not None else end.get("reason")
            why = f" ({reason})" if reason not in (None, "Error", "Completed") else ""
            lines.append(f"{who} ended{code}{why}, pod {pod['metadata']['name']}")
    return lines


def explained(snapshot: JobSnapshot, status: JobStatus, lines: list[str]) -> str:
    """What `maskfleet explain` prints about a job, whatever its state."""
    at = f" at step {status.step}" if status.step is not None else ""
    head = f"The run is {status.state}{at}{f': {status.detail}' if status.detail else ''}."
    reason = reason_of(snapshot)
    match status.state:
        case JobState.DONE:
            return "The run is done; there is nothing to explain."
        case JobState.CANCELLED:
            return "The run was cancelled.\n  → launch it again under its name to resume from its last checkpoint"
        case JobState.FAILED:
            own, reason = explain_lines(lines), _memory_in_log(lines) or reason
            vague = own.cause is None or own.cause.name in SYMPTOMS
            parts = [head, *pod_ends(snapshot)]
            if reason is not None and (vague or reason[0].name in ROOT_CAUSES):
                return "\n".join([*parts, "", Explanation(*reason).render()])
            also = [f"The cluster also says: {reason[0].name}. {reason[0].meaning}"] if reason is not None else []
            return "\n".join([*parts, "", own.render(), *also])
        case _:
            parts = [head, *(f"{host.address}: {host.state}  {host.detail}".rstrip() for host in status.hosts)]
            parts += pod_ends(snapshot)
            # While the operator is down, that counts beside any other reason.
            found = {one[0].name: one for one in (reason, _operator(snapshot)) if one is not None}
            for one in found.values():
                parts += ["", Explanation(*one).render()]
            return "\n".join([*parts, *(["", *map(event_text, snapshot.events[-5:])] if snapshot.events else [])])
