"""`maskfleet board` with the real TensorBoard."""

from __future__ import annotations

import base64
import os
import re
import signal
import socket
import ssl
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from typer.testing import CliRunner

from maskfleet.cli.board import PASSWORD_VARIABLE
from maskfleet.cli.main import app
from maskfleet.errors import MaskfleetError
from maskfleet.system.network import listeners, source_address
from ports import free_port

PASSWORD = "a long password"


def error_of(*arguments: str | Path, env: dict[str, str] | None = None) -> MaskfleetError:
    result = CliRunner().invoke(app, ["board", *map(str, arguments), "--no-browser"], env=env)
    assert isinstance(result.exception, MaskfleetError), result.output
    return result.exception


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_all_interfaces_at_once_are_refused(tmp_path: Path, host: str) -> None:
    assert "every network" in error_of(tmp_path, "--host", host).what


def test_other_addresses_need_a_password_that_is_long_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASKFLEET_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv(PASSWORD_VARIABLE, raising=False)
    arguments = (tmp_path, "--host", "192.0.2.1")
    assert "no terminal" in error_of(*arguments).what
    assert "fewer than 10" in error_of(*arguments, env={PASSWORD_VARIABLE: "short"}).what
    assert "cannot be read" in error_of(*arguments, "--password-file", tmp_path / "none").what
    (tmp_path / "password").write_text(f"{PASSWORD}\n")
    assert "cannot be used" in error_of(*arguments, "--password-file", tmp_path / "password").what
    assert "belong together" in error_of(*arguments, "--cert", tmp_path / "a").what


def test_a_missing_folder_and_a_port_in_use_are_errors(tmp_path: Path) -> None:
    assert "there is no folder" in error_of(tmp_path / "none").what
    port = free_port()
    with socket.create_server(("127.0.0.1", port)):
        assert f"port {port}" in error_of(tmp_path, "--port", str(port)).what


class Served:
    """A running `maskfleet board`, and its address."""

    def __init__(self, folder: Path, *arguments: str, **env: str) -> None:
        command = [sys.executable, "-m", "maskfleet", "board", str(folder), "--no-browser", *arguments]
        self.process = subprocess.Popen(
            command, env={**os.environ, **env}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        found = re.search(r"https?://\S+", line)
        assert found, self.stop()
        self.url = found[0]

    def stop(self) -> str:
        """What it printed to standard error."""
        self.process.send_signal(signal.SIGINT)
        return self.process.communicate(timeout=120)[1]


def status(url: str, password: str | None = None, context: ssl.SSLContext | None = None) -> tuple[int, bytes]:
    request = urllib.request.Request(url)
    if password is not None:
        request.add_header("Authorization", f"Basic {base64.b64encode(f'a:{password}'.encode()).decode()}")
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context))
    try:
        with opener.open(request, timeout=120) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


@pytest.mark.slow
def test_on_loopback_tensorboard_is_served_as_it_is(tmp_path: Path) -> None:
    served = Served(tmp_path, "--port", str(free_port()))
    try:
        code, page = status(served.url)
        assert (code, b"TensorBoard" in page) == (200, True)
    finally:
        served.stop()
    assert served.process.returncode == 0


@pytest.mark.slow
def test_on_a_network_it_is_behind_password_and_tls(tmp_path: Path) -> None:
    try:
        address = source_address("192.0.2.1")
    except OSError:
        pytest.skip("this machine has no network")
    env = {PASSWORD_VARIABLE: PASSWORD, "MASKFLEET_CACHE": str(tmp_path / "cache")}
    served = Served(tmp_path, "--host", address, "--port", str(free_port()), **env)
    try:
        assert served.url.startswith(f"https://{address}:")
        [chain] = (tmp_path / "cache" / "board").glob("*.crt")
        context = ssl.create_default_context(cafile=str(chain))
        code, page = status(served.url, PASSWORD, context)
        assert (code, b"TensorBoard" in page) == (200, True)
        assert status(f"{served.url}data/environment", PASSWORD, context)[0] == 200
        assert status(served.url, "a wrong password", context)[0] == 401
        assert status(served.url, None, context)[0] == 401
        children = Path(f"/proc/{served.process.pid}/task/{served.process.pid}/children").read_text().split()
        assert children
        for listener in listeners([served.process.pid, *map(int, children)]):
            assert listener.address == address or listener.is_loopback
        for pid in (served.process.pid, *map(int, children)):
            assert PASSWORD not in Path(f"/proc/{pid}/cmdline").read_text()
        assert all(PASSWORD not in Path(f"/proc/{pid}/environ").read_text() for pid in map(int, children))
        # The wait doubles with every wrong password, so that a slow machine comes too early in the end.
        answers = (status(served.url, f"wrong {number}", context)[0] for number in range(20))
        assert any(answer == 429 for answer in answers)
    finally:
        printed = served.stop()
    assert served.process.returncode == 0
    assert "fingerprint" in printed
    assert PASSWORD not in printed
