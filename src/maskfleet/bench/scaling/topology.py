"""Instance types as a network of GPUs, and the time of an all-reduce on it.

Bus bandwidth is what nccl-tests reports: bytes that each rank sends per second when the ring is full. Line rates are
AWS's. Instances with a bandwidth of "up to" some value are left out: nobody can rely on it for hours.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from maskfleet.bench.scaling.parameters import (
    EFA_HOP_S,
    EFA_SHARE,
    LOCAL_HOP_S,
    PCIE_HOP_S,
    TCP_HOP_S,
    TCP_SHARE,
    Origin,
)
from maskfleet.config.fields import nearest
from maskfleet.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Link:
    """How GPUs reach each other: in a node, or from node to node."""

    bytes_per_s: float  # bus bandwidth of an all-reduce; between nodes, of all adapters of a node together
    hop_s: float
    origin: Origin
    source: str


@dataclass(frozen=True, slots=True)
class Node:
    """One instance type. `network` connects it with others of its kind."""

    name: str
    gpus: int
    gpu: str
    vcpus: int
    inside: Link
    network: Link


NVLINK3 = Link(230.8e9, LOCAL_HOP_S.value, "published", "p4d, 1 GiB: 230.8 GB/s (NCCL issue 527)")
NVLINK4 = Link(300e9, LOCAL_HOP_S.value, "assumed", "below the 476 GB/s of large messages (nccl-tests 290)")
NVLINK5 = Link(500e9, LOCAL_HOP_S.value, "assumed", "NVLink 5, 1.8 TB/s per GPU")
NVLINK2 = Link(120e9, LOCAL_HOP_S.value, "assumed", "NVLink 2, 300 GB/s per GPU")
PCIE_A10G = Link(8e9, PCIE_HOP_S.value, "assumed", "through host memory")
PCIE_L40S = Link(16e9, PCIE_HOP_S.value, "assumed", "PCIe 4.0 x16")


def _efa(gbit_per_s: int, origin: Origin = "assumed") -> Link:
    bandwidth = EFA_SHARE.value * gbit_per_s / 8 * 1e9
    source = f"{EFA_SHARE.value} of {gbit_per_s:,} Gbit/s, EFA{', as p4d' if origin == 'assumed' else ''}"
    return Link(bandwidth, EFA_HOP_S.value, origin, source)


def _ethernet(gbit_per_s: int) -> Link:
    bandwidth = TCP_SHARE.value * gbit_per_s / 8 * 1e9
    return Link(bandwidth, TCP_HOP_S.value, TCP_SHARE.origin, f"{TCP_SHARE.value} of {gbit_per_s:,} Gbit/s")


NODES = {
    node.name: node
    for node in (
        Node("p3dn.24xlarge", 8, "V100", 96, NVLINK2, _efa(100)),
        Node("p4d.24xlarge", 8, "A100", 96, NVLINK3, _efa(400, "published")),
        Node("p4de.24xlarge", 8, "A100", 96, NVLINK3, _efa(400, "published")),
        Node("p5.48xlarge", 8, "H100", 192, NVLINK4, _efa(3200)),
        Node("p5e.48xlarge", 8, "H200", 192, NVLINK4, _efa(3200)),
        Node("p5en.48xlarge", 8, "H200", 192, NVLINK4, _efa(3200)),
        Node("p6-b200.48xlarge", 8, "B200", 192, NVLINK5, _efa(3200)),
        Node("g5.8xlarge", 1, "A10G", 32, PCIE_A10G, _ethernet(25)),
        Node("g5.12xlarge", 4, "A10G", 48, PCIE_A10G, _ethernet(40)),
        Node("g5.24xlarge", 4, "A10G", 96, PCIE_A10G, _ethernet(50)),
        Node("g5.48xlarge", 8, "A10G", 192, PCIE_A10G, _ethernet(100)),
        Node("g6.8xlarge", 1, "L4", 32, PCIE_A10G, _ethernet(25)),
        Node("g6.12xlarge", 4, "L4", 48, PCIE_A10G, _ethernet(40)),
        Node("g6.24xlarge", 4, "L4", 96, PCIE_A10G, _ethernet(50)),
        Node("g6.48xlarge", 8, "L4", 192, PCIE_A10G, _ethernet(100)),
        Node("g6e.8xlarge", 1, "L40S", 32, PCIE_L40S, _ethernet(25)),
        Node("g6e.12xlarge", 4, "L40S", 48, PCIE_L40S, _ethernet(100)),
        Node("g6e.24xlarge", 4, "L40S", 96, PCIE_L40S, _ethernet(200)),
        Node("g6e.48xlarge", 8, "L40S", 192, PCIE_L40S, _ethernet(400)),
    )
}


def node_named(name: str) -> Node:
    """The node of an instance type, with or without SageMaker's `ml.`."""
    bare = name.removeprefix("ml.")
    if bare in NODES:
        return NODES[bare]
    near = nearest(bare, NODES)
    raise ConfigError(
        f"the scaling model does not know the instance type {name}",
        remedy=f"{f'did you mean {near}? ' if near else ''}it knows {', '.join(NODES)}",
    )


def num_nodes(node: Node, gpus: int) -> int:
    """Nodes that hold `gpus` GPUs: part of one node, or whole nodes."""
    if gpus < 1:
        raise ConfigError(f"--gpus {gpus}: a run needs at least one GPU", remedy="pass --gpus 1,8,64")
    if gpus <= node.gpus:
        return 1
    if gpus % node.gpus:
        below = gpus // node.gpus * node.gpus
        raise ConfigError(
            f"{gpus} GPUs do not fill whole nodes of {node.name}, which has {node.gpus}",
            remedy=f"pass --gpus {below} or --gpus {below + node.gpus}",
        )
    return gpus // node.gpus


def all_reduce_s(num_bytes: float, node: Node, gpus: int) -> float:
    """Seconds of an all-reduce over `gpus` GPUs, by ring or tree, whichever is faster, as NCCL chooses.

    Ring: every rank sends 2 (n - 1) / n of the bytes in 2 (n - 1) hops. Double binary tree: twice the bytes, up and
    down a tree of nodes and a chain of GPUs in each. Either is as fast as its slowest link: the adapters of a node
    work in parallel, as parts of different rings.
    """
    nodes = num_nodes(node, gpus)
    if gpus == 1:
        return 0.0
    local_hop_s = node.inside.hop_s
    if nodes == 1:
        bandwidth, ring_hop_s, tree_hops_s = node.inside.bytes_per_s, local_hop_s, (gpus - 1) * local_hop_s
    else:
        bandwidth = node.network.bytes_per_s
        if node.gpus > 1:
            bandwidth = min(bandwidth, node.inside.bytes_per_s)
        ring_hop_s = node.network.hop_s
        tree_hops_s = math.ceil(math.log2(nodes)) * ring_hop_s + (node.gpus - 1) * local_hop_s
    ring_s = 2 * (gpus - 1) / gpus * num_bytes / bandwidth + 2 * (gpus - 1) * ring_hop_s
    tree_s = 2 * num_bytes / bandwidth + 2 * tree_hops_s
    return min(ring_s, tree_s)
