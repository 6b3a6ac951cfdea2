"""The queues chart: what Kueue's CRDs accept, limits of the pools, and runs that find the flavor of their type."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from cluster_charts import Manifest, lint, of_kind, refusal, rendered
from jsonschema import Draft202012Validator

from maskfleet.launch.instances import INSTANCES
from maskfleet.system.deploy_files import deploy_path
from tools import run_tool

KUEUE = json.loads((Path(__file__).parent / "crds" / "kueue-v0.17.2.schema.json").read_text(encoding="utf-8"))["kinds"]
NODES = yaml.safe_load((deploy_path("helm", "gpu-nodes") / "values.yaml").read_text(encoding="utf-8"))
POOLS = {name: {key: NODES[name][key] for key in ("gpu_limit", "instance_types")} for name in ("general", "efa")}
VALUES: dict[str, Any] = {"queue": "training", "pools": POOLS}


@functools.cache
def _default_text() -> str:
    return yaml.safe_dump_all(rendered("queues", values=VALUES))


def default_objects() -> list[Manifest]:
    """The objects with the pools of the chart gpu-nodes."""
    return list(yaml.safe_load_all(_default_text()))


def kueue_complaints(manifests: list[Manifest]) -> list[str]:
    """Errors against the specs of Kueue's CRDs, and against the rules that the CRD states in words."""
    found = []
    for one in manifests:
        version = one["apiVersion"].removeprefix("kueue.x-k8s.io/")
        errors = Draft202012Validator(KUEUE[one["kind"]][version]).iter_errors(one.get("spec", {}))
        found += [f"{one['kind']}/{one['metadata']['name']}: {error.json_path}: {error.message}" for error in errors]
        for group in one.get("spec", {}).get("resourceGroups", []):
            for flavor in group["flavors"]:
                if [each["name"] for each in flavor["resources"]] != group["coveredResources"]:
                    found.append(f"{flavor['name']}: its resources are not the covered ones, in their order")
    return found


def test_helm_lint_passes_for_the_queues_chart(tmp_path: Path) -> None:
    assert "0 chart(s) failed" in lint("queues", VALUES, tmp_path)


def test_kueue_accepts_every_object() -> None:
    manifests = default_objects()
    assert {one["kind"] for one in manifests} == {"LocalQueue", "ClusterQueue", "ResourceFlavor"}
    assert kueue_complaints(manifests) == []
    file_names = [(one["kind"], one["metadata"]["name"]) for one in manifests]
    assert len(set(file_names)) == len(file_names)


def test_an_older_kueue_gets_the_version_that_it_has() -> None:
    done = run_tool(
        *("helm", "template", "it", deploy_path("helm", "queues"), "--api-versions", "kueue.x-k8s.io/v1beta1"),
        *("--set", "queue=training", "--set-json", f"pools={json.dumps(POOLS)}"),
    )
    manifests = list(yaml.safe_load_all(done))
    assert {one["apiVersion"] for one in manifests} == {"kueue.x-k8s.io/v1beta1"}
    assert kueue_complaints(manifests) == []


def test_the_schema_finds_planted_errors() -> None:
    manifests = default_objects()
    [queue] = of_kind(manifests, "ClusterQueue")
    [local] = of_kind(manifests, "LocalQueue")
    queue["spec"]["resourceGroups"][1]["flavors"][0]["resources"].pop()
    queue["spec"]["resourceGroups"][0]["flavors"][0]["quota"] = 3
    local["spec"]["cluster_queue"] = "x"
    assert len(kueue_complaints(manifests)) == 3


def test_every_type_that_a_run_may_ask_for_has_its_flavor_and_its_pools_limit() -> None:
    manifests = rendered("queues", values={**VALUES, "pools": {**POOLS, "efa": {**POOLS["efa"], "gpu_limit": 64}}})
    label = "node.kubernetes.io/instance-type"
    types = {
        one["spec"]["nodeLabels"][label]: one["metadata"]["name"]
        for one in of_kind(manifests, "ResourceFlavor")
        if "spec" in one
    }
    assert set(types) == set(INSTANCES)
    [queue] = of_kind(manifests, "ClusterQueue")
    limits = {one["name"]: one["resources"][0] for one in queue["spec"]["resourceGroups"][1]["flavors"]}
    assert limits[types["p5.48xlarge"]] == {"name": "nvidia.com/gpu", "nominalQuota": "64"}
    assert limits[types["g5.xlarge"]] == {"name": "nvidia.com/gpu", "nominalQuota": "1024"}
    # Flavors in the queue are flavors that exist.
    used = {one["name"] for group in queue["spec"]["resourceGroups"] for one in group["flavors"]}
    assert used == {one["metadata"]["name"] for one in of_kind(manifests, "ResourceFlavor")}


def test_the_queue_covers_all_that_pods_of_a_run_request() -> None:
    # Kueue never admits a pod that requests a resource which its ClusterQueue does not name.
    [queue] = of_kind(default_objects(), "ClusterQueue")
    covered = {name for group in queue["spec"]["resourceGroups"] for name in group["coveredResources"]}
    run = {
        **{"image": "registry.example/train@sha256:" + "ab" * 32, "queue": "training", "hugepages_2mi_mib": 5128},
        **{"gpu_nodes": 2, "gpu_instance_type": "p5.48xlarge"},
    }
    [job] = of_kind(rendered("train", values=run), "MPIJob")
    assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "training"
    assert job["spec"]["runPolicy"]["suspend"] is True
    pods = [replica["template"]["spec"] for replica in job["spec"]["mpiReplicaSpecs"].values()]
    boxes = [box for pod in pods for box in (*pod["containers"], *pod.get("initContainers", []))]
    requested = {name for box in boxes for name in box.get("resources", {}).get("requests", {})}
    assert requested == covered
    assert pods[1]["nodeSelector"] == {"node.kubernetes.io/instance-type": "p5.48xlarge"}


def test_only_the_namespace_of_the_release_may_use_the_queue() -> None:
    manifests = rendered("queues", values=VALUES, namespace="vision")
    [queue], [local] = of_kind(manifests, "ClusterQueue"), of_kind(manifests, "LocalQueue")
    assert queue["spec"]["namespaceSelector"] == {"matchLabels": {"kubernetes.io/metadata.name": "vision"}}
    assert local["metadata"]["namespace"] == "vision"
    assert local["spec"]["clusterQueue"] == queue["metadata"]["name"] == "vision-training"


def test_a_cluster_queue_of_others_is_used_and_not_created() -> None:
    [local] = rendered("queues", values={"queue": "training", "cluster_queue": "research"})
    assert local["kind"] == "LocalQueue"
    assert local["spec"]["clusterQueue"] == "research"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("values", "word"),
    [
        ({**VALUES, "queue": ""}, "queue: required"),
        ({"queue": "training"}, "pools: required"),
        ({**VALUES, "pools": {"a": POOLS["efa"], "b": POOLS["efa"]}}, "in two pools"),
        (
            {**VALUES, "pools": {"a": {"gpu_limit": 1, "instance_types": [f"g{n}.xlarge" for n in range(65)]}}},
            "at most 64",
        ),
        ({**VALUES, "queue": "Training"}, "queue"),
        ({**VALUES, "limit": 3}, "limit"),
    ],
)
def test_the_queues_chart_rejects(values: dict[str, Any], word: str) -> None:
    assert word in refusal("queues", values=values)
