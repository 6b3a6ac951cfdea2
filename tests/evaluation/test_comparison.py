"""Runs side by side: the table and the pictures, from metrics of known values."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from maskfleet.config.load import METRICS_FILE
from maskfleet.errors import TrainingError
from maskfleet.training.output.compare import compare

BOX, MASK = "mAP(bbox)/IoU=0.5:0.95", "mAP(segm)/IoU=0.5:0.95"
R50: list[dict[str, Any]] = [
    {"step": 10, "total_cost": 3.0, "images_per_s": 1.0},
    {"step": 10, BOX: 0.25, MASK: 0.2, "mAP(bbox)/large": -1.0},
    {"step": 20, "total_cost": 2.0, "images_per_s": 5.0},
    {"step": 30, "total_cost": 2.5, "images_per_s": 4.0},
    {"step": 30, BOX: 0.2, MASK: 0.2125, "mAP(bbox)/large": -1.0},
]
FASTER: list[dict[str, Any]] = [{"step": 10, "total_cost": 1.5, "images_per_s": 8.0}, {"step": 10, BOX: 0.5}]


def written(folder: Path, records: list[dict[str, Any]]) -> Path:
    folder.mkdir(parents=True)
    (folder / METRICS_FILE).write_text("".join(f"{json.dumps(one)}\n" for one in records))
    return folder


@pytest.fixture
def runs(tmp_path: Path) -> dict[str, str | Path]:
    return {
        "r50": written(tmp_path / "a", R50),
        "faster <1>": str(written(tmp_path / "b" / "checkpoints", FASTER).parent),
    }


def test_the_table_has_the_best_scores_the_last_loss_and_the_median_speed(runs: dict[str, str | Path]) -> None:
    r50, faster = compare(runs).rows
    assert (r50.steps, r50.box_ap, r50.mask_ap, r50.ap_large) == (30, 0.25, 0.2125, None)
    assert (r50.loss, r50.images_per_s) == (2.5, 4.0)
    assert (faster.box_ap, faster.mask_ap, faster.images_per_s) == (0.5, None, 8.0)
    assert repr(compare(runs)).splitlines() == [
        "run         steps  box AP  mask AP  AP small  AP medium  AP large  loss  images/s",
        "r50            30    25.0     21.2         –          –         –   2.5         4",
        "faster <1>     10    50.0        –         –          –         –   1.5         8",
    ]


def test_a_notebook_shows_the_table_and_a_picture_for_each_metric(runs: dict[str, str | Path], tmp_path: Path) -> None:
    html = compare(runs)._repr_html_()
    assert "<td>faster &lt;1&gt;</td><td>10</td><td>50.0</td><td>–</td>" in html
    assert re.findall(r'<img src="data:image/svg\+xml;base64,[^"]+" alt="([^"]+)"', html) == [
        "total loss", "box AP", "mask AP",
    ]  # fmt: skip
    saved = compare(runs).save(tmp_path / "pictures")
    assert [path.name for path in saved] == ["total-loss.svg", "box-AP.svg", "mask-AP.svg"]
    assert [path.read_text().count('class="line"') for path in saved] == [2, 2, 1], "faster has no masks"
    assert compare({"faster": runs["faster <1>"]}).pictures().keys() == {"total loss", "box AP"}


def test_a_folder_without_metrics_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="has no metrics of r50"):
        compare({"r50": tmp_path})
