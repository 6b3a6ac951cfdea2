"""A run that is deleted while it trains ends, and leaves one that is launched again under its name alone."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from workshop import ranks_of, until

from maskfleet.launch.supervise.job_files import Host, Job, JobFolder
from maskfleet.launch.supervise.prepare import write_job_files
from maskfleet.launch.supervise.processes import job_id, processes_of
from maskfleet.launch.supervise.state import own_folder
from maskfleet.launch.supervise.state.own_folder import FOLDER_GONE, OwnFolder

# A supervisor whose ranks sleep instead of training.
CODE = """
import sys
from pathlib import Path
from maskfleet.launch.supervise import commands
from maskfleet.launch.supervise.supervisor import supervise
commands.train_command = lambda run_dir: ["-c", "import time; time.sleep(600)"]
raise SystemExit(supervise(Path(sys.argv[1]), 0))
"""


@pytest.fixture
def supervised(tmp_path: Path) -> Iterator[Callable[[], subprocess.Popen[bytes]]]:
    """Launches a run in RUNS/a; call it again for a second one there."""
    started: list[subprocess.Popen[bytes]] = []
    run_dir = tmp_path / "runs" / "a"
    job = Job("a", "supervisor", (Host("localhost", 1),), 1, 3, 0, str(tmp_path))

    def launch() -> subprocess.Popen[bytes]:
        write_job_files(run_dir, {"launch/job.json": job.to_json()})
        started.append(subprocess.Popen([sys.executable, "-c", CODE, str(run_dir)]))
        until(lambda: ranks_of(run_dir))
        return started[-1]

    yield launch
    for process in started:
        process.kill()  # its ranks die with it
        process.wait()


def test_a_run_that_is_deleted_ends_and_is_not_made_again(
    tmp_path: Path, supervised: Callable[[], subprocess.Popen[bytes]]
) -> None:
    supervisor, run_dir = supervised(), tmp_path / "runs" / "a"
    run_dir.rename(tmp_path / "trash")
    assert supervisor.wait(240) == FOLDER_GONE
    assert processes_of(job_id(run_dir)) == []
    assert not run_dir.exists()


def test_a_run_that_is_launched_again_after_it_was_deleted_has_the_folder_for_itself(
    tmp_path: Path, supervised: Callable[[], subprocess.Popen[bytes]]
) -> None:
    first, run_dir = supervised(), tmp_path / "runs" / "a"
    run_dir.rename(tmp_path / "trash")
    second = supervised()
    assert first.wait(240) == FOLDER_GONE
    until(lambda: ranks_of(run_dir))
    assert second.poll() is None
    assert JobFolder(run_dir).outcome() is None


def test_a_folder_that_cannot_be_read_or_is_not_mounted_for_a_moment_is_not_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = JobFolder(tmp_path / "a")
    folder.host(0).mkdir(parents=True)
    (folder.host(0) / "lock").write_text("process 1 on node1\n")
    (folder.path / "job.json").write_text("{}")
    own = OwnFolder(folder, 0)
    assert not own.is_gone()
    (folder.host(0) / "lock").write_text("")
    assert not own.is_gone(), "whoever has the lock now is writing its name"
    (folder.host(0) / "lock").unlink()
    assert not own.is_gone(), "somebody deleted the lock alone"
    (tmp_path / "a").rename(tmp_path / "b")
    assert own.is_gone()
    monkeypatch.setattr(own_folder, "_device_of", lambda path: -1)
    assert not own.is_gone(), "this is the empty folder below the file system"
