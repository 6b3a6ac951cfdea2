"""A training on shards gives the losses of one on files, to the last digit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from maskfleet.config.base import replaced
from maskfleet.config.run import RunConfig
from maskfleet.data.stage.stage import stage
from maskfleet.training.start import train

pytest_plugins = ("stage_fixtures",)


def losses(config: RunConfig, run_dir: Path) -> list[dict[str, object]]:
    train(config, run_dir)
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text("utf-8").splitlines()]
    return [{name: value for name, value in line.items() if "loss" in name} for line in lines]


@pytest.mark.slow
def test_shards_and_s3_train_like_files(micro: RunConfig, shapes_root: Path, s3: object, tmp_path: Path) -> None:
    for target in (str(tmp_path / "shards"), "s3://coco-data/shards"):
        stage(str(shapes_root), target, workers=2, shard_bytes=6_000, progress=lambda tally: None)
    short = {"train.epoch_schedule": ((1, None),), "data.cache_dir": str(tmp_path / "cache")}
    expected = losses(replaced(micro, short), tmp_path / "files")
    assert sum("loss" in name for line in expected for name in line) > 5
    for number, root in enumerate((str(tmp_path / "shards"), "s3://coco-data/shards")):
        found = losses(replaced(micro, {**short, "data.root": root}), tmp_path / f"run-{number}")
        assert found == expected
