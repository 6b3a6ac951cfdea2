"""What a cluster creates outside of Terraform's state and would leave behind: load balancers, nodes, EBS volumes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from maskfleet.errors import InfraError
from maskfleet.system.kube.client import ApiError, Json, Kube

OURS = "app.kubernetes.io/name in (maskfleet-train,maskfleet-notebook,maskfleet-stage-data)"
EBS_DRIVER = "ebs.csi.aws.com"
SAY_EVERY_S = 30.0
POLL_S = 5.0


@dataclass(frozen=True, slots=True)
class LeftoverKind:
    """A kind of object that must be deleted before the cluster is."""

    noun: str
    group: str
    plural: str
    selector: str = ""
    waited: bool = True
    """Whether something outside of the cluster is released only once the object is gone."""


# In this order: first what requests nodes and addresses, then what provides them.
KINDS = (
    LeftoverKind("MPIJob", "/apis/kubeflow.org/v2beta1", "mpijobs"),
    LeftoverKind("Job", "/apis/batch/v1", "jobs", selector=OURS, waited=False),
    LeftoverKind("Deployment", "/apis/apps/v1", "deployments", selector=OURS, waited=False),
    LeftoverKind("Ingress", "/apis/networking.k8s.io/v1", "ingresses"),
    LeftoverKind("Service", "/api/v1", "services"),
    LeftoverKind("NodePool", "/apis/karpenter.sh/v1", "nodepools"),
    LeftoverKind("NodeClaim", "/apis/karpenter.sh/v1", "nodeclaims"),
)


@dataclass(frozen=True, slots=True)
class Leftover:
    """One object to delete, and what to say about it."""

    path: str
    removing: str
    text: str
    waited: bool = True


@dataclass(frozen=True, slots=True)
class EbsVolume:
    """An EBS volume that a PersistentVolumeClaim in the cluster requested."""

    volume_id: str
    claim: str
    claim_path: str
    deleted_with_claim: bool


def leftovers(kube: Kube) -> list[Leftover]:
    """Everything to delete now, in the order of deletion."""
    return [found for kind in KINDS for found in _of_kind(kube, kind)]


def ebs_volumes(kube: Kube) -> list[EbsVolume]:
    """EBS volumes that would remain, and be billed, after the cluster is gone."""
    found = []
    for item in _items(kube, "/api/v1/persistentvolumes"):
        spec = item.get("spec", {})
        csi, claim = spec.get("csi") or {}, spec.get("claimRef") or {}
        if csi.get("driver") == EBS_DRIVER:
            namespace, name = claim.get("namespace", ""), claim.get("name", "")
            path = f"/api/v1/namespaces/{namespace}/persistentvolumeclaims/{name}" if name else ""
            is_deleted = bool(path) and spec.get("persistentVolumeReclaimPolicy") == "Delete"
            found.append(EbsVolume(str(csi.get("volumeHandle", "")), f"{namespace}/{name}", path, is_deleted))
    return found


def claims_with_volumes(kube: Kube) -> list[Leftover]:
    """Claims whose EBS volumes are deleted with them."""
    return [
        Leftover(
            path=volume.claim_path,
            removing=f"deleting claim {volume.claim} and its EBS volume {volume.volume_id}",
            text=f"EBS volume {volume.volume_id} of {volume.claim}",
        )
        for volume in ebs_volumes(kube)
        if volume.deleted_with_claim
    ]


def remove(
    kube: Kube, find: Callable[[Kube], Sequence[Leftover]], say: Callable[[str], None], *, limit_s: float
) -> None:
    """Delete what `find` finds, also what appears meanwhile, and wait until it is gone."""
    requested: set[str] = set()
    started_at = said_at = time.monotonic()
    said: list[str] = []
    while True:
        found = find(kube)
        for one in found:
            if one.path not in requested:
                say(one.removing)
                kube.delete(one.path)
                requested.add(one.path)
        names = [one.text for one in found if one.waited]
        if not names:
            return
        now = time.monotonic()
        if now - started_at > limit_s:
            raise InfraError(
                f"after {limit_s:.0f} s the cluster still has {_listed(names)}",
                remedy="see with kubectl describe what blocks the deletion (a finalizer whose controller is gone, a"
                " disruption budget), then run the command again; --wait allows more time",
            )
        if names != said or now - said_at >= SAY_EVERY_S:
            say(f"waiting for {_listed(names)} to be deleted ({now - started_at:.0f} s)")
            said, said_at = names, now
        time.sleep(POLL_S)


def _of_kind(kube: Kube, kind: LeftoverKind) -> list[Leftover]:
    found = []
    query = {"labelSelector": kind.selector} if kind.selector else {}
    for item in _items(kube, f"{kind.group}/{kind.plural}", **query):
        name, namespace, extra = item["metadata"]["name"], item["metadata"].get("namespace"), ""
        if kind.noun == "Service":
            if item.get("spec", {}).get("type") != "LoadBalancer":
                continue
            extra = " (load balancer)"
        path = f"{kind.group}{f'/namespaces/{namespace}' if namespace else ''}/{kind.plural}/{name}"
        text = f"{kind.noun} {f'{namespace}/' if namespace else ''}{name}{extra}"
        found.append(Leftover(path, f"removing {text}", text, kind.waited))
    return found


def _items(kube: Kube, path: str, **query: str) -> list[Json]:
    """All objects of a collection; none if the cluster does not know the kind."""
    try:
        return kube.items(path, **query)
    except ApiError as error:
        if error.status == 404:
            return []
        raise


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
