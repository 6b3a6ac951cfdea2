"""The one place of this room that starts processes: argument lists only, no shell."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from maskfleet.errors import InfraError

POLL_S = 0.1
STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True, slots=True)
class Finished:
    """A command that ended."""

    code: int
    out: str = ""
    err: str = ""
    interrupted: bool = False


def capture(
    argv: Sequence[str],
    *,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    stdin: str = "",
    timeout_s: float = 120,
) -> Finished:
    """Run a short command to its end."""
    try:
        done = subprocess.run(
            list(argv),
            cwd=cwd,
            env=dict(env) if env is not None else None,
            input=stdin,
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout_s,
        )
    except FileNotFoundError as error:
        raise InfraError(f"{argv[0]} is not installed here", remedy=f"install {argv[0]}") from error
    except subprocess.TimeoutExpired as error:
        raise InfraError(
            f"{Path(argv[0]).name} {argv[1] if len(argv) > 1 else ''} did not end within {timeout_s:.0f} s",
            remedy="check the network and the credentials, then run the command again",
        ) from error
    return Finished(done.returncode, done.stdout, done.stderr)


def stream(
    argv: Sequence[str],
    *,
    cwd: Path,
    env: Mapping[str, str],
    log: Path,
    line: Callable[[str], None],
    tick: Callable[[], None],
    asked_to_stop: Callable[[int], None],
) -> Finished:
    """Run a long command whose output goes to `log` and, line by line, to `line`; `tick` is called in between.

    The command writes to a file, not to a pipe: should this process be killed, Terraform still ends its work and saves
    its state. It has a session of its own, so that Ctrl-C reaches it once, from here; a second interrupt would make it
    give up its state. `asked_to_stop` hears how often the user has asked.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        with _stop_requests(asked_to_stop) as stop:
            process = subprocess.Popen(
                list(argv),
                cwd=cwd,
                env=dict(env),
                stdin=subprocess.DEVNULL,
                stdout=descriptor,
                stderr=descriptor,
                start_new_session=True,
                umask=0o077,
            )
            stop.process = process

            def between() -> None:
                stop.tell()
                tick()

            try:
                _follow(process, log, line, between)
            except BaseException:
                # Whatever went wrong in showing it (a closed pipe, say), Terraform must not be left half way.
                stop.forward()
                process.wait()
                raise
    finally:
        os.close(descriptor)
    return Finished(process.returncode, interrupted=stop.asked > 0)


def _follow(process: subprocess.Popen[bytes], log: Path, line: Callable[[str], None], tick: Callable[[], None]) -> None:
    with log.open("rb") as source:
        rest = b""
        while True:
            ended = process.poll() is not None  # asked before reading, so that the last lines are read after the end
            while chunk := source.read(1 << 16):
                *whole, rest = (rest + chunk).split(b"\n")
                for text in whole:
                    line(text.decode(errors="replace"))
            if ended:
                break
            tick()
            with suppress(subprocess.TimeoutExpired):
                process.wait(POLL_S)
        if rest.strip():
            line(rest.decode(errors="replace"))


class _Stop:
    def __init__(self, told: Callable[[int], None]) -> None:
        self.asked = 0
        self.process: subprocess.Popen[bytes] | None = None
        self._told = told
        self._last_told = 0
        self._forwarded = False

    def forward(self) -> None:
        """Interrupt the process once, however often this is called."""
        if self.process is not None and self.process.poll() is None and not self._forwarded:
            self._forwarded = True
            self.process.send_signal(signal.SIGINT)

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        self.asked += 1
        self.forward()

    def tell(self) -> None:
        """Say that a request came: here and not in the signal's own frame, where printing is not safe."""
        if self.asked > self._last_told:
            self.forward()  # again, for a signal that came before there was a process
            self._told(self.asked if self._last_told else 1)
            self._last_told = self.asked


@contextmanager
def _stop_requests(told: Callable[[int], None]) -> Iterator[_Stop]:
    stop = _Stop(told)
    if threading.current_thread() is not threading.main_thread():  # Python delivers signals to the main thread only
        yield stop
        return
    heard = [number for number in STOPPING if signal.getsignal(number) is not signal.SIG_IGN]  # nohup stays nohup
    before = {number: signal.signal(number, stop.on_signal) for number in heard}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
