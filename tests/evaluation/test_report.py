from __future__ import annotations

import base64
import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path

import cv2
import numpy as np
import pytest

from maskfleet.errors import TrainingError
from maskfleet.evaluation.coco_eval import ClassScore, CocoScores
from maskfleet.evaluation.report import score_text, write_report
from maskfleet.html.line_charts import (
    BOTTOM,
    LEFT,
    RIGHT,
    TOP,
    Series,
    line_chart,
    smoothed,
    thinned,
    tick_text,
    ticks,
)

VOID = {"meta", "link", "img", "line", "circle", "polyline"}


class Page(HTMLParser):
    """A parsed page: it must be well formed, and gives text and tags."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.cells: list[str] = []
        self.text = ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag in ("td", "th"):
            self.cells.append("")
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "script" not in self.open and "style" not in self.open:
            self.text += data
        if "td" in self.open or "th" in self.open:
            self.cells[-1] += data


def scores(base: float, *classes: tuple[str, float, float, int]) -> CocoScores:
    twelve = [base + place / 100 for place in range(11)]
    per_class = tuple(ClassScore(place, *row) for place, row in enumerate(classes, 1))
    return CocoScores(*twelve, -1.0, per_class)


def training_line(step: int) -> dict[str, float]:
    return {
        "step": step,
        "epoch": step // 50,
        "time": 1000.0 + step,
        "learning_rate": 0.02,
        "images_per_s": 10.0 + step % 3,
        "data_wait_s": 0.001,
        "memory_mib": 900.0,
        "total_cost": 2.0 / step,
        "rpn_losses/label_loss": 1.0 / step,
        "rpn_losses/level2/label_loss": 0.5 / step,
    }


def report(run_dir: Path, **changes: object) -> tuple[str, Page]:
    parts: dict[str, object] = {
        "metrics": [
            *(training_line(step) for step in range(10, 201, 10)),
            {"step": 200, "epoch": 4, "time": 1210.0, "mAP(bbox)/IoU=0.5:0.95": 0.41, "mAP(bbox)/IoU=0.5": 0.62},
        ],
        "scores": {
            "bbox": scores(0.4, ("cat", 0.3, 0.5, 1200), ("dog", 0.9, 0.95, 7), ("ghost", -1, -1, 0)),
            "segm": scores(0.2, ("cat", 0.25, 0.45, 1200), ("dog", 0.1, 0.2, 7), ("ghost", -1, -1, 0)),
        },
        "pictures": [],
        "config_text": "recipe: demo",
        "facts": {"device": "CPU"},
        "next_steps": ["Do `maskfleet predict`."],
    }
    path = write_report(run_dir, **(parts | changes))  # type: ignore[arg-type]
    assert path == run_dir / "report.html"
    text = path.read_text(encoding="utf-8")
    return text, Page(text)


def test_the_head_shows_the_figures_that_matter(tmp_path: Path) -> None:
    _, page = report(tmp_path / "my-run")
    words = " ".join(page.text.split())
    assert "my-run" in words
    assert "200 steps, 4 epochs; best box AP 41.0 at step 200." in words
    for figure in ("box AP40.0", "box AP5041.0", "mask AP20.0", "mask AP5021.0", "3 min 10 s", "speed11"):
        assert figure in words.replace("\n", "")


def test_a_given_training_time_is_preferred_to_the_clock_of_the_metrics(tmp_path: Path) -> None:
    text, _ = report(tmp_path, facts={"training time": "2 h 05 min"})
    assert text.count("2 h 05 min") == 2
    assert "3 min 10 s" not in text


def test_the_table_holds_the_twelve_values_of_boxes_and_masks(tmp_path: Path) -> None:
    _, page = report(tmp_path)
    start = page.cells.index("COCO value")
    rows = [page.cells[start + 3 * row : start + 3 * row + 3] for row in range(13)]
    assert rows[0] == ["COCO value", "box", "mask"]
    assert [row[1] for row in rows[1:]] == [*(f"{40 + place}.0" for place in range(11)), "–"]
    assert [row[2] for row in rows[1:]] == [*(f"{20 + place}.0" for place in range(11)), "–"]
    assert rows[1][0].startswith("AP")
    assert rows[12][0].startswith("AR large")


def test_classes_are_sorted_by_box_ap_with_the_unmeasured_last(tmp_path: Path) -> None:
    _, page = report(tmp_path)
    start = page.cells.index("class") + 6
    rows = [page.cells[start + 6 * row : start + 6 * row + 6] for row in range(3)]
    assert rows == [
        ["dog", "7", "90.0", "95.0", "10.0", "20.0"],
        ["cat", "1,200", "30.0", "50.0", "25.0", "45.0"],
        ["ghost", "0", "–", "–", "–", "–"],
    ]


def test_the_page_asks_nothing_of_the_network(tmp_path: Path) -> None:
    picture = np.zeros((8, 8, 3), np.uint8)
    text, page = report(tmp_path, pictures=[("a", picture)])
    assert "http:" not in text
    assert "https:" not in text
    for tag, attributes in page.tags:
        assert "srcset" not in attributes
        for name in ("src", "href"):
            assert (attributes.get(name) or "data:").startswith("data:"), tag
    assert "url(" not in text
    assert "@import" not in text
    policy = next(attributes["content"] for tag, attributes in page.tags if "http-equiv" in attributes)
    assert policy is not None
    assert "default-src 'none'" in policy


def test_what_people_wrote_cannot_become_markup(tmp_path: Path) -> None:
    evil = "</pre><script>alert(1)</script>\"'&"
    picture = np.zeros((8, 8, 3), np.uint8)
    text, page = report(
        tmp_path / "a<b>",
        scores={"bbox": scores(0.4, (evil, 0.3, 0.5, 3))},
        pictures=[(evil, picture)],
        config_text=evil,
        facts={evil: evil},
        next_steps=[f"{evil} `{evil}`"],
        metrics=[training_line(1) | {f"{evil}_loss": 1.0}, training_line(2) | {f"{evil}_loss": 1.0}],
    )
    assert "<script>alert" not in text
    assert [tag for tag, _ in page.tags].count("script") == 1
    assert page.text.count(evil) == 8  # class, caption, configuration, fact twice, next step twice, legend
    assert any(attributes.get("alt") == evil for _, attributes in page.tags)


def test_pictures_are_inside_the_page_in_their_colours(tmp_path: Path) -> None:
    small, large = np.full((20, 30, 3), (255, 0, 0), np.uint8), np.full((700, 2800, 3), (0, 0, 255), np.uint8)
    _, page = report(tmp_path, pictures=[("small", small), ("large", large)])
    uris = [attributes["src"] for tag, attributes in page.tags if tag == "img" and attributes.get("src")]
    images = [
        cv2.imdecode(np.frombuffer(base64.b64decode(uri.split(",")[1]), np.uint8), cv2.IMREAD_COLOR)  # type: ignore[union-attr]
        for uri in uris
    ]
    assert [image.shape for image in images] == [(20, 30, 3), (350, 1400, 3)]
    assert np.abs(images[0].astype(int) - (255, 0, 0)).max() <= 2
    assert np.abs(images[1].astype(int) - (0, 0, 255)).max() <= 2


def test_a_report_of_nothing_is_still_a_page(tmp_path: Path) -> None:
    text, page = report(tmp_path, metrics=[], scores={}, facts={}, next_steps=[], config_text="")
    assert "The model was not evaluated." in text
    assert "No training was recorded" in text
    assert "figure" not in [tag for tag, _ in page.tags]


def test_boxes_without_masks_have_no_mask_columns(tmp_path: Path) -> None:
    _, page = report(tmp_path, scores={"bbox": scores(0.4, ("cat", 0.3, 0.5, 3))})
    assert "mask" not in page.cells
    assert "mask AP" not in page.text


def test_losses_that_are_not_finite_leave_a_page(tmp_path: Path) -> None:
    lines = [training_line(step) | {"total_cost": math.nan if step > 1 else math.inf} for step in (1, 2, 3)]
    text, page = report(tmp_path, metrics=lines)
    assert "Total loss" not in page.text
    assert "Learning rate" in page.text
    assert "nan" not in "".join(re.findall(r'points="([^"]*)"', text))


def test_code_in_backticks_is_set_as_code(tmp_path: Path) -> None:
    text, _ = report(tmp_path)
    assert "<li>Do <code>maskfleet predict</code>.</li>" in text


def test_a_report_that_cannot_be_written_is_an_error_and_leaves_the_old_one(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("old")
    with pytest.raises(TrainingError, match="cannot write the report"):
        report(tmp_path / "file")
    report(tmp_path / "run")
    report(tmp_path / "run", config_text="second")
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["report.html"]


def coordinates(chart: str) -> list[list[tuple[float, float]]]:
    return [
        [tuple(map(float, spot.split(","))) for spot in path.split()]  # type: ignore[misc]
        for path in re.findall(r'points="([^"]*)"', chart)
    ]


def test_a_line_runs_from_corner_to_corner_of_its_axes() -> None:
    chart = line_chart([Series("a", [(0, 0.0), (50, 5.0), (100, 10.0)])], title="T")
    ((first, middle, last),) = coordinates(chart)
    assert first == (LEFT, BOTTOM)
    assert last[0] == RIGHT
    assert last[1] == pytest.approx(TOP + (BOTTOM - TOP) * 0.4 / 10.4, abs=0.1)  # 4% of air above the highest
    assert middle == (
        pytest.approx((first[0] + last[0]) / 2, abs=0.1),
        pytest.approx((first[1] + last[1]) / 2, abs=0.1),
    )
    assert re.findall(r'text-anchor="end">([^<]*)<', chart) == ["0", "5", "10"]
    Page(chart)


def test_the_pointer_finds_the_values_of_every_named_line() -> None:
    chart = line_chart(
        [Series("raw", [(1, 9.0)], faint=True), Series("a", [(1, 0.12345), (2, 2000.0)], 2)], title="T & Co"
    )
    (attributes,) = [attributes for tag, attributes in Page(chart).tags if tag == "figure"]
    data = json.loads(attributes["data-chart"] or "")
    assert [line["name"] for line in data["lines"]] == ["a"]
    assert data["lines"][0]["at"] == [1, 2]
    assert data["lines"][0]["text"] == ["0.123", "2k"]
    assert data["lines"][0]["color"] == 2


def test_a_few_huge_values_do_not_press_the_rest_flat() -> None:
    points = [(0.0, 1e6), *((float(x), 1.0) for x in range(1, 200))]
    ((first, second, *_),) = coordinates(line_chart([Series("a", points)], title="T"))
    assert first[1] == TOP  # cut off at the top
    assert second[1] < (TOP + BOTTOM) / 2


def test_a_chart_of_one_point_or_of_equal_values_can_be_drawn() -> None:
    for points in ([(5, 3.0)], [(5, 0.0)], [(1, 7.0), (2, 7.0)]):
        spots = coordinates(line_chart([Series("a", points)], title="T"))[0]
        assert all(LEFT <= x <= RIGHT and TOP <= y <= BOTTOM for x, y in spots)
    assert line_chart([Series("a", [(1, math.nan)])], title="T") == ""


def test_ticks_are_round_and_inside() -> None:
    assert ticks(0, 10) == [0, 2, 4, 6, 8, 10]
    assert ticks(0, 0.97) == pytest.approx([0, 0.2, 0.4, 0.6, 0.8])
    assert ticks(13, 88_000, count=6) == [20_000, 40_000, 60_000, 80_000]
    assert ticks(-1, 1, count=4) == pytest.approx([-1, -0.5, 0, 0.5, 1])
    assert ticks(3, 3) == [3]


def test_numbers_on_axes_are_short() -> None:
    texts = [tick_text(value) for value in (0, 0.25, 12_000, 1_500_000, 2e-5, -3000, 999)]
    assert texts == ["0", "0.25", "12k", "1.5M", "2e-05", "-3k", "999"]


def test_smoothing_keeps_straight_lines_and_constants() -> None:
    line = [(float(x), 2.0 * x) for x in range(100)]
    assert [y for _, y in smoothed(line)[:90]] == pytest.approx([y for _, y in line[:90]])
    flat = [(float(x), 3.0) for x in range(7)]
    assert smoothed(flat) == flat


def test_smoothing_is_a_mean_of_neighbours() -> None:
    # Ten points: one neighbour on either side; none at the start; only the one before at the end.
    values = [0, 3, 0, 0, 6, 0, 0, 0, 9, 3]
    got = [y for _, y in smoothed([(float(x), float(y)) for x, y in enumerate(values)])]
    assert got == pytest.approx([0, 1, 1, 2, 2, 2, 0, 3, 4, 6])
    assert smoothed([(0, 1.0), (1, math.nan), (2, 1.0)]) == [(0, 1.0), (2, 1.0)]


def test_thinning_keeps_order_and_every_spike() -> None:
    points = [(float(x), 0.0) for x in range(100_000)]
    points[77_777] = (77_777.0, 5.0)
    points[12_345] = (12_345.0, -5.0)
    thin = thinned(points, 600)
    assert len(thin) <= 600
    assert thin == sorted(thin)
    assert (77_777.0, 5.0) in thin
    assert (12_345.0, -5.0) in thin
    assert thinned(points[:600], 600) == points[:600]


def test_scores_read_as_points_of_a_hundred() -> None:
    assert [score_text(value) for value in (0, 0.3771, 1, -1, math.nan)] == ["0.0", "37.7", "100.0", "–", "–"]
