"""The training part of a report: curves, and where the time went."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from markupsafe import Markup

from maskfleet.evaluation.report.record import KINDS, ReportedRun
from maskfleet.html.charts import Point, Series, line_chart, smoothed, stacked_bar
from maskfleet.log import duration_text

AP_NAMES = {"IoU=0.5:0.95": "AP", "IoU=0.5": "AP50"}


@dataclass(frozen=True, slots=True)
class TimeUse:
    """Seconds of a run by what it did."""

    run: str
    seconds: Mapping[str, float]

    @property
    def bar(self) -> Markup:
        """The shares as one bar."""
        return stacked_bar(list(self.seconds.items()), title=f"time of {self.run}", text=duration_text)

    @property
    def rows(self) -> list[tuple[str, str, float]]:
        """Name, duration and share of each part."""
        total = sum(self.seconds.values()) or 1.0
        return [(name, duration_text(value), value / total) for name, value in self.seconds.items()]


def training_charts(runs: Sequence[ReportedRun]) -> list[Markup]:
    """The charts, most important first: of one run in detail, of several one line each."""
    charts = _charts_of_one(runs[0]) if len(runs) == 1 else _charts_of_several(runs)
    return [chart for chart in charts if chart]


def _charts_of_one(run: ReportedRun) -> list[Markup]:
    training = run.training
    ap = {f"mAP({kind})/{iou}": f"{word} {name}" for kind, word in KINDS.items() for iou, name in AP_NAMES.items()}
    # without the loss terms of single pyramid levels
    terms = [name for name in (training[-1] if training else {}) if name.endswith("_loss") and "/level" not in name]
    return [
        line_chart(_raw_and_smooth("loss", points(training, "total_cost"), 1), title="Total loss"),
        line_chart(
            [Series(label, _measured(run.metrics, name), color) for color, (name, label) in enumerate(ap.items(), 1)],
            title="Validation AP",
            y_text=_percent,
        ),
        line_chart(
            [Series(name, smoothed(points(training, name)), color) for color, name in enumerate(terms, 1)],
            title="Loss terms, smoothed",
        ),
        line_chart([Series("learning rate", points(training, "learning_rate"))], title="Learning rate"),
        line_chart(_raw_and_smooth("images/s", points(training, "images_per_s"), 3), title="Speed, images/s"),
        line_chart(_raw_and_smooth("ms", _waits_ms(training), 4), title="Data wait, ms per step"),
    ]


def _charts_of_several(runs: Sequence[ReportedRun]) -> list[Markup]:
    def overlaid(
        title: str, of_run: Callable[[ReportedRun], Sequence[Point]], y_text: Callable[[float], str] | None = None
    ) -> Markup:
        lines = [Series(run.name, of_run(run), color) for color, run in enumerate(runs, 1)]
        return line_chart(lines, title=title, y_text=y_text)

    charts = [overlaid("Total loss, smoothed", lambda run: smoothed(points(run.training, "total_cost")))]
    for kind, word in KINDS.items():
        name = f"mAP({kind})/IoU=0.5:0.95"
        charts.append(
            overlaid(f"Validation {word} AP", lambda run, name=name: _measured(run.metrics, name), _percent)  # type: ignore[misc]
        )
    return [
        *charts,
        overlaid("Learning rate", lambda run: points(run.training, "learning_rate")),
        overlaid("Speed, images/s, smoothed", lambda run: smoothed(points(run.training, "images_per_s"))),
        overlaid("Data wait, ms per step, smoothed", lambda run: smoothed(_waits_ms(run.training))),
    ]


def time_use(run: ReportedRun) -> TimeUse | None:
    """Where the time of a run went, from metrics.jsonl; None without two lines of training.

    A line has the speed since the line before, the wait for data per step and for checkpoints in all. What is left
    between the first and the last line: the run was interrupted, or worked again on steps it had lost. Parts that the
    run did not measure are left out.
    """
    training, images_per_gpu = run.training, run.images_per_gpu
    if len(training) < 2 or images_per_gpu is None:
        return None
    steps = data_s = saves_s = 0.0
    for before, line in pairwise(training):
        num_steps = line["step"] - before["step"]
        images = num_steps * line.get("ranks", 1) * images_per_gpu
        elapsed_s = images / line["images_per_s"] if line.get("images_per_s", 0) > 0 else 0.0
        waited_s = min(num_steps * line.get("data_wait_s", 0.0), elapsed_s)
        saved_s = min(line.get("checkpoint_s", 0.0), elapsed_s - waited_s)
        data_s, saves_s, steps = data_s + waited_s, saves_s + saved_s, steps + elapsed_s - waited_s - saved_s
    evaluations = [line for line in run.metrics if "evaluation_s" in line]
    known = {"training steps": steps, "waiting for data": data_s}
    if evaluations:
        known["evaluation"] = sum(line["evaluation_s"] for line in evaluations)
    if any("checkpoint_s" in line for line in run.metrics):
        known["checkpoints"] = saves_s + sum(line.get("checkpoint_s", 0.0) for line in evaluations)
    total_s = max(line["time"] for line in run.metrics) - training[0]["time"]
    return TimeUse(run.name, known | {"interruptions and other": max(total_s - sum(known.values()), 0.0)})


def points(records: Sequence[Mapping[str, float]], name: str) -> list[Point]:
    """(step, value) of a metric."""
    return [(record["step"], record[name]) for record in records if name in record]


def _measured(records: Sequence[Mapping[str, float]], name: str) -> list[Point]:
    return [point for point in points(records, name) if point[1] >= 0]


def _waits_ms(training: Sequence[Mapping[str, float]]) -> list[Point]:
    return [(step, 1000 * wait_s) for step, wait_s in points(training, "data_wait_s")]


def _raw_and_smooth(name: str, values: Sequence[Point], color: int) -> list[Series]:
    return [Series("raw", values, color, faint=True), Series(name, smoothed(values), color)]


def _percent(score: float) -> str:
    return f"{100 * score:.4g}"
