"""What a cluster has of the parts that training needs; only read, never changed."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from maskfleet.errors import InfraError
from maskfleet.system.kube.client import ApiError, Json, Kube

GPU = "nvidia.com/gpu"
EFA = "vpc.amazonaws.com/efa"
PART_OF = "app.kubernetes.io/part-of"
NAME = "app.kubernetes.io/name"
_GPU_TYPE = re.compile(r"(?:g\d|p\d)[\w-]*(?:\.[\w-]+)?")
_GPU_KEYS = (
    "node.kubernetes.io/instance-type",
    "karpenter.k8s.aws/instance-family",
    "eks.amazonaws.com/instance-family",
)
_CATEGORIES = ("karpenter.k8s.aws/instance-category", "eks.amazonaws.com/instance-category")


@dataclass(frozen=True, slots=True)
class Inventory:
    """What was found; a list is None if the cluster does not know the kind."""

    namespaces: frozenset[str] = frozenset()
    service_accounts: frozenset[str] = frozenset()
    claims: list[Json] = field(default_factory=list)
    csi_drivers: frozenset[str] = frozenset()
    storage_classes: list[Json] = field(default_factory=list)
    deployments: list[Json] = field(default_factory=list)
    daemons: list[Json] = field(default_factory=list)
    nodes: list[Json] = field(default_factory=list)
    node_pools: list[Json] | None = None
    node_classes: list[Json] | None = None
    cluster_queues: list[Json] | None = None
    has_mpijobs: bool = False
    has_old_mpijobs: bool = False
    """Whether the API has MPIJobs of version v1, those of Kubeflow's training operator."""


def take_inventory(kube: Kube, namespace: str) -> Inventory:
    """Look at the cluster; an error if a list may not be read, because nothing seen would mean nothing there."""
    try:
        return Inventory(
            namespaces=_names(_items(kube, "/api/v1/namespaces")),
            service_accounts=_names(_items(kube, f"/api/v1/namespaces/{namespace}/serviceaccounts")),
            claims=_items(kube, f"/api/v1/namespaces/{namespace}/persistentvolumeclaims") or [],
            csi_drivers=_names(_items(kube, "/apis/storage.k8s.io/v1/csidrivers")),
            storage_classes=_items(kube, "/apis/storage.k8s.io/v1/storageclasses") or [],
            deployments=_items(kube, "/apis/apps/v1/deployments") or [],
            daemons=_items(kube, "/apis/apps/v1/daemonsets") or [],
            nodes=_items(kube, "/api/v1/nodes") or [],
            node_pools=_items(kube, "/apis/karpenter.sh/v1/nodepools"),
            node_classes=_items(kube, "/apis/karpenter.k8s.aws/v1/ec2nodeclasses"),
            cluster_queues=_cluster_queues(kube),
            has_mpijobs=_items(kube, "/apis/kubeflow.org/v2beta1/mpijobs") is not None,
            has_old_mpijobs=_items(kube, "/apis/kubeflow.org/v1/mpijobs") is not None,
        )
    except ApiError as error:
        raise InfraError(
            f"what the cluster has cannot be read: {error.what}",
            remedy="use an identity that may read the whole cluster: an access entry with AmazonEKSAdminViewPolicy to"
            " plan, AmazonEKSClusterAdminPolicy for up and down",
        ) from error


def is_ours(thing: Json, name: str) -> bool:
    """Whether the labels of an object say that the chart maskfleet-`name` made it."""
    labels = thing["metadata"].get("labels") or {}
    return bool(labels.get(PART_OF) == "maskfleet" and labels.get(NAME) == f"maskfleet-{name}")


def full_name(thing: Json) -> str:
    """NAMESPACE/NAME, or NAME."""
    metadata = thing["metadata"]
    return "/".join(part for part in (metadata.get("namespace"), metadata["name"]) if part)


def mentions(workload: Json, word: str) -> bool:
    """Whether `word` is in the name or an image of a Deployment or DaemonSet."""
    pod = workload.get("spec", {}).get("template", {}).get("spec", {})
    images = [str(one.get("image", "")) for one in pod.get("containers", [])]
    return any(word in text for text in (workload["metadata"]["name"], *images))


def operators_for(deployments: Iterable[Json], namespace: str) -> list[str]:
    """Deployments of mpi-operator that serve the namespace."""
    found = []
    for one in deployments:
        pod = one.get("spec", {}).get("template", {}).get("spec", {})
        words = [word for box in pod.get("containers", []) for word in (*box.get("command", []), *box.get("args", []))]
        watched = [word.partition("=")[2] for word in words if re.match(r"--?namespace=", word)]
        if mentions(one, "mpi-operator") and all(each in ("", namespace) for each in watched):
            found.append(full_name(one))
    return found


def offers(nodes: Iterable[Json], resource: str) -> list[str]:
    """Nodes with at least one of `resource`."""
    return [
        one["metadata"]["name"]
        for one in nodes
        if str(one.get("status", {}).get("allocatable", {}).get(resource, "0")) != "0"
    ]


def starts_gpus(pool: Json) -> bool:
    """Whether a Karpenter NodePool is for GPU types, as far as its requirements and limits say."""
    spec = pool.get("spec", {})
    if GPU in (spec.get("limits") or {}):
        return True
    for one in spec.get("template", {}).get("spec", {}).get("requirements", []):
        key, values = one.get("key", ""), [str(value) for value in one.get("values") or []]
        if one.get("operator") == "NotIn":
            continue
        if "instance-gpu-" in key or (key in _CATEGORIES and {"g", "p"}.intersection(values)):
            return True
        if key in _GPU_KEYS and any(_GPU_TYPE.fullmatch(value) for value in values):
            return True
    return False


def _cluster_queues(kube: Kube) -> list[Json] | None:
    found = _items(kube, "/apis/kueue.x-k8s.io/v1beta2/clusterqueues")
    return found if found is not None else _items(kube, "/apis/kueue.x-k8s.io/v1beta1/clusterqueues")


def _items(kube: Kube, path: str) -> list[Json] | None:
    try:
        return kube.items(path)
    except ApiError as error:
        if error.status == 404:
            return None
        raise


def _names(things: Iterable[Json] | None) -> frozenset[str]:
    return frozenset(one["metadata"]["name"] for one in things or [])
