from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from parsed_page import Page
from slow_reference import random_case

from maskfleet.config.base import replaced
from maskfleet.config.recipes import recipe
from maskfleet.evaluation.analysis.analyze import Analysis, analyze
from maskfleet.evaluation.detections_file import DetectionsOrigin
from maskfleet.evaluation.report import detections
from maskfleet.evaluation.report.page import write_report
from maskfleet.evaluation.report.record import ReportedRun
from maskfleet.evaluation.report.scores import columns, differences, score_rows
from maskfleet.evaluation.report.settings import settings_table
from maskfleet.evaluation.report.training import time_use

DEMO = recipe("demo")


def line(step: int, time: float, **values: float) -> dict[str, float]:
    """A line of training of one rank."""
    return {"step": step, "epoch": 0, "time": time, "learning_rate": 0.1, "ranks": 1, "images_per_s": 4.0, **values}


@pytest.fixture(scope="module")
def case() -> tuple[dict[str, Any], list[dict[str, Any]]]:
    return random_case(5, images=30)


def record(name: str, analysis: Analysis, *, sha256: str = "a", **fields: Any) -> ReportedRun:
    scores = {kind: one.scores for kind, one in analysis.by_kind.items()}
    return ReportedRun(
        name, DEMO, scores=scores, analysis=analysis, origin=DetectionsOrigin(7, "val", "val.json", sha256), **fields
    )


@pytest.fixture(scope="module")
def runs(case: tuple[dict[str, Any], list[dict[str, Any]]]) -> list[ReportedRun]:
    """A run, and one that finds half of what it finds."""
    truth, results = case
    return [
        record("all", analyze(truth, results, kinds=("bbox",))),
        record("half", analyze(truth, results[::2], kinds=("bbox",))),
    ]


def test_time_is_divided_by_hand() -> None:
    config = replaced(DEMO, {"train.images_per_gpu": 2})
    lines = [
        line(10, 100.0),
        line(20, 105.0, data_wait_s=0.1, checkpoint_s=0.5),  # 20 images: 5 s, of which 1 s waiting for data
        {
            "step": 20,
            "epoch": 1,
            "time": 108.0,
            "mAP(bbox)/IoU=0.5:0.95": 0.5,
            "evaluation_s": 2.0,
            "checkpoint_s": 1.0,
        },
        line(30, 200.0, images_per_s=2.0),  # 10 s after an interruption
    ]
    use = time_use(ReportedRun("run", config, lines))
    assert use is not None
    assert use.seconds == pytest.approx(
        {
            "training steps": 3.5 + 10,
            "waiting for data": 1.0,
            "evaluation": 2.0,
            "checkpoints": 1.5,
            "interruptions and other": 100 - 18.0,
        }
    )
    assert sum(share for _, _, share in use.rows) == pytest.approx(1)
    chosen = replaced(DEMO, {"train.images_per_gpu": "auto"})
    assert time_use(ReportedRun("run", chosen, lines)) is None
    assert time_use(ReportedRun("run", chosen, lines, {"images per GPU": "2"})) == use
    assert time_use(ReportedRun("run", config, lines[:1])) is None
    unmeasured = time_use(ReportedRun("run", config, [line(10, 0.0), line(20, 5.0)]))
    assert unmeasured is not None
    assert list(unmeasured.seconds) == ["training steps", "waiting for data", "interruptions and other"]


def test_settings_are_the_fields_that_differ_from_the_recipe() -> None:
    one = ReportedRun("one", replaced(DEMO, {"train.base_lr": 0.5, "data.root": "/elsewhere"}))
    table = settings_table([one])
    assert table.recipe == "demo"
    assert table.rows == [("train.base_lr", str(DEMO.train.base_lr), ["0.5"])]
    two = ReportedRun("two", DEMO)
    assert settings_table([one, two]).rows == [
        ("train.base_lr", str(DEMO.train.base_lr), ["0.5", str(DEMO.train.base_lr)])
    ]
    other = settings_table([one, ReportedRun("other", recipe("scratch"))])
    assert other.recipe is None
    assert other.rows[0] == ("recipe", "", ["demo", "scratch"])


def test_a_run_that_finds_less_is_worse_and_one_that_finds_the_same_is_not(runs: list[ReportedRun]) -> None:
    found = differences(runs)
    assert [one.value for one in found] == ["box AP", "box AP50", "box AP75"]
    assert found[1].verdict == "worse"
    assert found[1].gain.startswith("-")
    same = differences([runs[0], runs[0]])
    assert {(one.gain, one.range, one.verdict) for one in same} == {
        ("+0.0", "+0.0 to +0.0", "no difference beyond chance")
    }


def test_ap_comes_with_its_interval(runs: list[ReportedRun]) -> None:
    [(_, _, [(value, around)]), *_] = score_rows(columns(runs[:1]))
    low, high = map(float, around.split(" to "))
    assert low < float(value) < high
    assert score_rows(columns(runs[:1]))[6][2][0][1] == "", "recall has none"


def test_several_runs_are_overlaid_and_compared(runs: list[ReportedRun], tmp_path: Path) -> None:
    trained = [
        ReportedRun(
            run.name, run.config, [line(step, step) for step in (1, 2, 3)], {"torch": run.name}, run.scores, run.origin,
            run.analysis,
        )
        for run in runs
    ]  # fmt: skip
    text = write_report(tmp_path / "page.html", trained).read_text()
    page = Page(text)
    words = " ".join(page.text.split())
    assert "Comparison with all" in words
    assert "95 % interval" in page.cells
    assert "Precision and recall of boxes, IoU 0.50" in words
    assert "all box AP" in page.cells
    assert "half box AP" in page.cells
    speed = re.search(r'<figure class="line-chart" data-chart="([^"]*)"><figcaption>Speed', text)
    assert speed is not None
    assert "all" in speed.group(1)
    assert "half" in speed.group(1)
    assert "cannot be compared" not in words


def test_runs_on_different_data_are_not_compared_and_the_page_says_so(runs: list[ReportedRun], tmp_path: Path) -> None:
    assert runs[1].analysis is not None
    other = record("other", runs[1].analysis, sha256="b")
    words = write_report(tmp_path / "page.html", [runs[0], other]).read_text()
    assert "Comparison with" not in words
    assert "AP, curves and errors are shown side by side, but cannot be compared" in words


def test_histograms_count_every_object_and_detection(runs: list[ReportedRun]) -> None:
    assert runs[0].analysis is not None
    main = runs[0].analysis.main
    for chart, count in ((detections.size_histogram(main), len(main.matches.object_area)),
                         (detections.score_histogram(main), len(main.matches.score))):  # fmt: skip
        told = re.findall(r"<title>[^:]*: ([\d,]+) \w+, ([\d,]+) \w+</title>", chart)
        assert sum(int(one.replace(",", "")) for pair in told for one in pair) == count


def test_the_matrix_has_a_cell_for_every_confusion(runs: list[ReportedRun]) -> None:
    assert runs[0].analysis is not None
    confusion = runs[0].analysis.confusion
    chart = str(detections.confusion_chart(confusion))
    told = {(a, b): int(n) for a, b, n in re.findall(r"<title>(class \d) → (class \d|not found): (\d+) ", chart)}
    names = [*confusion.names, "not found"]
    expected = {
        (names[row], names[column]): int(confusion.counts[row, column])
        for row in range(3)
        for column in range(4)
        if confusion.counts[row, column]
    }
    assert told == expected
    assert np.trace(confusion.counts) > 0
