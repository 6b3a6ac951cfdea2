"""The report in real Chromium: as people open it, from a file, on a screen and on a phone, in light and in dark."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from chromium import Page, chromium
from slow_reference import random_case

from maskfleet.config.recipes import recipe
from maskfleet.evaluation.analysis.analyze import analyze
from maskfleet.evaluation.detections_file import DetectionsOrigin
from maskfleet.evaluation.report.page import write_report
from maskfleet.evaluation.report.record import ReportedRun

pytestmark = pytest.mark.slow


def run(name: str, keep: float) -> ReportedRun:
    truth, results = random_case(5, images=20, classes=9)
    analysis = analyze(truth, results[: int(keep * len(results))], kinds=("bbox",))
    lines = [
        {"step": step, "epoch": 0, "time": step, "learning_rate": 0.1, "images_per_s": 4.0, "total_cost": 1 / step}
        for step in range(1, 50)
    ]
    lines.append({"step": 49, "epoch": 1, "time": 60, "mAP(bbox)/IoU=0.5:0.95": 0.3, "evaluation_s": 9.0})
    picture = np.full((200, 400, 3), 90, np.uint8)
    return ReportedRun(
        name,
        recipe("demo"),
        lines,
        {"device": "a very long name of a device " * 4},
        {"bbox": analysis.main.scores},
        DetectionsOrigin(49, "val", "val.json", "a"),
        analysis,
        best=[("best.jpg: annotated, detected", picture)],
        worst=[(f"{'long-name' * 12}.jpg: annotated, detected", picture)],
        notes=["a note"],
    )


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("reports")
    runs = [run("first", 1.0), run("second", 0.7)]
    return {
        "one": write_report(folder / "one.html", runs[:1], next_steps=["Do `this`."]),
        "several": write_report(folder / "several.html", runs),
    }


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with chromium(tmp_path_factory.mktemp("chromium") / "profile") as opened:
        yield opened


@pytest.mark.parametrize("name", ["one", "several"])
@pytest.mark.parametrize(("width", "dark"), [(1280, False), (390, False), (390, True)])
def test_the_page_fits_the_window_and_asks_nothing_of_the_network(
    page: Page, files: dict[str, Path], name: str, width: int, dark: bool
) -> None:
    known = len(page.problems), len(page.requests)
    page.size(width, 900, dark=dark)
    url = files[name].as_uri()
    page.open(url)
    assert page.run("document.documentElement.scrollWidth") <= width, "only tables scroll sideways, in their cards"
    sides = page.run("[...document.querySelectorAll('main > *')].map((one) => one.getBoundingClientRect().right)")
    assert max(sides) <= width
    background = page.run("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, background[4:-1].split(","))) < 200) == dark
    assert page.problems[known[0] :] == []
    assert {one for one in page.requests[known[1] :] if not one.startswith("data:")} == {url}


def test_legends_tooltips_sorting_and_pictures_work(page: Page, files: dict[str, Path]) -> None:
    known = len(page.problems)
    page.size(1280, 900)
    page.open(files["several"].as_uri())
    first = ".line-chart"
    assert not page.run(f"document.querySelector('{first} g[data-series]').classList.contains('off')")
    page.click(f"{first} .legend button")
    assert page.run(f"document.querySelector('{first} g[data-series]').classList.contains('off')")
    page.move_to(*page.middle(f"{first} svg"))
    page.wait(f"document.querySelector('{first} .tip').innerText.startsWith('step ')")
    classes = "[...document.querySelectorAll('.sortable tr')].slice(1).map((row) => row.cells[0].innerText)"
    before = page.run(classes)
    page.click(".sortable th button")
    after = page.run(classes)
    assert after == sorted(after)
    assert after != before
    page.middle(".open")  # images load when they come into view, and then get their height
    page.wait("document.querySelector('.open img').naturalWidth && document.querySelector('.open').offsetHeight > 100")
    page.click(".open")
    assert page.run("document.getElementById('viewer').open")
    assert page.run("document.querySelector('#viewer img').naturalWidth") == 400
    page.click("#close")
    assert not page.run("document.getElementById('viewer').open")
    assert page.problems[known:] == []
