"""What a cluster lacks, decided from what it has; no cluster and no terraform."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from maskfleet.errors import InfraError
from maskfleet.infra.existing.inventory import Inventory, operators_for, starts_gpus
from maskfleet.infra.existing.parts import Plan, parts_of, table, variables_of
from maskfleet.infra.terraform.state import Resource

Json = dict[str, Any]
OURS = {"app.kubernetes.io/part-of": "maskfleet", "app.kubernetes.io/name": "maskfleet-storage"}


def thing(name: str, namespace: str = "", labels: Json | None = None, **rest: Any) -> Json:
    return {
        "metadata": {"name": name, "labels": labels or {}, **({"namespace": namespace} if namespace else {})},
        **rest,
    }


def workload(name: str, image: str, *args: str) -> Json:
    pod = {"containers": [{"image": image, "args": list(args)}]}
    return thing(name, "tools", spec={"template": {"spec": pod}})


def pool(name: str, key: str = "", *values: str, operator: str = "In", **spec: Any) -> Json:
    requirements = [{"key": key, "operator": operator, "values": list(values)}] if key else []
    return thing(name, spec={"template": {"spec": {"requirements": requirements}}, **spec})


def node_class(name: str, **spec: Any) -> Json:
    tags = [{"tags": {"team": "vision"}}]
    return thing(
        name, spec={"role": "team-node", "subnetSelectorTerms": tags, "securityGroupSelectorTerms": tags, **spec}
    )


PLATFORM = Inventory(
    namespaces=frozenset({"kube-system", "kubeflow"}),
    service_accounts=frozenset({"default", "maskfleet-trainer", "maskfleet-staging"}),
    claims=[thing("pv-efs", "kubeflow"), thing("pv-fsx", "kubeflow")],
    csi_drivers=frozenset({"ebs.csi.aws.com", "efs.csi.aws.com"}),
    storage_classes=[thing("gp3", provisioner="ebs.csi.aws.com")],
    deployments=[workload("mpi", "mirror/mpi-operator:0.8.2")],
    daemons=[workload("gpu", "nvcr.io/nvidia/k8s-device-plugin:v0.18"), workload("aws-efa-k8s-device-plugin", "x")],
    node_pools=[pool("vision", "node.kubernetes.io/instance-type", "p5.48xlarge")],
    node_classes=[node_class("default")],
    cluster_queues=[thing("research")],
    has_mpijobs=True,
)


def plans(have: Inventory, *made: str, **settings: Any) -> dict[str, Plan]:
    ours = [Resource(f"terraform_data.{name}", "terraform_data") for name in made]
    return {part.title: part.plan for part in parts_of(have, settings, ours)}


def given(have: Inventory, *made: str, **settings: Any) -> dict[str, Any]:
    ours = [Resource(f"terraform_data.{name}", "terraform_data") for name in made]
    return variables_of(parts_of(have, settings, ours), settings)


def test_a_platform_that_has_everything_gets_nothing() -> None:
    assert set(plans(PLATFORM).values()) == {Plan.KEEP}
    found = given(PLATFORM, efs_id="fs-1", fsx_id="fs-2", kueue_enabled="true")
    assert set(found["existing_parts"]) == {
        *("namespace", "karpenter", "node_pools", "nvidia_device_plugin", "efa_device_plugin"),
        *("cluster_autoscaler", "mpi_operator", "kueue"),
    }
    assert found["efs_id"] == found["fsx_id"] == ""
    assert found["trainer_service_accounts"] == found["staging_service_accounts"] == []
    assert "gp3_enabled" not in found


def test_an_empty_cluster_gets_what_needs_nothing_in_aws() -> None:
    found = plans(Inventory())
    assert {title for title, plan in found.items() if plan is Plan.INSTALL} == {
        *("namespace kubeflow", "service accounts", "mpi-operator", "NVIDIA device plugin"),
    }
    assert given(Inventory())["existing_parts"] == [
        *("efa_device_plugin", "karpenter", "node_pools", "kueue", "cluster_autoscaler"),
    ]
    roles = {"karpenter_role_arn": "arn", "karpenter_queue": "q", "node_role_name": "nodes"}
    more = plans(Inventory(), efa_az="us-west-2b", kueue_enabled="true", **roles)
    assert more["Karpenter"] is more["GPU node pools"] is more["EFA device plugin"] is more["Kueue"] is Plan.INSTALL


def test_what_maskfleet_installed_is_not_taken_for_the_teams() -> None:
    made = ("kubeflow", "mpi_operator", "nvidia_device_plugin", "efa_device_plugin", "karpenter", "gpu_nodes", "kueue")
    ours = replace(
        PLATFORM,
        claims=[thing("pv-efs", "kubeflow", OURS)],
        storage_classes=[thing("maskfleet-gp3", labels=OURS, provisioner="ebs.csi.aws.com")],
    )
    found = given(ours, *made, 'data["maskfleet-trainer"]', efs_id="fs-1")
    assert found["existing_parts"] == ["cluster_autoscaler"]
    assert found["trainer_service_accounts"] == ["maskfleet-trainer"]
    assert found["staging_service_accounts"] == []
    assert found["gp3_enabled"] is True
    assert "efs_id" not in found  # the setting stays


def test_pools_take_role_and_network_from_the_teams_node_classes() -> None:
    have = replace(PLATFORM, node_pools=[pool("cpu", "karpenter.k8s.aws/instance-category", "m", "c")])
    found = given(have)
    assert "node_pools" not in found["existing_parts"]
    assert found["node_role_name"] == "team-node"
    assert found["node_subnet_tags"] == found["node_security_group_tags"] == {"team": "vision"}
    assert given(have, node_role_name="mine")["node_role_name"] == "mine"


@pytest.mark.parametrize(
    "terms", [[{"id": "subnet-1"}], [{"tags": {"a": "*"}}], [{"tags": {"a": "b"}}, {"tags": {"c": "d"}}]]
)
def test_a_selector_that_our_chart_cannot_repeat_is_not_guessed(terms: list[Json]) -> None:
    have = replace(PLATFORM, node_pools=[], node_classes=[node_class("default", subnetSelectorTerms=terms)])
    assert plans(have)["GPU node pools"] is Plan.OMIT
    assert plans(have, node_role_name="mine")["GPU node pools"] is Plan.INSTALL


def test_auto_mode_has_no_node_classes_that_we_could_use() -> None:
    have = replace(PLATFORM, node_pools=[pool("general-purpose")], node_classes=None)
    rows = "\n".join(table(parts_of(have, {}, [])))
    assert "EKS Auto Mode" in rows
    assert "Auto Mode has node classes of its own" in rows
    assert plans(have)["GPU node pools"] is Plan.OMIT


def test_an_operator_of_another_namespace_does_not_serve_ours() -> None:
    other = [workload("mpi-operator", "x", "--namespace=research")]
    assert operators_for(other, "kubeflow") == []
    assert operators_for(other, "research") == ["tools/mpi-operator"]
    assert plans(replace(PLATFORM, deployments=other))["mpi-operator"] is Plan.INSTALL


def test_mpijobs_of_the_training_operator_are_an_error() -> None:
    have = replace(PLATFORM, deployments=[], has_mpijobs=False, has_old_mpijobs=True)
    with pytest.raises(InfraError, match="training operator"):
        plans(have)


def test_a_file_system_without_its_driver_is_an_error() -> None:
    with pytest.raises(InfraError, match=r"no CSI driver fsx\.csi\.aws\.com") as caught:
        plans(replace(PLATFORM, claims=[]), fsx_id="fs-1")
    assert "aws-fsx-csi-driver" in caught.value.remedy
    assert plans(replace(PLATFORM, claims=[]), efs_id="fs-1")["claim pv-efs"] is Plan.INSTALL


@pytest.mark.parametrize(
    ("one", "expected"),
    [
        (pool("a", "node.kubernetes.io/instance-type", "m5.large", "g6e.xlarge"), True),
        (pool("a", "node.kubernetes.io/instance-type", "m5.large"), False),
        (pool("a", "node.kubernetes.io/instance-type", "p5.48xlarge", operator="NotIn"), False),
        (pool("a", "karpenter.k8s.aws/instance-family", "p4d"), True),
        (pool("a", "karpenter.k8s.aws/instance-category", "c", "g"), True),
        (pool("a", "karpenter.k8s.aws/instance-gpu-manufacturer", "nvidia"), True),
        (pool("a", limits={"nvidia.com/gpu": 8}), True),
        (pool("a", limits={"cpu": 8}), False),
    ],
)
def test_gpu_pools_are_recognised(one: Json, expected: bool) -> None:
    assert starts_gpus(one) is expected
