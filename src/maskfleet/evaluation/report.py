"""The report of a run: one self-contained HTML file."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup, escape
from numpy.typing import NDArray

from maskfleet.errors import TrainingError
from maskfleet.evaluation.coco_eval import CocoScores
from maskfleet.html.charts import Point, Series, line_chart, smoothed
from maskfleet.html.images import data_uri
from maskfleet.html.page import render
from maskfleet.log import duration_text
from maskfleet.system.files import write_atomically

FILE = "report.html"
TEMPLATE = Path(__file__).with_name("report.html.jinja")
KINDS = {"bbox": "box", "segm": "mask"}
VALUES = (
    ("ap", "AP", "mean over IoU 0.50 to 0.95"),
    ("ap50", "AP50", "IoU 0.50"),
    ("ap75", "AP75", "IoU 0.75"),
    ("ap_small", "AP small", "objects under 32² pixels"),
    ("ap_medium", "AP medium", "32² to 96² pixels"),
    ("ap_large", "AP large", "over 96² pixels"),
    ("ar1", "AR 1", "recall with 1 detection per image"),
    ("ar10", "AR 10", "with 10"),
    ("ar100", "AR 100", "with 100"),
    ("ar_small", "AR small", "objects under 32² pixels"),
    ("ar_medium", "AR medium", "32² to 96² pixels"),
    ("ar_large", "AR large", "over 96² pixels"),
)
MAX_PICTURE_PX = 1400  # longer side of an image in the page


@dataclass(frozen=True, slots=True)
class Tile:
    """One of the key numbers at the top of the page."""

    label: str
    value: str
    note: str = ""


def write_report(
    run_dir: Path,
    *,
    metrics: Sequence[Mapping[str, float]],
    scores: Mapping[str, CocoScores],
    pictures: Sequence[tuple[str, NDArray[np.uint8]]],
    config_text: str,
    facts: Mapping[str, str],
    next_steps: Sequence[str],
) -> Path:
    """Write RUN_DIR/report.html and return its path.

    `metrics` are the lines of metrics.jsonl, `scores` those of the trained model by `bbox` and `segm`; pictures are
    [H, W, 3] BGR. Empty arguments have no section. Text in backticks in a next step is shown as code. A fact named
    "training time" replaces the time between the first and the last line of metrics at the top of the page.
    """
    training = [record for record in metrics if "learning_rate" in record]
    page = render(
        TEMPLATE,
        made_by="report",
        name=run_dir.resolve().name,
        written_at=datetime.now().astimezone().strftime("%d %B %Y, %H:%M %Z"),
        lead=_lead(training, metrics),
        tiles=_tiles(training, scores, facts),
        charts=[chart for chart in _charts(training, metrics) if chart],
        score_rows=_score_rows(scores),
        class_rows=_class_rows(scores),
        kinds=[KINDS[kind] for kind in KINDS if kind in scores],
        pictures=[(title, data_uri(picture, max_px=MAX_PICTURE_PX)) for title, picture in pictures],
        config_text=config_text,
        facts=facts,
        next_steps=[_with_code(step) for step in next_steps],
    )
    path = run_dir / FILE
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        write_atomically(path, page)
    except OSError as error:
        raise TrainingError(
            f"cannot write the report {path}: {error.strerror}",
            remedy="free some disk space, or choose another directory",
        ) from error
    return path


def _lead(training: Sequence[Mapping[str, float]], metrics: Sequence[Mapping[str, float]]) -> str:
    """The sentence under the title."""
    if not training:
        return "No training was recorded; the scores are those of the given weights."
    last = training[-1]
    text = f"{int(last['step']):,} steps, {int(last['epoch']):,} epochs"
    evaluated = [record for record in metrics if record.get("mAP(bbox)/IoU=0.5:0.95", -1) >= 0]
    if evaluated:
        best = max(evaluated, key=lambda record: record["mAP(bbox)/IoU=0.5:0.95"])
        text += f"; best box AP {score_text(best['mAP(bbox)/IoU=0.5:0.95'])} at step {int(best['step']):,}"
    return text + "."


def _tiles(
    training: Sequence[Mapping[str, float]], scores: Mapping[str, CocoScores], facts: Mapping[str, str]
) -> list[Tile]:
    tiles = []
    for kind, word in KINDS.items():
        if kind in scores:
            tiles.append(Tile(f"{word} AP", score_text(scores[kind].ap), "IoU 0.50 to 0.95"))
            tiles.append(Tile(f"{word} AP50", score_text(scores[kind].ap50), "IoU 0.50"))
    if "training time" in facts:
        tiles.append(Tile("training time", facts["training time"]))
    elif len(training) > 1:
        tiles.append(Tile("training time", duration_text(training[-1]["time"] - training[0]["time"])))
    if training:
        speeds = sorted(record["images_per_s"] for record in training)
        tiles.append(Tile("speed", f"{speeds[len(speeds) // 2]:.3g}", "images/s, median"))
    return tiles


def _charts(training: Sequence[Mapping[str, float]], metrics: Sequence[Mapping[str, float]]) -> list[Markup]:
    """The charts, most important first; one without points is empty."""
    ious = {"IoU=0.5:0.95": "AP", "IoU=0.5": "AP50"}
    ap = {f"mAP({kind})/{iou}": f"{word} {name}" for kind, word in KINDS.items() for iou, name in ious.items()}
    # without the loss terms of single pyramid levels
    terms = [name for name in (training[-1] if training else {}) if name.endswith("_loss") and "/level" not in name]
    waits = [(step, 1000 * wait_s) for step, wait_s in _points(training, "data_wait_s")]
    return [
        line_chart(_raw_and_smooth("loss", _points(training, "total_cost"), 1), title="Total loss"),
        line_chart(
            [
                Series(label, [point for point in _points(metrics, name) if point[1] >= 0], color)
                for color, (name, label) in enumerate(ap.items(), 1)
            ],
            title="Validation AP",
            y_text=lambda score: f"{100 * score:.4g}",
        ),
        line_chart(
            [Series(name, smoothed(_points(training, name)), color) for color, name in enumerate(terms, 1)],
            title="Loss terms, smoothed",
        ),
        line_chart([Series("learning rate", _points(training, "learning_rate"))], title="Learning rate"),
        line_chart(_raw_and_smooth("images/s", _points(training, "images_per_s"), 3), title="Speed, images/s"),
        line_chart(_raw_and_smooth("ms", waits, 4), title="Data wait, ms per step"),
    ]


def _raw_and_smooth(name: str, points: Sequence[Point], color: int) -> list[Series]:
    return [Series("raw", points, color, faint=True), Series(name, smoothed(points), color)]


def _points(records: Sequence[Mapping[str, float]], name: str) -> list[Point]:
    return [(record["step"], record[name]) for record in records if name in record]


def _score_rows(scores: Mapping[str, CocoScores]) -> list[tuple[str, str, list[str]]]:
    """Name, meaning and values by kind, for each of COCO's twelve metrics."""
    kinds = [kind for kind in KINDS if kind in scores]
    return [
        (name, meaning, [score_text(getattr(scores[kind], field)) for kind in kinds])
        for field, name, meaning in VALUES
        if kinds
    ]


def _class_rows(scores: Mapping[str, CocoScores]) -> list[dict[str, Any]]:
    """Categories with their scores by kind, best box AP first (mask AP without boxes), unmeasured ones last."""
    kinds = [kind for kind in KINDS if kind in scores]
    if not kinds:
        return []
    by_kind = {kind: {one.category_id: one for one in scores[kind].per_class} for kind in kinds}
    first = sorted(scores[kinds[0]].per_class, key=lambda one: (-one.ap, one.name))
    return [
        {
            "name": one.name,
            "num_objects": one.num_objects,
            "cells": [
                (score_text(value), max(value, 0.0), value)
                for kind in kinds
                for value in (by_kind[kind][one.category_id].ap, by_kind[kind][one.category_id].ap50)
            ],
        }
        for one in first
    ]


def score_text(score: float) -> str:
    """A score of 0..1 as a percentage; a dash if it could not be measured."""
    return f"{100 * score:.1f}" if math.isfinite(score) and score >= 0 else "–"


def _with_code(text: str) -> Markup:
    """`text` as HTML, with text in backticks as code."""
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text))))  # noqa: S704 - escaped first
