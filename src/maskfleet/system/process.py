"""The one place that starts processes on this machine, from argument lists only: no shell ever reads them.

`capture` runs a short command to its end, `start` leaves one running, `stream` follows the output of a long one.
`RecordingShell` is the fake that ships with them. Exit codes are Python's: -N for a process that signal N ended.
"""

from __future__ import annotations

import ctypes
import os
import shlex
import signal
import subprocess
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Literal, Protocol

from maskfleet.errors import MaskfleetError
from maskfleet.system.signals import handled

if TYPE_CHECKING:
    from asyncio.subprocess import Process as AsyncProcess

POLL_S = 0.1
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)  # loaded here: a child of a process with threads must do as little as possible
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True, slots=True)
class Finished:
    """A command that has exited."""

    code: int
    out: str = ""
    err: str = ""
    interrupted: bool = False


def capture(
    argv: Sequence[str],
    stdin: str = "",
    *,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    timeout_s: float = 120,
) -> Finished:
    """Run a short command to its end."""
    try:
        done = subprocess.run(
            argv, cwd=cwd, env=env, input=stdin, capture_output=True, text=True, check=False, timeout=timeout_s
        )
    except OSError as error:
        raise _not_started(argv, cwd, error) from error
    except subprocess.TimeoutExpired as error:
        raise MaskfleetError(
            f"{' '.join([Path(argv[0]).name, *argv[1:2]])} did not finish within {timeout_s:.0f} s",
            remedy="check the network and the credentials, then run the same command again",
        ) from error
    return Finished(done.returncode, done.stdout, done.stderr)


class Running:
    """A process that `start` started."""

    def __init__(self, process: subprocess.Popen[bytes], *, leads_group: bool) -> None:
        self._process = process
        self._leads_group = leads_group
        self.pid = process.pid

    @property
    def output(self) -> IO[bytes]:
        """What it writes, where it was started with output="pipe"."""
        assert self._process.stdout is not None
        return self._process.stdout

    def exit_code(self) -> int | None:
        """None while it runs."""
        return self._process.poll()

    def wait(self, timeout_s: float | None = None) -> int | None:
        """Its exit code; None if it still runs after `timeout_s`."""
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def send_signal(self, number: int) -> None:
        """Send a signal to this process alone, not to its group; nothing happens if it has exited."""
        self._process.send_signal(number)

    def stop(self, grace_s: float) -> None:
        """Send it SIGTERM, so that it stops its children and exits; after `grace_s`, kill it and them."""
        self.send_signal(signal.SIGTERM)
        if self.wait(grace_s) is None:
            self.kill()

    def kill(self) -> None:
        """Kill it, with its process group if it leads one."""
        if self._process.poll() is None:
            if self._leads_group:
                os.killpg(self.pid, signal.SIGKILL)
            else:
                self._process.kill()
            self._process.wait()


def start(
    argv: Sequence[str],
    *,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    output: Path | Literal["discard", "pipe", "inherit"] = "discard",
    lifetime: Literal["independent", "session", "parent"] = "independent",
    private: bool = False,
    pass_fds: Sequence[int] = (),
) -> Running:
    """Start a command and return at once; standard output and error are appended to the file `output`.

    An `independent` command has a session of its own: it outlives this process and its terminal, and Ctrl-C does not
    reach it. With `session` it stays in the session of this process. With `parent` it has its own session, and the
    kernel kills it when this process dies, however that happens; start it from the main thread, since the kernel looks
    at the thread. With `private` the output and all files that the command creates are readable by their owner only.
    """
    target: int | None
    if isinstance(output, Path):
        target = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600 if private else 0o666)
    else:
        target = {"discard": subprocess.DEVNULL, "pipe": subprocess.PIPE, "inherit": None}[output]
    try:
        process = subprocess.Popen(
            argv,
            cwd=cwd,
            env=env,
            stdin=None if output == "inherit" else subprocess.DEVNULL,
            stdout=target,
            stderr=subprocess.STDOUT if output == "pipe" else target,
            start_new_session=lifetime != "session",
            umask=0o077 if private else -1,
            pass_fds=pass_fds,
            preexec_fn=_dying_with(os.getpid()) if lifetime == "parent" else None,
        )
    except OSError as error:
        raise _not_started(argv, cwd, error) from error
    finally:
        if isinstance(output, Path) and target is not None:
            os.close(target)
    return Running(process, leads_group=lifetime != "session")


def _dying_with(parent: int) -> Callable[[], None]:
    """For the child, between fork and exec: let the kernel kill it when `parent` dies."""

    def bind() -> None:
        # Other threads of the parent may have held locks at the fork: nothing here takes one.
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL.value, 0, 0, 0)
        if os.getppid() != parent:  # it died before the call
            os._exit(1)

    return bind


_detached: list[Running] = []  # kept, because Python warns of a process that runs on without its object


def detach(argv: Sequence[str], *, log: Path, cwd: Path | None = None, env: Mapping[str, str] | None = None) -> None:
    """Start a command that outlives this process and its terminal; its output is appended to `log`."""
    _detached.append(start(argv, cwd=cwd, env=env, output=log))


@asynccontextmanager
async def piped(argv: Sequence[str]) -> AsyncIterator[AsyncProcess]:
    """A process for asyncio, with pipes to its standard input and output; it is terminated when the block ends."""
    import asyncio  # here, because it is slow to import and few commands need it

    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*argv, stdin=pipe, stdout=pipe)
    try:
        yield process
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


def shell_code(code: int) -> int:
    """An exit code as a shell reports it: 128 + N for a process that signal N ended."""
    return 128 - code if code < 0 else code


def _not_started(argv: Sequence[str], cwd: Path | None, error: OSError) -> MaskfleetError:
    if cwd is not None and not cwd.is_dir():
        return MaskfleetError(f"there is no folder {cwd} to run {argv[0]} in", remedy="create it, then try again")
    if isinstance(error, FileNotFoundError):
        return MaskfleetError(f"{argv[0]} is not installed here", remedy=f"install {argv[0]}")
    return MaskfleetError(f"{argv[0]} cannot be started: {error.strerror}", remedy="check the file and its permissions")


class Shell(Protocol):
    """Runs commands given as lists of arguments."""

    def __call__(self, argv: Sequence[str], stdin: str = "", *, timeout_s: float = 60) -> Finished:
        """Run to the end."""

    def detach(self, argv: Sequence[str], *, cwd: Path, log: Path, env: Mapping[str, str] | None = None) -> None:
        """Start in a session of its own, which outlives this process and its terminal."""


class _RealShell:
    def __call__(self, argv: Sequence[str], stdin: str = "", *, timeout_s: float = 60) -> Finished:
        return capture(argv, stdin, timeout_s=timeout_s)

    def detach(self, argv: Sequence[str], *, cwd: Path, log: Path, env: Mapping[str, str] | None = None) -> None:
        detach(argv, cwd=cwd, env=env, log=log)


run_command: Shell = _RealShell()


@dataclass
class RecordingShell:
    """Starts nothing and records everything; answers with `answers` in order, then with success."""

    answers: list[Finished] = field(default_factory=list)
    calls: list[tuple[list[str], str]] = field(default_factory=list)
    detached: list[list[str]] = field(default_factory=list)

    def __call__(self, argv: Sequence[str], stdin: str = "", *, timeout_s: float = 60) -> Finished:
        self.calls.append((list(argv), stdin))
        return self.answers.pop(0) if self.answers else Finished(0)

    def detach(self, argv: Sequence[str], *, cwd: Path, log: Path, env: Mapping[str, str] | None = None) -> None:
        self.detached.append(list(argv))


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

    The command writes to a file, not to a pipe: if this process is killed, Terraform still finishes and saves its
    state. It has a session of its own, so that Ctrl-C reaches it once, from here; a second interrupt would make it
    abandon its state. `asked_to_stop` gets the number of stop requests so far.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    received: list[int] = []
    reported = 0
    stops = [number for number in STOP_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]  # nohup stays nohup
    with handled({number: lambda number, frame: received.append(number) for number in stops}):
        process = start(argv, cwd=cwd, env=env, output=log, private=True)

        def between() -> None:
            """Pass stop requests on: here and not in the signal handler, where printing is not safe."""
            nonlocal reported
            before, reported = reported, len(received)
            if reported > before:
                if not before:
                    process.send_signal(signal.SIGINT)
                asked_to_stop(reported if before else 1)  # may raise: the request is passed on already
            tick()

        try:
            code = _follow(process, log, line, between)
        except BaseException:
            # Whatever failed in showing the output (a closed pipe, say), Terraform must not be left half way.
            if not reported:
                process.send_signal(signal.SIGINT)
            process.wait()
            raise
    return Finished(code, interrupted=bool(received))


def _follow(process: Running, log: Path, line: Callable[[str], None], tick: Callable[[], None]) -> int:
    with log.open("rb") as source:
        rest = b""
        while True:
            code = process.exit_code()  # before reading, so that the last lines are read after the exit
            while chunk := source.read(1 << 16):
                *whole, rest = (rest + chunk).split(b"\n")
                for text in whole:
                    line(text.decode(errors="replace"))
            if code is not None:
                break
            tick()
            process.wait(POLL_S)
        if rest.strip():
            line(rest.decode(errors="replace"))
    return code


def remote_line(argv: Sequence[str]) -> str:
    """`argv` as the one line that a remote login shell reads back to the same list: SSH knows no lists.

    Only a leading `~/` is left for that shell to expand.
    """
    return " ".join(quoted(argument) for argument in argv)


def quoted(argument: str) -> str:
    """`argument` for a POSIX shell, with a leading `~/` left for it to expand."""
    if argument.startswith("~/") and len(argument) > 2:
        return f"~/{shlex.quote(argument[2:])}"
    return shlex.quote(argument)
