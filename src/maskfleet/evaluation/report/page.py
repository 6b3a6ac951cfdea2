"""Writes the report: one self-contained HTML file."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from markupsafe import Markup, escape

from maskfleet.errors import TrainingError
from maskfleet.evaluation.analysis.analyze import SHOWN_SCORE
from maskfleet.evaluation.report import detections, scores
from maskfleet.evaluation.report.record import KINDS, Picture, ReportedRun, are_comparable, score_text
from maskfleet.evaluation.report.settings import settings_table
from maskfleet.evaluation.report.training import time_use, training_charts
from maskfleet.html.images import data_uri
from maskfleet.html.page import render
from maskfleet.log import count_text, duration_text
from maskfleet.system.files import write_atomically

FILE = "report.html"
TEMPLATE = Path(__file__).with_name("report.html.jinja")
MAX_PICTURE_PX = 1400  # longer side of an image in the page


@dataclass(frozen=True, slots=True)
class Tile:
    """One of the key numbers at the top of the page."""

    label: str
    value: str
    note: str = ""


def write_report(path: Path, runs: Sequence[ReportedRun], *, next_steps: Sequence[str] = ()) -> Path:
    """Write the report of `runs` to `path` and return it. Text in backticks in a next step is shown as code."""
    page = render(TEMPLATE, made_by="report", **_values(runs), next_steps=[_with_code(step) for step in next_steps])
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, page)
    except OSError as error:
        raise TrainingError(
            f"cannot write the report {path}: {error.strerror}",
            remedy="free some disk space, or choose another directory",
        ) from error
    return path


def _values(runs: Sequence[ReportedRun]) -> dict[str, Any]:
    """Everything that the template shows."""
    columns = scores.columns(runs)
    comparable = len(runs) > 1 and are_comparable(runs)
    error_columns, error_rows = detections.error_table(runs)
    return {
        "name": ", ".join(run.name for run in runs),
        "written_at": datetime.now().astimezone().strftime("%d %B %Y, %H:%M %Z"),
        "leads": [(run.name if len(runs) > 1 else "", _lead(run)) for run in runs],
        "tiles": _tiles(runs[0]) if len(runs) == 1 else [],
        "notes": _notes(runs, comparable),
        "charts": training_charts(runs),
        "times": [use for use in map(time_use, runs) if use is not None],
        "columns": [column.title for column in columns],
        "score_rows": scores.score_rows(columns),
        "class_columns": scores.class_columns(columns),
        "class_rows": scores.class_rows(columns),
        "differences": scores.differences(runs) if comparable else [],
        "class_changes": scores.class_changes(runs) if comparable else [],
        "curves": detections.curve_charts(runs),
        "error_columns": error_columns,
        "error_rows": error_rows,
        "shown_score": SHOWN_SCORE,
        "details": [_details(run) for run in runs if run.analysis is not None],
        "pictures": [group for run in runs for group in _picture_groups(run, several=len(runs) > 1)],
        "settings": settings_table(runs),
        "names": [run.name for run in runs],
        "facts": _fact_rows(runs),
    }


def _lead(run: ReportedRun) -> str:
    """The sentence under the title."""
    training = run.training
    if not training:
        return "No training was recorded; the scores are those of the given weights."
    last = training[-1]
    text = f"{count_text(int(last['step']), 'step')}, {count_text(int(last['epoch']), 'epoch')}"
    evaluated = [record for record in run.metrics if record.get("mAP(bbox)/IoU=0.5:0.95", -1) >= 0]
    if evaluated:
        best = max(evaluated, key=lambda record: record["mAP(bbox)/IoU=0.5:0.95"])
        text += f"; best box AP {score_text(best['mAP(bbox)/IoU=0.5:0.95'])} at step {int(best['step']):,}"
    if run.origin is not None and run.origin.step is not None:
        text += f". The scores below are those of step {run.origin.step:,} on {run.origin.split}"
    return text + "."


def _tiles(run: ReportedRun) -> list[Tile]:
    training, tiles = run.training, []
    for kind in run.kinds:
        tiles.append(Tile(f"{KINDS[kind]} AP", score_text(run.scores[kind].ap), "IoU 0.50 to 0.95"))
        tiles.append(Tile(f"{KINDS[kind]} AP50", score_text(run.scores[kind].ap50), "IoU 0.50"))
    if "training time" in run.facts:
        tiles.append(Tile("training time", run.facts["training time"]))
    elif len(training) > 1:
        tiles.append(Tile("training time", duration_text(training[-1]["time"] - training[0]["time"])))
    if training:
        speeds = sorted(record["images_per_s"] for record in training)
        tiles.append(Tile("speed", f"{speeds[len(speeds) // 2]:.3g}", "images/s, median"))
    return tiles


def _notes(runs: Sequence[ReportedRun], comparable: bool) -> list[str]:
    notes = [f"{run.name}: {note}" if len(runs) > 1 else note for run in runs for note in run.notes]
    if len(runs) > 1 and not comparable and any(run.scores for run in runs):
        sets = ", ".join(f"{run.name}: {run.origin.split if run.origin else 'not known'}" for run in runs)
        notes.append(
            "The runs were not all evaluated on the same images and annotations, or that is not known "
            f"({sets}). AP, curves and errors are shown side by side, but cannot be compared; losses, speed and "
            "configuration can."
        )
    return notes


def _details(run: ReportedRun) -> dict[str, Any]:
    """Sizes, scores and confused classes of one run."""
    assert run.analysis is not None
    main = run.analysis.main
    confusion = run.analysis.confusion
    return {
        "name": run.name,
        "kind": "masks" if "segm" in run.analysis.by_kind else "boxes",
        "sizes": detections.size_histogram(main),
        "scores": detections.score_histogram(main),
        "matrix": detections.confusion_chart(confusion) if confusion.names else "",
        "left_out": max(len(confusion.names) - detections.CLASSES_IN_MATRIX, 0),
        "on_background": int(confusion.counts[-1].sum()),
        "confused": confusion.most_frequent(detections.CONFUSIONS_LISTED),
    }


def _picture_groups(run: ReportedRun, *, several: bool) -> list[tuple[str, list[tuple[str, str]]]]:
    """Title, and caption and data URI of each picture."""
    of = f" of {run.name}" if several else ""
    groups = ((f"Worst{of}", run.worst), (f"Best{of}", run.best), (f"Examples{of}", run.pictures))
    return [(title, _uris(pictures)) for title, pictures in groups if pictures]


def _uris(pictures: Sequence[Picture]) -> list[tuple[str, str]]:
    return [(caption, data_uri(picture, max_px=MAX_PICTURE_PX)) for caption, picture in pictures]


def _fact_rows(runs: Sequence[ReportedRun]) -> list[tuple[str, list[str]]]:
    names = dict.fromkeys(name for run in runs for name in run.facts)
    return [(name, [run.facts.get(name, "–") for run in runs]) for name in names]


def _with_code(text: str) -> Markup:
    """`text` as HTML, with text in backticks as code."""
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text))))  # noqa: S704 - escaped first
