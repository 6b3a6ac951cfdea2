"""What a worker requests fits on the nodes that Karpenter starts for it.

The table is Karpenter's own, for nodes with its defaults: memory less 7.5 % (vm-memory-overhead-percent), less 11 MiB
for each pod and 255 MiB (kube-reserved), less 100 MiB (eviction threshold). pkg/providers/instancetype/types.go of
aws/karpenter-provider-aws v1.13 has the formulas; for AL2023 they count the pods that the network interfaces could
serve, whatever maxPods is (UsesENILimitedMemoryOverhead), unless kubeReserved is set.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import yaml

from maskfleet.launch.instances import INSTANCES
from maskfleet.system.deploy_files import deploy_path

PUBLISHED: dict[str, dict[str, Any]] = json.loads(
    (Path(__file__).parents[1] / "crds" / "karpenter-instance-types-v1.13.json").read_text(encoding="utf-8")
)["types"]
REQUESTS = yaml.safe_load(deploy_path("helm", "train", "files", "instances.yaml").read_text(encoding="utf-8"))
NODE_VALUES = yaml.safe_load(deploy_path("helm", "gpu-nodes", "values.yaml").read_text(encoding="utf-8"))
# Network, storage and device plugins of a GPU node with EFA. Their charts request less than half of it.
DAEMONS_MIB, DAEMONS_CPU_M = 768, 600


def allocatable_mib(memory_mib: int, pods: int) -> int:
    return memory_mib - math.ceil(memory_mib * 0.075) - (11 * pods + 255) - 100


@pytest.mark.parametrize("name", INSTANCES)
def test_a_worker_fits_on_the_node_of_its_type(name: str) -> None:
    row, node = REQUESTS[name], PUBLISHED[name]
    assert row["memory_gib"] * 1024 + DAEMONS_MIB <= node["allocatable_memory_mib"]
    assert row["cpus"] * 1000 + DAEMONS_CPU_M <= node["allocatable_cpu_m"]
    ours = allocatable_mib(node["memory_mib"], NODE_VALUES["max_pods"])
    assert row["memory_gib"] * 1024 + DAEMONS_MIB <= ours
    # A margin, not a waste: at most 6 GiB more, or a tenth of a small node.
    assert ours - row["memory_gib"] * 1024 <= max(10 * 1024, 0.1 * node["memory_mib"])


@pytest.mark.parametrize("name", INSTANCES)
def test_karpenters_formula_gives_its_published_memory(name: str) -> None:
    node = PUBLISHED[name]
    assert allocatable_mib(node["memory_mib"], node["pods"]) == node["allocatable_memory_mib"]


@pytest.mark.parametrize("name", INSTANCES)
def test_every_type_can_serve_the_pods_that_a_node_may_run(name: str) -> None:
    assert PUBLISHED[name]["pods"] >= NODE_VALUES["max_pods"]


@pytest.mark.parametrize("name", INSTANCES)
def test_the_facts_of_a_type_are_those_that_karpenter_reads_from_ec2(name: str) -> None:
    facts, node = INSTANCES[name], PUBLISHED[name]
    assert facts.gpu.lower().replace(" ", "-") == node["gpu"]
    assert (facts.gpus, facts.gpu_memory_gib) == (node["gpus"], node["gpu_memory_mib"] // 1024)
    assert (facts.vcpus, facts.memory_gib, facts.efa) == (node["vcpus"], node["memory_mib"] // 1024, node["efa"])
