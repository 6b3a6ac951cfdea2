"""The numbers that the scaling model starts from, each with its origin.

measured: on a machine of ours; where the source names a result file, a test compares the two. published: by others.
derived: computed from numbers of these two kinds. assumed: an estimate.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Origin = Literal["measured", "published", "derived", "assumed"]


@dataclass(frozen=True, slots=True)
class Parameter:
    """One number of the model."""

    name: str
    value: float
    unit: str
    origin: Origin
    source: str


@dataclass(frozen=True, slots=True)
class Region:
    """A part of the network whose gradients are exchanged together, as soon as its backward pass is done."""

    name: str
    parameters: int  # trainable ones
    backward_share: float  # of the time of the whole backward pass


@dataclass(frozen=True, slots=True)
class GpuSpeed:
    """Speed of a GPU relative to the H200, and where the figure comes from."""

    relative: float
    origin: Origin
    source: str


# R50-FPN Mask R-CNN, 800 x 1344, bf16, one H200: images per step -> ms, with the update.
STEP_MS = {1: 6.637, 4: 15.735, 16: 51.571}
FED_SHARE = Parameter("speed fed by the loader / speed without it", 0.958, "", "measured", "results/fed.json, H200")
LOADER_RATE = Parameter("images loaded", 369.4, "per CPU second", "measured", "results/loader.json, EPYC")
CORES_PER_VCPU = Parameter("speed of a vCPU", 0.5, "cores", "assumed", "two hardware threads share a core")
PREFETCH = Parameter("batches prefetched per rank", 2, "", "assumed", "depends on data.num_workers")
CHECKPOINT_S = Parameter("training blocked by a checkpoint", 0.0141, "s", "measured", "results/checkpoint.json, H200")
CHECKPOINT_EVERY_S = Parameter("work between checkpoints", 900, "s", "assumed", "default of checkpoint.every_minutes")
EVAL_RATE = Parameter("images evaluated", 249, "per GPU and second", "measured", "results/eval_run.json, H200")
AP_S = Parameter("AP of 5,000 images, on rank 0", 2.822, "s", "measured", "results/eval.json, EPYC")
START_S = Parameter("start to first step, compiled before", 37.7, "s", "measured", "results/step.json, H200")
DETECT_S = Parameter("until a lost node is noticed", 16, "s", "derived", "launch/supervise/lost_hosts.py")
REJOIN_S = Parameter("until the remaining nodes start again", 17, "s", "measured", "three hosts, at most 33 s in all")
GPU_HOURS_PER_FAILURE = Parameter(
    "GPU hours per failure", 7.9 * 1024, "h", "published", "7.9 h at 1,024 GPUs (Meta, quoted by clockwork.io)"
)
BACKWARD_SHARE = Parameter("backward share of a step", 0.63, "", "derived", "roofline of the layers on the H200")
# Stem and res2 are frozen and have no gradients. Shares: by the roofline, of which backward is two thirds in a trained
# layer.
REGIONS = (
    Region("heads", 16_954_085, 0.276),
    Region("pyramid and RPN", 3_938_319, 0.441),
    Region("last stage of the backbone", 14_964_736, 0.056),
    Region("rest of the backbone", 8_317_952, 0.227),
)
BYTES_PER_GRADIENT = {"fp32": 4, "bf16": 2}

# Times of single steps divided by their median: 5 steps of 3 implementations, results/step_cpu.json.
STEP_RATIOS = (
    (1.0028, 1.0, 1.0157, 0.9847, 0.9984),
    (0.9963, 1.0272, 1.0159, 0.9748, 1.0),
    (0.9747, 1.0, 0.9518, 1.0094, 1.0095),
)
HICCUP_CHANCE = Parameter(
    "chance of a hiccup", 1e-4, "per rank and step", "assumed", "no run on many GPUs was recorded"
)
HICCUP_S = Parameter("length of a hiccup", 0.03, "s", "assumed", "no run on many GPUs was recorded")

EFA_SHARE = Parameter(
    "bus bandwidth / line rate, EFA", 0.59, "", "published", "p4d, 4 nodes: 29.6 of 50 GB/s (NCCL issue 527)"
)
TCP_SHARE = Parameter("bus bandwidth / line rate, g instances", 0.5, "", "assumed", "no GPUDirect RDMA")
LOCAL_HOP_S = Parameter(
    "latency of a hop in a node", 0.92e-6, "s", "derived", "p5: 12.9 us for 8 bytes (aws-k8s-tester PR 503)"
)
EFA_HOP_S = Parameter(
    "latency of a hop over EFA", 18.9e-6, "s", "derived", "2 x p6-b200: 50.6 us for 8 bytes (dstack PR 3961)"
)
PCIE_HOP_S = Parameter("latency of a hop over PCIe", 3e-6, "s", "assumed", "usual order of magnitude")
TCP_HOP_S = Parameter("latency of a hop between g instances", 40e-6, "s", "assumed", "usual order of magnitude")
LAUNCH_S = Parameter("start of a collective", 10e-6, "s", "assumed", "usual order of magnitude")

# COCO 2017, 1x: the run whose pauses and failures are simulated.
TRAIN_IMAGES, VAL_IMAGES, EPOCHS = 117_266, 5_000, 12
SGD_LIMIT = 256  # images per update

ROOFLINE = "ratio of the roofline bounds, arithmetic and bandwidth from datasheets"
GPU_SPEEDS = {
    "H200": GpuSpeed(1.0, "measured", "results/step.json"),
    "H100": GpuSpeed(0.916, "assumed", ROOFLINE),
    "A100": GpuSpeed(0.455, "derived", "714 / 1,436 images/s on 8 GPUs (MLPerf v3.0), times the H100's"),
    "V100": GpuSpeed(0.133, "assumed", ROOFLINE),
    "B200": GpuSpeed(2.115, "assumed", ROOFLINE),
    "L40S": GpuSpeed(0.296, "assumed", ROOFLINE),
    "A10G": GpuSpeed(0.075, "assumed", ROOFLINE),
    "L4": GpuSpeed(0.101, "assumed", ROOFLINE),
}
PARAMETERS = tuple(value for value in list(globals().values()) if isinstance(value, Parameter))
