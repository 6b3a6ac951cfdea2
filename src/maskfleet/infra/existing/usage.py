"""Who uses what maskfleet installed in a cluster of others: `down` keeps that."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from maskfleet.infra.existing.inventory import full_name, is_ours
from maskfleet.infra.existing.parts import accounts_made
from maskfleet.infra.kubernetes.leftovers import Leftover
from maskfleet.infra.terraform.state import State
from maskfleet.system.kube.client import ApiError, Json, Kube

POOL = "karpenter.sh/nodepool"
NODE_POOLS = "/apis/karpenter.sh/v1/nodepools"
NODE_CLAIMS = "/apis/karpenter.sh/v1/nodeclaims"
# What a namespace may contain; a namespace is deleted with all of it.
CONTENTS = (
    *(f"/api/v1/{kind}" for kind in ("persistentvolumeclaims", "services", "configmaps", "secrets", "serviceaccounts")),
    *(f"/apis/apps/v1/{kind}" for kind in ("deployments", "statefulsets", "daemonsets")),
    *("/apis/batch/v1/jobs", "/apis/batch/v1/cronjobs", "/apis/kubeflow.org/v2beta1/mpijobs", "/api/v1/pods"),
)
OUR_CHARTS = ("mpi-operator", "storage", "queues")
# Kubernetes creates these in every namespace.
GIVEN = {"kube-root-ca.crt", "default"}


def reasons_to_keep(kube: Kube, addons: State, namespace: str) -> dict[str, str]:
    """Names of resources of the add-ons root that something else uses, and what does."""
    made = {resource.name for resource in addons.resources}
    checks: dict[str, Callable[[], Sequence[str]]] = {
        "mpi_operator": lambda: _named("MPIJob", _items(kube, "/apis/kubeflow.org/v2beta1/mpijobs")),
        "storage": lambda: _named("pod", _mounting(kube)),
        "gpu_nodes": lambda: _named("pod", _on_our_nodes(kube)),
        "karpenter": lambda: _others(kube, "NodePool", NODE_POOLS, "gpu-nodes"),
        "kueue": lambda: _queues(kube),
        "kubeflow": lambda: _foreign_contents(kube, addons, namespace),
    }
    found = {name: users for name, check in checks.items() if name in made and (users := check())}
    # Its CRDs go with their chart, and every object of those kinds with them.
    if "karpenter" in found:
        found["karpenter_crd"] = found["karpenter"]
    return {name: f"{_listed(users)} would be lost or stop" for name, users in found.items()}


def our_nodes(kube: Kube) -> Callable[[Kube], list[Leftover]]:
    """What finds our node pools and their nodes, also once the pools are gone."""
    names = [pool["metadata"]["name"] for pool in _items(kube, NODE_POOLS) if is_ours(pool, "gpu-nodes")]

    def find(kube: Kube) -> list[Leftover]:
        pools = [one for one in _items(kube, NODE_POOLS) if one["metadata"]["name"] in names]
        claims = [one for one in _items(kube, NODE_CLAIMS) if _pool_of(one) in names]
        return [_leftover("NodePool", NODE_POOLS, one) for one in pools if is_ours(one, "gpu-nodes")] + [
            _leftover("NodeClaim", NODE_CLAIMS, one) for one in claims
        ]

    return find


def _leftover(kind: str, path: str, thing: Json) -> Leftover:
    text = f"{kind} {full_name(thing)}"
    return Leftover(f"{path}/{thing['metadata']['name']}", f"removing {text}", text)


def _on_our_nodes(kube: Kube) -> list[Json]:
    """Pods that run on nodes of our pools, apart from those of DaemonSets."""
    pools = {pool["metadata"]["name"] for pool in _items(kube, NODE_POOLS) if is_ours(pool, "gpu-nodes")}
    nodes = {node["metadata"]["name"] for node in _items(kube, "/api/v1/nodes") if _pool_of(node) in pools}
    return [
        pod
        for pod in _items(kube, "/api/v1/pods")
        if pod.get("spec", {}).get("nodeName") in nodes and _is_alive(pod) and not _owned_by(pod, "DaemonSet")
    ]


def _mounting(kube: Kube) -> list[Json]:
    """Pods that use the claims of our storage chart."""
    claims = {full_name(one) for one in _items(kube, "/api/v1/persistentvolumeclaims") if is_ours(one, "storage")}
    found = []
    for pod in _items(kube, "/api/v1/pods"):
        namespace = pod["metadata"].get("namespace", "")
        mounted = [volume.get("persistentVolumeClaim", {}) for volume in pod.get("spec", {}).get("volumes", [])]
        if _is_alive(pod) and any(f"{namespace}/{one.get('claimName')}" in claims for one in mounted):
            found.append(pod)
    return found


def _queues(kube: Kube) -> list[str]:
    versions = ("v1beta2", "v1beta1")
    found = [_others(kube, "ClusterQueue", f"/apis/kueue.x-k8s.io/{one}/clusterqueues", "queues") for one in versions]
    return found[0] or found[1]


def _foreign_contents(kube: Kube, addons: State, namespace: str) -> list[str]:
    """What the namespace contains besides what maskfleet installed in it."""
    accounts = accounts_made(addons.resources)
    releases = {str(one.attributes.get("name")) for one in addons.resources if one.type == "helm_release"}
    found = []
    for path in CONTENTS:
        group, _, plural = path.rpartition("/")
        for one in _items(kube, f"{group}/namespaces/{namespace}/{plural}"):
            labels = one["metadata"].get("labels") or {}
            is_record = labels.get("owner") == "helm" and labels.get("name") in releases
            is_account = plural == "serviceaccounts" and one["metadata"]["name"] in accounts
            given = one["metadata"]["name"] in GIVEN
            if not (is_record or is_account or given or any(is_ours(one, chart) for chart in OUR_CHARTS)):
                found.append(f"{plural}/{one['metadata']['name']}")
    return found


def _others(kube: Kube, kind: str, path: str, chart: str) -> list[str]:
    return _named(kind, [one for one in _items(kube, path) if not is_ours(one, chart)])


def _named(kind: str, things: Iterable[Json]) -> list[str]:
    return [f"{kind} {full_name(one)}" for one in things]


def _pool_of(thing: Json) -> str | None:
    return (thing["metadata"].get("labels") or {}).get(POOL)


def _is_alive(pod: Json) -> bool:
    return pod.get("status", {}).get("phase") not in ("Succeeded", "Failed")


def _owned_by(pod: Json, kind: str) -> bool:
    return any(one.get("kind") == kind for one in pod["metadata"].get("ownerReferences", []))


def _items(kube: Kube, path: str) -> list[Json]:
    """All objects of a list; none if the cluster does not know the kind."""
    try:
        return kube.items(path)
    except ApiError as error:
        if error.status == 404:
            return []
        raise


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
