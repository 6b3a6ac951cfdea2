"""A lock keeps other processes out, says who holds it, and never outlives its process."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from maskfleet.infra.terraform.session import Options, only_one
from maskfleet.system.lock import LockHeldError, NoLocksError, locked

HOLD = """
import sys
from pathlib import Path
from maskfleet.system.lock import locked
with locked(Path(sys.argv[1]), "testing"):
    print("mine", flush=True)
    sys.stdin.read()
"""
LONG_S = 120


@contextmanager
def held(path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds the lock, until it is killed or the block ends."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "mine\n"
        yield other


@pytest.fixture
def no_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(file: int, operation: int) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")  # as Lustre does without the option flock

    monkeypatch.setattr(fcntl, "flock", flock)


def test_a_second_process_gets_an_error_that_names_the_holder_of_the_lock(tmp_path: Path) -> None:
    with held(tmp_path / "lock") as other:
        with pytest.raises(LockHeldError) as caught, locked(tmp_path / "lock", "training in runs/a"):
            raise AssertionError("two processes hold the lock")
        who = f"process {other.pid} on {socket.gethostname()}"
        assert caught.value.what == f"another process is training in runs/a ({who})"
        assert "wait" in caught.value.remedy
    with locked(tmp_path / "lock", "training in runs/a"):
        assert (tmp_path / "lock").read_text() == f"process {os.getpid()} on {socket.gethostname()}\n"


def test_the_lock_of_a_killed_process_is_free_at_once(tmp_path: Path) -> None:
    with held(tmp_path / "lock") as other:
        other.kill()
        other.wait()
        with locked(tmp_path / "lock", "testing"):
            pass


def test_waiting_ends_when_the_holder_is_killed(tmp_path: Path) -> None:
    with held(tmp_path / "lock") as other:
        threading.Timer(0.3, other.kill).start()
        with locked(tmp_path / "lock", "testing", wait_s=LONG_S):
            assert other.wait() == -9


def test_waiting_for_a_lock_times_out(tmp_path: Path) -> None:
    with held(tmp_path / "lock"), pytest.raises(LockHeldError), locked(tmp_path / "lock", "testing", wait_s=0.2):
        pass


def test_an_error_inside_the_block_releases_the_lock(tmp_path: Path) -> None:
    with pytest.raises(KeyError), locked(tmp_path / "lock", "testing"):
        raise KeyError
    with locked(tmp_path / "lock", "testing"):
        pass


def test_a_holder_that_wrote_no_name_still_holds_the_lock(tmp_path: Path) -> None:
    with (tmp_path / "lock").open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(LockHeldError, match="did not write its name"), locked(tmp_path / "lock", "testing"):
            pass


def test_a_file_system_without_locks_is_an_error_and_leaves_nothing_that_counts_as_a_lock(
    tmp_path: Path, no_locks: None
) -> None:
    for _ in range(2):
        with (
            pytest.raises(NoLocksError, match="is on a file system without locks") as caught,
            locked(tmp_path / "lock", "training in runs/a"),
        ):
            pass
        assert "option flock" in caught.value.remedy


def test_other_errors_of_the_file_system_are_not_hidden(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"), locked(tmp_path / "file" / "lock", "testing"):
        pass


def test_infra_never_uses_a_lock_that_outlives_its_process(tmp_path: Path, no_locks: None) -> None:
    with pytest.raises(NoLocksError), only_one(Options(tmp_path)):
        raise AssertionError("a file took the place of a lock")
