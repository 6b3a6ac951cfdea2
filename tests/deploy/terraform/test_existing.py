"""The addons root on a cluster that exists, and the queues of Kueue that it creates."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from cluster_charts import of_kind, rendered
from hcl_schema import read_root
from terraform_addons import chart_values, provider_free_copy, root

from maskfleet.infra.existing import cluster, usage
from maskfleet.infra.existing.inventory import Inventory
from maskfleet.infra.existing.parts import parts_of
from maskfleet.infra.terraform.variables import required

RESOURCES = {name: body for kind, _, name, body in read_root(root()).blocks if kind == "resource"}


@pytest.fixture(scope="module")
def provider_free(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return provider_free_copy(tmp_path_factory.mktemp("existing"))


def test_the_parts_that_maskfleet_looks_for_are_those_of_the_root() -> None:
    text = (root() / "variables-existing.tf").read_text(encoding="utf-8")
    [listed] = re.findall(r"setsubtract\(var\.existing_parts, \[(.*?)\]\)", text, re.DOTALL)
    known = set(re.findall(r'"(\w+)"', listed))
    assert known == {part.name for part in parts_of(Inventory(), {}, []) if part.name} | {"cluster_autoscaler"}
    used = {
        part for file in root().glob("*.tf") for part in re.findall(r'existing_parts, "(\w+)"', file.read_text("utf-8"))
    }
    assert used == known


def test_a_part_that_is_there_creates_no_resource_of_its_name() -> None:
    resource_of = {"namespace": {"kubeflow"}, "karpenter": {"karpenter", "karpenter_crd"}, "node_pools": {"gpu_nodes"}}
    for part in parts_of(Inventory(), {}, []):
        for name in resource_of.get(part.name, {part.name}) if part.name else ():
            assert f'"{part.name}")' in str(RESOURCES[name]["count"]), name


def test_what_down_may_keep_are_names_of_the_root() -> None:
    code = Path(usage.__file__).read_text(encoding="utf-8")
    kept = set(re.findall(r'^        "(\w+)": lambda', code, re.MULTILINE)) | {"karpenter_crd"}
    assert len(kept) == 7
    assert kept <= set(RESOURCES)
    assert "data" in RESOURCES  # of the service accounts


def test_aws_or_empty_values_give_all_that_the_root_requires() -> None:
    described = {"cluster_id", "cluster_version", "cluster_endpoint", "cluster_ca", "region"}
    assert required(root()) == described | set(cluster.NOT_MADE)


@pytest.mark.slow
def test_on_a_cluster_of_others_nothing_needs_our_system_nodes(provider_free: Path) -> None:
    values = chart_values(provider_free, **cluster.NOT_MADE, system_node_selector={}, gp3_enabled=True)
    [deployment] = of_kind(rendered("mpi-operator", values=values["mpi_operator"]), "Deployment")
    assert "nodeSelector" not in deployment["spec"]["template"]["spec"]
    storage = rendered("storage", values=values["storage"], release="storage")
    [job] = of_kind(storage, "Job")
    assert "nodeSelector" not in job["spec"]["template"]["spec"]
    assert "maskfleet-gp3" in [one["metadata"]["name"] for one in of_kind(storage, "StorageClass")]


@pytest.mark.slow
def test_node_classes_select_subnets_and_groups_of_the_team(provider_free: Path) -> None:
    chosen = {"node_subnet_tags": {"tier": "private"}, "node_security_group_tags": {"tier": "nodes"}}
    values = chart_values(provider_free, **chosen)["gpu_nodes"]
    for one in of_kind(rendered("gpu-nodes", values=values, release="gpu"), "EC2NodeClass"):
        assert one["spec"]["subnetSelectorTerms"] == [{"tags": {"tier": "private"}}]
        assert one["spec"]["securityGroupSelectorTerms"] == [{"tags": {"tier": "nodes"}}]


@pytest.mark.slow
def test_the_queue_has_the_limits_of_the_pools(provider_free: Path) -> None:
    chosen = {"kueue_enabled": True, "kueue_queue": "training", "gpu_limit": 16, "gpu_instances": ["g5.xlarge"]}
    queues = chart_values(provider_free, **chosen, efa_instances=["p5.48xlarge"])["queues"]
    [queue] = of_kind(rendered("queues", values=queues), "ClusterQueue")
    flavors = queue["spec"]["resourceGroups"][1]["flavors"]
    assert {one["name"]: one["resources"][0]["nominalQuota"] for one in flavors} == {
        "kubeflow-training-g5-xlarge": "16",
        "kubeflow-training-p5-48xlarge": "16",
    }
    without_efa = chart_values(provider_free, **chosen, efa_az="", kueue_cluster_queue="research")["queues"]
    assert set(without_efa["pools"]) == {"gpu"}
    [local] = rendered("queues", values=without_efa)
    assert local["spec"]["clusterQueue"] == "research"


@pytest.mark.slow
def test_kueue_gives_nodes_back_if_a_run_does_not_get_all_of_them(provider_free: Path) -> None:
    values = chart_values(provider_free, kueue_ready_timeout="45m")["kueue"]
    config = yaml.safe_load(values["managerConfig"]["controllerManagerConfigYaml"])
    assert config["waitForPodsReady"]["timeout"] == "45m"
    # Kueue's default is the timeout: it would stop an elastic run half an hour after it lost a node.
    assert config["waitForPodsReady"]["recoveryTimeout"] == "0s"
    assert "kubeflow.org/mpijob" in config["integrations"]["frameworks"]
