"""The record of a run: what a report can know from a run directory, and what it says when something is missing."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from maskfleet.config.load import write_run_file
from maskfleet.config.run import RunConfig
from maskfleet.errors import DataError
from maskfleet.evaluation.detections_file import read_detections
from maskfleet.evaluation.report.record import ReportedRun
from maskfleet.training.output.metrics import read_metrics
from maskfleet.training.output.record import checked_run, read_environment, record_of, with_distinct_names
from maskfleet.training.run import train


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, micro: RunConfig) -> Path:
    run_dir = tmp_path_factory.mktemp("reported") / "mine"
    train(micro, run_dir)
    return run_dir


@pytest.fixture
def copied(trained: Path, tmp_path: Path) -> Path:
    return shutil.copytree(trained, tmp_path / "mine")


@pytest.mark.slow
def test_a_finished_run_has_detections_environment_and_a_full_report(trained: Path) -> None:
    stored = read_detections(trained)
    assert stored is not None
    last = [line for line in read_metrics(trained) if "mAP(bbox)/IoU=0.5" in line][-1]
    assert stored.origin.step == last["step"] == 18
    assert stored.scores["segm"].ap == last["mAP(segm)/IoU=0.5:0.95"]
    stages_s = [last["evaluation_detect_s"], last["evaluation_score_s"]]
    assert min(stages_s) > 0
    assert sum(stages_s) <= last["evaluation_s"] + 0.002  # all three are rounded
    assert {"device", "torch", "training time"} <= set(read_environment(trained))
    page = (trained / "report.html").read_text()
    for section in ("Where time went", "Kinds of errors", "Confused classes", "Environment", "Configuration"):
        assert section in page, section
    assert "data:image/jpeg" in page


@pytest.mark.slow
def test_the_analysis_has_the_scores_of_the_evaluation(trained: Path) -> None:
    record = record_of(trained)
    stored = read_detections(trained)
    assert stored is not None
    assert record.scores == stored.scores
    assert record.analysis is not None
    assert len(record.best) + len(record.worst) == 5, "every validation image"
    assert record.notes == []


@pytest.mark.slow
def test_missing_detections_are_computed_once_from_the_best_checkpoint(copied: Path) -> None:
    (copied / "detections.npz").unlink()
    asked: list[str] = []
    record = record_of(copied, progress=lambda what, done, total: asked.append(what))
    assert asked.count("detecting") == 5
    assert record.analysis is not None
    asked.clear()
    assert record_of(copied, progress=lambda what, done, total: asked.append(what)).scores == record.scores
    assert "detecting" not in asked


@pytest.mark.slow
def test_a_missing_data_set_leaves_the_scores(copied: Path, tmp_path: Path) -> None:
    record = record_of(copied, data=str(tmp_path / "moved"))
    assert record.analysis is None
    assert set(record.scores) == {"bbox", "segm"}
    assert "no curves, errors and pictures" in record.notes[0]
    (copied / "detections.npz").unlink()
    nothing = record_of(copied, data=str(tmp_path / "moved"))
    assert nothing.scores == {}
    assert "There are no detections to look at" in nothing.notes[0]


@pytest.mark.slow
def test_missing_images_leave_everything_but_pictures(copied: Path, micro: RunConfig, tmp_path: Path) -> None:
    moved = shutil.copytree(micro.data.root, tmp_path / "moved")
    for image in moved.rglob("*.jpg"):
        image.unlink()
    record = record_of(copied, data=str(moved))
    assert record.analysis is not None
    assert not record.best
    assert not record.worst
    assert "5 pictures could not be drawn" in record.notes[0]


@pytest.mark.slow
def test_changed_annotations_are_not_compared_with_old_detections(
    copied: Path, micro: RunConfig, tmp_path: Path
) -> None:
    moved = shutil.copytree(micro.data.root, tmp_path / "moved")
    file = moved / "annotations" / "instances_val.json"
    document = json.loads(file.read_text())
    document["annotations"].pop()
    file.write_text(json.dumps(document))
    record = record_of(copied, data=str(moved))
    assert record.analysis is None
    assert "is not the annotation file that the run was evaluated with" in record.notes[0]


def test_folders_that_are_no_runs_or_have_no_results_are_refused(tmp_path: Path, micro: RunConfig) -> None:
    with pytest.raises(DataError, match="there is no folder"):
        checked_run(tmp_path / "nothing")
    with pytest.raises(DataError, match="is not a run"):
        checked_run(tmp_path)
    write_run_file(tmp_path, micro)
    with pytest.raises(DataError, match="has no results yet"):
        checked_run(tmp_path)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "learning_rate": 0.1, "epoch": 0, "time": 1}\n')
    record = record_of(tmp_path)
    assert record.notes == ["The run has no checkpoint yet, so there are no detections to look at."]


def test_runs_of_one_name_are_told_apart_by_their_folders(micro: RunConfig) -> None:
    folders = [Path("/a/x/run"), Path("/b/x/run"), Path("/c/y")]
    named = with_distinct_names([ReportedRun(folder.name, micro) for folder in folders], folders)
    assert [record.name for record in named] == ["a/x/run", "b/x/run", "y"]


def test_an_environment_that_is_damaged_is_an_error_and_none_is_empty(tmp_path: Path) -> None:
    assert read_environment(tmp_path) == {}
    (tmp_path / "environment.json").write_text("{")
    with pytest.raises(DataError, match="cannot be read"):
        read_environment(tmp_path)
