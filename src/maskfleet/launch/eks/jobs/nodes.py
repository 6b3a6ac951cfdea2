"""Why Karpenter starts no node for pods that wait: what its NodePools, EC2NodeClasses and NodeClaims report.

Karpenter sends no event about a pod while no pool is ready, and deletes a NodeClaim that failed: the conditions of its
objects are then all that tells the reason.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from maskfleet.launch.eks.jobs.objects import condition, seconds_since
from maskfleet.launch.eks.permission import if_permitted, visible_items
from maskfleet.system.kube.client import Json, Kube

KARPENTER = "karpenter.sh/v1"
TYPE = "node.kubernetes.io/instance-type"
GPU = "nvidia.com/gpu"
POOL = "karpenter.sh/nodepool"
REGISTER_S = 600.0  # a machine with GPUs boots in less; Karpenter gives up after 900 s
REPORTED_S = 300.0
INITIALIZE_S = 300.0  # for device plugins and CSI drivers to start on a new node
_STARTING = ("AwaitingReconciliation", "")  # reasons of a condition that no controller has looked at yet


@dataclass(frozen=True, slots=True)
class Provisioning:
    """Karpenter's objects at one moment."""

    pools: list[Json]
    classes: list[Json]
    claims: list[Json]

    def pools_for(self, instance: str | None) -> list[Json]:
        """The pools that may provision nodes of a type; all of them if the pods ask for no type."""
        return [one for one in self.pools if instance is None or may_provision(one, instance)]


def read_provisioning(kube: Kube) -> Provisioning | None:
    """Karpenter's objects; None without Karpenter or without permission to list its pools."""
    if if_permitted(kube.get, f"/apis/{KARPENTER}") is None:
        return None
    pools = visible_items(kube, f"/apis/{KARPENTER}/nodepools")
    if pools is None:
        return None
    classes = visible_items(kube, "/apis/karpenter.k8s.aws/v1/ec2nodeclasses")
    return Provisioning(pools, classes or [], visible_items(kube, f"/apis/{KARPENTER}/nodeclaims") or [])


def may_provision(pool: Json, instance: str) -> bool:
    """Whether the requirements of `pool` admit the instance type; those on other labels are not looked at."""
    family, _, size = instance.partition(".")
    known = {TYPE: instance, "karpenter.k8s.aws/instance-family": family, "karpenter.k8s.aws/instance-size": size}
    for one in pool["spec"]["template"]["spec"].get("requirements", []):
        if one["key"] in known:
            is_listed = known[one["key"]] in one.get("values", [])
            if (one["operator"] == "In" and not is_listed) or (one["operator"] == "NotIn" and is_listed):
                return False
    return True


def pods_without_node(pods: list[Json]) -> list[Json]:
    """The pods that the scheduler found no node for."""
    return [
        pod
        for pod in pods
        if pod.get("status", {}).get("phase") == "Pending"
        and any(one.get("reason") == "Unschedulable" for one in pod["status"].get("conditions", []))
    ]


def reasons_for_no_node(kube: Kube, pods: list[Json]) -> tuple[str, ...]:
    """Why Karpenter starts no node for those of `pods` that have none: `object reason: message`; empty if unknown."""
    waiting = pods_without_node(pods)
    seen = read_provisioning(kube) if waiting else None
    if seen is None:
        return ()
    by_type: dict[str | None, list[Json]] = {}
    for pod in waiting:
        by_type.setdefault(pod.get("spec", {}).get("nodeSelector", {}).get(TYPE), []).append(pod)
    # The workers ask for a type and are what a run is about.
    ordered = sorted(by_type.items(), key=lambda one: one[0] is None)
    return tuple(line for instance, some in ordered for line in _reasons(kube, seen, instance, some))


def _reasons(kube: Kube, seen: Provisioning, instance: str | None, pods: list[Json]) -> Iterator[str]:
    pools = seen.pools_for(instance)
    if not pools:
        if instance is None or not visible_items(kube, "/api/v1/nodes", labelSelector=f"{TYPE}={instance}"):
            others = ", ".join(sorted(one["metadata"]["name"] for one in seen.pools)) or "none"
            yield f"Karpenter has no NodePool for {instance or 'these pods'}; its pools: {others}"
        return
    if all(is_unready(one) for one in pools):
        for pool in pools:
            yield from pool_trouble(seen, pool)
        return
    names = {one["metadata"]["name"] for one in pools}
    claims = [one for one in seen.claims if one["metadata"].get("labels", {}).get(POOL) in names]
    for claim in claims:
        yield from _claim_trouble(claim)
    for pool in pools:
        unhealthy = _condition(pool, "NodeRegistrationHealthy")
        if unhealthy.get("status") == "False":
            yield _line(pool, unhealthy)
    coming = [one for one in claims if condition(one, "Initialized") is None]
    wanted = max(map(_gpus, pods))
    # The limit counts nodes that are on their way, too: they may be for these pods.
    full = [limit_trouble(one, wanted) for one in pools if not is_unready(one)]
    if len(pods) > len(coming) and all(full):
        yield from full
    if not coming:
        yield from _filtered(kube, names)


def _filtered(kube: Kube, pools: set[str]) -> Iterator[str]:
    """The pools whose types are all unavailable where the pool may start them, as their events say once a minute."""
    path = "/api/v1/namespaces/default/events"  # where events about cluster-scoped objects are
    events = if_permitted(kube.items, path, fieldSelector="involvedObject.kind=NodePool") or []
    for one in events:
        name = one["involvedObject"].get("name")
        is_new = seconds_since(one.get("lastTimestamp") or one["metadata"]["creationTimestamp"]) < REPORTED_S
        if one.get("reason") == "NoCompatibleInstanceTypes" and name in pools and is_new:
            yield f"NodePool {name} NoCompatibleInstanceTypes: {one.get('message', '')}"


def is_unready(pool: Json) -> bool:
    """Whether Karpenter ignores the pool."""
    return _condition(pool, "Ready").get("status") == "False" or "deletionTimestamp" in pool["metadata"]


def pool_trouble(seen: Provisioning, pool: Json) -> Iterator[str]:
    """Why the pool is not ready: conditions of its EC2NodeClass, which tell more than the pool's own, come first."""
    reference = pool["spec"]["template"]["spec"].get("nodeClassRef", {})
    for one in seen.classes:
        if reference.get("kind") == "EC2NodeClass" and one["metadata"]["name"] == reference.get("name"):
            yield from (_line(one, it) for it in _false(one))
    yield from (_line(pool, one) for one in _false(pool))
    if "deletionTimestamp" in pool["metadata"]:
        yield f"NodePool {pool['metadata']['name']} is being deleted"


def limit_trouble(pool: Json, gpus: int) -> str:
    """What the pool has in use of its limit if nodes with `gpus` more GPUs exceed it; empty if they do not."""
    limit = pool["spec"].get("limits", {}).get(GPU)
    used = pool.get("status", {}).get("resources", {}).get(GPU, "0")
    if limit is None or int(used) + gpus <= int(limit):
        return ""
    return f"NodePool {pool['metadata']['name']} has reached its limit: {used} of {limit} GPUs are in use"


def _claim_trouble(claim: Json) -> Iterator[str]:
    """What keeps a NodeClaim from becoming a node, in the order in which it becomes one."""
    launched, registered = _condition(claim, "Launched"), _condition(claim, "Registered")
    name = claim["metadata"]["name"]
    if launched.get("status") != "True":
        if launched.get("reason", "") not in _STARTING:
            yield _line(claim, launched)
        return
    steps = (("Registered", launched, REGISTER_S), ("Initialized", registered, INITIALIZE_S))
    for kind, before, longest_s in steps:
        now = _condition(claim, kind)
        if now.get("status") != "True":
            waited_s = seconds_since(before["lastTransitionTime"])
            if waited_s > longest_s:
                yield f"NodeClaim {name} is not {kind} after {waited_s / 60:.0f} min: {now.get('message', '')}"
            return


def _gpus(pod: Json) -> int:
    limits = [one.get("resources", {}).get("limits", {}) for one in pod.get("spec", {}).get("containers", [])]
    return sum(int(one.get(GPU, 0)) for one in limits)


def _false(thing: Json) -> list[Json]:
    """Its conditions that are false, but for the one that only sums up the others."""
    return [one for one in thing.get("status", {}).get("conditions", []) if _is_cause(one)]


def _is_cause(one: Json) -> bool:
    return one["status"] == "False" and one["type"] not in ("Ready", "NodeRegistrationHealthy")


def _condition(thing: Json, kind: str) -> Json:
    conditions = thing.get("status", {}).get("conditions", [])
    found: Json = next((one for one in conditions if one["type"] == kind), {})
    return found


def _line(thing: Json, one: Json) -> str:
    text = f"{thing.get('kind', '')} {thing['metadata']['name']} {one.get('reason', '')}: {one.get('message', '')}"
    return " ".join(text.split())
