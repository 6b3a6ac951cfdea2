"""The child processes that compile, as the rank that started them sees them."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch

from maskfleet.log import logger
from maskfleet.system.process import Running, start
from maskfleet.training.background.artifacts import CompiledCanvas, write_artifacts
from maskfleet.training.background.child import CompileJob
from maskfleet.training.background.compiled_before import mark_compiled
from maskfleet.training.background.target import Target

MAX_SIDE_BY_SIDE = 4
CORES_PER_CHILD = 4  # a child also starts compiler processes, and the run's loader needs cores too
MAX_MINUTES = 30.0
_MAX_REASON = 300  # characters of a log line


class Compilation(Protocol):
    """Work of child processes; tests replace it."""

    def poll(self) -> tuple[bool, str]:
        """Whether all is done, and why it failed; never waits."""

    def stop(self) -> None:
        """End what still runs."""


Start = Callable[[Sequence[CompileJob]], Compilation]


def side_by_side(jobs: int) -> int:
    """How many canvases compile at a time on this host."""
    return max(1, min(jobs, MAX_SIDE_BY_SIDE, _cores() // CORES_PER_CHILD))


@dataclass
class Children:
    """One child process per canvas, a few at a time; they end with this process and never use the terminal."""

    jobs: Sequence[CompileJob]
    command: Sequence[str] = (sys.executable, "-P", "-m", "maskfleet.training.background.child")
    save_to: Sequence[Path] = ()  # files for all that was compiled
    env: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        # Below the temporary folder: names and configuration of a run are nobody else's business.
        self._folder = tempfile.TemporaryDirectory(prefix="maskfleet-compile-")
        self._waiting = list(range(len(self.jobs)))
        self._running: dict[int, Running] = {}
        self._failure = ""
        self._started_at = self.clock()
        self._limit = side_by_side(len(self.jobs))
        self._start_next()

    def poll(self) -> tuple[bool, str]:
        """Whether all canvases are compiled, and why it failed; starts the next children."""
        codes = {number: child.exit_code() for number, child in self._running.items()}
        exited = {number: code for number, code in codes.items() if code is not None}
        for number in exited:
            del self._running[number]
        mark_compiled((self.jobs[number] for number, code in exited.items() if code == 0), self.env)
        failed = [number for number, code in exited.items() if code != 0]
        if failed:
            number = failed[0]
            self._fail(f"{self._canvas(number)}: {self._last_line(number) or f'exit code {exited[number]}'}")
        if self._running and self.clock() - self._started_at > 60 * MAX_MINUTES:
            self._fail(f"within {MAX_MINUTES:.0f} minutes")
        self._start_next()
        done = not self._running and not self._waiting
        if done and not self._failure:
            for path in self.save_to:
                self._save(path)
            self.save_to = ()
        return done, self._failure

    def write(self, path: Path) -> None:
        """Write what was compiled to `path`, once all is done."""
        parts = [CompiledCanvas(job, self._file(n, "artifacts").read_bytes()) for n, job in enumerate(self.jobs)]
        write_artifacts(path, Target.of(torch.device(self.jobs[0].device)), parts)

    def stop(self) -> None:
        """Kill the children that still run, with the compiler processes they started."""
        self._waiting.clear()
        for child in self._running.values():
            child.kill()
        self._running.clear()
        self._folder.cleanup()

    def _save(self, path: Path) -> None:
        """Leave what was compiled for other hosts; the run does not depend on it."""
        try:
            self.write(path)
        except OSError as error:
            logger.warning("compiled code is not saved to %s: %s", path, error.strerror)

    def _start_next(self) -> None:
        while self._waiting and len(self._running) < self._limit:
            number = self._waiting.pop(0)
            job, log = self._file(number, "json"), self._file(number, "log")
            self.jobs[number].save(job)
            saved = self._file(number, "artifacts")
            self._running[number] = start(
                [*self.command, str(job), str(saved)],
                env=self._child_env(),
                output=log,
                lifetime="parent",
                private=True,
            )

    def _child_env(self) -> dict[str, str]:
        """Without the rank of this process, and with its share of the cores."""
        env = {name: value for name, value in self.env.items() if name not in _RANK_VARIABLES}
        env.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(max(1, _cores() // (2 * self._limit))))
        return env

    def _fail(self, reason: str) -> None:
        self._failure = self._failure or reason
        self._waiting.clear()
        for child in self._running.values():
            child.kill()
        self._running.clear()

    def _canvas(self, number: int) -> str:
        height, width = self.jobs[number].canvas
        return f"for images of {height} x {width}"

    def _file(self, number: int, kind: str) -> Path:
        return Path(self._folder.name) / f"{number}.{kind}"

    def _last_line(self, number: int) -> str:
        lines = self._file(number, "log").read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return lines[-1][:_MAX_REASON] if lines else ""


_RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def _cores() -> int:
    return len(os.sched_getaffinity(0))
