"""`maskfleet notebook` for a run on this machine: JupyterLab and TensorBoard on 127.0.0.1, until Ctrl-C."""

from __future__ import annotations

import importlib.util
import os
import secrets
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from maskfleet.errors import LaunchError
from maskfleet.launch.servers.processes import POLL_S, server_ended, server_process, tensorboard_command
from maskfleet.system.deploy_files import notebooks_path
from maskfleet.system.kube.port_forward import bound_socket
from maskfleet.system.signals import interrupt_on_signals


@dataclass(frozen=True, slots=True)
class LocalServers:
    """Commands and addresses of the two servers of a run."""

    jupyter: tuple[str, ...]
    tensorboard: tuple[str, ...]
    jupyter_url: str
    tensorboard_url: str
    token: str


def servers_for(run_dir: Path, *, port: int, token: str | None = None) -> LocalServers:
    """JupyterLab on `port` and TensorBoard on the one after it; the token is passed in the environment."""
    if importlib.util.find_spec("jupyterlab") is None:
        raise LaunchError("JupyterLab is not installed here", remedy="pip install 'maskfleet[notebook]'")
    secret = token or secrets.token_urlsafe(24)
    here = "127.0.0.1"
    jupyter = (sys.executable, "-m", "jupyterlab", "--no-browser", f"--ServerApp.ip={here}", f"--ServerApp.port={port}")
    as_root = ("--allow-root",) if os.geteuid() == 0 else ()
    return LocalServers(
        (*jupyter, "--ServerApp.port_retries=0", *as_root),
        tensorboard_command(run_dir, here, port + 1),
        f"http://{here}:{port}/lab?token={secret}",
        f"http://{here}:{port + 1}/",
        secret,
    )


def serve(run_dir: Path, *, port: int, on_ready: Callable[[LocalServers], None]) -> None:
    """Run both servers until Ctrl-C; raises if one of them exits by itself."""
    if not run_dir.is_dir():
        raise LaunchError(f"there is no folder {run_dir}", remedy="give a run's folder or handle")
    servers = servers_for(run_dir.resolve(), port=port)
    for needed in (port, port + 1):
        with bound_socket(needed):
            pass
    work = copied_notebooks(run_dir)
    with tempfile.TemporaryDirectory(prefix="maskfleet-notebook-") as logs:
        env = {**os.environ, "JUPYTER_TOKEN": servers.token, "LOGDIR": str(run_dir.resolve())}
        with (
            interrupt_on_signals(),
            server_process("JupyterLab", servers.jupyter, work, env, Path(logs)) as jupyter,
            server_process("TensorBoard", servers.tensorboard, work, env, Path(logs)) as board,
        ):
            on_ready(servers)
            while all(process.exit_code() is None for process in (jupyter, board)):
                time.sleep(POLL_S)
            name, ended = ("JupyterLab", jupyter) if jupyter.exit_code() is not None else ("TensorBoard", board)
            raise server_ended(name, ended, Path(logs), hidden=servers.token)


def copied_notebooks(run_dir: Path) -> Path:
    """RUN_DIR/notebooks with copies of the package's notebooks; existing files are kept."""
    work = run_dir / "notebooks"
    work.mkdir(exist_ok=True)
    for file in notebooks_path().glob("*.ipynb"):
        if not (work / file.name).exists():
            shutil.copyfile(file, work / file.name)
    return work
