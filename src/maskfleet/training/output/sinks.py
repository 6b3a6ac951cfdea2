"""Where the metrics of a run go: metrics.jsonl, the log and TensorBoard; services are in `trackers`.

To add a sink: a class with `write` and `close`, a line in `open_sinks`, and a test.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from maskfleet.config.load import METRICS_FILE
from maskfleet.errors import TrainingError
from maskfleet.log import BETWEEN, duration_text, log_line, log_metrics, logger, number_text
from maskfleet.system.files import write_atomically
from maskfleet.training.output.measurement import AP, Measurement, parsed_line
from maskfleet.training.output.names import EPOCH, IMAGES_PER_S, LEARNING_RATE, TOTAL_LOSS, loss_names
from maskfleet.training.output.tensorboard import TensorBoard


class Sink(Protocol):
    """One destination of measurements; only rank 0 has sinks."""

    def write(self, measurement: Measurement) -> None:
        """Write down a measurement; a sink ignores what it cannot show, such as pictures in a text file."""

    def close(self) -> None:
        """Finish pending writes."""


def open_sinks(run_dir: Path, log: Sink, *, after_step: int, evaluation_due: bool = False) -> tuple[Sink, ...]:
    """The sinks of a run that starts or resumes after `after_step`; what they hold of later steps is dropped.

    `evaluation_due`: the run evaluates again after that step, so that an earlier result is dropped from the file.
    """
    return (
        MetricsFile(run_dir, after_step=after_step, evaluation_due=evaluation_due),
        log,
        TensorBoard(run_dir / "tensorboard", after_step=after_step),
    )


class MetricsFile:
    """RUN_DIR/metrics.jsonl: one JSON object per measurement."""

    def __init__(self, run_dir: Path, *, after_step: int, evaluation_due: bool = False) -> None:
        self._path = run_dir / METRICS_FILE
        if self._path.is_file():
            self._truncate(after_step, evaluation_due)

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

    def _truncate(self, after_step: int, evaluation_due: bool) -> None:
        """Drop the lines of later steps and of an evaluation to be repeated, and a line that a kill left incomplete."""

        def is_kept(line: bytes) -> bool:
            record = parsed_line(line)
            if record is None or record["step"] > after_step:
                return False
            return not (evaluation_due and record["step"] == after_step and any(AP in name for name in record))

        lines = self._path.read_bytes().splitlines(keepends=True)
        kept = [line.rstrip(b"\n") + b"\n" for line in lines if is_kept(line)]
        if kept == lines:
            return
        _replace(self._path, b"".join(kept))
        dropped = len(lines) - len(kept)
        logger.info("dropped %d lines of %s: the run resumes after step %d", dropped, METRICS_FILE, after_step)


class MetricLog:
    """All metrics of every measurement in the log, as one line of `name: value` pairs."""

    def write(self, measurement: Measurement) -> None:
        if measurement.values:
            prefix = "evaluation  " if measurement.is_evaluation else ""
            log_metrics({"step": measurement.step, **measurement.values}, prefix=prefix)

    def close(self) -> None:
        """Nothing is pending: `log.close_logging` closes the log."""


@dataclass(frozen=True, slots=True)
class ShortLog:
    """What a person looks for, in the log: progress, losses, learning rate, speed and the time left."""

    total_steps: int
    images_per_step: int

    def write(self, measurement: Measurement) -> None:
        if measurement.is_evaluation:
            MetricLog().write(measurement)
        elif measurement.values:
            log_line(self.line(measurement))

    def line(self, measurement: Measurement) -> str:
        """The line of a measurement, with short names and four digits."""
        values = measurement.values
        parts = [f"step: {measurement.step}/{self.total_steps}", f"epoch: {values[EPOCH]:g}"]
        parts += [f"{_short_name(name)}: {values[name]:.4g}" for name in loss_names(values)]
        parts += [f"lr: {values[LEARNING_RATE]:.4g}", f"{values[IMAGES_PER_S]:.4g} images/s"]
        steps_left = self.total_steps - measurement.step
        if steps_left > 0 and values[IMAGES_PER_S] > 0:
            parts.append(f"{duration_text(steps_left * self.images_per_step / values[IMAGES_PER_S])} left")
        return BETWEEN.join(parts)

    def close(self) -> None:
        """Nothing is pending: `log.close_logging` closes the log."""


def _short_name(name: str) -> str:
    """`rpn_label` for rpn_losses/label_loss, `maskrcnn` for maskrcnn_loss/maskrcnn_loss, `loss` for the total."""
    if name == TOTAL_LOSS:
        return "loss"
    parts = [re.sub(r"_loss(es)?(?=$|_)", "", part) for part in name.split("/")]
    return "_".join(dict.fromkeys(parts))


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
