"""`maskfleet serve` as a process: errors of the command line, hostile clients, memory, token and TLS, Ctrl-C."""

from __future__ import annotations

import base64
import http.client
import json
import os
import re
import signal
import socket
import ssl
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import cv2
import numpy as np
import pytest
from typer.testing import CliRunner

from maskfleet.cli.main import app
from maskfleet.cli.serve import TOKEN_VARIABLE
from maskfleet.errors import MaskfleetError
from maskfleet.system.network import listeners, source_address
from ports import free_port

TOKEN = "a token that is long enough"
IMAGE = np.random.default_rng(0).integers(0, 255, (48, 64, 3), dtype=np.uint8)
JPEG = cv2.imencode(".jpg", IMAGE)[1].tobytes()


def error_of(*arguments: str | Path, env: dict[str, str] | None = None) -> MaskfleetError:
    result = CliRunner().invoke(app, ["serve", *map(str, arguments), "--no-browser"], env=env)
    assert isinstance(result.exception, MaskfleetError), result.output
    return result.exception


@pytest.mark.slow
def test_what_cannot_be_served_is_a_clear_error(served_run: Path, tmp_path: Path) -> None:
    port = str(free_port())
    assert "there is no" in error_of(tmp_path / "none", "--port", port).what
    assert "is not a run" in error_of(tmp_path, "--port", port).what
    (tmp_path / "run.yaml").write_bytes((served_run / "run.yaml").read_bytes())
    assert "no checkpoint yet" in error_of(tmp_path, "--port", port).what
    (tmp_path / "a.safetensors").write_bytes(b"bad")
    assert "a.safetensors" in error_of(tmp_path / "a.safetensors", "--port", port).what
    assert error_of(served_run, "--data", tmp_path / "no-data", "--port", port).remedy
    assert "exclude each other" in error_of(served_run, "--best", "--last").what
    assert "no checkpoint of step 5" in error_of(served_run, "--step", "5", "--port", port).what
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert "cannot be used" in error_of(served_run, "--port", str(taken.getsockname()[1])).what


def test_other_addresses_need_a_token(served_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASKFLEET_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    for host in ("0.0.0.0", "::"):
        assert "every network" in error_of(served_run, "--host", host).what
    other = (served_run, "--host", "192.0.2.1")  # an address that no machine has
    assert "fewer than 16" in error_of(*other, env={TOKEN_VARIABLE: "short"}).what
    assert not (tmp_path / "cache" / "serve").exists()
    assert "cannot be used" in error_of(*other).what
    assert (tmp_path / "cache" / "serve" / "token").stat().st_mode & 0o777 == 0o600
    (tmp_path / "token").write_text(TOKEN)
    (tmp_path / "token").chmod(0o644)
    assert "others can read" in error_of(*other, "--token-file", tmp_path / "token").what
    assert "belong together" in error_of(*other, "--cert", tmp_path / "a").what


class Served:
    """A running `maskfleet serve`, and its address."""

    def __init__(self, source: Path, *arguments: str, **env: str) -> None:
        command = [sys.executable, "-m", "maskfleet", "serve", str(source), "--no-browser", "--port", "0", *arguments]
        self.process = subprocess.Popen(
            [*command, "--device", "cpu", "--score", "0"],
            env={**os.environ, "OMP_NUM_THREADS": "1", **env},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        found = re.search(r"https?://\S+", self.process.stdout.readline())
        assert found, self.stop()
        self.url = urlsplit(found[0])

    def ask(
        self, path: str, body: bytes | None = None, context: ssl.SSLContext | None = None, **headers: str
    ) -> tuple[int, Any]:
        """Status and answer; JSON is read."""
        assert self.url.hostname
        connection = (
            http.client.HTTPConnection(self.url.hostname, self.url.port, timeout=240)
            if context is None
            else http.client.HTTPSConnection(self.url.hostname, self.url.port, timeout=240, context=context)
        )
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        try:
            connection.request("GET" if body is None else "POST", path, body, {"Content-Type": "image/jpeg", **names})
            response = connection.getresponse()
            content = response.read()
            is_json = response.headers["Content-Type"] == "application/json"
            return response.status, json.loads(content) if is_json else content
        finally:
            connection.close()

    def peak_mib(self) -> float:
        lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM:"))

    def stop(self) -> str:
        """What it printed to standard error, after Ctrl-C."""
        self.process.send_signal(signal.SIGINT)
        return self.process.communicate(timeout=240)[1]


@pytest.mark.slow
def test_hostile_files_and_many_clients_get_sentences_and_little_memory(served_run: Path) -> None:
    served = Served(served_run)
    try:
        status, expected = served.ask("/detect", JPEG)
        assert status == 200
        before = served.peak_mib()
        huge = cv2.imencode(".png", np.zeros((10_000, 10_000), np.uint8))[1].tobytes()
        hostile = {
            b"": 400,
            b"<svg xmlns='http://www.w3.org/2000/svg'><image href='file:///etc/passwd'/></svg>": 400,
            b"<!doctype html><script>alert(1)</script>": 400,
            b"\xff\xd8<html>": 400,
            JPEG[:-40]: 400,
            JPEG[:200] + os.urandom(400): 400,
            huge: 413,
            bytes(100 * 10**6): 413,
        }
        for body, wanted in hostile.items():
            status, answer = served.ask("/detect", body)
            assert (status, bool(answer["error"]), bool(answer["remedy"])) == (wanted, True, True)
        with ThreadPoolExecutor(50) as clients:
            answers = list(clients.map(lambda number: served.ask("/detect", JPEG if number % 5 else huge), range(50)))
        assert [answer for answer in answers if answer[0] == 200] == [(200, expected)] * 40
        assert [status for status, _ in answers].count(413) == 10
        assert served.peak_mib() - before < 300
        assert served.ask("/detect", JPEG, Origin="https://attacker.example")[0] == 403
        assert served.ask("/model", Host="attacker.example")[0] == 403
        for path in ("/../../etc/passwd", "/%2e%2e/%2e%2e/etc/passwd", "/image?id=../../etc/passwd"):
            assert served.ask(path)[0] in (400, 404)
        assert all(listener.is_loopback for listener in listeners([served.process.pid]))
    finally:
        printed = served.stop()
    assert served.process.returncode == 0, printed
    assert printed.endswith("stopped\n")
    assert "Traceback" not in printed


@pytest.mark.slow
def test_on_a_network_it_is_behind_token_and_tls(served_run: Path, tmp_path: Path) -> None:
    try:
        address = source_address("192.0.2.1")
    except OSError:
        pytest.skip("this machine has no network")
    served = Served(served_run, "--host", address, MASKFLEET_CACHE=str(tmp_path), **{TOKEN_VARIABLE: TOKEN})
    try:
        assert served.url.scheme == "https"
        [chain] = (tmp_path / "serve").glob("*.crt")
        context = ssl.create_default_context(cafile=str(chain))
        bearer = {"Authorization": f"Bearer {TOKEN}"}
        basic = {"Authorization": f"Basic {base64.b64encode(f'me:{TOKEN}'.encode()).decode()}"}
        own = {"Origin": f"https://{served.url.netloc}", "Sec_Fetch_Site": "same-origin"}
        for allowed in (bearer, basic, {**basic, **own}):
            assert served.ask("/detect", JPEG, context, **allowed)[0] == 200
            assert served.ask("/", None, context, **allowed)[0] == 200
        assert served.ask("/detect", JPEG, context, **basic, Origin="https://attacker.example")[0] == 403
        assert served.ask("/detect", bytes(20_000_001), context, **basic)[0] == 413
        assert served.ask("/", None, context)[0] == 401
        assert {listener.address for listener in listeners([served.process.pid])} == {address, "127.0.0.1"}
        assert TOKEN not in Path(f"/proc/{served.process.pid}/cmdline").read_text()
        wrong: list[int] = []
        while 429 not in wrong and len(wrong) < 14:  # each further one must wait twice as long: a busy machine is slow
            wrong.append(served.ask("/", None, context, Authorization=f"Bearer wrong {len(wrong)}")[0])
        assert (wrong[:5], wrong[-1]) == ([401] * 5, 429)
    finally:
        printed = served.stop()
    assert served.process.returncode == 0
    assert "fingerprint" in printed
    assert TOKEN not in printed
