"""The detector of a run directory whose checkpoints are damaged."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

import pytest

from maskfleet.config.base import replaced
from maskfleet.config.load import write_run_file
from maskfleet.config.run import RunConfig
from maskfleet.errors import MaskfleetError
from maskfleet.inference.load import load
from maskfleet.model.build import build_mask_rcnn
from maskfleet.model.weights.checkpoint import CheckpointFolder, Snapshot
from maskfleet.training.checkpoint import write_checkpoint


@pytest.fixture
def run_dir(tmp_path: Path, micro: RunConfig) -> Path:
    """A run with three checkpoints, the second of which is the best."""
    write_run_file(tmp_path, micro)
    model = build_mask_rcnn(replaced(micro, {"model.num_categories": 1}).model)
    tensors = {f"model/{name}": tensor for name, tensor in model.state_dict().items()}
    for step in (1, 2, 3):
        snapshot = Snapshot(step, tensors, {"categories": [{"id": 7, "name": "disc"}]})
        write_checkpoint(CheckpointFolder(tmp_path / "checkpoints").path(step), snapshot, best=step == 2)
    return tmp_path


def damage(run_dir: Path, step: int) -> None:
    os.truncate(CheckpointFolder(run_dir / "checkpoints").path(step), 100)


def empty_manifest(run_dir: Path, step: int, content: str = "") -> None:
    CheckpointFolder(run_dir / "checkpoints").path(step).with_suffix(".json").write_text(content)


def test_the_best_is_used_whatever_happened_to_an_older_one(run_dir: Path) -> None:
    empty_manifest(run_dir, 1, "null")
    assert load(run_dir, "cpu").source == f"best checkpoint of {run_dir}, step 2"


def test_the_newest_intact_one_stands_in_for_a_damaged_best(run_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    damage(run_dir, 2)
    damage(run_dir, 3)
    assert load(run_dir, "cpu").source == f"newest checkpoint of {run_dir}, step 1"
    assert "using the newest intact checkpoint instead of the best one" in caplog.text


def test_a_best_without_a_readable_manifest_is_reported(run_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    empty_manifest(run_dir, 2)
    assert load(run_dir, "cpu").source == f"newest checkpoint of {run_dir}, step 3"
    assert "has no readable manifest" in caplog.text
    assert "if it was the best, that is unknown now" in caplog.text


def test_a_run_with_nothing_but_damaged_checkpoints_is_an_error_with_a_remedy(run_dir: Path) -> None:
    for step in (1, 2, 3):
        damage(run_dir, step)
    with pytest.raises(MaskfleetError, match="all 3 checkpoints") as caught:
        load(run_dir, "cpu")
    assert "restore one from a backup" in caught.value.remedy


@pytest.mark.parametrize(("checkpoint", "step"), [("best", 2), (1, 1)])
def test_the_remedy_for_a_damaged_checkpoint_that_was_asked_for_works(
    run_dir: Path, checkpoint: Literal["best"] | int, step: int
) -> None:
    damage(run_dir, step)
    with pytest.raises(MaskfleetError, match="is damaged") as caught:
        load(run_dir, "cpu", checkpoint=checkpoint)
    assert "run the same command again" not in caught.value.remedy, "that gives the same error"
    assert "--last" in caught.value.remedy
    assert load(run_dir, "cpu", checkpoint="last").step == 3
