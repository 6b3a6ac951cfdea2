"""The lines of a real run, read by the regular expressions of AWS Samples."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from processes import finish, prepared

from maskfleet.config.base import replaced
from maskfleet.config.run import RunConfig
from maskfleet.training.output.metrics import read_metrics

# As the SageMaker notebooks of AWS Samples define them: greedy, and without regard for each other.
NAMES = [
    *(f"fastrcnn_losses/{name}" for name in ("box_loss", "label_loss", "num_fg_label")),
    *(f"fastrcnn_losses/label_metrics/{name}" for name in ("accuracy", "false_negative", "fg_accuracy")),
    *(f"maskrcnn_loss/{name}" for name in ("accuracy", "fg_pixel_ratio", "maskrcnn_loss", "pos_accuracy")),
    *(
        f"mAP({kind})/{name}"
        for kind in ("bbox", "segm")
        for name in ("IoU=0.5", "IoU=0.5:0.95", "IoU=0.75", "large", "medium", "small")
    ),
]


def pattern(name: str) -> re.Pattern[str]:
    escaped = name.replace("(", r"\(").replace(")", r"\)").replace(".", r"\.")
    return re.compile(rf".*{escaped}:\s*(\S+).*")


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory, micro: RunConfig) -> Path:
    folder = tmp_path_factory.mktemp("lines")
    finish(
        prepared(
            folder,
            replaced(micro, {"train.epoch_schedule": ((2, None),), "eval.every_epochs": 1, "log.all_metrics": True}),
        )
    )
    return folder


def test_there_are_22_names() -> None:
    assert len(NAMES) == 22


@pytest.mark.parametrize("name", NAMES)
def test_every_line_gives_the_value_in_metrics_jsonl(run_dir: Path, name: str) -> None:
    lines = (run_dir / "log.txt").read_text().splitlines()
    found = [float(match[1]) for line in lines if (match := pattern(name).search(line))]
    written = [record[name] for record in read_metrics(run_dir) if name in record]
    assert written
    assert found == written
