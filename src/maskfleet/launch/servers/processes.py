"""TensorBoard and JupyterLab as child processes."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from maskfleet.errors import LaunchError
from maskfleet.system.process import Running, start

POLL_S = 0.2
STOP_S = 10.0
SHOWN_LINES = 20


def tensorboard_command(run_dir: Path, host: str, port: int) -> tuple[str, ...]:
    """TensorBoard of the runs in `run_dir`, on one address."""
    module = (sys.executable, "-m", "tensorboard.main")
    return (*module, "--logdir", str(run_dir), "--host", host, "--port", str(port))


@contextmanager
def server_process(
    name: str, command: tuple[str, ...], cwd: Path, env: dict[str, str], logs: Path
) -> Iterator[Running]:
    """A server that runs while the block does, with its output in `logs`."""
    # In its own session, so that Ctrl-C reaches only this process, which then stops its servers.
    process = start(command, cwd=cwd, env=env, output=logs / f"{name}.log")
    try:
        yield process
    finally:
        process.stop(STOP_S)


def server_ended(name: str, process: Running, logs: Path, *, hidden: str | None = None) -> LaunchError:
    """The error for a server that ended by itself, with its last lines; `hidden` is a secret that they may hold."""
    words = (logs / f"{name}.log").read_text(encoding="utf-8", errors="replace").splitlines()[-SHOWN_LINES:]
    shown = "\n".join(line.replace(hidden, "…") if hidden else line for line in words)
    return LaunchError(f"{name} ended with {process.exit_code()}:\n{shown}", remedy="fix that, then try again")
