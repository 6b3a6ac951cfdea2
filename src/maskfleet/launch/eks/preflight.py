"""Whether a cluster can take a job, asked before anything is sent: each lack with what to do about it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime

from maskfleet.config.launch import EksLaunch
from maskfleet.errors import LaunchError
from maskfleet.launch.eks.status import MPI
from maskfleet.system.kube.client import ApiError, Json, Kube

STALE_S = 120.0  # an operator that runs renews its lease every few seconds
_LOOK = "see `kubectl get deploy -A | grep mpi-operator`; deploy/helm/mpi-operator installs it"
RIGHTS = (
    ("create", "kubeflow.org", "mpijobs", ""),
    ("create", "", "configmaps", ""),
    ("create", "", "secrets", ""),  # helm keeps its records there
    ("list", "", "secrets", ""),
    ("list", "", "pods", ""),
    ("get", "", "pods", "log"),
)


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was looked at; `lack` says what is wrong, and is empty where all is well."""

    name: str
    found: str
    lack: str = ""
    remedy: str = ""
    is_doubtful: bool = False  # no reason to refuse a launch, but worth a look


def checks(kube: Kube, launch: EksLaunch) -> Iterator[Check]:
    """All that a launch needs of the cluster, what the rest depends on first."""
    yield _namespace(kube)
    yield _kind(kube)
    yield _operator(kube)
    yield _rights(kube)
    for name in sorted({launch.shared_claim, launch.data_claim or launch.shared_claim}):
        yield _claim(kube, name)


def refuse_unfit(kube: Kube, launch: EksLaunch) -> None:
    """The first lack is an error."""
    for check in checks(kube, launch):
        if check.lack:
            raise LaunchError(check.lack, remedy=check.remedy)


def _namespace(kube: Kube) -> Check:
    try:
        found = kube.get(f"/api/v1/namespaces/{kube.namespace}")
    except ApiError as error:
        if error.status != 403:
            raise
        return Check("namespace", f"{kube.namespace}, which may not be looked at")
    if found is None:
        return Check(
            "namespace",
            "missing",
            f"the cluster has no namespace {kube.namespace}",
            f"`maskfleet infra up eks` makes it, or kubectl create namespace {kube.namespace}",
        )
    return Check("namespace", kube.namespace)


def _kind(kube: Kube) -> Check:
    served = kube.get(f"/apis/{MPI}")
    if served is None or not any(one["name"] == "mpijobs" for one in served.get("resources", [])):
        return Check(
            "MPIJob",
            "missing",
            "the cluster does not know MPIJobs: the MPI operator is not installed",
            "install deploy/helm/mpi-operator, which `maskfleet infra up eks` does",
        )
    return Check("MPIJob", MPI)


def _operator(kube: Kube) -> Check:
    """Its lease tells whether it runs, wherever it is installed; without one nothing is known, and nothing refused."""
    try:
        leases = kube.items("/apis/coordination.k8s.io/v1/leases", fieldSelector="metadata.name=mpi-operator")
    except ApiError as error:
        if error.status != 403:
            raise
        return Check("MPI operator", "may not be looked at")
    ages = [_silence_s(lease) for lease in leases]
    if not ages:
        return Check("MPI operator", "has no lease: it may run all the same", remedy=_LOOK, is_doubtful=True)
    if min(ages) > STALE_S:
        last = f" for {min(ages):.0f} s"
        return Check(
            "MPI operator",
            f"no sign of life{last}",
            f"the MPI operator does not run: no sign of life{last}",
            _LOOK,
        )
    return Check("MPI operator", f"runs, last sign of life {max(0.0, min(ages)):.0f} s ago")


def _silence_s(lease: Json) -> float:
    renewed = str(lease.get("spec", {}).get("renewTime") or "1970-01-01T00:00:00Z").replace("Z", "+00:00")
    return (datetime.now(UTC) - datetime.fromisoformat(renewed)).total_seconds()


def _rights(kube: Kube) -> Check:
    lacking = [f"{verb} {kind}{f'/{part}' if part else ''}" for verb, group, kind, part in RIGHTS
               if not may(kube, verb, group, kind, part)]  # fmt: skip
    if lacking:
        return Check(
            "rights",
            f"lacks {', '.join(lacking)}",
            f"you may not {', '.join(lacking)} in namespace {kube.namespace}",
            "ask who runs the cluster for these rights (docs/run-anywhere/eks/index.md lists what is needed)",
        )
    return Check("rights", "all that a launch needs")


def may(kube: Kube, verb: str, group: str, kind: str, part: str = "") -> bool:
    """Whether whoever asks may do so in the namespace."""
    asked = {"namespace": kube.namespace, "verb": verb, "group": group, "resource": kind, "subresource": part}
    review = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SelfSubjectAccessReview",
        "spec": {"resourceAttributes": {name: value for name, value in asked.items() if value}},
    }
    answer = kube.create("/apis/authorization.k8s.io/v1/selfsubjectaccessreviews", review)
    return bool(answer.get("status", {}).get("allowed"))


def _claim(kube: Kube, name: str) -> Check:
    claim = kube.get(kube.of_namespace("persistentvolumeclaims", name))
    what = f"volume claim {name}"
    if claim is None:
        return Check(
            what,
            "missing",
            f"namespace {kube.namespace} has no {what}",
            "install deploy/helm/storage, which `maskfleet infra up eks` does, or name another launch.shared_claim",
        )
    phase = claim.get("status", {}).get("phase", "Pending")
    if phase == "Bound" or (phase == "Pending" and _binds_late(kube, claim)):
        return Check(what, phase)
    return Check(
        what,
        phase,
        f"{what} is {phase}, not bound to a volume",
        f"see `kubectl -n {kube.namespace} describe pvc {name}`; its volume may be missing or of another class",
    )


def _binds_late(kube: Kube, claim: Json) -> bool:
    """Whether its storage class waits for the first pod."""
    name = claim.get("spec", {}).get("storageClassName")
    if not name:
        return False
    try:
        found = kube.get(f"/apis/storage.k8s.io/v1/storageclasses/{name}")
    except ApiError as error:
        if error.status == 403:
            return False
        raise
    return found is not None and found.get("volumeBindingMode") == "WaitForFirstConsumer"
