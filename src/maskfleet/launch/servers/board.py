"""`maskfleet board`: TensorBoard of a run; for other machines, behind a password and TLS."""

from __future__ import annotations

import os
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from maskfleet.errors import LaunchError
from maskfleet.launch.servers.processes import POLL_S, server_ended, server_process, tensorboard_command
from maskfleet.system.files import cache_folder
from maskfleet.system.network import LOOPBACK
from maskfleet.system.process import Running
from maskfleet.system.signals import interrupt_on_signals
from maskfleet.system.web.certificate import Certificate, self_signed
from maskfleet.system.web.front import free_port, is_local, protected, url_of
from maskfleet.system.web.proxy import PasswordGate

SHORTEST_PASSWORD = 10
START_S = 120.0  # TensorBoard imports a lot, and the disk may be slow


@dataclass(frozen=True, slots=True)
class BoardOptions:
    """Where to serve, and for an address that others reach, how it is protected."""

    host: str
    port: int
    password: Callable[[], str] = field(repr=False)  # asked for only where it is needed
    certificate: Certificate | None = None  # None: self-signed, made once


def serve_board(run_dir: Path, options: BoardOptions, on_ready: Callable[[str, str | None], None]) -> None:
    """Serve until Ctrl-C; `on_ready` gets the address and the fingerprint of a self-signed certificate."""
    if not run_dir.is_dir():
        raise LaunchError(f"there is no folder {run_dir}", remedy="give a run's folder, or a folder of runs")
    if is_local(options.host):
        with _tensorboard(run_dir.resolve(), options.host, free_port(options.host, options.port)) as running:
            on_ready(url_of("http", options.host, options.port), None)
            running.wait()
        return
    certificate = options.certificate or self_signed(cache_folder("board"), options.host)
    gate = PasswordGate(checked_password(options.password()))
    inner_port, address = free_port(LOOPBACK, 0), (options.host, options.port)
    with (
        protected(address, upstream_port=inner_port, gate=gate, certificate=certificate) as port,
        _tensorboard(run_dir.resolve(), LOOPBACK, inner_port) as running,
    ):
        fingerprint = certificate.fingerprint() if options.certificate is None else None
        on_ready(url_of("https", options.host, port), fingerprint)
        running.wait()


def checked_password(password: str) -> str:
    """`password`; raises if it is too short."""
    if len(password) < SHORTEST_PASSWORD:
        raise LaunchError(f"the password has fewer than {SHORTEST_PASSWORD} characters", remedy="choose a longer one")
    return password


@dataclass(frozen=True, slots=True)
class _Board:
    process: Running
    logs: Path

    def wait(self) -> None:
        """Until Ctrl-C; an error if TensorBoard ends by itself."""
        while self.process.exit_code() is None:
            time.sleep(POLL_S)
        raise server_ended("TensorBoard", self.process, self.logs)


@contextmanager
def _tensorboard(run_dir: Path, host: str, port: int) -> Iterator[_Board]:
    """TensorBoard, which answers from the beginning of the block on."""
    command = tensorboard_command(run_dir, host, port)
    with tempfile.TemporaryDirectory(prefix="maskfleet-board-") as folder:
        logs = Path(folder)
        with interrupt_on_signals(), server_process("TensorBoard", command, run_dir, {**os.environ}, logs) as process:
            deadline = time.monotonic() + START_S
            while not _accepts(host, port):
                if process.exit_code() is not None:
                    raise server_ended("TensorBoard", process, logs)
                if time.monotonic() > deadline:
                    raise LaunchError(f"TensorBoard does not answer after {START_S:.0f} s", remedy="try again")
                time.sleep(POLL_S)
            yield _Board(process, logs)


def _accepts(host: str, port: int) -> bool:
    try:
        with socket.create_connection((host, port), timeout=5):
            return True
    except OSError:
        return False
