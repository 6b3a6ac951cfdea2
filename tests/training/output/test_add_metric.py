"""Adding a metric takes a line in `HOST_METRICS`, adding a sink a class and a line in `open_sinks`: done here."""

from __future__ import annotations

from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import SCALARS, EventAccumulator

from maskfleet.config.base import replaced
from maskfleet.config.run import RunConfig
from maskfleet.training import run
from maskfleet.training.output import metrics
from maskfleet.training.output.measurement import Measurement
from maskfleet.training.output.metrics import Interval, read_metrics
from maskfleet.training.output.sinks import Sink, open_sinks


class Csv:
    """Step and total loss, one line per measurement."""

    def __init__(self, path: Path, *, after_step: int) -> None:
        self.path = path
        self.is_closed = False
        lines = path.read_text().splitlines()[1:] if path.exists() else []
        kept = [line for line in lines if int(line.split(",")[0]) <= after_step]
        path.write_text("\n".join(["step,total_cost", *kept]) + "\n")

    def write(self, measurement: Measurement) -> None:
        if "total_cost" in measurement.values:
            with self.path.open("a") as file:
                file.write(f"{measurement.step},{measurement.values['total_cost']!r}\n")

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def csv_sinks(monkeypatch: pytest.MonkeyPatch) -> list[Csv]:
    made: list[Csv] = []

    def sinks(run_dir: Path, log: Sink, *, after_step: int, evaluation_due: bool) -> tuple[Sink, ...]:
        made.append(Csv(run_dir / "losses.csv", after_step=after_step))
        return (*open_sinks(run_dir, log, after_step=after_step, evaluation_due=evaluation_due), made[-1])

    monkeypatch.setattr(run, "open_sinks", sinks)
    return made


def images_per_step(interval: Interval) -> float:
    return interval.images / interval.steps


def test_an_added_metric_and_an_added_sink_are_used_by_a_real_run(
    micro: RunConfig, tmp_path: Path, csv_sinks: list[Csv], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(metrics.HOST_METRICS, "images_per_step", images_per_step)
    run.train(replaced(micro, {"train.epoch_schedule": ((2, None),), "log.all_metrics": True}), tmp_path)

    records = [record for record in read_metrics(tmp_path) if "total_cost" in record]
    assert [record["images_per_step"] for record in records] == [2.0] * 12
    lines = [line for line in (tmp_path / "log.txt").read_text().splitlines() if "total_cost: " in line]
    assert all("  images_per_step: 2.0  " in line for line in lines)
    assert len(lines) == 12
    board = EventAccumulator(str(tmp_path / "tensorboard"), size_guidance={SCALARS: 0})
    board.Reload()
    assert [event.value for event in board.Scalars("images_per_step")] == [2.0] * 12

    rows = [line.split(",") for line in (tmp_path / "losses.csv").read_text().splitlines()[1:]]
    assert [(int(step), float(loss)) for step, loss in rows] == [(r["step"], r["total_cost"]) for r in records]
    assert [sink.is_closed for sink in csv_sinks] == [True]


def test_a_resumed_run_opens_its_sinks_after_the_checkpoint(
    micro: RunConfig, tmp_path: Path, csv_sinks: list[Csv]
) -> None:
    config = replaced(micro, {"train.epoch_schedule": ((2, None),), "eval.every_epochs": 0})
    run.train(config, tmp_path)
    complete = (tmp_path / "losses.csv").read_text()
    newest = max((tmp_path / "checkpoints").glob("*.json"))
    newest.unlink()  # as if the process had been killed before its last checkpoint was complete
    run.train(config, tmp_path)
    assert (tmp_path / "losses.csv").read_text() == complete
    assert len(csv_sinks) == 2
