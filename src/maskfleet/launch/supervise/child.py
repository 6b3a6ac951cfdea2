"""The starter of the ranks as a child process: its lines stamped into a file, its end forced when it will not come."""

from __future__ import annotations

import re
import signal
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from maskfleet.launch.supervise.job_files import stamp
from maskfleet.launch.supervise.processes import end, marked, sweep, wrappers_of
from maskfleet.system.process import shell_code, start

_RANK_TAG = re.compile(rb"^\[rank\d+\]: ")
_MPI_TAG = re.compile(rb"^\[1,(\d+)\]<std\w+>: ?")


class Child:
    """torchrun or mpirun, with all that it started."""

    def __init__(self, argv: Sequence[str], *, cwd: Path, env: Mapping[str, str], output: Path, mark: str) -> None:
        self._mark = mark
        self._process = start(argv, cwd=cwd, env=env, output="pipe")
        self._pump = threading.Thread(target=_pump, args=(self._process.output, output), daemon=True)
        self._pump.start()

    def exit_code(self) -> int | None:
        """As a shell reports it: 128 + N for signal N; None while it runs."""
        code = self._process.exit_code()
        return None if code is None else shell_code(code)

    def stop(self, grace_s: float) -> None:
        """Send SIGTERM once, wait for up to `grace_s`, then kill all that is left."""
        if self._process.exit_code() is None:
            # mpirun would kill the ranks a second after SIGTERM; one rank that gets it makes all others save.
            wrappers = wrappers_of(marked(self._mark))
            end(wrappers or [self._process.pid], number=signal.SIGTERM)
            if self._process.wait(grace_s) is None:
                self._process.kill()
        self.clean()

    def clean(self) -> None:
        """After the end of the starter: no process of it stays, and its last lines are written."""
        sweep(self._mark)
        self._pump.join(timeout=5)


def write_line(output: Path, text: str) -> None:
    """A line of the supervisor's own among those of the ranks."""
    with output.open("ab") as file:
        file.write(f"{stamp()} [launch]: {text}\n".encode())


def _pump(source: IO[bytes], output: Path) -> None:
    with output.open("ab") as file:
        for line in source:
            file.write(stamp().encode() + b" " + tidied(line) + b"\n")
            file.flush()


def tidied(line: bytes) -> bytes:
    """`line` of torchrun or mpirun with its rank in front, once: torchrun says it again where a line came in pieces."""
    text = _MPI_TAG.sub(lambda match: b"[rank%s]: " % match[1], line.rstrip(b"\r\n"))
    rank = _RANK_TAG.match(text)
    return rank[0] + text[rank.end() :].replace(rank[0], b"") if rank else text
