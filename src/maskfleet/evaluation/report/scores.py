"""The scores in a report: COCO's twelve values, AP by class, and differences between runs.

Shapes: B bootstrap samples, V values (AP, AP50, AP75).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from maskfleet.evaluation.analysis.bootstrap import VALUES as SAMPLED
from maskfleet.evaluation.analysis.bootstrap import ConfidenceInterval, interval
from maskfleet.evaluation.coco_eval import Kind
from maskfleet.evaluation.report.record import KINDS, ReportedRun, score_text

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
CLASSES_IN_COMPARISON = 8  # gains and losses that are listed


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a table of scores: a kind of a run."""

    run: ReportedRun
    kind: Kind
    title: str


@dataclass(frozen=True, slots=True)
class Difference:
    """What a run gained over the first one: a value in percent points, and its interval."""

    run: str
    value: str  # such as "box AP"
    gain: str
    range: str
    verdict: str  # better, worse or the same


def columns(runs: Sequence[ReportedRun]) -> list[Column]:
    """A column for each kind of each run."""
    return [
        Column(run, kind, KINDS[kind] if len(runs) == 1 else f"{run.name} {KINDS[kind]}")
        for kind in KINDS
        for run in runs
        if kind in run.scores
    ]


def score_rows(of: Sequence[Column]) -> list[tuple[str, str, list[tuple[str, str]]]]:
    """Name and meaning of each of COCO's twelve metrics, and for each column the value and its interval."""
    return [
        (name, meaning, [(score_text(getattr(one.run.scores[one.kind], field)), _range(one, field)) for one in of])
        for field, name, meaning in VALUES
        if of
    ]


def class_columns(of: Sequence[Column]) -> list[str]:
    """Titles of the values of each class: AP and, of one run, AP50."""
    return [f"{one.title} {field.upper()}" for one in of for field in _class_fields(of)]


def class_rows(of: Sequence[Column]) -> list[dict[str, Any]]:
    """Categories with the values of `class_columns`, best in the first one first, unmeasured ones last."""
    if not of:
        return []
    by_column = [{one.category_id: one for one in column.run.scores[column.kind].per_class} for column in of]
    order = sorted(of[0].run.scores[of[0].kind].per_class, key=lambda one: (-one.ap, one.name))
    rows = []
    for first in order:
        found = [scores.get(first.category_id) for scores in by_column]
        fields = _class_fields(of)
        values = [getattr(one, field) if one is not None else -1.0 for one in found for field in fields]
        cells = [(score_text(value), max(value, 0.0), value) for value in values]
        rows.append({"name": first.name, "num_objects": first.num_objects, "cells": cells})
    return rows


def differences(runs: Sequence[ReportedRun]) -> list[Difference]:
    """AP, AP50 and AP75 of each further run against the first; the runs were evaluated on the same images."""
    first, found = runs[0].analysis, []
    for run in runs[1:]:
        for kind, word in KINDS.items():
            if first is None or run.analysis is None or kind not in first.by_kind or kind not in run.analysis.by_kind:
                continue
            old, new = first.by_kind[kind], run.analysis.by_kind[kind]
            for index, (field, name) in enumerate(zip(SAMPLED, ("AP", "AP50", "AP75"), strict=True)):
                gain = getattr(new.scores, field) - getattr(old.scores, field)
                found.append(
                    _difference(run.name, f"{word} {name}", gain, new.sampled[:, index] - old.sampled[:, index])
                )
    return found


def _difference(run: str, value: str, gain: float, sampled: Any) -> Difference:
    around = interval(gain, sampled)
    if around is None:
        return Difference(run, value, "–", "", "not measured")
    verdict = "no difference beyond chance"
    if around.excludes_zero:
        verdict = "better" if gain > 0 else "worse"
    return Difference(run, value, f"{100 * gain:+.1f}", f"{100 * around.low:+.1f} to {100 * around.high:+.1f}", verdict)


def class_changes(runs: Sequence[ReportedRun]) -> list[tuple[str, str, list[tuple[str, str]], list[tuple[str, str]]]]:
    """Run and kind of AP, classes that gained most over the first run, and those that lost most."""
    found = []
    for run in runs[1:]:
        kind: Kind = "segm" if "segm" in run.scores and "segm" in runs[0].scores else "bbox"
        if kind not in run.scores or kind not in runs[0].scores:
            continue
        before = {one.category_id: one.ap for one in runs[0].scores[kind].per_class if one.ap >= 0}
        gains = [
            (one.ap - before[one.category_id], one.name)
            for one in run.scores[kind].per_class
            if one.category_id in before and one.ap >= 0
        ]
        gains.sort(key=lambda gain: (-gain[0], gain[1]))
        up = [(name, f"{100 * gain:+.1f}") for gain, name in gains[:CLASSES_IN_COMPARISON] if gain > 0]
        down = [(name, f"{100 * gain:+.1f}") for gain, name in gains[::-1][:CLASSES_IN_COMPARISON] if gain < 0]
        found.append((run.name, KINDS[kind], up, down))
    return found


def _class_fields(of: Sequence[Column]) -> tuple[str, ...]:
    return ("ap", "ap50") if len({one.run.name for one in of}) == 1 else ("ap",)


def _range(column: Column, field: str) -> str:
    """The interval of a value, such as `39.1 to 41.0`; empty if there is none."""
    analysis = column.run.analysis
    if analysis is None or field not in SAMPLED or column.kind not in analysis.by_kind:
        return ""
    value = getattr(column.run.scores[column.kind], field)
    around: ConfidenceInterval | None = interval(value, analysis.by_kind[column.kind].sampled[:, SAMPLED.index(field)])
    if around is None or value < 0:
        return ""
    return f"{100 * max(around.low, 0.0):.1f} to {100 * min(around.high, 1.0):.1f}"
