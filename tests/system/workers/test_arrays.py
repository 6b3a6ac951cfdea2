"""Workers for calls with arrays answer in order, report errors, and exit with their parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from maskfleet.errors import MaskfleetError
from maskfleet.system.workers.arrays import CALLS_PER_WORKER, SLOT_BYTES, ArrayWorkers

PARENT = """
import os
from maskfleet.system.workers.arrays import ArrayWorkers
workers = ArrayWorkers(2, preload=["maskfleet.errors"])
pids = [workers.submit(os.getpid).result() for _ in range(4)]
print(*{worker.process.pid for worker in workers._workers}, flush=True)
os.kill(os.getpid(), 9)
"""


def square(number: int) -> int:
    return number * number


def fail(what: str) -> None:
    raise MaskfleetError(what, remedy="do something else")


def reverse(values: bytes) -> bytes:
    return bytes(values[::-1])


def reverse_slowly(values: bytes) -> bytes:
    time.sleep(0.02)
    return bytes(values[::-1])


def total(array: NDArray[np.uint8]) -> int:
    return int(array.sum())


def repeated(array: NDArray[np.uint8], count: int) -> NDArray[np.uint8]:
    return np.tile(array, count)


def not_sendable() -> Callable[[], None]:
    return lambda: None


def threads() -> str | None:
    return os.environ.get("OPENBLAS_NUM_THREADS")


@pytest.fixture(scope="module")
def workers() -> Iterator[ArrayWorkers]:
    with closing(ArrayWorkers(2, preload=["maskfleet.errors"])) as started:
        yield started


def test_answers_belong_to_their_calls(workers: ArrayWorkers) -> None:
    futures = [workers.submit(square, number) for number in range(50)]
    assert [future.result() for future in futures] == [number * number for number in range(50)]
    assert os.getpid() not in {workers.submit(os.getpid).result() for _ in range(4)}
    assert workers.submit(threads).result() == "1"


def test_errors_reach_the_caller_and_the_worker_continues(workers: ArrayWorkers) -> None:
    with pytest.raises(MaskfleetError, match="no such thing") as caught:
        workers.submit(fail, "no such thing").result()
    assert caught.value.remedy == "do something else"
    with pytest.raises(RuntimeError, match="in square"):
        workers.submit(square, "text").result()
    assert workers.submit(square, 3).result() == 9


def test_arrays_of_more_calls_than_slots_do_not_overwrite_each_other(workers: ArrayWorkers) -> None:
    arrays = [np.full(10_000, number, np.uint8) for number in range(60)]
    calls = [workers.submit(total, array) for array in arrays]
    assert [call.result() for call in calls] == [10_000 * number for number in range(60)]


@pytest.mark.parametrize("size", [SLOT_BYTES - 1, SLOT_BYTES, SLOT_BYTES + 1, 4 * SLOT_BYTES])
def test_what_exceeds_the_shared_memory_passes_through_the_pipe(workers: ArrayWorkers, size: int) -> None:
    array, text = np.arange(size, dtype=np.uint8), bytes(range(251)) * (size // 251)
    sums = [workers.submit(total, array) for _ in range(10)]
    texts = [workers.submit(reverse, text) for _ in range(10)]
    tiles = [workers.submit(repeated, array[:1000], size // 1000) for _ in range(10)]
    assert {call.result() for call in sums} == {int(array.sum())}
    assert {call.result() for call in texts} == {text[::-1]}
    assert all(np.array_equal(call.result(), np.tile(array[:1000], size // 1000)) for call in tiles)


def test_long_arguments_and_long_answers_do_not_wait_for_each_other(workers: ArrayWorkers) -> None:
    text = bytes(range(250)) * (4 * SLOT_BYTES // 250)
    calls = [workers.submit(reverse_slowly, text) for _ in range(3 * len(workers))]
    assert {call.result() for call in calls} == {text[::-1]}


def test_calls_without_an_answer_are_few(workers: ArrayWorkers) -> None:
    calls = []
    for number in range(40):
        calls.append(workers.submit(total, np.full(100_000, number, np.uint8)))
        assert sum(not call.is_done for call in calls) <= len(workers) * CALLS_PER_WORKER
    assert sum(call.result() for call in calls) == 100_000 * sum(range(40))
    assert all(call.is_done for call in calls)


def test_answers_do_not_change_when_their_memory_is_used_again(workers: ArrayWorkers) -> None:
    kept = [workers.submit(repeated, np.full(1000, number, np.uint8), 2).result() for number in range(20)]
    assert [int(array[0]) for array in kept] == list(range(20))
    assert all(len(array) == 2000 and len(set(array.tolist())) == 1 for array in kept)


def test_an_answer_that_cannot_be_sent_is_an_error_of_its_call(workers: ArrayWorkers) -> None:
    with pytest.raises(RuntimeError, match="pickle"):
        workers.submit(not_sendable).result()
    assert workers.submit(square, 3).result() == 9


def test_without_processes_this_one_works() -> None:
    with closing(ArrayWorkers(0, preload=["maskfleet.errors"])) as none:
        assert len(none) == 0
        assert none.submit(os.getpid).result() == os.getpid()


def test_a_worker_that_dies_is_reported() -> None:
    with closing(ArrayWorkers(1, preload=["maskfleet.errors"])) as workers:
        with pytest.raises(MaskfleetError, match="a worker process died"):
            workers.submit(os._exit, 1).result()
        with pytest.raises(MaskfleetError, match="a worker process died"):
            workers.submit(square, 1).result()


def test_all_calls_of_a_worker_that_dies_are_reported() -> None:
    with closing(ArrayWorkers(1, preload=["maskfleet.errors"])) as workers:
        calls = [workers.submit(os._exit, 1), workers.submit(square, 1), workers.submit(square, 2)]
        for call in reversed(calls):
            with pytest.raises(MaskfleetError, match="a worker process died"):
                call.result()


def test_close_ends_the_processes() -> None:
    workers = ArrayWorkers(2, preload=["maskfleet.errors"])
    processes = [worker.process for worker in workers._workers]
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
