"""Runs on this machine, through the command line."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
from processes import losses
from workshop import Workshop, ranks_of, until

from maskfleet.config.launch import LocalLaunch
from maskfleet.config.recipes import recipe
from maskfleet.errors import LaunchError
from maskfleet.launch.backend import parse_handle
from maskfleet.launch.job import JobHandle, JobState, job_for
from maskfleet.launch.local.backend import LocalBackend
from maskfleet.launch.supervise.job_files import JobFolder
from maskfleet.launch.supervise.processes import job_id, processes_of
from maskfleet.launch.supervise.status import status_of
from maskfleet.system.process import RecordingShell
from maskfleet.training.output.metrics import read_metrics

NASTY = "a b'\"$(touch harm)`touch harm`;\n&"


def run_dir_of(handle: str) -> Path:
    return Path(parse_handle(handle).path)


def test_submit_sends_just_what_render_shows(tmp_path: Path) -> None:
    shell = RecordingShell()
    backend = LocalBackend(LocalLaunch(), run=shell, cwd=tmp_path)
    rendered = backend.render(job_for(recipe("demo"), slots=(2,), name="a"))
    assert rendered == backend.render(job_for(recipe("demo"), slots=(2,), name="a"))
    handle = backend.submit(rendered)
    assert handle == JobHandle("local", "", str(tmp_path / "runs" / "a"))
    assert shell.detached == [list(command) for command in rendered.commands]
    for name, content in rendered.files.items():
        assert (tmp_path / "runs" / "a" / name).read_text() == content
    text = rendered.text()
    assert all(content in text for content in rendered.files.values())
    assert all(json.dumps(list(command)) in text for command in rendered.commands)


def test_another_run_under_the_same_name_is_refused(tmp_path: Path) -> None:
    backend = LocalBackend(LocalLaunch(), run=RecordingShell(), cwd=tmp_path)
    backend.submit(backend.render(job_for(recipe("demo"), slots=(1,), name="a")))
    with pytest.raises(LaunchError, match="already"):
        backend.submit(backend.render(job_for(recipe("demo"), slots=(1,), name="a")))


def test_a_dry_run_sends_nothing(workshop: Workshop) -> None:
    done = workshop("launch", "-c", str(workshop.run_file), "--name", "a", "--dry-run")
    assert done.returncode == 0
    assert 'file "run.yaml"' in done.stdout
    assert not (workshop.folder / "runs").exists()


def test_a_file_gives_the_slots_of_an_instance_that_nobody_knows(workshop: Workshop) -> None:
    page = (Path(__file__).parents[3] / "docs" / "run-anywhere" / "launch.md").read_text()
    (workshop.folder / "more.json").write_text(page.split("```json\n")[1].split("```")[0])
    options = ["launch", "-c", str(workshop.run_file), "--on", "ssh", "--hosts", "a,b", "--dry-run"]
    options += ["--launch-set", "environment=/opt/env", "--instance", "x9.large"]
    assert "nothing is known of the instance type x9.large" in workshop(*options).stderr
    shown = workshop(*options, "--instances", "more.json").stdout
    assert shown.count('"slots": 2') == 2


def test_launching_imports_no_torch(workshop: Workshop) -> None:
    import subprocess
    import sys

    code = (
        "import sys; from maskfleet.cli.main import app; "
        "app(['launch', '-c', 'micro.yaml', '--dry-run'], standalone_mode=False); "
        "print(sorted({'torch', 'numpy', 'cv2', 'boto3'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=workshop.folder, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.slow
def test_two_detached_runs_side_by_side_with_killed_ranks_end_alike(workshop: Workshop) -> None:
    common = ("--ranks", "2", "-s", "train.epoch_schedule=[[40, null]]", "-s", "eval.every_epochs=0")
    first, second = (workshop.launched("--name", name, *common) for name in ("first", "second"))
    victim = run_dir_of(first)
    until(lambda: any(record["step"] >= 8 for record in read_metrics(victim)))
    os.kill(ranks_of(victim)[0], signal.SIGKILL)
    followed = workshop("logs", "-f", first)
    assert "resuming after step" in followed.stdout
    assert followed.stdout.rstrip().endswith("the run is done")
    workshop("logs", "-f", second)
    status = workshop.status(first)
    assert (status["state"], status["restarts"], status["step"]) == ("done", 1, 120)
    assert losses(victim) == losses(run_dir_of(second))
    assert processes_of(job_id(victim)) == []


@pytest.mark.slow
def test_cancel_saves_leaves_no_process_and_may_be_repeated(workshop: Workshop) -> None:
    handle = workshop.launched("--name", "a", "--ranks", "2", "--set", "train.epoch_schedule=[[4000, null]]")
    run_dir = run_dir_of(handle)
    until(lambda: any(record["step"] >= 4 for record in read_metrics(run_dir)))
    assert len(processes_of(job_id(run_dir))) >= 2
    assert workshop("cancel", handle).returncode == 0
    assert processes_of(job_id(run_dir)) == []
    assert workshop("cancel", handle).returncode == 0
    assert workshop.status(handle)["state"] == "cancelled"
    last = max(int(path.stem.split("-")[1]) for path in (run_dir / "checkpoints").glob("step-*.json"))
    assert last == read_metrics(run_dir)[-1]["step"]
    unknown = workshop("cancel", "local:///no/such/run")
    assert (unknown.returncode, unknown.stdout[:18]) == (0, "nothing to cancel:")


@pytest.mark.slow
def test_a_machine_that_shuts_down_saves_and_the_same_launch_resumes_later(workshop: Workshop) -> None:
    short = ("--name", "a", "-s", "train.epoch_schedule=[[30, null]]", "-s", "eval.every_epochs=0")
    handle = workshop.launched(*short)
    run_dir = run_dir_of(handle)
    until(lambda: any(record["step"] >= 8 for record in read_metrics(run_dir)))
    beat = JobFolder(run_dir).heartbeat(0)
    assert beat is not None
    os.kill(beat.pid, signal.SIGTERM)  # as init does to every process
    until(lambda: not processes_of(job_id(run_dir)) and not Path(f"/proc/{beat.pid}").exists())
    saved = max(int(path.stem.split("-")[1]) for path in (run_dir / "checkpoints").glob("step-*.json"))
    assert saved == read_metrics(run_dir)[-1]["step"] < 180
    assert JobFolder(run_dir).outcome() is None
    assert "host 0 stops" in workshop("logs", handle).stdout
    status = status_of(run_dir)
    assert (status.state, status.hosts[0].state) == (JobState.LOST, "left")
    again = workshop("launch", "-c", str(workshop.run_file), *short)
    assert again.returncode == 0, again.stdout + again.stderr
    assert f"resuming after step {saved}" in again.stdout
    assert read_metrics(run_dir)[-1]["step"] == 180
    assert workshop.status(handle)["restarts"] == 0


@pytest.mark.slow
def test_a_bug_that_kills_every_attempt_stops_after_the_budget_with_its_first_words(workshop: Workshop) -> None:
    done = workshop(
        "launch", "-c", str(workshop.run_file), "--name", "a", "--max-restarts", "1", "-s", "data.root=/nowhere"
    )
    assert done.returncode == 1
    assert "First to fail was rank 0" in done.stderr
    assert "cause: missing data" in done.stderr
    handle = done.stdout.splitlines()[0]
    status = workshop.status(handle)
    assert (status["state"], status["restarts"]) == ("failed", 1)
    assert workshop("explain", handle).stdout.strip() in done.stderr


@pytest.mark.slow
def test_paths_and_values_with_quotes_blanks_and_newlines_do_no_harm(workshop: Workshop) -> None:
    nasty = workshop.folder / NASTY
    nasty.mkdir()
    set_value = json.dumps(f"/nowhere/{NASTY}")
    workshop.folder = nasty
    done = workshop(
        "launch", "-c", str(workshop.run_file), "--name", "a", "--max-restarts", "0", "-s", f"data.root={set_value}"
    )
    assert done.returncode == 1
    assert "cause: missing data" in done.stderr
    handle = done.stdout.splitlines()[0]
    assert run_dir_of(handle) == nasty / "runs" / "a"
    assert workshop.status(handle)["state"] == "failed"
    assert not list(workshop.folder.parent.rglob("harm"))


@pytest.mark.parametrize("command", ["status", "logs", "explain"])
def test_an_unknown_job_is_an_error_that_says_so(command: str, workshop: Workshop) -> None:
    done = workshop(command, f"local://{workshop.folder}/none")
    assert done.returncode != 0
    assert "there is no job" in done.stdout + done.stderr
