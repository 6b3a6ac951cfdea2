"""Damaged state files count as absent: no command fails because of them, and the run can be launched again."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from maskfleet.cli.main import app
from maskfleet.config.launch import LocalLaunch
from maskfleet.config.recipes import recipe
from maskfleet.errors import LaunchError
from maskfleet.launch.explain import explain_job
from maskfleet.launch.job import JobState, JobStatus, job_for
from maskfleet.launch.local.backend import LocalBackend
from maskfleet.launch.supervise.job_files import Endpoint, Host, Job, JobFolder, event_line
from maskfleet.launch.supervise.lost_hosts import HostMonitor
from maskfleet.launch.supervise.prepare import refuse_running
from maskfleet.launch.supervise.state.kept_lines import KeptLines
from maskfleet.launch.supervise.status import log_lines, status_of
from maskfleet.launch.supervise.status import main as remote
from maskfleet.system.machine import machine_id
from maskfleet.system.process import RecordingShell

BEAT = {
    "machine": machine_id(),  # its process has exited
    "count": 7,
    "pid": 4_000_000,
    "state": "done",
    "generation": 0,
    "restarts": 0,
    "time": 1.0,
    "address": "127.0.0.1",
    "lost": [],
}
FILES = ("job.json", "outcome.json", "endpoint.json", "host-0/beat.json", "host-0/events.jsonl", "host-0/output.log")
DAMAGED = {
    "empty": b"",
    "torn": b'{"state": "do',
    "null": b"null",
    "list": b"[1]",
    "no keys": b"{}",
    "wrong types": b'{"state": [1], "count": {}, "time": null, "hosts": 3, "what": 4, "generation": "x"}',
    "binary": b"\xff\xfe\x00\n\x00",
    "deep": b"[" * 50_000,
    "large number": b'{"state": "done", "exit_code": 1e999, "step": 1e999, "count": 1e999}\n',
}


def add_event(folder: JobFolder, what: str) -> None:
    KeptLines(folder.host(0) / "events.jsonl", durable=True).add(event_line(what))


@pytest.fixture
def finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The run directory of a run that has ended."""
    monkeypatch.chdir(tmp_path)
    backend = LocalBackend(LocalLaunch(), run=RecordingShell(), cwd=tmp_path)
    run_dir = Path(backend.submit(backend.render(job_for(recipe("demo"), slots=(1,), name="a"))).path)
    folder = JobFolder(run_dir)
    (folder.host(0) / "beat.json").write_text(json.dumps(BEAT))
    add_event(folder, "the run is done")
    folder.write_endpoint(Endpoint(0, 0, "127.0.0.1"))
    folder.write_outcome("done", 0)
    (folder.host(0) / "output.log").write_text("2026-11-15T10:00:00.000000Z [launch]: the run is done\n")
    (run_dir / "metrics.jsonl").write_text('{"step": 3}\n')
    return run_dir


@pytest.mark.parametrize("name", [*FILES, "../metrics.jsonl"])
def test_damage_of_any_kind_is_no_error(finished: Path, name: str) -> None:
    for data in DAMAGED.values():
        (finished / "launch" / name).write_bytes(data)
        assert status_of(finished).state in (JobState.DONE, JobState.LOST)
        lines = list(log_lines(finished))
        assert name == "host-0/output.log" or lines == ["[launch]: the run is done"]
        assert explain_job(finished)
        refuse_running(finished)


@pytest.mark.parametrize("name", ["job.json", "outcome.json"])
def test_every_command_works_with_a_damaged_file_and_the_run_can_be_launched_again(finished: Path, name: str) -> None:
    (finished / "launch" / name).write_bytes(DAMAGED["torn"])
    handle = f"local://{finished}"
    for command in (["status", handle], ["status", handle, "--json"], ["explain", handle], ["logs", handle]):
        done = CliRunner().invoke(app, command)
        assert done.exception is None or isinstance(done.exception, SystemExit), (command, done.exception)
    assert CliRunner().invoke(app, ["cancel", handle]).exit_code == 0
    backend = LocalBackend(LocalLaunch(), run=RecordingShell(), cwd=finished.parents[1])
    backend.submit(backend.render(job_for(recipe("demo"), slots=(1,), name="a")))
    assert status_of(finished).state is JobState.PENDING


def test_the_state_without_a_damaged_file_is_what_the_others_show(finished: Path) -> None:
    assert status_of(finished).state is JobState.DONE
    (finished / "launch" / "job.json").write_bytes(b"")
    assert status_of(finished).state is JobState.DONE
    (finished / "launch" / "outcome.json").write_bytes(b"")
    assert status_of(finished).state is JobState.LOST, "nothing shows how it ended, and nobody is alive"
    refuse_running(finished)


def test_a_damaged_outcome_can_be_replaced(finished: Path) -> None:
    folder = JobFolder(finished)
    (folder.path / "outcome.json").write_bytes(b'{"state": "do')
    folder.write_outcome("failed", 3, "why")
    outcome = folder.outcome()
    assert outcome is not None
    assert (outcome.state, outcome.exit_code, outcome.why) == ("failed", 3, "why")
    folder.write_outcome("done", 0)
    assert folder.outcome() == outcome, "a good one stays"


def test_events_around_a_torn_line_are_kept(finished: Path) -> None:
    folder = JobFolder(finished)
    with (folder.host(0) / "events.jsonl").open("ab") as file:
        file.write(b'{"time": "2026-11-15T1\n[1]\nnull\n')
    add_event(folder, "supervisor is up")
    assert [event.what for event in folder.events()] == ["the run is done", "supervisor is up"]


def test_fields_of_a_newer_version_are_ignored(finished: Path) -> None:
    folder = JobFolder(finished)
    for name in ("job.json", "outcome.json", "endpoint.json", "host-0/beat.json"):
        path = folder.path / name
        path.write_text(json.dumps({**json.loads(path.read_text()), "new_in_9": {"a": [1]}}))
    assert folder.job().name == "a"
    assert (folder.heartbeat(0), folder.outcome(), folder.endpoint()) != (None, None, None)
    newer = {**status_of(finished).as_json(), "new_in_9": 1}
    newer["hosts"] = [{**host, "new_in_9": 1} for host in newer["hosts"]]
    assert JobStatus.from_json(json.loads(json.dumps(newer))) == status_of(finished)


def test_a_heartbeat_that_cannot_be_read_is_no_sign_of_life(tmp_path: Path) -> None:
    folder = JobFolder(tmp_path)
    folder.host(1).mkdir(parents=True)
    (folder.host(1) / "beat.json").write_text(json.dumps(BEAT))
    job = Job("a", "supervisor", (Host("a", 1), Host("b", 1)), 1, 0, 0, "/")
    now = [0.0]
    monitor = HostMonitor(folder, job, 0, clock=lambda: now[0])
    (folder.host(1) / "beat.json").write_bytes(b"")
    now[0] = 89.0
    monitor.poll()
    now[0] = 91.0
    assert monitor.poll() == ([1], []), "the torn file did not count as a heartbeat"
    assert monitor.poll() == ([], [])


def test_a_folder_that_cannot_be_read_for_a_moment_keeps_its_content(
    finished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = JobFolder(finished)
    known = (folder.endpoint(), folder.outcome(), folder.heartbeat(0))

    def fails(self: Path) -> bytes:
        raise OSError(5, os.strerror(5), str(self))

    monkeypatch.setattr(Path, "read_bytes", fails)
    assert (folder.endpoint(), folder.outcome(), folder.heartbeat(0)) == known
    assert JobFolder(finished).outcome() is None, "nothing was known before"


def test_a_run_of_another_user_is_an_error_that_names_it(finished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stat = Path.stat

    def refused(self: Path, *, follow_symlinks: bool = True) -> os.stat_result:
        if self.is_relative_to(finished / "launch"):
            raise PermissionError(13, os.strerror(13), str(self))
        return stat(self, follow_symlinks=follow_symlinks)

    monkeypatch.setattr(Path, "stat", refused)  # as root, which may read everything
    for command in ("status", "explain", "logs", "cancel"):
        done = CliRunner().invoke(app, [command, f"local://{finished}"])
        assert isinstance(done.exception, LaunchError), (command, done.exception)
        assert done.exception.what == f"{finished} cannot be read: Permission denied"
    listed = CliRunner().invoke(app, ["runs", str(finished.parent), "--json"])
    assert listed.exit_code == 0
    assert [one["run"] for one in json.loads(listed.stdout)] == [str(finished)]


@pytest.mark.parametrize("name", ["outcome.json", "host-0/lock"])
def test_what_keeps_cancel_from_writing_is_an_error_that_names_the_file(finished: Path, name: str) -> None:
    path = finished / "launch" / name
    path.unlink(missing_ok=True)
    path.mkdir()  # as root, which may write everywhere
    done = CliRunner().invoke(app, ["cancel", f"local://{finished}"])
    assert isinstance(done.exception, LaunchError), done.exception
    assert str(path) in done.exception.what
    assert remote([str(finished), "stop"]) == 3, "the same on a host that SSH reaches"


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The paths that were synced to disk."""
    found: list[str] = []
    fsync, lock = os.fsync, threading.Lock()

    def recorded(descriptor: int) -> None:
        with lock:
            found.append(str(Path(f"/proc/self/fd/{descriptor}").readlink()))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", recorded)
    return found


@pytest.mark.parametrize(
    ("write", "folder_of"),
    [
        (lambda folder: folder.write_outcome("done", 0), lambda folder: folder.path),
        (lambda folder: folder.write_endpoint(Endpoint(0, 0, "a")), lambda folder: folder.path),
        (lambda folder: folder.request_cancel(), lambda folder: folder.path),
        (lambda folder: add_event(folder, "x"), lambda folder: folder.host(0)),
    ],
)
def test_what_must_survive_a_power_cut_is_synced_with_its_folder(
    tmp_path: Path, synced: list[str], write: Callable[[JobFolder], None], folder_of: Callable[[JobFolder], Path]
) -> None:
    folder = JobFolder(tmp_path)
    folder.host(0).mkdir(parents=True)
    write(folder)
    own = folder_of(folder)
    assert str(own) in synced
    assert any(Path(path).parent == own for path in synced)
