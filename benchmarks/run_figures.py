"""Figures of a run from its metrics.jsonl and from samples of memory: speed by phase, pauses, and what grows.

An interval is the steps between two lines of metrics.jsonl. Times are seconds since 1970, as in these lines.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

Record = dict[str, Any]
Line = Mapping[str, float]
FLAT_GROWTH = 0.02  # of memory, from the first to the last quarter of a run
FASTEST = 0.1  # share of the intervals


@dataclass(frozen=True, slots=True)
class Interval:
    """Steps `after_step` + 1 to `step`."""

    after_step: int
    step: int
    started_at: float
    ended_at: float
    wait_s: float  # for data, of all steps
    checkpoint_s: float

    @property
    def steps(self) -> int:
        return self.step - self.after_step

    @property
    def seconds(self) -> float:
        return self.ended_at - self.started_at

    @property
    def step_s(self) -> float:
        return self.seconds / self.steps

    @property
    def own_step_s(self) -> float:
        """Without waiting for data and checkpoints; too short where a GPU computed while the host waited."""
        return (self.seconds - self.wait_s - self.checkpoint_s) / self.steps


@dataclass(frozen=True, slots=True)
class Switch:
    """When the steps of a run became compiled ones, and how long the run paused for that."""

    ended_at: float
    seconds: float


def is_evaluation(line: Line) -> bool:
    return "evaluation_s" in line


def intervals_of(lines: Sequence[Line], images_per_step: int) -> list[Interval]:
    """The intervals of a run; their clock starts at the line before, or after an evaluation when that has ended."""
    found: list[Interval] = []
    after_step, since = 0, None
    for line in lines:
        if is_evaluation(line):
            since = None
            continue
        steps = int(line["step"]) - after_step
        start = since if since is not None else line["time"] - steps * images_per_step / line["images_per_s"]
        wait_s = line["data_wait_s"] * steps
        found.append(Interval(after_step, int(line["step"]), start, line["time"], wait_s, line["checkpoint_s"]))
        after_step, since = int(line["step"]), line["time"]
    return found


def by_phase(intervals: Sequence[Interval], switch: Switch | None) -> dict[str, list[Interval]]:
    """Intervals before, in and after the switch to compiled steps; without one, all are `full speed`."""
    if switch is None:
        return {"full speed": [*intervals]}
    began_at = switch.ended_at - switch.seconds
    return {
        "eager": [one for one in intervals if one.ended_at <= began_at],
        "switch": [one for one in intervals if one.ended_at > began_at and one.started_at < switch.ended_at],
        "full speed": [one for one in intervals if one.started_at >= switch.ended_at],
    }


def speed_of(intervals: Sequence[Interval], images_per_step: int) -> Record:
    """Steps and images per second of `intervals`; the time between them, in validations, does not count."""
    steps, seconds = sum(one.steps for one in intervals), sum(one.seconds for one in intervals)
    if not steps:
        return {"steps": 0}
    return {
        "first_step": intervals[0].after_step + 1,
        "last_step": intervals[-1].step,
        "steps": steps,
        "seconds": round(seconds, 2),
        "images_per_s": round(steps * images_per_step / seconds, 2),
        "step_ms_median": round(1e3 * statistics.median(one.step_s for one in intervals), 2),
        "data_wait_ms_per_step": round(1e3 * sum(one.wait_s for one in intervals) / steps, 2),
    }


def step_alone(intervals: Sequence[Interval], images_per_step: int) -> Record:
    """The speed of the step itself, in two ways: the median without waiting, and the fastest tenth as it was."""
    if not intervals:
        return {}
    own_s = statistics.median(one.own_step_s for one in intervals)
    fastest = sorted(one.step_s for one in intervals)[: max(1, round(FASTEST * len(intervals)))]
    fastest_s = statistics.median(fastest)
    return {
        "ms_without_waiting": round(1e3 * own_s, 2),
        "images_per_s_without_waiting": round(images_per_step / own_s, 2),
        "ms_fastest_tenth": round(1e3 * fastest_s, 2),
        "images_per_s_fastest_tenth": round(images_per_step / fastest_s, 2),
    }


def shares(images_per_s: float, alone: Mapping[str, float], benchmark_images_per_s: float | None = None) -> Record:
    """`images_per_s` divided by the speeds of the step: those of `step_alone`, and that of a benchmark."""
    found = {
        "of_step_without_waiting": images_per_s / alone["images_per_s_without_waiting"],
        "of_fastest_tenth": images_per_s / alone["images_per_s_fastest_tenth"],
    }
    if benchmark_images_per_s is not None:
        found["of_benchmark"] = images_per_s / benchmark_images_per_s
    return {name: round(value, 4) for name, value in found.items()}


def checkpoint_pauses(intervals: Sequence[Interval]) -> list[Record]:
    """Each interval of a phase with a checkpoint: how long the host waited for it, and what the interval lost by it.

    The host also waits for steps that the GPU has still to do, so it may wait for longer than the run loses. That is
    the time above the median, which noise can make negative.
    """
    usual_s = statistics.median(one.step_s for one in intervals) if intervals else 0.0
    return [
        {
            "steps": [one.after_step + 1, one.step],
            "host_waited_s": round(one.checkpoint_s, 3),
            "lost_s": round(one.seconds - one.steps * usual_s, 3),
        }
        for one in intervals
        if one.checkpoint_s > 0
    ]


def validation_pauses(lines: Sequence[Line], images_per_step: int, num_images: int, ended_at: float) -> list[Record]:
    """Each validation of `num_images` images, with the seconds in which no step was done; a run ended at `ended_at`.

    After its last validation a run also writes its report and its weights, in `end_s`.
    """
    found = []
    intervals = intervals_of(lines, images_per_step)
    for line in filter(is_evaluation, lines):
        before = [one.ended_at for one in intervals if one.step <= line["step"]]
        after = [one.started_at for one in intervals if one.after_step >= line["step"]]
        stages = {name: line[f"evaluation_{name}_s"] for name in ("detect", "score") if f"evaluation_{name}_s" in line}
        record: Record = {
            "after_step": line["step"],
            "images": num_images,
            "checkpoint_before_s": line["checkpoint_s"],
            "evaluation_s": line["evaluation_s"],
            "images_per_s": round(num_images / line["evaluation_s"], 1),
            "stages_s": stages,
            "stages_images_per_s": {name: round(num_images / value, 1) for name, value in stages.items() if value},
            "ap": {name: round(value, 5) for name, value in line.items() if name.endswith("IoU=0.5:0.95")},
        }
        if before:
            record["pause_s"] = round((after[0] if after else line["time"]) - before[-1], 3)
        if not after:
            record["end_s"] = round(ended_at - line["time"], 3)
        found.append(record)
    return found


def seconds_at_end(lines: Sequence[Line], now: float) -> float:
    """Seconds since the last validation, if no step was logged after it; otherwise 0."""
    return now - lines[-1]["time"] if lines and is_evaluation(lines[-1]) else 0.0


def whole_rates(
    intervals: Sequence[Interval], images_per_step: int, pauses_s: Sequence[float], epoch_images: int | None
) -> dict[str, float]:
    """Images per second over the wall time: of training with its checkpoints, and with the validations seen.

    `in_real_epochs` has one such validation for each `epoch_images` images.
    """
    images, seconds = images_per_step * sum(one.steps for one in intervals), sum(one.seconds for one in intervals)
    rates = {"training": images / seconds}
    if pauses_s:
        rates["with_validation"] = images / (seconds + sum(pauses_s))
    if pauses_s and epoch_images is not None:
        rates["in_real_epochs"] = epoch_images / (epoch_images * seconds / images + statistics.mean(pauses_s))
    return rates


def flatness(samples: Sequence[tuple[float, float]], since: float, until: float) -> Record | None:
    """Medians of the quarters of the samples (time, value) in a window, and whether the last is not above the first.

    None with fewer than eight samples.
    """
    values = [value for moment, value in samples if since <= moment <= until]
    if len(values) < 8:
        return None
    ends = [len(values) * quarter // 4 for quarter in range(5)]
    medians = [statistics.median(values[start:end]) for start, end in pairwise(ends)]
    growth = medians[-1] / medians[0] - 1 if medians[0] else 0.0
    return {
        "quarters": [round(median, 1) for median in medians],
        "most": round(max(values), 1),
        "growth": round(growth, 4),
        "flat": growth <= FLAT_GROWTH,
    }
