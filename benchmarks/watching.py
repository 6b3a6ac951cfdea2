"""Watches a run of `maskfleet train` to its end and sums up what it did: speed, pauses, memory, clocks and power."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from run_figures import (
    Interval,
    Line,
    Record,
    by_phase,
    checkpoint_pauses,
    flatness,
    intervals_of,
    is_evaluation,
    seconds_at_end,
    shares,
    speed_of,
    step_alone,
    validation_pauses,
    whole_rates,
)
from running import StartedRun, SwitchWatch
from samples import GpuSamples, HostSamples, Sample

POLL_S, SAMPLE_S, FLUSH_S = 0.2, 2.0, 10.0
WARM_UP_S = 10.0  # of memory, at full speed: workers start, and queues fill up
GPU_STATE = ("sm_clock_mhz", "memory_clock_mhz", "power_w", "temperature_c")
LOAD = ("sample_fast_rcnn_targets/num_fg", "sample_fast_rcnn_targets/num_bg", "total_cost")


@dataclass(slots=True)
class Watch:
    """What was seen of a run so far."""

    run: StartedRun
    host: HostSamples
    gpu: GpuSamples
    switch: SwitchWatch = field(default_factory=SwitchWatch)
    ended_at: float | None = None
    stopped: str = ""  # why we stopped it, if we did

    def summary(
        self, *, val_images: int = 0, epoch_images: int | None = None, benchmark_images_per_s: float | None = None
    ) -> Record:
        """Figures of the run, of as much of it as has happened.

        `val_images` are in each validation, `epoch_images` between two of them in a run on the real data set.
        """
        lines = self.run.lines()
        record: Record = {"ended": self._ending(), "wall_s": round(self._now() - self.run.started_at, 1)}
        if not any(not is_evaluation(line) for line in lines):
            return record | {"end_of_output": self.run.output.strip().splitlines()[-5:]}
        batch = images_per_step(self.run.run_dir, lines)
        intervals = intervals_of(lines, batch)
        phases = by_phase(intervals, self.switch.switch)
        full = phases["full speed"]
        record |= {
            "images_per_step": batch,
            **self._start(intervals, full),
            "compiled": self.switch.switch is not None or "compiled the step for images" in self.run.output,
            "phases": {name: speed_of(some, batch) for name, some in phases.items()},
            "step_alone": step_alone(full, batch),
            "checkpoints": [pause for some in phases.values() for pause in checkpoint_pauses(some)],
            "validations": validation_pauses(lines, batch, val_images, self._now()),
            "load_at_full_speed": load_of(lines, full),
        }
        if full:
            pauses = [one["pause_s"] for one in record["validations"] if "pause_s" in one]
            rates = {
                "from_first_step": whole_rates(intervals, batch, pauses, epoch_images),
                "from_full_speed": whole_rates(full, batch, pauses, epoch_images),
            }
            record["whole_run"] = with_shares(rates, record["step_alone"], benchmark_images_per_s)
            record |= self._samples(lines, full[0].started_at + WARM_UP_S, full[-1].ended_at)
        if self.run.process.returncode not in (None, 0):
            record["end_of_output"] = self.run.output.strip().splitlines()[-5:]
        return record

    def _now(self) -> float:
        return time.time() if self.ended_at is None else self.ended_at

    def _ending(self) -> str:
        if self.ended_at is None:
            return "still running"
        if self.stopped:
            return f"stopped: {self.stopped}"
        code = self.run.process.returncode
        return "finished" if code == 0 else f"failed with exit code {code}"

    def _start(self, intervals: Sequence[Interval], full: Sequence[Interval]) -> Record:
        """Seconds since the start of the process; metrics.jsonl has a line only every `train.log_every_steps`."""
        begin, first, switch = self.run.started_at, intervals[0], self.switch.switch
        return {
            "to_start_of_first_step_s": round(first.started_at - begin, 1),
            "to_first_line_s": round(first.ended_at - begin, 1),
            "first_line_after_step": first.step,
            "to_full_speed_s": round(full[0].started_at - begin, 1) if full else None,
            "switch_s": switch.seconds if switch else None,
        }

    def _samples(self, lines: Sequence[Line], since: float, until: float) -> Record:
        """Memory, clocks and power between two moments."""
        torch_mib = [(line["time"], line["memory_mib"]) for line in lines if "memory_mib" in line]
        series = {
            **{f"host_{name}": values for name, values in self.host.values.items() if name.endswith("_mib")},
            **{f"gpu_{name}": values for name, values in self.gpu.values.items() if name == "memory_used_mib"},
            "peak_of_metrics_mib": torch_mib,
        }
        state = {name: spread(self.gpu.values.get(name, []), since, until) for name in GPU_STATE}
        return {
            "memory_at_full_speed": {name: flatness(values, since, until) for name, values in series.items()},
            "processes": spread(self.host.values.get("processes", []), since, until),
            "gpu_at_full_speed": state,
        }


def watched(
    run: StartedRun, *, timeout_s: float, flush: Callable[[Watch], None], max_end_s: float | None = None
) -> Watch:
    """Watch `run` until it ends; `flush` is called now and then, and at the end.

    The run is stopped after `timeout_s`, and `max_end_s` after a validation that no step follows.
    """
    watch = Watch(run, HostSamples(run.process.pid), GpuSamples(SAMPLE_S))
    next_sample_s = next_flush_s = 0.0
    try:
        while run.is_running:
            time.sleep(POLL_S)
            watch.switch.look(run.output)
            if run.seconds >= next_sample_s:
                watch.host.take()
                next_sample_s += SAMPLE_S
                if max_end_s is not None and seconds_at_end(run.lines(), time.time()) > max_end_s:
                    watch.stopped = f"more than {max_end_s:g} s for the report and the weights"
                    break
            if run.seconds >= next_flush_s:
                flush(watch)
                next_flush_s += FLUSH_S
            if run.seconds >= timeout_s:
                watch.stopped = f"more than {timeout_s:.0f} s"
                break
        run.stop()
    finally:
        watch.ended_at = time.time()
        watch.gpu.close()
        flush(watch)
    return watch


def write(record: Record, path: Path) -> None:
    """Write `record` so that a reader never finds half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".part")
    temporary.write_text(json.dumps(record, indent=2) + "\n")
    temporary.replace(path)


def with_shares(
    rates: Mapping[str, Mapping[str, float]], alone: Record, benchmark_images_per_s: float | None
) -> Record:
    """Each rate with its shares of the speeds of the step."""
    return {
        since: {
            what: {"images_per_s": round(rate, 2), **shares(rate, alone, benchmark_images_per_s)}
            for what, rate in some.items()
        }
        for since, some in rates.items()
    }


def images_per_step(run_dir: Path, lines: Sequence[Line]) -> int:
    """Images of one step on all ranks, which the run may have chosen itself."""
    environment = json.loads((run_dir / "environment.json").read_text())
    return int(environment["images per GPU"]) * int(lines[0]["ranks"])


def load_of(lines: Sequence[Line], intervals: Sequence[Interval]) -> Record:
    """Sampled regions per image, as means over the lines of `intervals`, and the loss."""
    steps = {one.step for one in intervals}
    some = [line for line in lines if line["step"] in steps and not is_evaluation(line)]
    means = {name: statistics.mean(line[name] for line in some) for name in LOAD if some and name in some[0]}
    return {name: round(value, 3) for name, value in means.items()}


def spread(samples: Sequence[Sample], since: float, until: float) -> Record | None:
    """Least, median and most of the samples in a window."""
    values = [value for moment, value in samples if since <= moment <= until]
    if not values:
        return None
    return {"least": min(values), "median": statistics.median(values), "most": max(values)}
