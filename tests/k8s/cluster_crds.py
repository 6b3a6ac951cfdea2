"""CRDs that charts need: those of the cluster, or ones that the tests create and remove."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from kube import eventually

from maskfleet.system.deploy_files import deploy_path
from tools import run_tool, try_tool

MPIJOBS = "mpijobs.kubeflow.org"
MPIJOBS_FILE = ("helm", "mpi-operator", "crds", f"{MPIJOBS}.yaml")
KARPENTER = (
    ("karpenter.sh", "NodePool", "nodepools", "Cluster"),
    ("karpenter.k8s.aws", "EC2NodeClass", "ec2nodeclasses", "Cluster"),
)
CERT_MANAGER = (("cert-manager.io", "Certificate", "certificates", "Namespaced"),)


def crd_exists(name: str) -> bool:
    """Whether the API knows this definition."""
    done = try_tool("kubectl", "get", "crd", name)
    assert done.returncode == 0 or "NotFound" in done.stderr, done.stderr
    return done.returncode == 0


@contextmanager
def mpijobs_known() -> Iterator[None]:
    """The definition that we ship, unless the cluster has one."""
    with _crd_from(deploy_path(*MPIJOBS_FILE), MPIJOBS):
        yield


@contextmanager
def kinds_known(kinds: tuple[tuple[str, str, str, str], ...], folder: Path) -> Iterator[None]:
    """Definitions that take anything, for those of `kinds` (group, kind, plural, scope) that the cluster lacks."""
    with ExitStack() as made:
        for group, kind, plural, scope in kinds:
            path = folder / f"{plural}.json"
            path.write_text(json.dumps(_permissive(group, kind, plural, scope)), encoding="utf-8")
            made.enter_context(_crd_from(path, f"{plural}.{group}"))
        yield


@contextmanager
def _crd_from(path: Path, name: str) -> Iterator[None]:
    if crd_exists(name):
        yield
        return
    # Client-side apply writes the whole definition into an annotation, which may be too large for one.
    run_tool("kubectl", "apply", "--server-side", "-f", path)
    try:
        # Established, and discovered by clients, which takes a moment longer.
        eventually(lambda: try_tool("kubectl", "get", name, "-A").returncode == 0, what=f"an answer about {name}")
        yield
    finally:
        run_tool("kubectl", "delete", "crd", name, "--timeout=60s")


def _permissive(group: str, kind: str, plural: str, scope: str) -> dict[str, Any]:
    anything = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    version = {"name": "v1", "served": True, "storage": True, "schema": {"openAPIV3Schema": anything}}
    names = {"kind": kind, "listKind": f"{kind}List", "plural": plural, "singular": kind.lower()}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.{group}"},
        "spec": {"group": group, "scope": scope, "names": names, "versions": [version]},
    }
