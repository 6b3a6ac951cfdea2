"""Write deploy/helm/train/files/instances.yaml: what a worker pod may request on each instance type.

The facts come from `maskfleet.launch.instances`; CPU and memory are reduced by what the node's daemons need.
"""

from __future__ import annotations

import math
from pathlib import Path

from maskfleet.launch.instances import INSTANCES, Instance

TARGET = Path(__file__).resolve().parent.parent / "deploy" / "helm" / "train" / "files" / "instances.yaml"
HEADER = """\
# What a worker may ask for on each instance type. Written by scripts/chart_instances.py; do not edit.
# cpus and memory_gib exclude what the kubelet, the daemons of a GPU node and Karpenter reserve.
"""


def pod_cpus(instance: Instance) -> int:
    """CPUs available to the worker: one of every 24, and at least one, is reserved."""
    return instance.vcpus - math.ceil(instance.vcpus / 24)


def pod_memory_gib(instance: Instance) -> int:
    """GiB available to the worker, also on nodes of a node class that does not limit the number of pods.

    Karpenter plans with 92.5 % of the memory. The kubelet reserves 11 MiB for each pod that the network interfaces
    could serve, up to 8.2 GiB; daemons need the rest of what is left out here.
    """
    return math.floor(instance.memory_gib * 0.925 - min(10, max(2, instance.memory_gib / 16)))


def table() -> str:
    """The text of the file."""
    rows = [
        f"{one.name}: {{gpus: {one.gpus}, efa: {one.efa}, cpus: {pod_cpus(one)}, memory_gib: {pod_memory_gib(one)}}}\n"
        for one in INSTANCES.values()
    ]
    return HEADER + "".join(rows)


if __name__ == "__main__":
    TARGET.write_text(table(), encoding="utf-8")
