from __future__ import annotations

import base64
import math
import re
from pathlib import Path

import cv2
import numpy as np
import pytest
from parsed_page import Page

from maskfleet.config.base import replaced
from maskfleet.config.recipes import recipe
from maskfleet.errors import TrainingError
from maskfleet.evaluation.coco_eval import ClassScore, CocoScores
from maskfleet.evaluation.report.page import write_report
from maskfleet.evaluation.report.record import ReportedRun, score_text


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
        "config": recipe("demo"),
        "facts": {"device": "CPU"},
    }
    next_steps = changes.pop("next_steps", ["Do `maskfleet predict`."])
    record = ReportedRun(run_dir.name, **(parts | changes))  # type: ignore[arg-type]
    path = write_report(run_dir / "report.html", [record], next_steps=next_steps)  # type: ignore[arg-type]
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


def test_one_step_is_singular(tmp_path: Path) -> None:
    _, page = report(tmp_path, metrics=[training_line(1)])
    assert "1 step, 0 epochs." in " ".join(page.text.split())


def test_a_given_training_time_is_preferred_to_the_clock_of_the_metrics(tmp_path: Path) -> None:
    text, _ = report(tmp_path, facts={"training time": "2 h 05 min"})
    assert text.count("2 h 05 min") == 2
    assert "3 min 10 s" not in text


def test_the_table_holds_the_twelve_values_of_boxes_and_masks(tmp_path: Path) -> None:
    _, page = report(tmp_path)
    start = page.cells.index("COCO metric")
    rows = [page.cells[start + 3 * row : start + 3 * row + 3] for row in range(13)]
    assert rows[0] == ["COCO metric", "box", "mask"]
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
        config=replaced(recipe("demo"), {"data.root": evil, "model.backbone.weights": evil}),
        notes=[evil],
        facts={evil: evil},
        next_steps=[f"{evil} `{evil}`"],
        metrics=[training_line(1) | {f"{evil}_loss": 1.0}, training_line(2) | {f"{evil}_loss": 1.0}],
    )
    assert "<script>alert" not in text
    assert [tag for tag, _ in page.tags].count("script") == 1
    assert page.text.count(evil) == 9  # class, caption, field, note, fact twice, next step twice, legend
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
    text, page = report(tmp_path, metrics=[], scores={}, facts={}, next_steps=[])
    assert "The model was not evaluated." in text
    assert "No training was recorded" in text
    assert "figure" not in [tag for tag, _ in page.tags]
    assert "As in the recipe demo" in text


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
    report(tmp_path / "run", notes=["second"])
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["report.html"]


def test_scores_read_as_percentages() -> None:
    assert [score_text(value) for value in (0, 0.3771, 1, -1, math.nan)] == ["0.0", "37.7", "100.0", "–", "–"]
