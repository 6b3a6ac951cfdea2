"""Predicted speed and efficiency of R50-FPN Mask R-CNN on 1 to 1,024 GPUs, and what limits them."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain
from typing import Literal

from maskfleet.bench.scaling.parameters import (
    AP_S,
    BACKWARD_SHARE,
    BYTES_PER_GRADIENT,
    CHECKPOINT_EVERY_S,
    CHECKPOINT_S,
    CORES_PER_VCPU,
    DETECT_S,
    EPOCHS,
    EVAL_RATE,
    FED_SHARE,
    GPU_HOURS_PER_FAILURE,
    GPU_SPEEDS,
    HICCUP_CHANCE,
    HICCUP_S,
    LAUNCH_S,
    LOADER_RATE,
    PREFETCH,
    REGIONS,
    REJOIN_S,
    SGD_LIMIT,
    START_S,
    STEP_MS,
    STEP_RATIOS,
    TRAIN_IMAGES,
    VAL_IMAGES,
)
from maskfleet.bench.scaling.simulate import (
    Jitter,
    RunPlan,
    RunTime,
    StepPlan,
    StepTime,
    simulate_run,
    simulate_steps,
)
from maskfleet.bench.scaling.topology import Node, all_reduce_s, num_nodes
from maskfleet.errors import ConfigError

RANK_STEPS, MAX_STEPS, REPEATS = 100_000, 400, 50  # simulated per prediction
NEGLIGIBLE = 0.01  # a loss below this share is no limit
GPU_COUNTS = (1, 8, 16, 32, 64, 128, 256, 1024)

Scaling = Literal["weak", "strong"]


@dataclass(frozen=True, slots=True)
class Setting:
    """What a prediction is asked for, beside the instance type and the number of GPUs."""

    images_per_gpu: int = 16
    exchange_dtype: str = "fp32"
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Prediction:
    """One line of the table."""

    instance: str
    scaling: Scaling
    gpus: int
    nodes: int
    images_per_gpu: int
    step: StepTime
    run: RunTime
    efficiency: float  # images per second and GPU, relative to one GPU with Setting.images_per_gpu
    run_efficiency: float  # the same for a whole run, with start, pauses and failures
    losses: dict[str, float]  # what the step loses, by cause
    run_losses: dict[str, float]  # what the run loses, by cause

    @property
    def limit(self) -> str:
        """What costs the step most; `compute` where nothing costs 1 %."""
        return _limit(self.losses)

    @property
    def run_limit(self) -> str:
        """What costs the run most; `steps` where it is what limits the step."""
        return _limit(self.run_losses)

    @property
    def images_per_step(self) -> int:
        return self.gpus * self.images_per_gpu

    @property
    def images_per_s(self) -> float:
        return self.images_per_step / self.step.total_s

    @property
    def beyond_sgd(self) -> bool:
        """Whether no published schedule of SGD reaches the same AP with so many images per update."""
        return self.images_per_step > SGD_LIMIT


def compute_s(images: int, gpu: str) -> float:
    """Seconds of a step of `images` images fed by the loader: linear between and beyond the measured batch sizes."""
    sizes = sorted(STEP_MS)
    above = next((index for index, size in enumerate(sizes[1:], 1) if images <= size), len(sizes) - 1)
    low, high = sizes[above - 1], sizes[above]
    slope = (STEP_MS[high] - STEP_MS[low]) / (high - low)
    step_ms = STEP_MS[low] + slope * (images - low)
    return step_ms / 1000 / FED_SHARE.value / GPU_SPEEDS[gpu].relative


def measured_jitter() -> Jitter:
    """The distribution of step times on one rank."""
    ratios = tuple(chain.from_iterable(STEP_RATIOS))
    return Jitter(ratios, hiccup_chance=HICCUP_CHANCE.value, hiccup_s=HICCUP_S.value)


def step_plan(node: Node, gpus: int, images_per_gpu: int, exchange_dtype: str = "fp32") -> StepPlan:
    """The parts of one step on `gpus` GPUs of `node`."""
    total_s = compute_s(images_per_gpu, node.gpu)
    backward_s = BACKWARD_SHARE.value * total_s
    num_bytes = BYTES_PER_GRADIENT[exchange_dtype]
    exchange_s = (
        LAUNCH_S.value + all_reduce_s(num_bytes * region.parameters, node, gpus) if gpus > 1 else 0.0
        for region in REGIONS
    )
    rate = LOADER_RATE.value * CORES_PER_VCPU.value * node.vcpus / node.gpus
    return StepPlan(
        forward_s=total_s - backward_s,
        backward_s=tuple(backward_s * region.backward_share for region in REGIONS),
        exchange_s=tuple(exchange_s),
        load_s=images_per_gpu / rate,
        prefetch=int(PREFETCH.value),
    )


def run_plan(node: Node, gpus: int, images_per_step: int, step_s: float) -> RunPlan:
    """COCO's 1x schedule with an evaluation after each epoch."""
    evaluated_per_s = EVAL_RATE.value * GPU_SPEEDS[node.gpu].relative * gpus
    return RunPlan(
        epoch_s=math.ceil(TRAIN_IMAGES / images_per_step) * step_s,
        epochs=EPOCHS,
        start_s=START_S.value,
        evaluation_s=VAL_IMAGES / evaluated_per_s + AP_S.value,
        checkpoint_s=CHECKPOINT_S.value,
        checkpoint_every_s=CHECKPOINT_EVERY_S.value,
        failures_per_s=gpus / (GPU_HOURS_PER_FAILURE.value * 3600),
        restart_s=DETECT_S.value + REJOIN_S.value + START_S.value,
    )


def predict(node: Node, gpus: int, setting: Setting, scaling: Scaling = "weak") -> Prediction:
    """Weak scaling keeps the images per GPU; strong scaling reduces them to hold SGD_LIMIT images per step."""
    images = images_per_gpu(gpus, setting, scaling)
    step, run = _simulated(node, gpus, images, setting)
    alone, run_alone = _simulated(node, 1, setting.images_per_gpu, setting)
    losses = _step_losses(step, images, alone, setting.images_per_gpu)
    run_losses = _run_losses(run, gpus, run_alone)
    return Prediction(
        instance=node.name,
        scaling=scaling,
        gpus=gpus,
        nodes=num_nodes(node, gpus),
        images_per_gpu=images,
        step=step,
        run=run,
        efficiency=1 - sum(losses.values()),
        run_efficiency=1 - sum(run_losses.values()),
        losses=losses,
        run_losses=run_losses,
    )


def predictions(node: Node, gpu_counts: Iterable[int], setting: Setting) -> list[Prediction]:
    """Weak scaling for each number of GPUs, and strong scaling where it differs."""
    check_setting(setting)
    found = []
    for gpus in gpu_counts:
        found.append(predict(node, gpus, setting, "weak"))
        if images_per_gpu(gpus, setting, "strong") != setting.images_per_gpu:
            found.append(predict(node, gpus, setting, "strong"))
    return found


def images_per_gpu(gpus: int, setting: Setting, scaling: Scaling) -> int:
    """Images that each GPU gets in a step; at least one."""
    if scaling == "weak":
        return setting.images_per_gpu
    return max(1, min(setting.images_per_gpu, SGD_LIMIT // gpus))


def check_setting(setting: Setting) -> None:
    """Raise ConfigError if no prediction can be made."""
    if setting.images_per_gpu < 1:
        raise ConfigError(
            f"--images-per-gpu {setting.images_per_gpu}: a step needs at least one image", remedy="pass 1 or more"
        )
    if setting.exchange_dtype not in BYTES_PER_GRADIENT:
        raise ConfigError(
            f"--exchange-dtype {setting.exchange_dtype}: gradients are exchanged in {' or '.join(BYTES_PER_GRADIENT)}",
            remedy=f"pass one of {', '.join(BYTES_PER_GRADIENT)}",
        )
    if setting.seed < 0:
        raise ConfigError(f"--seed {setting.seed} is negative", remedy="pass 0 or more")


@functools.lru_cache(maxsize=4096)
def _simulated(node: Node, gpus: int, images: int, setting: Setting) -> tuple[StepTime, RunTime]:
    plan = step_plan(node, gpus, images, setting.exchange_dtype)
    steps = min(MAX_STEPS, -(-RANK_STEPS // gpus))
    step = simulate_steps(plan, measured_jitter(), ranks=gpus, steps=steps, seed=setting.seed)
    run = simulate_run(run_plan(node, gpus, gpus * images, step.total_s), repeats=REPEATS, seed=setting.seed)
    return step, run


def _step_losses(step: StepTime, images: int, alone: StepTime, images_alone: int) -> dict[str, float]:
    """The share of a step that each limit costs compared with one GPU; they sum up to 1 - efficiency."""

    def lost(part_s: float, part_alone_s: float) -> float:
        return (part_s / images - part_alone_s / images_alone) / (step.total_s / images)

    return {
        "small batch": lost(step.compute_s, alone.compute_s),
        "loader": lost(step.loader_s, alone.loader_s),
        "stragglers": lost(step.stragglers_s, alone.stragglers_s),
        "communication": lost(step.communication_s, alone.communication_s),
    }


def _run_losses(run: RunTime, gpus: int, alone: RunTime) -> dict[str, float]:
    """The share of a run that each part costs compared with one GPU; they sum up to 1 - run efficiency."""

    def lost(part_s: float, part_alone_s: float) -> float:
        return (gpus * part_s - part_alone_s) / (gpus * run.total_s)

    return {
        "steps": lost(run.work_s, alone.work_s),
        "start": lost(run.start_s, alone.start_s),
        "pauses": lost(run.pauses_s, alone.pauses_s),
        "failures": lost(run.failures_s, alone.failures_s),
    }


def _limit(losses: dict[str, float]) -> str:
    worst = max(losses, key=losses.__getitem__)
    return worst if losses[worst] >= NEGLIGIBLE else "compute"
