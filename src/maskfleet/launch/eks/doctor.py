"""Can a Kubernetes cluster train? Checks what a launch requires, and what would keep it pending."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from decimal import Decimal, InvalidOperation

from maskfleet.config.launch import EksLaunch
from maskfleet.errors import LaunchError
from maskfleet.launch.eks.jobs.nodes import (
    GPU,
    TYPE,
    Provisioning,
    is_unready,
    limit_trouble,
    may_provision,
    pool_trouble,
)
from maskfleet.launch.eks.mpijob import with_instance_facts
from maskfleet.launch.eks.permission import if_permitted, refused_permissions, visible_items
from maskfleet.launch.eks.status import MPI, OPERATOR_DEAD_S, operator_silence
from maskfleet.launch.findings import Finding, Verdict, judged
from maskfleet.system.kube.client import ApiError, Json, Kube

CLUSTER = "cluster"
_FIND_OPERATOR = "see `kubectl get deploy -A | grep mpi-operator`; deploy/helm/mpi-operator installs it"
KUEUE = "kueue.x-k8s.io"
_OF_CHART = ("get", "create", "delete")
# Verbs that a launch, its status and its logs need, by API group, resource and subresource.
PERMISSIONS: dict[tuple[str, str, str], tuple[str, ...]] = {
    ("", "configmaps", ""): _OF_CHART,
    ("", "serviceaccounts", ""): _OF_CHART,
    ("networking.k8s.io", "networkpolicies", ""): _OF_CHART,
    ("policy", "poddisruptionbudgets", ""): _OF_CHART,
    ("", "secrets", ""): ("get", "list", "create", "update", "delete"),  # helm stores its records there
    ("", "pods", ""): ("list",),
    ("", "pods", "log"): ("get",),
    ("", "persistentvolumeclaims", ""): ("get",),
}
OF_MPIJOB = {("kubeflow.org", "mpijobs", ""): _OF_CHART, ("batch", "jobs", ""): ("get",)}
OF_ELASTIC_JOB = {("batch", "jobs", ""): _OF_CHART}
SUCCESS_POLICY = (1, 31)  # the Kubernetes version that knows successPolicy of Jobs
_UNITS = {"k": 10**3, "M": 10**6, "G": 10**9, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}


def examine_eks(launch: EksLaunch, *, which: Callable[[str], str | None] = shutil.which) -> list[Finding]:
    """Check the cluster that `launch` would use, without creating anything in it."""
    settled = with_instance_facts(launch)
    helm = which("helm")
    findings = [judged("here", "helm", helm is not None, helm or "not found", "install helm 3")]
    with Kube(context=launch.context, namespace=launch.namespace) as kube:
        try:
            version = kube.version()
        except LaunchError as error:
            return [*findings, Finding(CLUSTER, "API", Verdict.FAIL, error.what, error.remedy)]
        findings.append(Finding(CLUSTER, "API", Verdict.OK, f"answers, {version}"))
        findings += [*requirements(kube, settled), _nodes(kube, settled)]
        if settled.gpus:
            findings.append(_device_plugin(kube))
            findings.append(_quota(kube, settled.gpus * settled.nodes))
    return findings


def _nodes(kube: Kube, launch: EksLaunch) -> Finding:
    """Whether there are nodes of the instance type, or a Karpenter pool that provisions them."""
    name = f"nodes {launch.instance}"
    nodes = visible_items(kube, "/api/v1/nodes")
    if nodes is None:
        return Finding(CLUSTER, name, Verdict.WARN, "not permitted to list them", "ask for permission to list nodes")
    there = [one for one in nodes if one["metadata"].get("labels", {}).get(TYPE) == launch.instance]
    visible = visible_items(kube, "/apis/karpenter.sh/v1/nodepools")
    pools = [one for one in visible or [] if _makes(one, launch.instance)]
    if pools:
        return _pools(kube, launch, name, len(there), pools)
    enough = len(there) >= launch.nodes
    found = f"{len(there)} now" if enough else f"{len(there)} of {launch.nodes}, and no Karpenter pool provisions them"
    if visible is None and not enough:
        found = f"{len(there)} of {launch.nodes}; not permitted to list Karpenter's pools"
        return Finding(CLUSTER, name, Verdict.WARN, found, "ask for permission to list nodepools.karpenter.sh")
    remedy = (
        "add the type to a pool of deploy/helm/gpu-nodes, or take another --instance; other autoscalers are not seen"
    )
    return judged(CLUSTER, name, enough, found, remedy, Verdict.WARN)


def _makes(pool: Json, instance: str) -> bool:
    requirements = pool["spec"]["template"]["spec"].get("requirements", [])
    return any(one["key"] == TYPE for one in requirements) and may_provision(pool, instance)


def _pools(kube: Kube, launch: EksLaunch, name: str, there: int, pools: list[Json]) -> Finding:
    """Whether any of `pools` is ready and within its limit with the nodes of the launch."""
    names = ", ".join(sorted(one["metadata"]["name"] for one in pools))
    enough = there >= launch.nodes
    ready = [one for one in pools if not is_unready(one)]
    if not ready:
        classes = visible_items(kube, "/apis/karpenter.k8s.aws/v1/ec2nodeclasses") or []
        why = "; ".join(line for one in pools for line in pool_trouble(Provisioning(pools, classes, []), one))
        found = f"{there} now; pool {names} is not ready: {why}"
        remedy = "the message names what to fix: `kubectl describe nodepool,ec2nodeclass`"
        return Finding(CLUSTER, name, Verdict.WARN if enough else Verdict.FAIL, found, remedy)
    full = [limit_trouble(one, (launch.gpus or 0) * (launch.nodes - there)) for one in ready]
    if not enough and all(full):
        remedy = "wait for other runs, take fewer nodes, or raise the pool's limit (deploy/helm/gpu-nodes)"
        return Finding(CLUSTER, name, Verdict.WARN, f"{there} now, {launch.nodes} wanted; {'; '.join(full)}", remedy)
    return Finding(CLUSTER, name, Verdict.OK, f"{there} now; pool {names} provisions more")


def _device_plugin(kube: Kube) -> Finding:
    daemons = visible_items(kube, "/apis/apps/v1/daemonsets")
    if daemons is None:
        return Finding(CLUSTER, "NVIDIA device plugin", Verdict.WARN, "not permitted to list DaemonSets")
    found = ", ".join(sorted(one["metadata"]["name"] for one in daemons if "nvidia" in one["metadata"]["name"]))
    nodes = [] if found else visible_items(kube, "/api/v1/nodes") or []
    if any(one.get("status", {}).get("allocatable", {}).get(GPU, "0") != "0" for one in nodes):
        found = "nodes offer GPUs"
    remedy = "install it, which `maskfleet infra up eks` does (docs/run-anywhere/eks/addons.md)"
    nothing = "no DaemonSet, and no node offers GPUs"
    return judged(CLUSTER, "NVIDIA device plugin", bool(found), found or nothing, remedy)


def _quota(kube: Kube, wanted: int) -> Finding:
    """Whether the namespace's quotas allow `wanted` more GPUs."""
    quotas = visible_items(kube, kube.of_namespace("resourcequotas"))
    if quotas is None:
        remedy = "ask for permission to list resourcequotas, or look at them with the administrator"
        return Finding(CLUSTER, "quota", Verdict.WARN, "not permitted to list them", remedy)
    for quota in quotas:
        hard, used = quota.get("status", {}).get("hard", {}), quota.get("status", {}).get("used", {})
        key = f"requests.{GPU}"
        if key in hard:
            free = amount(hard[key]) - amount(used.get(key, "0"))
            found = f"{quota['metadata']['name']}: {used.get(key, 0)} of {hard[key]} GPUs used, {wanted} wanted"
            return judged(CLUSTER, "quota", free >= wanted, found, "wait, take fewer nodes, or raise the quota")
    return Finding(CLUSTER, "quota", Verdict.OK, "none on GPUs")


def amount(text: str) -> Decimal:
    """A Kubernetes quantity as a number."""
    unit = next((one for one in sorted(_UNITS, key=len, reverse=True) if text.endswith(one)), "")
    try:
        return Decimal(text.removesuffix(unit)) * _UNITS.get(unit, 1)
    except InvalidOperation:
        return Decimal(text.removesuffix("m")) / 1000


def requirements(kube: Kube, launch: EksLaunch) -> Iterator[Finding]:
    """Whether each requirement of a launch is met, in the order in which they depend on each other."""
    yield _namespace(kube)
    if launch.min_nodes is None:
        yield _kind(kube)
        yield _operator(kube)
    else:
        yield _success_policy(kube)
    yield _permissions(kube, OF_MPIJOB if launch.min_nodes is None else OF_ELASTIC_JOB)
    if launch.queue:
        yield _queue(kube, launch.queue)
    for name in sorted({launch.shared_claim, launch.data_claim or launch.shared_claim}):
        yield _claim(kube, name)


def refuse_unfit(kube: Kube, launch: EksLaunch) -> None:
    """Raise for the first requirement that is not met."""
    for finding in requirements(kube, launch):
        if finding.refusal:
            raise LaunchError(finding.refusal, remedy=finding.remedy)


def _met(name: str, found: str) -> Finding:
    return Finding(CLUSTER, name, Verdict.OK, found)


def _lacking(name: str, found: str, refusal: str, remedy: str) -> Finding:
    return Finding(CLUSTER, name, Verdict.FAIL, found, remedy, refusal)


def _namespace(kube: Kube) -> Finding:
    try:
        found = kube.get(f"/api/v1/namespaces/{kube.namespace}")
    except ApiError as error:
        if error.status != 403:
            raise
        return _met("namespace", f"{kube.namespace}, not permitted to read it")
    if found is None:
        return _lacking(
            "namespace",
            "missing",
            f"the cluster has no namespace {kube.namespace}",
            f"`maskfleet infra up eks` makes it, or kubectl create namespace {kube.namespace}",
        )
    return _met("namespace", kube.namespace)


def _kind(kube: Kube) -> Finding:
    served = kube.get(f"/apis/{MPI}")
    if served is None or not any(one["name"] == "mpijobs" for one in served.get("resources", [])):
        return _lacking(
            "MPIJob",
            "missing",
            "the cluster has no MPIJob resource: the MPI operator is not installed",
            "install deploy/helm/mpi-operator, which `maskfleet infra up eks` does",
        )
    return _met("MPIJob", MPI)


def _operator(kube: Kube) -> Finding:
    """Its lease shows whether it runs, wherever it is installed; a missing lease is no reason to refuse."""
    age_s = operator_silence(kube)
    if age_s is None:
        found = "no lease of it can be seen, but it may run all the same"
        return Finding(CLUSTER, "MPI operator", Verdict.WARN, found, _FIND_OPERATOR)
    if age_s > OPERATOR_DEAD_S:
        found = f"lease not renewed for {age_s:.0f} s"
        return _lacking("MPI operator", found, f"the MPI operator does not run: {found}", _FIND_OPERATOR)
    return _met("MPI operator", f"runs, lease renewed {age_s:.0f} s ago")


def _success_policy(kube: Kube) -> Finding:
    """Whether the API knows what an elastic job needs."""
    version = kube.version()
    found = re.match(r"v?(\d+)\.(\d+)", version)
    if found is not None and (int(found[1]), int(found[2])) < SUCCESS_POLICY:
        return _lacking(
            "elastic jobs",
            f"Kubernetes {version} is too old",
            f"launch.min_nodes needs Kubernetes 1.31 or newer, and the cluster has {version}",
            "leave launch.min_nodes out, or upgrade the cluster",
        )
    return _met("elastic jobs", "the API knows successPolicy of Jobs")


def _permissions(kube: Kube, of_job: Mapping[tuple[str, str, str], tuple[str, ...]]) -> Finding:
    lacking = refused_permissions(kube, {**of_job, **PERMISSIONS})
    if lacking:
        return _lacking(
            "rights",
            f"lacks {', '.join(lacking)}",
            f"you may not {', '.join(lacking)} in namespace {kube.namespace}",
            "ask the cluster's administrator for these permissions (docs/run-anywhere/eks/index.md lists all)",
        )
    return _met("rights", "all that a launch needs")


def _queue(kube: Kube, name: str) -> Finding:
    """Whether Kueue and its LocalQueue `name` exist: without Kueue nothing would resume a queued job."""
    what = f"queue {name}"
    group = kube.get(f"/apis/{KUEUE}")
    if group is None:
        return _lacking(
            what,
            "Kueue is not installed",
            f"launch.queue is {name}, but the cluster has no Kueue",
            "leave launch.queue out, or install Kueue (docs/run-anywhere/eks/addons.md)",
        )
    version = group["preferredVersion"]["groupVersion"]
    queues = visible_items(kube, kube.of_namespace("localqueues", group=version))
    if queues is None:
        return Finding(CLUSTER, what, Verdict.WARN, "not permitted to list queues", f"ask to list localqueues.{KUEUE}")
    names = sorted(one["metadata"]["name"] for one in queues)
    if name not in names:
        return _lacking(
            what,
            "missing",
            f"namespace {kube.namespace} has no Kueue queue {name}",
            f"name one of: {', '.join(names)}" if names else "ask the administrator for a LocalQueue in the namespace",
        )
    return _met(what, "exists")


def _claim(kube: Kube, name: str) -> Finding:
    claim = kube.get(kube.of_namespace("persistentvolumeclaims", name))
    what = f"volume claim {name}"
    if claim is None:
        return _lacking(
            what,
            "missing",
            f"namespace {kube.namespace} has no {what}",
            "install deploy/helm/storage, which `maskfleet infra up eks` does, or name another launch.shared_claim",
        )
    phase = claim.get("status", {}).get("phase", "Pending")
    if phase == "Bound" or (phase == "Pending" and _binds_late(kube, claim)):
        return _met(what, phase)
    return _lacking(
        what,
        phase,
        f"{what} is {phase}, not bound to a volume",
        f"see `kubectl -n {kube.namespace} describe pvc {name}`; its volume may be missing or of another class",
    )


def _binds_late(kube: Kube, claim: Json) -> bool:
    """Whether its storage class binds volumes only for the first pod."""
    name = claim.get("spec", {}).get("storageClassName")
    if not name:
        return False
    found = if_permitted(kube.get, f"/apis/storage.k8s.io/v1/storageclasses/{name}")
    return found is not None and found.get("volumeBindingMode") == "WaitForFirstConsumer"
