"""The ranks of one host as child processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from maskfleet.launch.explain import explain_job
from maskfleet.launch.supervise import child
from maskfleet.launch.supervise.child import RankProcesses, rank_variables, run_ranks
from maskfleet.launch.supervise.job_files import Host, Job
from maskfleet.launch.supervise.prepare import write_job_files
from maskfleet.launch.supervise.state.kept_lines import KeptLines

LONG_S = 120
FAILS = "import os, sys, time; time.sleep(0.1); sys.exit(7 if os.environ['RANK'] == '1' else 0)"
DIES_OR_WAITS = """
import os, signal, time
signal.signal(signal.SIGTERM, lambda number, frame: os._exit(9))
print("ready", flush=True)
if os.environ["RANK"] == "1":
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(600)
"""
SAVES = """
import os, signal, time
received = []
signal.signal(signal.SIGTERM, lambda number, frame: received.append(number))
print("ready", flush=True)
while not received:
    time.sleep(0.01)
if os.environ["RANK"] == "0":
    time.sleep(0.2)  # saves
    print(f"saved after {len(received)} signals", flush=True)
os._exit(143)
"""


def started(code: str, output: Path, count: int = 2) -> RankProcesses:
    ranks = [{**os.environ, **rank_variables(rank, count, rank, count)} for rank in range(count)]
    return RankProcesses([sys.executable, "-c", code], ranks, cwd=output.parent, output=KeptLines(output))


def ended(ranks: RankProcesses) -> int | None:
    until(lambda: ranks.exit_code() is not None)
    ranks.clean_up()
    return ranks.exit_code()


def lines(output: Path) -> list[str]:
    """Lines of `output` without their time stamps."""
    return sorted(line.split(" ", 1)[1] for line in output.read_text().splitlines())


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LONG_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_the_code_and_the_rank_of_the_first_failure_are_told(tmp_path: Path) -> None:
    ranks = started(FAILS, tmp_path / "log")
    assert ended(ranks) == 7
    assert ranks.failed_rank == 1
    ranks = started("print('done')", tmp_path / "log")
    assert (ended(ranks), ranks.failed_rank) == (0, None)
    assert lines(tmp_path / "log") == ["[rank0]: done", "[rank1]: done"]


def test_the_others_are_stopped_when_one_rank_dies(tmp_path: Path) -> None:
    ranks = started(DIES_OR_WAITS, tmp_path / "log", count=3)
    assert ended(ranks) == 137
    assert ranks.failed_rank == 1


def test_a_rank_that_ignores_the_signal_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "ABORT_GRACE_S", 0.2)
    stubborn = DIES_OR_WAITS.replace("lambda number, frame: os._exit(9)", "signal.SIG_IGN")
    assert ended(started(stubborn, tmp_path / "log")) == 137


def test_a_rank_that_saves_gets_one_signal_though_the_others_have_ended(tmp_path: Path) -> None:
    """A second signal would end it at once."""
    ranks = started(SAVES, tmp_path / "log")
    until(lambda: (tmp_path / "log").exists() and (tmp_path / "log").read_text().count("ready") == 2)
    ranks.stop(LONG_S)
    assert "[rank0]: saved after 1 signals" in lines(tmp_path / "log")


def test_a_rank_does_not_wait_for_a_disk_that_cannot_be_written(tmp_path: Path) -> None:
    output = tmp_path / "log"
    output.mkdir()  # so that it cannot be opened
    code = "import os, time\nfor i in range(3000): print('x' * 100, flush=True)\n"
    code += "open('printed', 'w').close()\nwhile os.path.isdir('log'): time.sleep(0.01)\nprint('last')"
    ranks = started(code, output, count=1)
    until(lambda: (tmp_path / "printed").exists())
    output.rmdir()
    assert ended(ranks) == 0
    written = output.read_text().splitlines()
    assert len(written) == 3001, "the lines were kept until they could be written"
    assert written[-1].endswith("[rank0]: last")


def test_ranks_in_the_foreground_meet_in_a_folder_that_is_removed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    code = "import os, pathlib; p = pathlib.Path(os.environ['MASKFLEET_STORE_FILE']); print(p.parent.name)"
    assert run(tmp_path, code) == 0
    assert capfd.readouterr().out.split() == ["store", "store"]
    own = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "5"}
    argv = [sys.executable, "-c", "import os; print('MASKFLEET_STORE_FILE' in os.environ)"]
    assert run_ranks(argv, 1, env=own, folder=tmp_path / "store") == 0
    assert capfd.readouterr().out.split() == ["False"], "the user chose where they meet"
    assert run(tmp_path, FAILS) == 7
    assert "rank 1 ended with code 7" in capfd.readouterr().err
    assert not list(tmp_path.iterdir())


def run(folder: Path, code: str) -> int:
    return run_ranks([sys.executable, "-c", code], 2, env=os.environ, folder=folder / "store")


def test_ranks_in_the_foreground_save_on_ctrl_c(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    interrupt = SAVES.replace("while not", f"os.kill({os.getpid()}, 2) if os.environ['RANK'] == '1' else 0\nwhile not")
    assert run(tmp_path, interrupt) == 128 + signal.SIGTERM
    assert "saved after 1 signals" in capfd.readouterr().out


@pytest.mark.parametrize("starter", ["supervisor", "mpirun"])
def test_a_job_that_cannot_be_started_fails_after_its_restarts_and_is_explained(tmp_path: Path, starter: str) -> None:
    missing, run_dir = tmp_path / "none", tmp_path / "runs" / "a"
    job = Job("a", starter, (Host("localhost", 2),), 1, 1, 0, str(missing))
    write_job_files(run_dir, {"launch/job.json": job.to_json()})
    argv = [sys.executable, "-m", "maskfleet.launch.supervise.supervisor", str(run_dir), "0"]
    assert subprocess.run(argv, timeout=240, check=False).returncode == 1
    explained = explain_job(run_dir)
    assert "The run is failed: the ranks ended with code 2 after 1 restarts." in explained
    assert f"error: there is no folder {missing} to run " in explained
    assert "→ create it, then try again" in explained
