"""torchrun or mpirun as a child process: its output goes to a file with time stamps, and it is killed if it hangs."""

from __future__ import annotations

import re
import signal
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from maskfleet.launch.supervise.job_files import stamp
from maskfleet.launch.supervise.processes import kill_all, processes_of, send_signal, wrappers_of
from maskfleet.system.process import shell_code, start

_RANK_TAG = re.compile(rb"^\[rank\d+\]: ")
_MPI_TAG = re.compile(rb"^\[1,(\d+)\]<std\w+>: ?")


class Child:
    """torchrun or mpirun, with all processes that it started."""

    def __init__(self, argv: Sequence[str], *, cwd: Path, env: Mapping[str, str], output: Path, job: str) -> None:
        self._job = job
        self._process = start(argv, cwd=cwd, env=env, output="pipe")
        self._writer = threading.Thread(target=_copy_output, args=(self._process.output, output), daemon=True)
        self._writer.start()

    def exit_code(self) -> int | None:
        """As a shell reports it: 128 + N for signal N; None while it runs."""
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
        """After torchrun or mpirun has exited: kill processes that are left, and write the last lines."""
        kill_all(self._job)
        self._writer.join(timeout=5)


def write_line(output: Path, text: str) -> None:
    """Write a line of the supervisor among those of the ranks."""
    with output.open("ab") as file:
        file.write(f"{stamp()} [launch]: {text}\n".encode())


def _copy_output(source: IO[bytes], output: Path) -> None:
    with output.open("ab") as file:
        for line in source:
            file.write(stamp().encode() + b" " + normalized(line) + b"\n")
            file.flush()


def normalized(line: bytes) -> bytes:
    """`line` of torchrun or mpirun with one rank tag in front; torchrun repeats it where a line came in pieces."""
    text = _MPI_TAG.sub(lambda match: b"[rank%s]: " % match[1], line.rstrip(b"\r\n"))
    rank = _RANK_TAG.match(text)
    return rank[0] + text[rank.end() :].replace(rank[0], b"") if rank else text
