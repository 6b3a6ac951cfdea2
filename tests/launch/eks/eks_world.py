"""A cluster that can take a job, on the fake API."""

from __future__ import annotations

import base64
import gzip
import json
from datetime import UTC, datetime
from typing import Any

from maskfleet.system.kube.fake import FakeKube

Json = dict[str, Any]
JOB = "training.kubeflow.org/job-name"
ROLE = "training.kubeflow.org/job-role"


def fit_cluster(api: FakeKube) -> FakeKube:
    """Namespace, MPIJobs, an operator that lives, and a bound claim."""
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    api.add(
        {"kind": "Namespace", "metadata": {"name": "kubeflow"}},
        {"kind": "APIResourceList", "metadata": {"name": "kubeflow.org/v2beta1"}, "resources": [{"name": "mpijobs"}]},
        {"kind": "Lease", "metadata": {"name": "mpi-operator", "namespace": "mpi"}, "spec": {"renewTime": now}},
        claim("pv-fsx"),
    )
    return api


def claim(name: str, phase: str = "Bound", storage_class: str = "") -> Json:
    return {"kind": "PersistentVolumeClaim", "metadata": {"name": name, "namespace": "kubeflow"},
            "spec": {"storageClassName": storage_class}, "status": {"phase": phase}}  # fmt: skip


def mpijob(*conditions: str, completed: bool = False) -> Json:
    status: Json = {"conditions": [{"type": kind, "status": "True", "reason": kind} for kind in conditions]}
    if completed:
        status["completionTime"] = "2026-11-15T11:00:00Z"
    return {"kind": "MPIJob", "metadata": {"name": "r50", "namespace": "kubeflow", "creationTimestamp": STAMP,
                                           "labels": {"app.kubernetes.io/part-of": "maskfleet"}},
            "spec": {"mpiReplicaSpecs": {"Worker": {"replicas": 2}}}, "status": status}  # fmt: skip


def launcher(number: int = 1, *, phase: str = "Running", code: int | None = None, restarts: int = 0) -> Json:
    state: Json = {"running": {}} if code is None else {"terminated": {"exitCode": code, "reason": "Error"}}
    container = {"name": "launcher", "restartCount": restarts, "state": state}
    meta = {"name": f"r50-launcher-{number}", "namespace": "kubeflow", "labels": {JOB: "r50", ROLE: "launcher"},
            "creationTimestamp": f"2026-11-15T10:{number:02d}:00Z"}  # fmt: skip
    statuses = [] if phase == "Pending" else [container]
    return {"kind": "Pod", "metadata": meta, "spec": {"volumes": []},
            "status": {"phase": phase, "containerStatuses": statuses, "conditions": []}}  # fmt: skip


def ready_worker(index: int) -> Json:
    labels = {JOB: "r50", ROLE: "worker", "training.kubeflow.org/replica-index": str(index)}
    return {"kind": "Pod", "metadata": {"name": f"r50-worker-{index}", "namespace": "kubeflow", "labels": labels},
            "spec": {"volumes": []},
            "status": {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}}  # fmt: skip


def helm_record(
    release: str,
    values: Json,
    *,
    status: str = "deployed",
    version: int = 1,
    chart: str = "train",
    manifest: str = "metadata:\n  labels:\n    app.kubernetes.io/part-of: maskfleet\n",
) -> Json:
    """The Secret in which helm stores a release."""
    data = {"name": release, "info": {"status": status, "description": "Install complete"}, "version": version,
            "chart": {"metadata": {"name": chart}, "values": {"log_dir": "logs", "shared_fs": "fsx",
                                                              "shared_pvc": "pv-fsx", "run_id": None}},
            "config": values, "manifest": manifest}  # fmt: skip
    packed = base64.b64encode(base64.b64encode(gzip.compress(json.dumps(data).encode()))).decode()
    labels = {"owner": "helm", "name": release, "status": status, "version": str(version)}
    name = f"sh.helm.release.v1.{release}.v{version}"
    return {"kind": "Secret", "metadata": {"name": name, "namespace": "kubeflow", "labels": labels},
            "type": "helm.sh/release.v1", "data": {"release": packed}}  # fmt: skip


IMAGE = "repo/train@sha256:" + "ab" * 32
STAMP = "2026-11-15T10:00:00Z"
