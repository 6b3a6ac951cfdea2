"""The ranks of this host, or mpirun, as child processes: their output goes to a file with time stamps and rank tags."""

from __future__ import annotations

import re
import shutil
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Protocol

from maskfleet.errors import MaskfleetError
from maskfleet.launch.supervise.job_files import stamp
from maskfleet.launch.supervise.processes import kill_all, processes_of, send_signal, wrappers_of
from maskfleet.launch.supervise.state.kept_lines import KeptLines
from maskfleet.system.process import Running, shell_code, start
from maskfleet.system.rank_variables import STORE_FILE, STORE_SOCKET
from maskfleet.system.signals import stop_request

SAVE_GRACE_S = 60.0  # grace period for a rank to save after SIGTERM
ABORT_GRACE_S = 10.0  # grace period for ranks to exit when they have nothing to save
POLL_S = 0.1
STOPPED_CODES = (128 + signal.SIGTERM, 128 + signal.SIGINT)  # of ranks that saved because they were asked to stop
_RANK_TAG = re.compile(rb"^\[rank\d+\]: ")
_MPI_TAG = re.compile(rb"^\[1,(\d+)\]<std\w+>: ?")


def grace_after(code: int) -> float:
    """Grace period for the other ranks after one ended with `code`: if it was asked to stop, they all save."""
    return SAVE_GRACE_S + ABORT_GRACE_S if code in STOPPED_CODES else ABORT_GRACE_S


class Child(Protocol):
    """Processes that train, as the supervisor sees them."""

    failed_rank: int | None

    def exit_code(self) -> int | None:
        """As a shell reports it: 128 + N for signal N; None while a process runs."""

    def stop(self, grace_s: float) -> None:
        """Send SIGTERM, wait for the grace period, then kill what is left."""

    def clean_up(self) -> None:
        """After the end: kill processes that are left, and write the last lines."""


class Lines(Protocol):
    """Where the lines of the ranks go."""

    def add(self, line: bytes) -> None:
        """Take one line: a time stamp, the tag of its rank, what it wrote, and a newline."""


class RankProcesses:
    """The ranks of this host; when one fails, the others are stopped. They die with this process."""

    def __init__(
        self,
        argv: Sequence[str],
        environments: Sequence[Mapping[str, str]],
        *,
        cwd: Path,
        output: Lines | None,
        job: str | None = None,
    ) -> None:
        """Start `argv` once with each environment; without `output` they write to where this process does."""
        self._job = job
        self.failed_rank: int | None = None
        self._failed_code = 0
        self._deadline = float("inf")
        self._ranks: dict[int, Running] = {}
        self._terminated: list[Running] = []
        self._writers: list[threading.Thread] = []
        for env in environments:
            fds = [int(env[STORE_SOCKET])] if STORE_SOCKET in env else []
            process = start(
                argv, cwd=cwd, env=env, output="inherit" if output is None else "pipe", lifetime="parent", pass_fds=fds
            )
            rank = int(env["RANK"])
            self._ranks[rank] = process
            if output is not None:
                self._writers.append(_writer(process.output, output, tag=f"[rank{rank}]: ".encode()))

    def exit_code(self) -> int | None:
        """The exit code of the rank that failed first, as a shell reports it; None while a rank runs."""
        running = self._running()
        if self.failed_rank is not None and running and time.monotonic() > self._deadline:
            for process in running:
                process.kill()
        return None if self._running() else self._failed_code

    def stop(self, grace_s: float) -> None:
        """Send SIGTERM to all ranks, wait for the grace period, then kill what is left."""
        deadline = time.monotonic() + grace_s
        self._terminate(self._running())
        while (running := self._running()) and time.monotonic() < deadline:
            time.sleep(POLL_S)
        for process in running:
            process.kill()
        self.clean_up()

    def clean_up(self) -> None:
        """After the end: kill processes that the ranks left, and write the last lines."""
        if self._job is not None:
            kill_all(self._job)
        for writer in self._writers:
            writer.join(timeout=5)

    def _running(self) -> list[Running]:
        """The ranks that run; the first failure begins the grace period of the others."""
        codes = {rank: process.exit_code() for rank, process in self._ranks.items()}
        running = [process for rank, process in self._ranks.items() if codes[rank] is None]
        failed = {rank: shell_code(code) for rank, code in codes.items() if code}
        if failed and self.failed_rank is None:
            # Of several that ended since the last look, one that a signal killed did not just notice the loss.
            self.failed_rank = max(failed, key=lambda rank: (failed[rank] > 128, failed[rank], -rank))
            self._failed_code = failed[self.failed_rank]
            self._deadline = time.monotonic() + grace_after(self._failed_code)
            if self._failed_code not in STOPPED_CODES:  # else the others are saving, and a second signal would end that
                self._terminate(running)
        return running

    def _terminate(self, processes: Sequence[Running]) -> None:
        """Send SIGTERM to those that have not got it."""
        for process in processes:
            if process not in self._terminated:
                self._terminated.append(process)
                process.send_signal(signal.SIGTERM)


class Mpirun:
    """mpirun, with all processes that it started on this host."""

    def __init__(self, argv: Sequence[str], *, cwd: Path, env: Mapping[str, str], output: KeptLines, job: str) -> None:
        self._job = job
        self.failed_rank: int | None = None  # mpirun says it in its output only
        self._process = start(argv, cwd=cwd, env=env, output="pipe", lifetime="parent")
        self._writer = _writer(self._process.output, output)

    def exit_code(self) -> int | None:
        """As a shell reports it; None while it runs."""
        code = self._process.exit_code()
        return None if code is None else shell_code(code)

    def stop(self, grace_s: float) -> None:
        """Send SIGTERM, wait for the grace period, then kill what is left."""
        if self._process.exit_code() is None:
            # mpirun would kill the ranks a second after its own SIGTERM; a rank that gets one tells all others to save.
            wrappers = wrappers_of(processes_of(self._job))
            send_signal(wrappers or [self._process.pid], signal.SIGTERM)
            if self._process.wait(grace_s) is None:
                self._process.kill()
        self.clean_up()

    def clean_up(self) -> None:
        """After mpirun has exited: kill processes that are left, and write the last lines."""
        kill_all(self._job)
        self._writer.join(timeout=5)


class NotStarted:
    """In place of processes that could not be started: they ended with `error`, which is written to `output`."""

    failed_rank: int | None = None

    def __init__(self, error: MaskfleetError, output: Lines) -> None:
        self._code = error.exit_code
        for line in f"error: {error}".splitlines():
            output.add(f"{stamp()} {line}\n".encode())

    def exit_code(self) -> int | None:
        return self._code

    def stop(self, grace_s: float) -> None:
        """Nothing runs."""

    def clean_up(self) -> None:
        """Nothing is left."""


def run_ranks(argv: Sequence[str], count: int, *, env: Mapping[str, str], folder: Path) -> int:
    """Run `argv` as `count` ranks of this machine in the foreground; returns the exit code.

    They meet in `folder`, which is removed afterwards, unless the user set MASTER_ADDR and MASTER_PORT.
    """
    shutil.rmtree(folder, ignore_errors=True)  # of ranks that were killed
    is_set = "MASTER_ADDR" in env and "MASTER_PORT" in env
    meeting = {} if is_set else {STORE_FILE: str(folder / "ranks")}
    ranks = [{**env, **meeting, **rank_variables(rank, count, rank, count)} for rank in range(count)]
    try:
        with stop_request() as request:
            child = RankProcesses(argv, ranks, cwd=Path.cwd(), output=None)
            while child.exit_code() is None:
                if request.number:
                    child.stop(SAVE_GRACE_S)
                time.sleep(POLL_S)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    code = child.exit_code() or 0
    if code and not request.number:
        print(f"rank {child.failed_rank} ended with code {code}", file=sys.stderr, flush=True)
    return code


def rank_variables(rank: int, world_size: int, local_rank: int, local_world_size: int) -> dict[str, str]:
    """PyTorch's variables that tell a process its rank."""
    values = {"RANK": rank, "WORLD_SIZE": world_size, "LOCAL_RANK": local_rank, "LOCAL_WORLD_SIZE": local_world_size}
    return {name: str(value) for name, value in values.items()}


def write_line(output: KeptLines, text: str) -> None:
    """Write a line of the supervisor among those of the ranks."""
    output.add(f"{stamp()} [launch]: {text}\n".encode())


def _writer(source: IO[bytes], log: Lines, *, tag: bytes = b"") -> threading.Thread:
    """A thread that copies the lines of `source` to `log` until it ends."""

    def copy() -> None:
        with source:
            for line in source:
                log.add(stamp().encode() + b" " + normalized(tag + line) + b"\n")

    writer = threading.Thread(target=copy, daemon=True)
    writer.start()
    return writer


def normalized(line: bytes) -> bytes:
    """`line` of a rank or of mpirun with one rank tag in front; torch writes one of its own into tracebacks."""
    text = _MPI_TAG.sub(lambda match: b"[rank%s]: " % match[1], line.rstrip(b"\r\n"))
    rank = _RANK_TAG.match(text)
    return rank[0] + text[rank.end() :].replace(rank[0], b"") if rank else text
