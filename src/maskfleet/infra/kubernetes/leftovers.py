"""What a cluster made outside of Terraform's state and would outlive it: load balancers, Karpenter's nodes, disks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from maskfleet.errors import InfraError
from maskfleet.infra.kubernetes.kubectl import Cluster

OURS = "app.kubernetes.io/name in (maskfleet-train,maskfleet-notebook,maskfleet-stage-data)"
EBS_DRIVER = "ebs.csi.aws.com"
SAY_EVERY_S = 30.0
POLL_S = 5.0


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of object that must go before the cluster does."""

    noun: str
    group: str
    plural: str
    selector: str = ""
    waited: bool = True
    """Whether something outside of the cluster ends only when the object is gone."""

    @property
    def path(self) -> str:
        return f"{self.group}/{self.plural}"

    def path_of(self, item: dict[str, Any]) -> str:
        meta = item["metadata"]
        space = f"/namespaces/{meta['namespace']}" if meta.get("namespace") else ""
        return f"{self.group}{space}/{self.plural}/{meta['name']}"


# In this order: first what asks for nodes and addresses, then what gives them.
KINDS = (
    Kind("MPIJob", "/apis/kubeflow.org/v2beta1", "mpijobs"),
    Kind("Job", "/apis/batch/v1", "jobs", selector=OURS, waited=False),
    Kind("Deployment", "/apis/apps/v1", "deployments", selector=OURS, waited=False),
    Kind("Ingress", "/apis/networking.k8s.io/v1", "ingresses"),
    Kind("Service", "/api/v1", "services"),
    Kind("NodePool", "/apis/karpenter.sh/v1", "nodepools"),
    Kind("NodeClaim", "/apis/karpenter.sh/v1", "nodeclaims"),
)


@dataclass(frozen=True, slots=True)
class Found:
    """One object to remove."""

    kind: Kind
    path: str
    text: str


@dataclass(frozen=True, slots=True)
class Disk:
    """An EBS volume that a claim in the cluster asked for."""

    volume_id: str
    claim: str
    claim_path: str
    goes_with_claim: bool


@dataclass(frozen=True, slots=True)
class Waiting:
    """How long to wait, and the clock to wait by."""

    limit_s: float
    clock: Callable[[], float]
    sleep: Callable[[float], None]


def leftovers(cluster: Cluster) -> list[Found]:
    """Everything to remove now, in the order of removing."""
    return [found for kind in KINDS for found in _of_kind(cluster, kind)]


def disks(cluster: Cluster) -> list[Disk]:
    """EBS volumes that would be left over, and paid for, when the cluster is gone."""
    found = []
    for item in cluster.items("/api/v1/persistentvolumes"):
        spec = item.get("spec", {})
        csi, claim = spec.get("csi") or {}, spec.get("claimRef") or {}
        if csi.get("driver") == EBS_DRIVER:
            space, name = claim.get("namespace", ""), claim.get("name", "")
            path = f"/api/v1/namespaces/{space}/persistentvolumeclaims/{name}" if name else ""
            found.append(
                Disk(
                    volume_id=str(csi.get("volumeHandle", "")),
                    claim=f"{space}/{name}",
                    claim_path=path,
                    goes_with_claim=bool(path) and spec.get("persistentVolumeReclaimPolicy") == "Delete",
                )
            )
    return found


def remove(cluster: Cluster, say: Callable[[str], None], waiting: Waiting) -> None:
    """Delete all leftovers and wait until what they stand for is gone; again and again, should more appear."""
    asked: set[str] = set()

    def left() -> list[str]:
        now = leftovers(cluster)
        for found in now:
            if found.path not in asked:
                say(f"removing {found.text}")
                cluster.delete(found.path)
                asked.add(found.path)
        return [found.text for found in now if found.kind.waited]

    _wait(left, say, waiting)


def remove_disks(cluster: Cluster, say: Callable[[str], None], waiting: Waiting) -> None:
    """Delete the claims of EBS volumes and wait until the volumes that go with their claims are deleted."""
    asked: set[str] = set()

    def left() -> list[str]:
        now = [disk for disk in disks(cluster) if disk.goes_with_claim]
        for disk in now:
            if disk.claim_path not in asked:
                say(f"deleting claim {disk.claim} and its EBS volume {disk.volume_id}")
                cluster.delete(disk.claim_path)
                asked.add(disk.claim_path)
        return [f"EBS volume {disk.volume_id} of {disk.claim}" for disk in now]

    _wait(left, say, waiting)


def _wait(left: Callable[[], Sequence[str]], say: Callable[[str], None], waiting: Waiting) -> None:
    began = waiting.clock()
    said: tuple[Sequence[str], float] = ((), began)
    while names := left():
        now = waiting.clock()
        if now - began > waiting.limit_s:
            raise InfraError(
                f"after {waiting.limit_s:.0f} s the cluster still has {_listed(names)}",
                remedy="see with kubectl describe what holds it (a finalizer whose controller is gone, a disruption"
                " budget), then run it again; --wait gives it more time",
            )
        if names != said[0] or now - said[1] >= SAY_EVERY_S:
            say(f"waiting for {_listed(names)} to go ({now - began:.0f} s)")
            said = (names, now)
        waiting.sleep(POLL_S)


def _of_kind(cluster: Cluster, kind: Kind) -> list[Found]:
    query = {"labelSelector": kind.selector} if kind.selector else {}
    items = cluster.items(kind.path, **query)
    if kind.plural == "services":
        items = [item for item in items if item.get("spec", {}).get("type") == "LoadBalancer"]
    return [Found(kind, kind.path_of(item), _text(kind, item)) for item in items]


def _text(kind: Kind, item: dict[str, Any]) -> str:
    meta = item["metadata"]
    space = f"{meta['namespace']}/" if meta.get("namespace") else ""
    extra = " (load balancer)" if kind.plural == "services" else ""
    return f"{kind.noun} {space}{meta['name']}{extra}"


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
