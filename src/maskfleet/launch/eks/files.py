"""The shared volume of a job on Kubernetes, accessed through a small pod that is deleted afterwards."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

from maskfleet.errors import ConfigError, LaunchError
from maskfleet.launch.eks.explain import reason_of
from maskfleet.launch.eks.handle import launch_of
from maskfleet.launch.eks.release import RunStorage, record_of, storage_of
from maskfleet.launch.eks.status import JobSnapshot
from maskfleet.launch.files.agent import RefusedError, parts_of
from maskfleet.launch.files.transfer import AGENT, Report, RunFiles, Volume, ignore
from maskfleet.launch.job import JobHandle
from maskfleet.system.kube.client import ApiError, Json, Kube
from maskfleet.system.kube.exec import process_in
from maskfleet.system.signals import interrupt_on_signals

START_S = 600.0  # a training image of many GB may have to be pulled first
POLL_S = 1.0
IDLE_S = 120  # how long the pod waits for a request if the process that created it was killed
LIFE_S = 6 * 3600
CONTAINER = "files"
STARTING = ("ContainerCreating", "PodInitializing", "ErrImagePull", None)  # ErrImagePull may be transient


@contextlib.contextmanager
def run_files(handle: JobHandle, *, writable: bool, is_file: bool, report: Report) -> Iterator[RunFiles]:
    """What `handle`, RELEASE or RELEASE/PATH, refers to."""
    launch = launch_of(handle)
    release, slash, path = handle.path.partition("/")
    if is_file and not slash:
        raise ConfigError(f"{handle} names a run, not a file in it", remedy=f"write {handle}/PATH")
    with (
        Kube(context=launch.context, namespace=launch.namespace) as kube,
        volume_of(kube, release, path, writable=writable, report=report) as volume,
    ):
        yield RunFiles(volume, kube.run)


@contextlib.contextmanager
def volume_of(
    kube: Kube, release: str, path: str, *, writable: bool = False, report: Report = ignore
) -> Iterator[Volume]:
    """The volume of `release` at `path`: below the run's folder, or below the volume's root if it begins with `/`."""
    storage = storage_of(record_of(kube, release), release)
    below = path.lstrip("/") if path.startswith("/") else f"{storage.folder}/{path}".rstrip("/")
    _refuse_escape(below)
    name = f"{release}-files-{secrets.token_hex(3)}"
    with interrupt_on_signals():
        kube.create(kube.of_namespace("pods"), pod_for(name, release, storage, writable=writable))
        try:
            report(f"starting pod {name}")
            _wait_for_start(kube, release, name, report=report)
            opener = partial(process_in, kube, name, CONTAINER, ("python3", *AGENT))
            yield Volume(opener, {"root": storage.mount, "path": below})
        finally:
            kube.delete(kube.of_namespace("pods", name), grace_s=0)


def _refuse_escape(path: str) -> None:
    """Refuse a path that the agent would refuse, before a pod is created."""
    try:
        parts_of(path)
    except RefusedError as error:
        raise LaunchError(str(error), remedy="see what is there with `maskfleet ls`") from error


def pod_for(name: str, release: str, storage: RunStorage, *, writable: bool) -> Json:
    """A pod that only mounts the volume, without permissions in the cluster or on its node."""
    labels = {
        "app.kubernetes.io/name": "maskfleet-files",
        "app.kubernetes.io/instance": release,
        "app.kubernetes.io/managed-by": "maskfleet",
        "app.kubernetes.io/part-of": "maskfleet",
    }
    annotations = {"sidecar.istio.io/inject": "false", "karpenter.sh/do-not-disrupt": "true"}
    safe: dict[str, Any] = {"runAsNonRoot": True, "runAsUser": 1000, "runAsGroup": 1000}
    safe["seccompProfile"] = {"type": "RuntimeDefault"}
    container = {
        "name": CONTAINER,
        "image": storage.image,
        "command": ["python3", *AGENT, "wait", str(IDLE_S)],
        "securityContext": {
            **safe,
            "allowPrivilegeEscalation": False,
            "privileged": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "resources": {
            "requests": {"cpu": "100m", "memory": "128Mi"},
            "limits": {"cpu": "1", "memory": "512Mi"},
        },
        "volumeMounts": [{"name": "shared", "mountPath": storage.mount, "readOnly": not writable}],
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": labels, "annotations": annotations},
        "spec": {
            "restartPolicy": "Never",
            "activeDeadlineSeconds": LIFE_S,
            "terminationGracePeriodSeconds": 5,
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "securityContext": safe,
            "imagePullSecrets": [{"name": secret} for secret in storage.pull_secrets],
            "containers": [container],
            "volumes": [{"name": "shared", "persistentVolumeClaim": {"claimName": storage.claim}}],
        },
    }


def _wait_for_start(kube: Kube, release: str, name: str, *, report: Report) -> None:
    """Wait until the pod runs; raise at once if it never will."""
    deadline, said = time.monotonic() + START_S, ""
    while True:
        pod = kube.get(kube.of_namespace("pods", name))
        if pod is None:
            raise LaunchError(f"pod {name} was deleted by someone else", remedy="try again")
        status = pod.get("status", {})
        if status.get("phase") == "Running":
            return
        waiting = [one.get("state", {}).get("waiting", {}).get("reason") for one in status.get("containerStatuses", [])]
        is_stuck = any(reason not in STARTING for reason in waiting) or status.get("phase") in ("Failed", "Succeeded")
        if is_stuck or time.monotonic() > deadline:
            raise _stuck(kube, release, pod)
        words = _waits_for(status, waiting)
        if words not in ("", said):
            report(f"{name} waits: {words}")
            said = words
        time.sleep(POLL_S)


def _waits_for(status: Json, waiting: list[str | None]) -> str:
    """What the scheduler, or the containers' reasons for `waiting`, say about a pod that does not run yet."""
    unscheduled = [
        one.get("message") or one.get("reason", "")
        for one in status.get("conditions", [])
        if one.get("type") == "PodScheduled" and one.get("status") == "False"
    ]
    return next((" ".join(words.split()) for words in [*unscheduled, *waiting] if words), "")


def _stuck(kube: Kube, release: str, pod: Json) -> LaunchError:
    name = pod["metadata"]["name"]
    try:
        events = kube.items(kube.of_namespace("events"), fieldSelector=f"involvedObject.name={name}")
    except ApiError:
        events = []  # the pod's own state tells most of it
    reason = reason_of(JobSnapshot(release, pods=[pod], events=events))
    if reason is None:
        phase = pod.get("status", {}).get("phase")
        return LaunchError(f"pod {name}, which would read the files, is {phase}", remedy="try again")
    cause, evidence = reason
    what = f"pod {name}, which would read the files, does not start. {cause.meaning}"
    return LaunchError(f"{what}\n{evidence}", remedy=cause.next_step)
