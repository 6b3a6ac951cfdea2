"""Worker processes answer in order, report errors, and exit with their parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from maskfleet.errors import MaskfleetError
from maskfleet.system.workers.processes import WorkerProcesses

PARENT = """
import os
from maskfleet.system.workers.processes import WorkerProcesses
workers = WorkerProcesses(2, preload=["maskfleet.errors"])
pids = [workers.submit(os.getpid).result() for _ in range(4)]
print(*{process.pid for process in workers._processes}, flush=True)
os.kill(os.getpid(), 9)
"""


def square(number: int) -> int:
    return number * number


def fail(what: str) -> None:
    raise MaskfleetError(what, remedy="do something else")


def threads() -> str | None:
    return os.environ.get("OPENBLAS_NUM_THREADS")


@pytest.fixture(scope="module")
def workers() -> Iterator[WorkerProcesses]:
    with closing(WorkerProcesses(2, preload=["maskfleet.errors"])) as started:
        yield started


def test_answers_belong_to_their_calls(workers: WorkerProcesses) -> None:
    futures = [workers.submit(square, number) for number in range(50)]
    assert [future.result() for future in futures] == [number * number for number in range(50)]
    assert os.getpid() not in {workers.submit(os.getpid).result() for _ in range(4)}
    assert workers.submit(threads).result() == "1"


def test_errors_reach_the_caller_and_the_worker_continues(workers: WorkerProcesses) -> None:
    with pytest.raises(MaskfleetError, match="no such thing") as caught:
        workers.submit(fail, "no such thing").result()
    assert caught.value.remedy == "do something else"
    with pytest.raises(RuntimeError, match="in square"):
        workers.submit(square, "text").result()
    assert workers.submit(square, 3).result() == 9


def test_without_processes_this_one_works() -> None:
    with closing(WorkerProcesses(0, preload=["maskfleet.errors"])) as none:
        assert len(none) == 0
        assert none.submit(os.getpid).result() == os.getpid()


def test_a_worker_that_dies_is_reported() -> None:
    with closing(WorkerProcesses(1, preload=["maskfleet.errors"])) as workers:
        with pytest.raises(MaskfleetError, match="a worker process died"):
            workers.submit(os._exit, 1).result()
        with pytest.raises(MaskfleetError, match="a worker process died"):
            workers.submit(square, 1).result()


def test_close_ends_the_processes() -> None:
    workers = WorkerProcesses(2, preload=["maskfleet.errors"])
    processes = list(workers._processes)
    workers.close()
    assert [process.exitcode for process in processes] == [0, 0]


def test_workers_exit_if_their_parent_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    pids = [int(pid) for pid in done.stdout.split()]
    assert len(pids) == 2
    deadline = time.monotonic() + 30
    while any(is_running(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(is_running(pid) for pid in pids)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
