"""The one place that starts processes on this machine, and RecordingShell, the fake that ships with it."""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from maskfleet.errors import LaunchError


@dataclass(frozen=True, slots=True)
class Finished:
    """A command that ended."""

    code: int
    out: str = ""
    err: str = ""


class Shell(Protocol):
    """Runs commands given as lists of arguments; no shell ever reads them."""

    def __call__(self, argv: Sequence[str], stdin: str = "", *, timeout_s: float = 60) -> Finished:
        """Run to the end."""

    def detach(self, argv: Sequence[str], *, cwd: Path, log: Path, env: Mapping[str, str] | None = None) -> None:
        """Start in a session of its own, which outlives this process and its terminal."""


class _RealShell:
    def __call__(self, argv: Sequence[str], stdin: str = "", *, timeout_s: float = 60) -> Finished:
        try:
            done = subprocess.run(
                list(argv), input=stdin, capture_output=True, text=True, check=False, timeout=timeout_s
            )
        except FileNotFoundError as error:
            raise LaunchError(f"{argv[0]} is not installed here", remedy=f"install {argv[0]}") from error
        except subprocess.TimeoutExpired as error:
            raise LaunchError(
                f"{argv[0]} did not end within {timeout_s:.0f} s", remedy="try again; `maskfleet doctor` may say why"
            ) from error
        return Finished(done.returncode, done.stdout, done.stderr)

    def detach(self, argv: Sequence[str], *, cwd: Path, log: Path, env: Mapping[str, str] | None = None) -> None:
        with log.open("ab") as output:
            subprocess.Popen(
                list(argv),
                cwd=cwd,
                env=dict(env) if env is not None else None,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )


run_command: Shell = _RealShell()


@dataclass
class RecordingShell:
    """Starts nothing, remembers everything; answers with `answers` in order, then with success."""

    answers: list[Finished] = field(default_factory=list)
    calls: list[tuple[list[str], str]] = field(default_factory=list)
    detached: list[list[str]] = field(default_factory=list)

    def __call__(self, argv: Sequence[str], stdin: str = "", *, timeout_s: float = 60) -> Finished:
        self.calls.append((list(argv), stdin))
        return self.answers.pop(0) if self.answers else Finished(0)

    def detach(self, argv: Sequence[str], *, cwd: Path, log: Path, env: Mapping[str, str] | None = None) -> None:
        self.detached.append(list(argv))


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
