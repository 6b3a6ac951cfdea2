"""The processes of a job on this host, found by a variable in their environment, and how to kill them."""

from __future__ import annotations

import hashlib
import os
import signal
import time
from pathlib import Path

from maskfleet.system.rank_variables import ATTEMPT

JOB_VARIABLE = "MASKFLEET_JOB"


def job_id(run_dir: Path) -> str:
    """The value of JOB_VARIABLE for the job in `run_dir`; only letters and digits, so it needs no quoting."""
    return hashlib.sha256(str(run_dir).encode()).hexdigest()[:20]


def processes_of(job: str, *, up_to: int | None = None) -> list[int]:
    """Ids of the processes of the job, except this one and its parents; `up_to` leaves out later generations."""
    wanted = f"{JOB_VARIABLE}={job}".encode()
    return [
        pid
        for pid, variables in _environments()
        if wanted in variables and (up_to is None or _generation(variables) <= up_to)
    ]


def processes_of_all_jobs() -> list[int]:
    """Ids of the processes of every job on this host."""
    return [pid for pid, names in _environments() if any(one.startswith(f"{JOB_VARIABLE}=".encode()) for one in names)]


def _environments() -> list[tuple[int, list[bytes]]]:
    mine = _ancestry()
    pids = sorted(int(folder.name) for folder in Path("/proc").iterdir() if folder.name.isdigit())
    return [(pid, _environment(Path("/proc") / str(pid)).split(b"\0")) for pid in pids if pid not in mine]


def wrappers_of(pids: list[int]) -> list[int]:
    """Those of `pids` that wrap a rank under mpirun (rank.py)."""
    return [
        pid
        for pid in pids
        if b"maskfleet.launch.supervise.rank" in _read(Path("/proc") / str(pid) / "cmdline").split(b"\0")
    ]


def send_signal(pids: list[int], number: signal.Signals = signal.SIGKILL) -> None:
    """Send `number` to each of `pids`, ignoring processes that have exited."""
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


def kill_all(job: str, *, up_to: int | None = None, grace_s: float = 10) -> list[int]:
    """Kill all processes of the job; returns those left after the grace period, such as one stuck in disk I/O.

    With `up_to`, processes of later generations are spared.
    """
    deadline = time.monotonic() + grace_s
    while left := processes_of(job, up_to=up_to):
        if time.monotonic() > deadline:
            return left
        send_signal(left)
        time.sleep(0.05)
    return []


def _generation(variables: list[bytes]) -> int:
    """The generation that a process with this environment belongs to; -1 if it does not say."""
    prefix = f"{ATTEMPT}=".encode()
    values = [one.removeprefix(prefix) for one in variables if one.startswith(prefix)]
    return int(values[0]) if values and values[0].isdigit() else -1


def _environment(folder: Path) -> bytes:
    state = _read(folder / "stat").rpartition(b")")[2].split()
    return b"" if not state or state[0] == b"Z" else _read(folder / "environ")


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return b""  # it has exited, or belongs to another user and so not to the job


def _ancestry() -> set[int]:
    pids, pid = set(), os.getpid()
    while pid > 0:
        pids.add(pid)
        try:
            pid = int((Path("/proc") / str(pid) / "stat").read_text().rsplit(")", 1)[1].split()[1])
        except (FileNotFoundError, ProcessLookupError):
            break  # it has just exited, like the command that detached this process
    return pids
