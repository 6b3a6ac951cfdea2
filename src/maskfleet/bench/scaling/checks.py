"""Checks of the model: against published results of NVIDIA and AWS, and against a real run of a few processes.

MLPerf: NVIDIA's Mask R-CNN runs its ROI heads eagerly, so a step has a part that does not shrink with the batch, and it
exchanges all gradients in fp16 in one piece after backward. Two published points of round v2.1, 8 and 32 GPUs, give
this fixed part; one of v3.0, 8 GPUs, the time per image. The 64 GPUs of v3.0 are predicted; nothing is fitted to them.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from maskfleet.bench.scaling.parameters import BACKWARD_SHARE, EFA_HOP_S, REGIONS
from maskfleet.bench.scaling.predict import measured_jitter
from maskfleet.bench.scaling.simulate import Jitter, StepPlan, simulate_steps
from maskfleet.bench.scaling.topology import NODES, NVLINK4, Link, Node, all_reduce_s

# 8 adapters of 400 Gbit/s; 46 to 48 of 50 GB/s are usual (nccl-tests issue 290).
_NETWORK = Link(0.93 * 400e9, EFA_HOP_S.value, "published", "nccl-tests issue 290")
DGX_H100 = Node("DGX H100", 8, "H100", 224, NVLINK4, _NETWORK)
FP16_BYTES = 2
STEPS = 400


@dataclass(frozen=True, slots=True)
class Record:
    """One published result: logged images per second of all GPUs."""

    gpus: int
    images_per_step: int
    images_per_s: float

    @property
    def images_per_gpu(self) -> int:
        return self.images_per_step // self.gpus

    @property
    def step_s(self) -> float:
        return self.images_per_step / self.images_per_s


V2_1 = (Record(8, 96, 1359), Record(32, 128, 3910))
V3_0 = (Record(8, 96, 1436), Record(64, 256, 8250))


@dataclass(frozen=True, slots=True)
class MlperfCheck:
    """Images per second and GPU on 64 GPUs, relative to 8."""

    published: float
    predicted: float
    fixed_ms: float  # part of a step that does not depend on the batch
    image_ms: float


def check_mlperf(*, seed: int = 0) -> MlperfCheck:
    """Predict v3.0 on 64 GPUs from three other results."""
    small, large = V2_1
    fewer_images = large.images_per_gpu
    small_s, large_s = (_compute_s(record, seed) for record in V2_1)
    fixed_s = large_s - (small_s - large_s) / (small.images_per_gpu - fewer_images) * fewer_images
    reference, target = V3_0
    image_s = (_compute_s(reference, seed) - fixed_s) / reference.images_per_gpu
    step_s = _step_s(fixed_s + image_s * target.images_per_gpu, target.gpus, seed)
    rate = reference.images_per_s / reference.gpus
    return MlperfCheck(
        published=target.images_per_s / target.gpus / rate,
        predicted=target.images_per_gpu / step_s / rate,
        fixed_ms=1000 * fixed_s,
        image_ms=1000 * image_s,
    )


# AWS's TensorFlow Mask R-CNN on p3dn, 4 images of varying size per GPU, between epochs 12 and 24.
P3DN = (Record(8, 32, 84.1), Record(16, 64, 158.3), Record(32, 128, 283.7))


@dataclass(frozen=True, slots=True)
class P3dnCheck:
    """Images per second and GPU relative to 8 GPUs, at the same number of images per GPU."""

    gpus: int
    published: float
    predicted: float


def check_p3dn(*, seed: int = 0) -> list[P3dnCheck]:
    """Predict 16 and 32 V100 from 8. Gradients in fp32 overlap with backward, as in Horovod."""
    node = NODES["p3dn.24xlarge"]
    reference = P3DN[0]
    backward_s = BACKWARD_SHARE.value * reference.step_s
    regions_s = tuple(backward_s * region.backward_share for region in REGIONS)

    def step_s(gpus: int) -> float:
        exchange_s = tuple(all_reduce_s(4 * region.parameters, node, gpus) for region in REGIONS)
        plan = StepPlan(reference.step_s - backward_s, regions_s, exchange_s)
        return simulate_steps(plan, measured_jitter(), ranks=gpus, steps=STEPS, seed=seed).total_s

    rate, step_of_reference = reference.images_per_s / reference.gpus, step_s(reference.gpus)
    return [
        P3dnCheck(one.gpus, one.images_per_s / one.gpus / rate, step_of_reference / step_s(one.gpus))
        for one in P3DN[1:]
    ]


@dataclass(frozen=True, slots=True)
class RunCheck:
    """Mean milliseconds of a step of a real run."""

    predicted_ms: float
    measured_ms: float


def check_rounds(rounds: Sequence[Mapping[str, Any]], *, seed: int = 0) -> RunCheck:
    """Predict a run of benchmarks/scaling_run.py from its parts: steps without an exchange, and exchanges alone.

    Stragglers are ranks that are slower than the others in the same step; what slows all of them is no straggling. The
    ranks of such a run share the cores with the exchange, so the two do not overlap.
    """
    usual_ms = [statistics.median(one["compute_ms"]) for one in rounds]
    ratios = [ms / usual for one, usual in zip(rounds, usual_ms, strict=True) for ms in one["compute_ms"]]
    exchange_ms = statistics.mean(one["exchange_ms"] for one in rounds)
    plan = StepPlan(0.0, (statistics.mean(usual_ms) / 1000,), (exchange_ms / 1000,), overlapped=False)
    ranks = len(rounds[0]["compute_ms"])
    step = simulate_steps(plan, Jitter(tuple(ratios)), ranks=ranks, steps=STEPS, seed=seed)
    return RunCheck(1000 * step.total_s, statistics.mean(one["run_ms"] for one in rounds))


def _step_s(compute_s: float, gpus: int, seed: int) -> float:
    """A step that computes for `compute_s` and then exchanges all gradients."""
    num_bytes = FP16_BYTES * sum(region.parameters for region in REGIONS)
    plan = StepPlan(0.0, (compute_s,), (all_reduce_s(num_bytes, DGX_H100, gpus),), overlapped=False)
    return simulate_steps(plan, measured_jitter(), ranks=gpus, steps=STEPS, seed=seed).total_s


def _compute_s(record: Record, seed: int) -> float:
    """Seconds of computing with which the model's step takes as long as the published one."""
    compute_s = record.step_s
    for _ in range(8):  # each round leaves about 3 % of the error: what stragglers add to a change
        compute_s += record.step_s - _step_s(compute_s, record.gpus, seed)
    return compute_s
