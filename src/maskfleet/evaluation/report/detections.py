"""The part of a report about detections: curves, kinds of errors, confused classes, sizes and scores.

Shapes: T IoU thresholds, R recall levels, K categories.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray

from maskfleet.evaluation.analysis.analyze import KindAnalysis
from maskfleet.evaluation.analysis.confusion import Confusion
from maskfleet.evaluation.analysis.curves import NOT_MEASURED, RECALL_LEVELS
from maskfleet.evaluation.analysis.matches import AT_50, IOU_THRESHOLDS
from maskfleet.evaluation.report.record import KINDS, ReportedRun
from maskfleet.html.charts import Band, Point, Series, bar, histogram, line_chart
from maskfleet.html.heat_map import heat_map

SHOWN_IOUS = (0.5, 0.75, 0.9)
SIZE_EDGES = (0, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384)  # side of a square of the object's area, in pixels
SCORE_BINS = 20
CLASSES_IN_MATRIX = 80
CONFUSIONS_LISTED = 12


@dataclass(frozen=True, slots=True)
class ErrorRow:
    """A kind of error, with count, cost in percent points of AP50 and a bar for each column."""

    name: str
    meaning: str
    cells: list[tuple[int, str, Markup]]


def curve_charts(runs: Sequence[ReportedRun]) -> list[Markup]:
    """Precision against recall: of one run at three IoUs, of several runs a chart for each of two IoUs."""
    known = [(run, run.analysis) for run in runs if run.analysis is not None]
    charts = []
    for kind, word in KINDS.items():
        of_kind = [(run, analysis.by_kind[kind]) for run, analysis in known if kind in analysis.by_kind]
        title = f"Precision and recall of {'boxes' if word == 'box' else 'masks'}"
        if len(runs) == 1:
            groups = [(title, [(f"IoU {iou:.2f}", one, iou) for _, one in of_kind for iou in SHOWN_IOUS])]
        else:
            groups = [
                (f"{title}, IoU {iou:.2f}", [(run.name, one, iou) for run, one in of_kind]) for iou in (0.5, 0.75)
            ]
        for text, lines in groups:
            series = [Series(name, _mean_curve(one, iou), color) for color, (name, one, iou) in enumerate(lines, 1)]
            charts.append(line_chart(series, title=text, x_label="recall", y_text=lambda share: f"{share:.2g}"))
    return [chart for chart in charts if chart]


def _mean_curve(one: KindAnalysis, iou: float) -> list[Point]:
    """The mean over classes of precision at each recall."""
    precision: NDArray[np.float64] = one.precision[IOU_THRESHOLDS.index(iou)]  # [R, K]
    measured = precision[:, precision[0] != NOT_MEASURED]
    if not measured.size:
        return []
    return list(zip(RECALL_LEVELS.round(2).tolist(), measured.mean(axis=1).tolist(), strict=True))


def error_table(runs: Sequence[ReportedRun]) -> tuple[list[str], list[ErrorRow]]:
    """Titles of the columns, one for each kind of each run, and the rows."""
    columns = [
        (KINDS[kind] if len(runs) == 1 else f"{run.name} {KINDS[kind]}", run.analysis.by_kind[kind].errors)
        for kind in KINDS
        for run in runs
        if run.analysis is not None and kind in run.analysis.by_kind
    ]
    largest = max((error.ap50_cost for _, errors in columns for error in errors), default=0.0)
    rows = []
    for errors in zip(*(errors for _, errors in columns), strict=True):
        cells = [
            (one.count, f"{100 * one.ap50_cost:.1f}", bar(max(one.ap50_cost, 0.0), largest, label=one.name))
            for one in errors
        ]
        rows.append(ErrorRow(errors[0].name, errors[0].meaning, cells))
    return [title for title, _ in columns], rows


def score_histogram(one: KindAnalysis) -> Markup:
    """Detections by score: right ones, with an object at IoU 0.5, and wrong ones."""
    matches = one.matches
    counted = ~matches.is_ignored[:, AT_50]
    place = np.minimum((matches.score * SCORE_BINS).astype(int), SCORE_BINS - 1)
    right, wrong = (
        np.bincount(place[counted & flag], minlength=SCORE_BINS).tolist()
        for flag in (matches.is_right[:, AT_50], ~matches.is_right[:, AT_50])
    )
    names = [f"score {number / SCORE_BINS:.2f} to {(number + 1) / SCORE_BINS:.2f}" for number in range(SCORE_BINS)]
    return histogram(
        {"right": right, "wrong": wrong},
        title="Detections by score",
        x_label="score",
        y_label="detections",
        bin_names=names,
        x_ticks=[(position, f"{position / SCORE_BINS:g}") for position in range(0, SCORE_BINS + 1, 4)],
    )


def size_histogram(one: KindAnalysis) -> Markup:
    """Objects by size: those that were found at IoU 0.5, and those that were not."""
    matches = one.matches
    place = np.searchsorted(SIZE_EDGES, np.sqrt(matches.object_area), side="right") - 1
    place = np.clip(place, 0, len(SIZE_EDGES) - 1)
    found, missed = (
        np.bincount(place[flag], minlength=len(SIZE_EDGES)).tolist()
        for flag in (matches.is_found[:, AT_50], ~matches.is_found[:, AT_50])
    )
    ends = [*(f"to {edge}²" for edge in SIZE_EDGES[1:]), "and more"]
    small, large = SIZE_EDGES.index(32), SIZE_EDGES.index(96)
    return histogram(
        {"found": found, "missed": missed},
        title="Objects by size",
        x_label="square root of the area, px",
        y_label="objects",
        bin_names=[f"{start}² {end} px" for start, end in zip(SIZE_EDGES, ends, strict=True)],
        x_ticks=[(position, str(edge)) for position, edge in enumerate(SIZE_EDGES)],
        bands=[Band(0, small, "small"), Band(small, large, "medium"), Band(large, len(SIZE_EDGES), "large")],
    )


def confusion_chart(confusion: Confusion) -> Markup:
    """The classes with the most objects as a heat map; detections on no object are not in it."""
    counts = confusion.counts
    chosen = np.argsort(-counts[:-1].sum(axis=1), kind="stable")[:CLASSES_IN_MATRIX]
    chosen = np.sort(chosen)
    rows = [[*counts[row, chosen].tolist(), int(counts[row, -1])] for row in chosen.tolist()]
    return heat_map(
        rows, names=[confusion.names[row] for row in chosen.tolist()], title="Confusion matrix", last_column="not found"
    )
