"""The gpu-nodes chart: Karpenter's pools, which types are in them, and which values it rejects."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml
from cluster_charts import karpenter_complaints, lint, of_kind, refusal, rendered

from maskfleet.launch.instances import INSTANCES
from maskfleet.system.deploy_files import deploy_path

REQUIRED = {"cluster_id": "demo", "role_name": "demo-node-role"}
EFA = {**REQUIRED, "efa_az": "us-west-2b"}
VARIANTS: dict[str, dict[str, Any]] = {
    "general only": REQUIRED,
    "both": EFA,
    "efa only": {**EFA, "general": {"enabled": False}},
    "everything": {
        **EFA,
        "capacity_type": "spot",
        "consolidate_after": "1h30m",
        "expire_after": "720h",
        "ami_alias": "al2023@latest",
        "subnet_tags": {"tier": "private"},
        "security_group_tags": {"tier": "nodes"},
        "root_volume": {"gib": 500, "iops": 16000, "throughput_mib": 1000, "kms_key_id": "alias/ebs"},
        "instance_store_policy": "RAID0",
        "startup_taints": {"efs": False},
        "tags": {"Name": "mine", "team": 'vision "a" {{ b }}'},
        "labels": {"team": "vision"},
        "general": {"zones": ["us-west-2a", "us-west-2b"], "gpu_limit": 16},
        "efa": {
            "gpu_limit": 64,
            "placement_group": "fleet efa",
            "capacity_reservations": [{"id": "cr-0123abcd"}, {"tags": {"for": "training"}, "ownerID": "123456789012"}],
            "reserved_only": True,
        },
    },
    "no taints": {**REQUIRED, "startup_taints": {"efs": False, "fsx": False}},
}


def pools(values: dict[str, Any], release: str = "gpu") -> dict[str, dict[str, Any]]:
    found = of_kind(rendered("gpu-nodes", values=values, release=release), "NodePool")
    return {one["metadata"]["name"]: one["spec"] for one in found}


def classes(values: dict[str, Any], release: str = "gpu") -> dict[str, dict[str, Any]]:
    found = of_kind(rendered("gpu-nodes", values=values, release=release), "EC2NodeClass")
    return {one["metadata"]["name"]: one["spec"] for one in found}


def required(pool: dict[str, Any], key: str) -> list[str] | None:
    for one in pool["template"]["spec"]["requirements"]:
        if one["key"] == key:
            assert one["operator"] == "In"
            return list(one["values"])
    return None


def types(pool: dict[str, Any]) -> set[str]:
    return set(required(pool, "node.kubernetes.io/instance-type") or [])


def test_helm_lint_passes_for_the_gpu_nodes_chart(tmp_path: Path) -> None:
    assert "0 chart(s) failed" in lint("gpu-nodes", EFA, tmp_path)


@pytest.mark.parametrize("variant", VARIANTS)
def test_karpenter_accepts_every_object_of_the_pools(variant: str) -> None:
    manifests = rendered("gpu-nodes", values=VARIANTS[variant])
    assert manifests
    assert karpenter_complaints(manifests) == []


def test_karpenters_schema_finds_planted_errors() -> None:
    (pool,) = of_kind(rendered("gpu-nodes", values=REQUIRED), "NodePool")
    (node_class,) = of_kind(rendered("gpu-nodes", values=REQUIRED), "EC2NodeClass")
    errors: list[tuple[dict[str, Any], list[str], Any]] = [
        (pool, ["spec", "disruption", "consolidationPolicy"], "WhenUnderutilized"),
        (pool, ["spec", "disruption", "expireAfter"], "Never"),
        (pool, ["spec", "template", "spec", "nodeClassRef"], {"name": "gpu"}),
        (pool, ["spec", "template", "spec", "kubelet"], {}),
        (pool, ["apiVersion"], "karpenter.sh/v1beta1"),
        (node_class, ["spec", "amiSelectorTerms"], [{"alias": "al2@latest", "id": "ami-1"}]),
        (node_class, ["spec", "instanceProfile"], "both"),
        (node_class, ["spec", "metadataOptions", "httpTokens"], "yes"),
        (node_class, ["spec", "blockDeviceMappings", "ebs"], {}),
        (node_class, ["spec", "tags", "karpenter.sh/nodepool"], "gpu"),
        (node_class, ["spec", "subnetSelectorTerms"], []),
    ]
    for manifest, path, value in errors:
        broken = copy.deepcopy(manifest)
        inner = broken
        for key in path[:-1]:
            inner = inner[key][0] if isinstance(inner[key], list) else inner[key]
        inner[path[-1]] = value
        assert karpenter_complaints([broken]), path


def test_a_type_is_in_the_efa_pool_exactly_if_it_has_efa() -> None:
    both = pools(EFA)
    assert set(both) == {"gpu", "gpu-efa"}
    with_efa = {name for name, facts in INSTANCES.items() if facts.efa > 0}
    assert types(both["gpu-efa"]) == with_efa
    assert types(both["gpu"]) == set(INSTANCES) - with_efa
    assert all(INSTANCES[name].gpus > 0 for name in INSTANCES)


def test_the_efa_pool_is_in_one_zone_and_the_general_one_in_all() -> None:
    both = pools(EFA)
    assert required(both["gpu-efa"], "topology.kubernetes.io/zone") == ["us-west-2b"]
    assert required(both["gpu"], "topology.kubernetes.io/zone") is None
    assert required(pools(VARIANTS["everything"])["gpu"], "topology.kubernetes.io/zone") == ["us-west-2a", "us-west-2b"]


def test_without_a_zone_for_efa_there_is_no_efa_pool() -> None:
    assert set(pools(REQUIRED)) == set(classes(REQUIRED)) == {"gpu"}
    assert set(pools(VARIANTS["efa only"])) == {"gpu-efa"}


def test_every_pool_uses_the_node_class_with_its_name() -> None:
    manifests = VARIANTS["both"]
    for name, pool in pools(manifests).items():
        reference = pool["template"]["spec"]["nodeClassRef"]
        assert reference == {"group": "karpenter.k8s.aws", "kind": "EC2NodeClass", "name": name}
        assert name in classes(manifests)


def test_the_defaults_are_those_of_aws_samples() -> None:
    for pool in pools(EFA).values():
        assert pool["disruption"]["consolidationPolicy"] == "WhenEmpty"
        assert pool["disruption"]["consolidateAfter"] == "600s"
        assert pool["limits"] == {"nvidia.com/gpu": 1024}
        assert required(pool, "karpenter.sh/capacity-type") == ["on-demand"]
        node = pool["template"]["spec"]
        assert node["taints"] == [{"key": "nvidia.com/gpu", "value": "true", "effect": "NoSchedule"}]
        assert node["startupTaints"] == [
            {"key": f"{driver}.csi.aws.com/agent-not-ready", "effect": "NoExecute"} for driver in ("efs", "fsx")
        ]


def test_a_training_node_is_never_disrupted() -> None:
    for pool in pools(EFA).values():
        assert pool["template"]["spec"]["expireAfter"] == "Never"
        allowed = {reason: one["nodes"] for one in pool["disruption"]["budgets"] for reason in one["reasons"]}
        assert allowed == {"Drifted": "0", "Underutilized": "0", "Empty": "100%"}


def test_startup_taints_name_only_installed_drivers() -> None:
    (taint,) = pools(VARIANTS["everything"])["gpu"]["template"]["spec"]["startupTaints"]
    assert taint["key"] == "fsx.csi.aws.com/agent-not-ready"
    assert "startupTaints" not in pools(VARIANTS["no taints"])["gpu"]["template"]["spec"]


def test_nodes_are_private_encrypted_and_need_imdsv2() -> None:
    for name, node_class in classes(EFA).items():
        (disk,) = node_class["blockDeviceMappings"]
        assert disk["ebs"]["encrypted"] is True
        assert disk["ebs"]["volumeType"] == "gp3"
        assert node_class["metadataOptions"]["httpTokens"] == "required"
        assert node_class["metadataOptions"]["httpPutResponseHopLimit"] == 1
        assert node_class["associatePublicIPAddress"] is False
        assert "userData" not in node_class
        assert node_class["tags"] == {"Name": f"demo-{name}"}


def test_subnets_and_security_groups_are_found_by_the_clusters_tags() -> None:
    node_class = classes(REQUIRED)["gpu"]
    assert node_class["subnetSelectorTerms"] == [{"tags": {"karpenter.sh/discovery": "demo"}}]
    assert node_class["securityGroupSelectorTerms"] == [{"tags": {"karpenter.sh/discovery": "demo"}}]
    chosen = classes(VARIANTS["everything"])["gpu"]
    assert chosen["subnetSelectorTerms"] == [{"tags": {"tier": "private"}}]
    assert chosen["securityGroupSelectorTerms"] == [{"tags": {"tier": "nodes"}}]


def test_only_the_nodes_with_efa_are_in_the_placement_group() -> None:
    chosen = classes(VARIANTS["everything"])
    assert chosen["gpu-efa"]["placementGroupSelector"] == {"name": "fleet efa"}
    assert "placementGroupSelector" not in chosen["gpu"]
    assert "placementGroupSelector" not in classes(EFA)["gpu-efa"]


def test_the_kubelet_reserves_memory_for_few_pods() -> None:
    # 11 MiB a pod and 255 MiB, as the kubelet of EKS's images reserves it for the largest number of pods.
    for node_class in classes(EFA).values():
        assert node_class["kubelet"] == {"maxPods": 29, "kubeReserved": {"memory": "574Mi"}}
    chosen = classes({**REQUIRED, "max_pods": 110})["gpu"]["kubelet"]
    assert chosen == {"maxPods": 110, "kubeReserved": {"memory": "1465Mi"}}


def test_a_reservation_changes_its_own_pool_only() -> None:
    chosen, reserved = classes(VARIANTS["everything"]), pools(VARIANTS["everything"])
    assert "capacityReservationSelectorTerms" not in chosen["gpu"]
    assert chosen["gpu-efa"]["capacityReservationSelectorTerms"][0] == {"id": "cr-0123abcd"}
    assert required(reserved["gpu"], "karpenter.sh/capacity-type") == ["spot"]
    assert required(reserved["gpu-efa"], "karpenter.sh/capacity-type") == ["reserved"]
    shared = {**EFA, "efa": {"capacity_reservations": [{"instanceMatchCriteria": "open"}]}}
    assert required(pools(shared)["gpu-efa"], "karpenter.sh/capacity-type") == ["reserved", "on-demand"]


def test_tags_keep_quotes_and_braces_and_the_nodes_name() -> None:
    tags = classes(VARIANTS["everything"])["gpu"]["tags"]
    assert tags == {"Name": "demo-gpu", "team": 'vision "a" {{ b }}'}


def test_pool_names_that_yaml_reads_as_numbers_stay_strings() -> None:
    assert set(pools({**EFA, "cluster_id": "0123"}, release="1e3")) == {"1e3", "1e3-efa"}
    assert classes({**EFA, "cluster_id": "0123"}, release="1e3")["1e3"]["subnetSelectorTerms"] == [
        {"tags": {"karpenter.sh/discovery": "0123"}}
    ]


def test_the_device_plugin_finds_our_nodes() -> None:
    for pool in pools(VARIANTS["everything"]).values():
        assert pool["template"]["metadata"]["labels"] == {"nvidia.com/gpu.present": "true", "team": "vision"}


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"role_name": "r"}, "cluster_id"),
        ({"cluster_id": "c"}, "role_name"),
        ({**REQUIRED, "capacity_type": "SPOT"}, "capacity_type"),
        ({**REQUIRED, "consolidate_after": "10 minutes"}, "consolidate_after"),
        ({**REQUIRED, "expire_after": "never"}, "expire_after"),
        ({**REQUIRED, "ami_alias": "al2@latest"}, "ami_alias"),
        ({**REQUIRED, "efa_az": "us-west-2"}, "efa_az"),
        (
            {**REQUIRED, "efa_az": "us-west-2b", "general": {"instance_types": ["p5.48xlarge"]}},
            "general.instance_types",
        ),
        ({**REQUIRED, "general": {"instance_types": []}}, "instance_types"),
        ({**REQUIRED, "general": {"instance_types": ["g5 xlarge"]}}, "instance_types"),
        ({**REQUIRED, "general": {"gpu_limit": "many"}}, "gpu_limit"),
        ({**REQUIRED, "general": {"enabled": False}}, "general.enabled"),
        ({**REQUIRED, "general": {"reserved_only": True}}, "general.reserved_only"),
        ({**REQUIRED, "general": {"capacity_reservations": [{"id": "cr-1", "ownerID": "1"}]}}, "capacity_reservations"),
        ({**REQUIRED, "root_volume": {"gib": 10}}, "gib"),
        ({**REQUIRED, "max_pods": 5}, "max_pods"),
        ({**REQUIRED, "labels": {"a": "not a label"}}, "labels"),
        ({**REQUIRED, "capacity": "spot"}, "capacity"),
    ],
)
def test_a_bad_value_of_the_pools_is_rejected_by_name(values: dict[str, Any], field: str) -> None:
    assert field in refusal("gpu-nodes", values=values)


def test_a_release_name_of_the_pools_that_is_too_long_is_rejected_by_name() -> None:
    assert "release name" in refusal("gpu-nodes", values=REQUIRED, release="g" * 41)


def test_every_value_of_the_pools_is_used() -> None:
    folder = deploy_path("helm", "gpu-nodes")
    templates = "".join(file.read_text(encoding="utf-8") for file in (folder / "templates").iterdir())
    for name in yaml.safe_load((folder / "values.yaml").read_text(encoding="utf-8")):
        assert f"Values.{name}" in templates or f'"{name}"' in templates, name
