"""Write deploy/helm/train/files/instances.yaml: what a worker pod may ask for on each instance type.

The facts come from `maskfleet.launch.instances`; from CPU and memory the share of the node's own daemons is taken off.
"""

from __future__ import annotations

import math
from pathlib import Path

from maskfleet.launch.instances import INSTANCES, Instance

TARGET = Path(__file__).resolve().parent.parent / "deploy" / "helm" / "train" / "files" / "instances.yaml"
HEADER = """\
# What a worker may ask for on each instance type. Written by scripts/chart_instances.py; do not edit.
# cpus and memory_gib leave some for the kubelet, the daemons of a GPU node and Karpenter's own allowance.
"""


def pod_cpus(instance: Instance) -> int:
    """CPUs left for the worker: one of every 24, and at least one, is kept back."""
    return instance.vcpus - math.ceil(instance.vcpus / 24)


def pod_memory_gib(instance: Instance) -> int:
    """GiB left for the worker: Karpenter counts on 92.5 %, of which kubelet and daemons take up to a few GiB."""
    return math.floor(instance.memory_gib * 0.925 - max(1.5, instance.memory_gib * 0.02))


def table() -> str:
    """The text of the file."""
    rows = [
        f"{one.name}: {{gpus: {one.gpus}, efa: {one.efa}, cpus: {pod_cpus(one)}, memory_gib: {pod_memory_gib(one)}}}\n"
        for one in INSTANCES.values()
    ]
    return HEADER + "".join(rows)


if __name__ == "__main__":
    TARGET.write_text(table(), encoding="utf-8")
