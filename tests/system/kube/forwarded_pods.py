"""Pods on the fake Kubernetes API, each with the port of this machine that its port-forward reaches."""

from __future__ import annotations

from typing import Any

from maskfleet.system.kube.fake import FakeKube, path_of


def pod(name: str, *, ready: bool = True, labels: dict[str, str] | None = None, **status: Any) -> dict[str, Any]:
    conditions = [{"type": "Ready", "status": "True" if ready else "False"}]
    metadata = {"name": name, "namespace": "kubeflow", "labels": labels or {"a": "b"}}
    return {"kind": "Pod", "metadata": metadata, "status": {"conditions": conditions, **status}}


def set_pods(api: FakeKube, *pods: dict[str, Any], ports: dict[str, int]) -> None:
    """Replace all pods at once: requests run in other threads."""
    api.ports = ports
    others = {path: thing for path, thing in api.objects.items() if thing.get("kind") != "Pod"}
    api.objects = {**others, **{path_of(one): one for one in pods}}
