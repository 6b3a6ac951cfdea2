"""Is a Kubernetes cluster fit to train? What a launch would be refused for, and what would keep it waiting."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from decimal import Decimal, InvalidOperation

from maskfleet.config.launch import EksLaunch
from maskfleet.errors import LaunchError
from maskfleet.launch.eks.preflight import checks
from maskfleet.launch.local.doctor import Verdict
from maskfleet.launch.slots import slots_for
from maskfleet.launch.ssh.doctor import Finding
from maskfleet.system.kube.client import ApiError, Json, Kube

GPU = "nvidia.com/gpu"
TYPE = "node.kubernetes.io/instance-type"
PLACE = "cluster"
_UNITS = {"k": 10**3, "M": 10**6, "G": 10**9, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}


def examine_eks(launch: EksLaunch, *, which: Callable[[str], str | None] = shutil.which) -> list[Finding]:
    """Look at the cluster that `launch` would use, without making anything in it."""
    settled, slots = slots_for(launch)
    assert isinstance(settled, EksLaunch)
    findings = [_helm(which("helm"))]
    with Kube(context=launch.context, namespace=launch.namespace) as kube:
        try:
            version = kube.get("/api/v1/namespaces", limit=1)
        except LaunchError as error:
            return [*findings, Finding(PLACE, "API", Verdict.FAIL, error.what, error.remedy)]
        assert version is not None
        findings.append(Finding(PLACE, "API", Verdict.OK, "answers"))
        for check in checks(kube, settled):
            verdict = Verdict.FAIL if check.lack else Verdict.WARN if check.is_doubtful else Verdict.OK
            findings.append(Finding(PLACE, check.name, verdict, check.found, check.remedy))
        findings.append(_nodes(kube, settled))
        if settled.gpus:
            findings.append(_device_plugin(kube))
            findings.append(_quota(kube, settled.gpus * len(slots)))
    return findings


def _helm(found: str | None) -> Finding:
    if found:
        return Finding("here", "helm", Verdict.OK, found)
    return Finding("here", "helm", Verdict.FAIL, "not found", "install helm 3")


def _nodes(kube: Kube, launch: EksLaunch) -> Finding:
    """Whether there are nodes of the instance type, or something that makes them."""
    name = f"nodes {launch.instance}"
    nodes = _visible(kube, "/api/v1/nodes")
    if nodes is None:
        return Finding(PLACE, name, Verdict.WARN, "may not be looked at", "ask for the right to list nodes")
    there = [one for one in nodes if one["metadata"].get("labels", {}).get(TYPE) == launch.instance]
    pools = [one["metadata"]["name"] for one in _visible(kube, "/apis/karpenter.sh/v1/nodepools") or []
             if _makes(one, launch.instance)]  # fmt: skip
    if pools:
        return Finding(PLACE, name, Verdict.OK, f"{len(there)} now; pool {', '.join(sorted(pools))} makes more")
    if len(there) >= launch.nodes:
        return Finding(PLACE, name, Verdict.OK, f"{len(there)} now")
    return Finding(
        PLACE,
        name,
        Verdict.WARN,
        f"{len(there)} of {launch.nodes}, and no Karpenter pool makes them",
        "add the type to a pool of deploy/helm/gpu-nodes, or take another --instance; other autoscalers are not seen",
    )


def _makes(pool: Json, instance: str) -> bool:
    requirements = pool["spec"]["template"]["spec"].get("requirements", [])
    types = [one for one in requirements if one["key"] == TYPE]
    return all(one["operator"] == "In" and instance in one["values"] for one in types) and bool(types)


def _device_plugin(kube: Kube) -> Finding:
    daemons = _visible(kube, "/apis/apps/v1/daemonsets")
    if daemons is None:
        return Finding(PLACE, "NVIDIA device plugin", Verdict.WARN, "may not be looked at")
    found = [one["metadata"]["name"] for one in daemons if "nvidia" in one["metadata"]["name"]]
    if found:
        return Finding(PLACE, "NVIDIA device plugin", Verdict.OK, ", ".join(sorted(found)))
    nodes = _visible(kube, "/api/v1/nodes") or []
    if any(one.get("status", {}).get("allocatable", {}).get(GPU, "0") != "0" for one in nodes):
        return Finding(PLACE, "NVIDIA device plugin", Verdict.OK, "nodes offer GPUs")
    remedy = "install it, which `maskfleet infra up eks` does (docs/run-anywhere/eks/addons.md)"
    return Finding(PLACE, "NVIDIA device plugin", Verdict.FAIL, "no DaemonSet, and no node offers GPUs", remedy)


def _quota(kube: Kube, wanted: int) -> Finding:
    """Whether the namespace's quotas leave room for so many GPUs."""
    for quota in _visible(kube, kube.of_namespace("resourcequotas")) or []:
        hard, used = quota.get("status", {}).get("hard", {}), quota.get("status", {}).get("used", {})
        key = f"requests.{GPU}"
        if key in hard:
            room = amount(hard[key]) - amount(used.get(key, "0"))
            found = f"{quota['metadata']['name']}: {used.get(key, 0)} of {hard[key]} GPUs used, {wanted} wanted"
            if room < wanted:
                return Finding(PLACE, "quota", Verdict.FAIL, found, "wait, take fewer nodes, or raise the quota")
            return Finding(PLACE, "quota", Verdict.OK, found)
    return Finding(PLACE, "quota", Verdict.OK, "none on GPUs")


def amount(text: str) -> Decimal:
    """A Kubernetes quantity as a number."""
    unit = next((one for one in sorted(_UNITS, key=len, reverse=True) if text.endswith(one)), "")
    try:
        return Decimal(text.removesuffix(unit)) * _UNITS.get(unit, 1)
    except InvalidOperation:
        return Decimal(text.removesuffix("m")) / 1000


def _visible(kube: Kube, path: str) -> list[Json] | None:
    """All objects of a list; None where they may not be listed, nothing where there is no such kind."""
    try:
        return kube.items(path)
    except ApiError as error:
        if error.status == 404:
            return []
        if error.status == 403:
            return None
        raise
