"""Why Karpenter starts no node: NodePools, EC2NodeClasses and NodeClaims with the conditions that Karpenter writes.

Reasons and messages are those of Karpenter 1.13: pkg/errors and pkg/controllers of its AWS provider and of its core.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from eks_world import fit_cluster, mpijob

from maskfleet.config.launch import EksLaunch
from maskfleet.launch.backend import backend_of
from maskfleet.launch.eks.doctor import examine_eks
from maskfleet.launch.eks.jobs.nodes import may_provision
from maskfleet.launch.findings import Verdict
from maskfleet.launch.job import JobHandle
from maskfleet.system.kube.fake import FakeKube
from ports import free_port

HANDLE = JobHandle("eks", "kubeflow", "r50")
Json = dict[str, Any]


@pytest.fixture
def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeKube]:
    fake = fit_cluster(FakeKube(tmp_path, port=free_port()))
    monkeypatch.setenv("KUBECONFIG", str(fake.kubeconfig))
    fake.add({"kind": "APIResourceList", "metadata": {"name": "karpenter.sh/v1"}, "resources": []})
    fake.add(mpijob("Created"), waiting(0), waiting(1))
    yield fake
    fake.stop()


def waiting(index: int) -> Json:
    labels = {"training.kubeflow.org/job-name": "r50", "training.kubeflow.org/job-role": "worker",
              "training.kubeflow.org/replica-index": str(index)}  # fmt: skip
    message = "0/4 nodes are available: 4 Insufficient nvidia.com/gpu."
    container = {"name": "worker", "resources": {"limits": {"nvidia.com/gpu": "8"}}}
    unscheduled = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
    return {"kind": "Pod", "metadata": {"name": f"r50-worker-{index}", "namespace": "kubeflow", "labels": labels},
            "spec": {"containers": [container], "nodeSelector": {"node.kubernetes.io/instance-type": "p4d.24xlarge"}},
            "status": {"phase": "Pending", "conditions": [unscheduled]}}  # fmt: skip


def is_so(kind: str, status: str = "True", reason: str = "", message: str = "", minutes: float = 20) -> Json:
    since = (datetime.now(UTC) - timedelta(minutes=minutes)).strftime("%Y-%m-%dT%H:%M:%SZ")
    return {"type": kind, "status": status, "reason": reason or kind, "message": message, "lastTransitionTime": since}


def pool(*conditions: Json, types: tuple[str, ...] = ("p4d.24xlarge",), name: str = "gpu-efa", used: int = 0) -> Json:
    requirement = {"key": "node.kubernetes.io/instance-type", "operator": "In", "values": list(types)}
    node_class = {"group": "karpenter.k8s.aws", "kind": "EC2NodeClass", "name": name}
    spec = {"template": {"spec": {"requirements": [requirement], "nodeClassRef": node_class}},
            "limits": {"nvidia.com/gpu": 16}}  # fmt: skip
    return {"kind": "NodePool", "metadata": {"name": name}, "spec": spec,
            "status": {"conditions": list(conditions), "resources": {"nvidia.com/gpu": str(used)}}}  # fmt: skip


READY = (is_so("ValidationSucceeded"), is_so("NodeClassReady"), is_so("Ready"))
UNREADY = is_so("Ready", "False", "UnhealthyDependents", "NodeClassReady=False")


def node_class(*conditions: Json) -> Json:
    ready = is_so("Ready", "False", "UnhealthyDependents", "SubnetsReady=False")
    return {"kind": "EC2NodeClass", "metadata": {"name": "gpu-efa"}, "status": {"conditions": [*conditions, ready]}}


def node_claim(*conditions: Json, of: str = "gpu-efa") -> Json:
    return {"kind": "NodeClaim", "metadata": {"name": f"{of}-8xk2t", "labels": {"karpenter.sh/nodepool": of}},
            "status": {"conditions": list(conditions)}}  # fmt: skip


def failed(reason: str, message: str) -> Json:
    return node_claim(is_so("Launched", "Unknown", reason, message))


def event(reason: str, message: str, *, kind: str = "NodeClaim", name: str = "gpu-efa-8xk2t") -> Json:
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return {"kind": "Event", "metadata": {"name": f"{name}.1", "namespace": "default", "creationTimestamp": now},
            "involvedObject": {"kind": kind, "name": name}, "reason": reason, "message": message, "type": "Warning",
            "lastTimestamp": now}  # fmt: skip


def ice(error: str) -> Json:
    text = f"NodeClaim gpu-efa-8xk2t event: creating instance, insufficient capacity, with fleet error(s), {error}"
    return event("InsufficientCapacityError", text)


CASES: dict[str, tuple[str, str, list[Json]]] = {
    "no pool at all": ("no node pool", "has no NodePool for p4d.24xlarge; its pools: none", []),
    "pool of another type": ("no node pool", "its pools: gpu-efa", [pool(*READY, types=("g5.xlarge",))]),
    "subnets": (
        "node class",
        "EC2NodeClass gpu-efa SubnetsNotFound: SubnetSelector did not match any Subnets",
        [
            pool(is_so("NodeClassReady", "False", "UnhealthyDependents", "SubnetsReady=False"), UNREADY),
            node_class(is_so("SubnetsReady", "False", "SubnetsNotFound", "SubnetSelector did not match any Subnets")),
        ],
    ),
    "node class missing": (
        "node class",
        "NodeClass not found on cluster",
        [pool(is_so("NodeClassReady", "False", "NodeClassNotFound", "NodeClass not found on cluster"), UNREADY)],
    ),
    "pool invalid": (
        "pool not ready",
        "invalid label",
        [pool(is_so("ValidationSucceeded", "False", "NodePoolValidationFailed", "invalid label"), UNREADY)],
    ),
    "role of karpenter": (
        "launch refused",
        "isn't authorized to call ec2:RunInstances",
        [
            pool(is_so("NodeClassReady", "False", "UnhealthyDependents", "ValidationSucceeded=False"), UNREADY),
            node_class(is_so("ValidationSucceeded", "False", "RunInstancesAuthCheckFailed",
                             "Controller isn't authorized to call ec2:RunInstances")),
        ],
    ),
    "limit": ("pool limit", "gpu-efa has reached its limit: 12 of 16 GPUs", [pool(*READY, used=12)]),
    "spot role": (
        "spot role",
        "AuthFailure.ServiceLinkedRoleCreationNotPermitted",
        [pool(*READY), ice("AuthFailure.ServiceLinkedRoleCreationNotPermitted: The provided credentials do not have "
                           "permission to create the service-linked role for EC2 Spot Instances.")],
    ),
    "spot role on the claim": (
        "spot role",
        "NodeClaim gpu-efa-8xk2t SpotSLRCreationFailed",
        [pool(*READY), failed("SpotSLRCreationFailed", "User does not have sufficient permission to create the Spot "
                              "ServiceLinkedRole to launch spot instances")],
    ),
    "quota": (
        "account limit",
        "VcpuLimitExceeded",
        [pool(*READY), ice("VcpuLimitExceeded: You have requested more vCPU capacity than your current vCPU limit of "
                           "0 allows")],
    ),
    "zone": (
        "not offered",
        "us-east-1e",
        [pool(*READY), ice("Unsupported: Your requested instance type (p4d.24xlarge) is not supported in your "
                           "requested Availability Zone (us-east-1e).")],
    ),
    "no capacity": (
        "no capacity",
        "InsufficientInstanceCapacity",
        [pool(*READY), ice("InsufficientInstanceCapacity: We currently do not have sufficient p4d.24xlarge capacity")],
    ),
    "addresses": (
        "no address",
        "InsufficientFreeAddressesInSubnet",
        [pool(*READY), ice("InsufficientFreeAddressesInSubnet: There are not enough free addresses in subnet")],
    ),
    "all filtered": (
        "no offering",
        "filtered out all compatible",
        [pool(*READY), event("NoCompatibleInstanceTypes", "NodePool requirements filtered out all compatible available "
                             "instance types", kind="NodePool", name="gpu-efa")],
    ),
    "image": ("node class", "AMINotFound", [pool(*READY), failed("AMINotFound", "AMI used does not exist")]),
    "other failure": ("launch failed", "LaunchFailed", [pool(*READY), failed("LaunchFailed", "something else")]),
    "never joined": (
        "node not joined",
        "Node not registered with cluster",
        [pool(*READY), node_claim(is_so("Launched", minutes=12), is_so("Registered", "Unknown", "NodeNotFound",
                                                                      "Node not registered with cluster"))],
    ),
    "failed to join": (
        "node not joined",
        "Failed to register node",
        [pool(*READY, is_so("NodeRegistrationHealthy", "False", "RegistrationFailed", "Failed to register node"))],
    ),
    "no device": (
        "node not initialized",
        'Resource "nvidia.com/gpu" was requested but not registered',
        [pool(*READY), node_claim(is_so("Launched"), is_so("Registered", minutes=8),
                                  is_so("Initialized", "Unknown", "ResourceNotRegistered",
                                        'Resource "nvidia.com/gpu" was requested but not registered'))],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_explain_names_what_keeps_karpenter_from_starting_a_node(name: str, api: FakeKube) -> None:
    cause, words, things = CASES[name]
    api.add(*things)
    told = backend_of(HANDLE).explain(HANDLE)
    assert f"cause: {cause}." in told
    assert words in told.split("seen in: ")[1].splitlines()[0]


def test_status_says_why_no_node_comes(api: FakeKube) -> None:
    api.add(*CASES["subnets"][2])
    detail = backend_of(HANDLE).status(HANDLE).detail
    assert detail.startswith("0 of 2 workers are ready; EC2NodeClass gpu-efa SubnetsNotFound: SubnetSelector did not")


@pytest.mark.parametrize(
    "things",
    [
        [pool(UNREADY, name="other"), pool(*READY)],  # one pool that is ready is enough
        [pool(*READY, types=("g5.xlarge",), name="small", used=16), pool(*READY)],
        [pool(*READY), failed("x", "y") | {"metadata": {"name": "o", "labels": {"karpenter.sh/nodepool": "other"}}}],
        [pool(*READY), node_claim(is_so("Launched", "Unknown", "AwaitingReconciliation"))],
        [pool(*READY), node_claim(is_so("Launched", minutes=2), is_so("Registered", "Unknown", "NodeNotFound"))],
    ],
)
def test_what_concerns_other_nodes_or_takes_its_time_is_no_reason(things: list[Json], api: FakeKube) -> None:
    api.add(*things)
    assert backend_of(HANDLE).status(HANDLE).detail == "0 of 2 workers are ready"


def test_a_limit_that_nodes_on_their_way_have_filled_is_no_reason(api: FakeKube) -> None:
    both = [node_claim(is_so("Launched", minutes=1)), node_claim(is_so("Launched", minutes=1))]
    both[1]["metadata"] = {**both[1]["metadata"], "name": "gpu-efa-2nd"}
    api.add(pool(*READY, used=16), *both)
    assert "limit" not in backend_of(HANDLE).status(HANDLE).detail


def test_nodes_of_the_type_that_are_busy_need_no_pool(api: FakeKube) -> None:
    labels = {"node.kubernetes.io/instance-type": "p4d.24xlarge"}
    api.add({"kind": "Node", "metadata": {"name": "a", "labels": labels}})
    assert "cause: no gpu node." in backend_of(HANDLE).explain(HANDLE)


@pytest.mark.parametrize("closed", ["nodepools", "nodeclaims"])
def test_who_may_not_read_karpenters_objects_gets_what_the_scheduler_says(closed: str, api: FakeKube) -> None:
    api.add(pool(*READY), failed("LaunchFailed", "secret"))
    api.forbidden.add(f"/apis/karpenter.sh/v1/{closed}")
    assert "cause: no gpu node." in backend_of(HANDLE).explain(HANDLE)


def test_after_a_failed_launch_the_failure_counts_not_that_the_type_is_unavailable_now(api: FakeKube) -> None:
    api.add(pool(*READY), *CASES["no capacity"][2][1:])
    later = event("FailedScheduling", "Failed to schedule pod, no instance type which met the scheduling requirements "
                  "and had enough resources, had a required offering", kind="Pod", name="r50-worker-0")  # fmt: skip
    later["metadata"]["namespace"], later["lastTimestamp"] = "kubeflow", "2099-01-01T00:00:00Z"
    api.add(later)
    assert "cause: no capacity." in backend_of(HANDLE).explain(HANDLE)


@pytest.mark.parametrize(
    ("name", "verdict", "words"),
    [
        ("subnets", Verdict.FAIL, "0 now; pool gpu-efa is not ready: EC2NodeClass gpu-efa SubnetsNotFound"),
        ("limit", Verdict.WARN, "0 now, 2 wanted; NodePool gpu-efa has reached its limit: 12 of 16 GPUs are in use"),
        ("quota", Verdict.OK, "pool gpu-efa provisions more"),
    ],
)
def test_doctor_says_which_pool_starts_no_node(name: str, verdict: Verdict, words: str, api: FakeKube) -> None:
    api.add(*CASES[name][2])
    found = examine_eks(EksLaunch(nodes=2, instance="p4d.24xlarge"), which=lambda name: name)
    [nodes] = [one for one in found if one.name == "nodes p4d.24xlarge"]
    assert nodes.verdict is verdict
    assert words in nodes.found


@pytest.mark.parametrize(
    ("requirement", "is_admitted"),
    [
        ({"key": "node.kubernetes.io/instance-type", "operator": "NotIn", "values": ["p4d.24xlarge"]}, False),
        ({"key": "karpenter.k8s.aws/instance-family", "operator": "In", "values": ["p4d", "p5"]}, True),
        ({"key": "karpenter.k8s.aws/instance-family", "operator": "In", "values": ["g5"]}, False),
        ({"key": "karpenter.k8s.aws/instance-size", "operator": "NotIn", "values": ["24xlarge"]}, False),
        ({"key": "karpenter.k8s.aws/instance-cpu", "operator": "Gt", "values": ["8"]}, True),
    ],
)
def test_requirements_of_a_pool_admit_a_type(requirement: Json, is_admitted: bool) -> None:
    spec = {"template": {"spec": {"requirements": [requirement]}}}
    assert may_provision({"spec": spec}, "p4d.24xlarge") is is_admitted
