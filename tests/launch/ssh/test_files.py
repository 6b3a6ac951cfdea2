"""`maskfleet ls` and `fetch` of a run on a host: over a real sshd on loopback."""

from __future__ import annotations

import getpass
import os
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from maskfleet.errors import LaunchError
from maskfleet.launch.backend import backend_of
from maskfleet.launch.files.transfer import RunFiles
from maskfleet.launch.job import JobHandle
from ports import free_port

CONFIG = """
Port {port}
ListenAddress 127.0.0.1
HostKey {folder}/host
AuthorizedKeysFile {folder}/own.pub
PidFile none
StrictModes no
UsePAM no
PasswordAuthentication no
PermitRootLogin prohibit-password
"""


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """An sshd that takes one key, and a home that has it and knows the host."""
    sshd = shutil.which("sshd", path="/usr/sbin:/usr/local/sbin:/usr/bin")
    if sshd is None or not (os.access("/run", os.W_OK) or Path("/run/sshd").is_dir()):
        pytest.skip("no sshd can run here: apt-get install openssh-server, and be root")
    Path("/run/sshd").mkdir(exist_ok=True)
    for name in ("host", "own"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / name)], check=True)
    port = free_port()
    (tmp_path / "config").write_text(CONFIG.format(port=port, folder=tmp_path))
    home = tmp_path / "home"
    (home / ".ssh").mkdir(parents=True)
    monkeypatch.setenv("HOME", str(home))
    shutil.copy(tmp_path / "own", home / ".ssh" / "id_ed25519")
    (home / ".ssh" / "known_hosts").write_text(f"[127.0.0.1]:{port} {(tmp_path / 'host.pub').read_text()}")
    server = subprocess.Popen([sshd, "-D", "-f", str(tmp_path / "config")])
    try:
        _await_port(port)
        yield f"{getpass.getuser()}@127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait()


def _await_port(port: int) -> None:
    deadline = time.monotonic() + 120
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=60).close()
            return
        except OSError:
            assert time.monotonic() < deadline, "sshd did not start"
            time.sleep(0.05)


def files_of(handle: JobHandle) -> AbstractContextManager[RunFiles]:
    return backend_of(handle).files(handle)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "fleet 'x'" / "runs" / "r50"
    (folder / "launch").mkdir(parents=True)
    (folder / "launch" / "job.json").write_text("{}")
    (folder / "big").write_bytes(bytes(range(256)) * 4000)
    return folder


def test_the_files_of_a_run_on_a_host_are_listed_fetched_and_sent(host: str, run_dir: Path, tmp_path: Path) -> None:
    handle = JobHandle("ssh", f"{host},me@192.0.2.1", str(run_dir))
    with files_of(handle) as files:
        assert [one.path for one in files.entries()] == ["big", "launch"]
        done = files.fetch(tmp_path / "here")
    assert (done.files, done.bytes_read) == (2, 1_024_002)
    assert (tmp_path / "here" / "big").read_bytes() == (run_dir / "big").read_bytes()
    with files_of(JobHandle("ssh", host, f"{run_dir}/copy")) as files:
        assert files.put(run_dir / "big") == 1_024_000
    assert (run_dir / "copy").read_bytes() == (run_dir / "big").read_bytes()


def test_a_folder_on_a_host_that_is_no_run_is_refused(host: str) -> None:
    with (
        pytest.raises(LaunchError, match="there is no run in /nowhere/runs/a"),
        files_of(JobHandle("ssh", host, "/nowhere/runs/a")) as files,
    ):
        files.entries()


def test_a_host_out_of_reach_is_named(host: str) -> None:
    with (
        pytest.raises(LaunchError, match=re.escape("127.0.0.1:1 cannot be reached")),
        files_of(JobHandle("ssh", "me@127.0.0.1:1", "/runs/a")) as files,
    ):
        files.entries()
