"""What a run measures: losses summed on the device and read once per log line, speed and memory of the host.

Loss terms and other metrics of the network get their names where they are computed, in `model/`; evaluation scores in
`evaluation/coco_eval.py`; everything else here. To add a metric of the run: a line in `HOST_METRICS` and a test.

Shapes: L loss terms, M other metrics.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from maskfleet.config.load import METRICS_FILE
from maskfleet.errors import TrainingError
from maskfleet.training.output.measurement import Measurement, parsed_line
from maskfleet.training.output.names import (
    CHECKPOINT_S,
    DATA_WAIT_S,
    EPOCH,
    IMAGES_PER_S,
    LEARNING_RATE,
    MEMORY_MIB,
    TOTAL_LOSS,
)
from maskfleet.training.output.sinks import Sink

MIB = 2**20


@dataclass(frozen=True, slots=True)
class Interval:
    """The steps since the last log line, as the host saw them."""

    lr: float
    steps: int
    images: int  # of all ranks
    elapsed_s: float
    data_wait_s: float  # of all steps together
    device: torch.device
    saved_s: float = 0.0  # waiting for checkpoints, of all steps together


HOST_METRICS: dict[str, Callable[[Interval], float]] = {
    LEARNING_RATE: lambda interval: interval.lr,
    IMAGES_PER_S: lambda interval: round(interval.images / interval.elapsed_s, 3),
    DATA_WAIT_S: lambda interval: round(interval.data_wait_s / interval.steps, 6),  # per step
    CHECKPOINT_S: lambda interval: round(interval.saved_s, 3),
    MEMORY_MIB: lambda interval: round(peak_memory_mib(interval.device), 1),
}


def host_metrics(interval: Interval) -> dict[str, float]:
    """All of `HOST_METRICS`, by name."""
    return {name: measure(interval) for name, measure in HOST_METRICS.items()}


def peak_memory_mib(device: torch.device) -> float:
    """Peak memory so far: of the GPU, or of this process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / MIB
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024  # Linux counts in KiB


class Metrics:
    """Sums of the loss terms since the last log line, and the sinks that all measurements go to.

    Every rank has one and calls the same methods; only rank 0 has sinks. `mean_over_ranks` takes a float64 vector on
    the host and returns its mean over the ranks; without it each rank's numbers are its own.
    """

    def __init__(
        self,
        sinks: Sequence[Sink],
        *,
        mean_over_ranks: Callable[[Tensor], Tensor] | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._sinks = sinks
        self._mean_over_ranks = mean_over_ranks
        self._clock = clock
        self._names: list[str] = []
        self._sums: Tensor | None = None  # [L] float64
        self._count = 0

    def add(self, losses: Mapping[str, Tensor]) -> None:
        """Add the loss terms of one step, scalars; nothing is read back from the device."""
        values = torch.stack([loss.detach() for loss in losses.values()]).double()  # [L]
        if self._sums is None:
            self._names, self._sums = list(losses), values
        else:
            assert self._names == list(losses), "every step has the same loss terms"
            self._sums = self._sums.to(values.device) + values
        self._count += 1

    def write(
        self,
        step: int,
        *,
        epoch: int,
        host: Mapping[str, float],
        network: Mapping[str, Tensor] | None = None,
        extra: Mapping[str, float] | None = None,
    ) -> dict[str, float]:
        """Write the mean of each loss term since the last write, their sum `total_cost`, and the given metrics.

        `host` comes from `host_metrics`, `network` from the step. This is the only time that the host waits for the
        device. Returns what was written.
        """
        values = {EPOCH: epoch, **host, **self._read_means(network or {}), **(extra or {})}
        self._send(step, values=values)
        return values

    def write_eval(self, step: int, epoch: int, scores: Mapping[str, float]) -> None:
        """Write the scores of an evaluation after `step`, all on one line."""
        self._send(step, values={EPOCH: epoch, **scores}, is_evaluation=True)

    def write_picture(self, step: int, tag: str, picture: NDArray[np.uint8]) -> None:
        """Send `picture` [H, W, 3] BGR to the sinks that show pictures."""
        self._send(step, pictures={tag: picture})

    def state_dict(self) -> dict[str, Any]:
        """This rank's sums since the last write; JSON stores them to the last bit."""
        sums = [] if self._sums is None else self._sums.tolist()
        return {"names": list(self._names), "sums": sums, "count": self._count}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state`, so that the next write has the same digits as without an interruption."""
        self._names, self._count = list(state["names"]), int(state["count"])
        self._sums = torch.tensor(state["sums"], dtype=torch.float64) if self._count else None

    def close(self) -> None:
        """Close all sinks."""
        for sink in self._sinks:
            sink.close()

    def _read_means(self, network: Mapping[str, Tensor]) -> dict[str, float]:
        """Means of the loss terms over steps, then `network`, all averaged over the ranks; resets the sums."""
        parts = []
        if self._sums is not None:
            parts.append(self._sums / self._count)  # [L]
        if network:
            parts.append(torch.stack([value.detach().double() for value in network.values()]))  # [M]
        names, num_losses = self._names, 0 if self._sums is None else len(self._names)
        self._names, self._sums, self._count = [], None, 0
        if not parts:
            return {}
        device = parts[-1].device  # sums from a checkpoint are still on the host
        vector = torch.cat([part.to(device) for part in parts]).cpu()  # [L + M]
        if self._mean_over_ranks is not None:
            vector = self._mean_over_ranks(vector)
        numbers: list[float] = vector.tolist()
        means = {TOTAL_LOSS: _rounded(sum(numbers[:num_losses]))} if num_losses else {}
        return means | {name: _rounded(number) for name, number in zip([*names, *network], numbers, strict=True)}

    def _send(self, step: int, **content: Any) -> None:
        measurement = Measurement(step, round(self._clock(), 3), **content)
        for sink in self._sinks:
            sink.write(measurement)


def read_metrics(run_dir: Path) -> list[dict[str, float]]:
    """The lines of RUN_DIR/metrics.jsonl, oldest first; empty without the file. Incomplete lines are left out."""
    path = run_dir / METRICS_FILE
    if not path.exists():
        return []
    try:
        records = [parsed_line(line) for line in path.read_bytes().splitlines()]
    except OSError as error:
        raise TrainingError(
            f"cannot read {path}: {error.strerror}", remedy="check that you may read the run directory"
        ) from error
    return [record for record in records if record is not None]


def _rounded(number: float) -> float:
    """`number` to nine digits: enough to tell any two float32 values apart."""
    return float(f"{number:.9g}")
