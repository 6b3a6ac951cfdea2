"""What a cluster creates outside of Terraform's state and would leave behind: load balancers, nodes, EBS volumes."""

from __future__ import annotations

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

    @property
    def path(self) -> str:
        return f"{self.group}/{self.plural}"

    def path_of(self, item: Json) -> str:
        meta = item["metadata"]
        namespace = f"/namespaces/{meta['namespace']}" if meta.get("namespace") else ""
        return f"{self.group}{namespace}/{self.plural}/{meta['name']}"


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
    """One object to delete."""

    kind: LeftoverKind
    path: str
    text: str


@dataclass(frozen=True, slots=True)
class EbsVolume:
    """An EBS volume that a PersistentVolumeClaim in the cluster requested."""

    volume_id: str
    claim: str
    claim_path: str
    deleted_with_claim: bool


@dataclass(frozen=True, slots=True)
class WaitLimit:
    """How long to wait, and the clock to use."""

    limit_s: float
    clock: Callable[[], float]
    sleep: Callable[[float], None]


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
            found.append(
                EbsVolume(
                    volume_id=str(csi.get("volumeHandle", "")),
                    claim=f"{namespace}/{name}",
                    claim_path=path,
                    deleted_with_claim=bool(path) and spec.get("persistentVolumeReclaimPolicy") == "Delete",
                )
            )
    return found


def remove(kube: Kube, say: Callable[[str], None], wait: WaitLimit) -> None:
    """Delete all leftovers, also those that appear meanwhile, and wait until they are gone."""
    requested: set[str] = set()

    def remaining() -> list[str]:
        now = leftovers(kube)
        for found in now:
            if found.path not in requested:
                say(f"removing {found.text}")
                kube.delete(found.path)
                requested.add(found.path)
        return [found.text for found in now if found.kind.waited]

    _wait_until_none(remaining, say, wait)


def remove_ebs_volumes(kube: Kube, say: Callable[[str], None], wait: WaitLimit) -> None:
    """Delete the claims of EBS volumes, and wait until the volumes that are deleted with their claims are gone."""
    requested: set[str] = set()

    def remaining() -> list[str]:
        now = [volume for volume in ebs_volumes(kube) if volume.deleted_with_claim]
        for volume in now:
            if volume.claim_path not in requested:
                say(f"deleting claim {volume.claim} and its EBS volume {volume.volume_id}")
                kube.delete(volume.claim_path)
                requested.add(volume.claim_path)
        return [f"EBS volume {volume.volume_id} of {volume.claim}" for volume in now]

    _wait_until_none(remaining, say, wait)


def _wait_until_none(remaining: Callable[[], Sequence[str]], say: Callable[[str], None], wait: WaitLimit) -> None:
    started_at = wait.clock()
    said: tuple[Sequence[str], float] = ((), started_at)
    while names := remaining():
        now = wait.clock()
        if now - started_at > wait.limit_s:
            raise InfraError(
                f"after {wait.limit_s:.0f} s the cluster still has {_listed(names)}",
                remedy="see with kubectl describe what blocks the deletion (a finalizer whose controller is gone, a"
                " disruption budget), then run the command again; --wait allows more time",
            )
        if names != said[0] or now - said[1] >= SAY_EVERY_S:
            say(f"waiting for {_listed(names)} to be deleted ({now - started_at:.0f} s)")
            said = (names, now)
        wait.sleep(POLL_S)


def _of_kind(kube: Kube, kind: LeftoverKind) -> list[Leftover]:
    items = _items(kube, kind.path, **({"labelSelector": kind.selector} if kind.selector else {}))
    if kind.plural == "services":
        items = [item for item in items if item.get("spec", {}).get("type") == "LoadBalancer"]
    return [Leftover(kind, kind.path_of(item), _text(kind, item)) for item in items]


def _items(kube: Kube, path: str, **query: str) -> list[Json]:
    """All objects of a collection; none if the cluster does not know the kind."""
    try:
        return kube.items(path, **query)
    except ApiError as error:
        if error.status == 404:
            return []
        raise


def _text(kind: LeftoverKind, item: Json) -> str:
    meta = item["metadata"]
    namespace = f"{meta['namespace']}/" if meta.get("namespace") else ""
    extra = " (load balancer)" if kind.plural == "services" else ""
    return f"{kind.noun} {namespace}{meta['name']}{extra}"


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
