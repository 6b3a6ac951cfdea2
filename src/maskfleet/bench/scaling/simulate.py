"""Discrete-event simulations of a training step on many ranks and of a whole run. The same seed, the same result."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Jitter:
    """How much a rank's steps vary: ratios to the usual step to draw from, and rare, long interruptions."""

    ratios: tuple[float, ...] = (1.0,)
    hiccup_chance: float = 0.0  # per rank and step
    hiccup_s: float = 0.0

    def draw(self, usual_s: float, ranks: int, random: np.random.Generator) -> Array:
        """Seconds that each rank computes in one step."""
        ratios = random.choice(np.asarray(self.ratios), size=ranks)
        return usual_s * ratios + self.hiccup_s * (random.random(ranks) < self.hiccup_chance)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step of one rank: forward, then backward region by region, whose gradients are exchanged as they are done."""

    forward_s: float  # with the update
    backward_s: tuple[float, ...]
    exchange_s: tuple[float, ...]  # all-reduce of each region's gradients
    load_s: float = 0.0  # between two batches of this rank's loader
    prefetch: int = 2  # batches that the loader may be ahead
    overlapped: bool = True  # whether an exchange runs while the next region computes

    @property
    def compute_s(self) -> float:
        return self.forward_s + sum(self.backward_s)


@dataclass(frozen=True, slots=True)
class StepTime:
    """Mean seconds of a step and its parts, which sum up to it."""

    compute_s: float  # mean over ranks
    loader_s: float  # mean wait for a batch
    stragglers_s: float  # from the mean rank's end of backward to the last one's
    communication_s: float  # from there to the end of the exchange

    @property
    def total_s(self) -> float:
        return self.compute_s + self.loader_s + self.stragglers_s + self.communication_s


def simulate_steps(plan: StepPlan, jitter: Jitter, *, ranks: int, steps: int, seed: int) -> StepTime:
    """Play `steps` steps on `ranks` ranks. All ranks leave an exchange together, so each step starts at one moment."""
    random = np.random.default_rng([seed, ranks])
    done_shares = np.cumsum((plan.forward_s + plan.backward_s[0], *plan.backward_s[1:])) / plan.compute_s
    exchange_s = plan.exchange_s if plan.overlapped else (sum(plan.exchange_s),)
    if not plan.overlapped:
        done_shares = done_shares[-1:]
    now, loaded_at = 0.0, np.zeros(ranks)
    free_at: deque[Array] = deque([np.zeros(ranks)] * plan.prefetch, maxlen=plan.prefetch)  # slots of the queue
    parts = np.zeros(4)
    for _ in range(steps):
        loaded_at = np.maximum(loaded_at, free_at[0]) + plan.load_s
        started_at = np.maximum(now, loaded_at)
        free_at.append(started_at)
        compute_s = jitter.draw(plan.compute_s, ranks, random)
        computed_at = started_at + compute_s
        exchanged_at = 0.0
        for share, seconds in zip(done_shares, exchange_s, strict=True):
            exchanged_at = max(exchanged_at, float((started_at + share * compute_s).max())) + seconds
        last = float(computed_at.max())
        end = max(exchanged_at, last)
        parts += (compute_s.mean(), started_at.mean() - now, last - computed_at.mean(), end - last)
        now = end
    compute, loader, stragglers, communication = (float(part) for part in parts / steps)
    return StepTime(compute, loader, stragglers, communication)


@dataclass(frozen=True, slots=True)
class RunPlan:
    """A whole run: its work in seconds of steps, where it pauses and what a failure costs."""

    epoch_s: float
    epochs: int
    start_s: float
    evaluation_s: float  # at the end of each epoch
    checkpoint_s: float  # blocked by one checkpoint
    checkpoint_every_s: float
    failures_per_s: float
    restart_s: float  # from a failure to the next step


@dataclass(frozen=True, slots=True)
class RunTime:
    """Mean seconds of a run and its parts, which sum up to it."""

    work_s: float
    start_s: float
    pauses_s: float  # evaluation and checkpoints
    failures_s: float  # restarts and the work done twice
    num_failures: float

    @property
    def total_s(self) -> float:
        return self.work_s + self.start_s + self.pauses_s + self.failures_s


def simulate_run(plan: RunPlan, *, repeats: int, seed: int) -> RunTime:
    """The mean of `repeats` runs. A failure discards the work since the last checkpoint."""
    runs = [_one_run(plan, np.random.default_rng([seed, number])) for number in range(repeats)]
    clock_s, pauses_s, failures = np.asarray(runs).mean(axis=0).tolist()
    work_s = plan.epoch_s * plan.epochs
    return RunTime(work_s, plan.start_s, pauses_s, clock_s - plan.start_s - work_s - pauses_s, failures)


def _one_run(plan: RunPlan, random: np.random.Generator) -> tuple[float, float, float]:
    """Seconds of one run, those of its pauses, and its failures."""
    clock_s, paused_s, failures = plan.start_s, 0.0, 0
    fails_at = clock_s + _until_failure(plan, random)
    stops = _checkpoints(plan)
    saved_s, index = 0.0, 0
    while index < len(stops):
        work_s, ends_epoch = stops[index]
        reached_at = clock_s + work_s - saved_s
        if fails_at <= reached_at:
            failures += 1
            clock_s = max(clock_s, fails_at) + plan.restart_s  # one during a pause counts from its end
            fails_at = clock_s + _until_failure(plan, random)
            continue
        pause_s = plan.checkpoint_s + (plan.evaluation_s if ends_epoch else 0.0)
        clock_s, paused_s, saved_s, index = reached_at + pause_s, paused_s + pause_s, work_s, index + 1
    return clock_s, paused_s, float(failures)


def _until_failure(plan: RunPlan, random: np.random.Generator) -> float:
    return float(random.exponential(1 / plan.failures_per_s)) if plan.failures_per_s else float("inf")


def _checkpoints(plan: RunPlan) -> Sequence[tuple[float, bool]]:
    """(work done, whether an epoch ends there) at each checkpoint."""
    inside = max(1, int(np.ceil(plan.epoch_s / plan.checkpoint_every_s)))
    return [
        (plan.epoch_s * (epoch + part / inside), part == inside)
        for epoch in range(plan.epochs)
        for part in range(1, inside + 1)
    ]
