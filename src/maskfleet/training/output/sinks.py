"""Where the metrics of a run go: metrics.jsonl, the log and TensorBoard.

To add a sink: a class with `write` and `close`, a line in `open_sinks`, and a test.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from maskfleet.errors import TrainingError
from maskfleet.log import log_metrics, logger, number_text
from maskfleet.system.files import write_atomically
from maskfleet.training.output.tensorboard import TensorBoard

METRICS_FILE = "metrics.jsonl"


@dataclass(frozen=True, slots=True)
class Measurement:
    """What a run measured after one step: values by metric name, and pictures by tag."""

    step: int
    time: float  # seconds since 1970
    values: Mapping[str, float] = field(default_factory=dict)
    pictures: Mapping[str, NDArray[np.uint8]] = field(default_factory=dict)  # [H, W, 3] BGR
    is_evaluation: bool = False


class Sink(Protocol):
    """One destination of measurements; only rank 0 has sinks."""

    def write(self, measurement: Measurement) -> None:
        """Write down a measurement; a sink ignores what it cannot show, such as pictures in a text file."""

    def close(self) -> None:
        """Finish pending writes."""


def open_sinks(run_dir: Path, *, after_step: int) -> tuple[Sink, ...]:
    """The sinks of a run that starts or resumes after `after_step`; what they hold of later steps is dropped."""
    return (
        MetricsFile(run_dir, after_step=after_step),
        MetricLog(),
        TensorBoard(run_dir / "tensorboard", after_step=after_step),
    )


class MetricsFile:
    """RUN_DIR/metrics.jsonl: one JSON object per measurement."""

    def __init__(self, run_dir: Path, *, after_step: int) -> None:
        self._path = run_dir / METRICS_FILE
        if self._path.is_file():
            self._truncate(after_step)

    def write(self, measurement: Measurement) -> None:
        if not measurement.values:
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("ab") as file:
                file.write(_json_line({"step": measurement.step, **measurement.values, "time": measurement.time}))
        except OSError as error:
            raise _cannot_write(self._path, error) from error

    def close(self) -> None:
        """Nothing is pending: the file is closed after every line."""

    def _truncate(self, after_step: int) -> None:
        """Drop the lines of later steps, and a line that a kill left incomplete."""
        lines = self._path.read_bytes().splitlines(keepends=True)
        kept = [line.rstrip(b"\n") + b"\n" for line in lines if _step_of(line) <= after_step]
        if kept == lines:
            return
        _replace(self._path, b"".join(kept))
        dropped = len(lines) - len(kept)
        logger.info("dropped %d lines of %s: the run resumes after step %d", dropped, METRICS_FILE, after_step)


class MetricLog:
    """One line of `name: value` pairs in the log per measurement."""

    def write(self, measurement: Measurement) -> None:
        if measurement.values:
            prefix = "evaluation  " if measurement.is_evaluation else ""
            log_metrics({"step": measurement.step, **measurement.values}, prefix=prefix)

    def close(self) -> None:
        """Nothing is pending: `log.close_logging` closes the log."""


def parsed_line(line: bytes) -> dict[str, float] | None:
    """The values of one line of metrics.jsonl, with NaN for null; None if the line is incomplete."""
    try:
        record = json.loads(line)
    except ValueError:
        return None
    if not isinstance(record, dict) or not isinstance(record.get("step"), int):
        return None
    return {name: math.nan if value is None else value for name, value in record.items()}


def _step_of(line: bytes) -> float:
    record = parsed_line(line)
    return math.inf if record is None else record["step"]


def _json_line(record: Mapping[str, float]) -> bytes:
    """`record` as strict JSON, which has no NaN: values that are not finite become null."""
    fields = (
        f"{json.dumps(name)}: {number_text(value) if math.isfinite(value) else 'null'}"
        for name, value in record.items()
    )
    return f"{{{', '.join(fields)}}}\n".encode()


def _replace(path: Path, content: bytes) -> None:
    try:
        write_atomically(path, content)
    except OSError as error:
        raise _cannot_write(path, error) from error


def _cannot_write(path: Path, error: OSError) -> TrainingError:
    return TrainingError(
        f"cannot write {path}: {error.strerror}",
        remedy="free disk space or get write access there, then start the same command again to continue",
    )
