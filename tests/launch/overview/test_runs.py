"""`maskfleet runs`: what a folder of runs and an S3 prefix look like at a glance."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from flaky_s3 import FlakyS3
from stage_server import direct
from typer.testing import CliRunner

from maskfleet.cli.main import app
from maskfleet.errors import LaunchError
from maskfleet.launch.job import JobState
from maskfleet.launch.overview.sources import summaries
from maskfleet.launch.overview.summary import RunRecord, summary_of
from maskfleet.launch.supervise.job_files import JobFolder
from maskfleet.system.lock import is_held_here, locked

pytest_plugins = ("stage_fixtures",)

BOX, MASK = "mAP(bbox)/IoU=0.5:0.95", "mAP(segm)/IoU=0.5:0.95"


def write_run(
    folder: Path, *, steps: int, total: int, aps: dict[int, float], age_s: float = 0, done: bool = False
) -> Path:
    """A run as training leaves it, that last changed `age_s` ago."""
    folder.mkdir(parents=True)
    (folder / "run.yaml").write_text("# maskfleet\nrecipe: r50_fpn_1x  # of a recipe\nmodel:\n  future_field: 1\n")
    records = [{"step": step, "images_per_s": 10.0 + step % 2, "total_cost": 1.5} for step in range(1, steps + 1)]
    records += [{"step": step, BOX: ap + 0.1, MASK: ap} for step, ap in aps.items()]
    lines = [json.dumps(record) for record in records] + ['{"step": 99']  # cut short by a kill
    (folder / "metrics.jsonl").write_text("\n".join(lines))
    (folder / "log.txt").write_text(f"12 images; {total} steps of 2 images, 6 steps per epoch\n")
    if done:
        (folder / "model.safetensors").write_bytes(b"")
    for file in folder.iterdir():
        os.utime(file, (time.time() - age_s,) * 2)
    return folder


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    write_run(tmp_path / "runs" / "a", steps=18, total=18, aps={6: 0.25, 12: 0.5, 18: 0.375}, age_s=7300, done=True)
    write_run(tmp_path / "runs" / "group" / "b", steps=5, total=18, aps={}, age_s=10)
    (tmp_path / "runs" / "a" / "nested").mkdir()
    (tmp_path / "runs" / "a" / "nested" / "run.yaml").touch()
    (tmp_path / "runs" / "images").mkdir()
    return tmp_path / "runs"


def test_runs_are_found_newest_first_with_what_they_did(runs: Path) -> None:
    b, a = summaries(str(runs))
    assert (b.run, a.run) == (str(runs / "group" / "b"), str(runs / "a"))
    assert (a.recipe, a.step, a.total_steps, a.state) == ("r50_fpn_1x", 18, 18, "done")
    assert (a.box_ap, a.mask_ap, a.ap) == (0.6, 0.5, 0.5), "the best, not the last"
    assert a.images_per_s == 10.5
    assert a.age_s == pytest.approx(7300, abs=60)
    assert (b.step, b.total_steps, b.ap, b.state) == (5, 18, None, "unfinished")


def test_the_command_prints_a_table_and_json(runs: Path) -> None:
    done = CliRunner().invoke(app, ["runs", str(runs)], env={"COLUMNS": "120"})
    assert done.exit_code == 0, done.output
    header, b, a = (line.split() for line in done.output.splitlines())
    assert header == ["run", "recipe", "step", "AP", "images/s", "state", "age"]
    assert a[:6] == ["a", "r50_fpn_1x", "18/18", "50.0", "10.5", "done"]
    assert b[:6] == ["group/b", "r50_fpn_1x", "5/18", "–", "11", "unfinished"]
    listed = json.loads(CliRunner().invoke(app, ["runs", str(runs), "--json"]).output)
    assert [(one["state"], one["mask_ap"]) for one in listed] == [("unfinished", None), ("done", 0.5)]


def test_a_run_that_is_trained_here_is_running(runs: Path) -> None:
    lock = runs / "group" / "b" / ".lock"
    assert not is_held_here(lock)
    with locked(lock, "training"):
        assert is_held_here(lock)
        assert [one.state for one in summaries(str(runs / "group"))] == ["running"]
    assert not is_held_here(lock)
    assert [one.state for one in summaries(str(runs / "group"))] == ["unfinished"]


def test_the_outcome_of_a_launched_run_is_its_state(runs: Path) -> None:
    folder = JobFolder(runs / "group" / "b")
    folder.path.mkdir()
    (folder.path / "job.json").write_text("{}")
    folder.write_outcome("failed", 1, "out of memory")
    assert [one.state for one in summaries(str(runs / "group"))] == ["failed"]


def test_a_finished_run_that_was_extended_is_unfinished() -> None:
    metrics = b'{"step": 18}\n{"step": 20}\n'
    log = "18 images; 18 steps of 2 images\nstep: 18/18\n18 images; 36 steps of 2 images\nstep: 20/36  epoch: 3"
    files = RunRecord("r", "", metrics, log, {"model.safetensors": 100.0, "metrics.jsonl": 200.0})
    summary = summary_of(files, now=260)
    assert (summary.state, summary.step, summary.total_steps, summary.age_s) == ("unfinished", 20, 36, 60)
    assert summary_of(files, now=0, job=JobState.RUNNING).state == "running"


def test_files_of_any_content_give_a_summary() -> None:
    metrics = b'[]\n{"step": "x"}\n{"step": 3, "images_per_s": null}\n\xff\n' + b"[" * 100_000
    files = RunRecord("r", "recipe: [broken", metrics, "step: 1/", {})
    summary = summary_of(files, now=0)
    assert (summary.recipe, summary.step, summary.total_steps, summary.age_s) == (None, 3, None, None)


def test_a_missing_folder_is_an_error_and_an_empty_one_is_not(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="there is no folder"):
        summaries(str(tmp_path / "none"))
    assert "no runs in" in CliRunner().invoke(app, ["runs", str(tmp_path)]).output
    with pytest.raises(LaunchError, match="not an S3 URL"):
        summaries("s3://Bucket_of_mine/runs")


def test_the_command_needs_no_torch(runs: Path) -> None:
    code = "import sys; from maskfleet.launch.overview.sources import summaries; summaries(sys.argv[1]);"
    code += "assert not {'torch', 'numpy', 'boto3'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code, str(runs)], check=True)


@pytest.mark.slow
def test_runs_in_s3(s3: FlakyS3, runs: Path) -> None:
    client = direct(s3)
    for path in sorted(runs.rglob("*")):
        if path.is_file():
            client.upload_file(str(path), "coco-data", f"team/{path.relative_to(runs).as_posix()}")
    client.put_object(Bucket="coco-data", Key="other/run.yaml", Body=b"recipe: scratch\n")
    found = {one.run: one for one in summaries("s3://coco-data/team")}
    assert set(found) == {"s3://coco-data/team/a", "s3://coco-data/team/group/b"}
    a = found["s3://coco-data/team/a"]
    assert (a.recipe, a.step, a.total_steps, a.mask_ap, a.state) == ("r50_fpn_1x", 18, 18, 0.5, "done")
    assert found["s3://coco-data/team/group/b"].state == "unfinished"
    assert [one.recipe for one in summaries("s3://coco-data/other")] == ["scratch"]
    with pytest.raises(LaunchError, match="does not exist"):
        summaries("s3://no-such-bucket-here/x")
