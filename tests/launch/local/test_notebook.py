"""`maskfleet notebook` as people run it: a password typed or piped, the forward, and the servers on this machine."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import select
import signal
import socket
import socketserver
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import bcrypt
import pytest
from forwarded_pods import pod, set_pods
from typer.testing import CliRunner

from maskfleet.cli.main import app
from maskfleet.errors import LaunchError
from maskfleet.launch.local import notebook as notebook_local
from maskfleet.launch.local.notebook import LocalServers, copied_notebooks, servers_for
from maskfleet.system.kube.fake import FakeKube
from ports import free_port
from tools import ROOT

PASSWORD = "correct horse battery"
LONG_S = 240  # that long nothing takes, however busy the machine
RUN = {"image": "x/maskfleet:1", "shared_fs": "fsx", "shared_pvc": "pv-fsx", "log_dir": "logs", "run_id": "r50"}
START = """
import typer
from maskfleet.cli.notebook import notebook
from maskfleet.errors import MaskfleetError
app = typer.Typer()
app.command()(notebook)
try:
    app()
except MaskfleetError as error:
    raise SystemExit(str(error))
"""
HELM = """#!{python}
import json, sys
from pathlib import Path
with open({log!r}, "a") as log:
    log.write(json.dumps([sys.argv[1:], sys.stdin.read()]) + "\\n")
if sys.argv[1:4] == ["get", "values", "r50-notebook"]:
    sys.exit("Error: release: not found")
print({run!r})
"""


@dataclass
class World:
    """A helm that only notes what it is told, and an API with one pod that echoes."""

    api: FakeKube
    log: Path
    env: dict[str, str]
    port: int
    command: list[str] = field(default_factory=list)

    def helm_calls(self) -> list[Any]:
        return [json.loads(line) for line in self.log.read_text().splitlines()]

    def stored_hash(self) -> bytes:
        [sent] = [json.loads(stdin) for argv, stdin in self.helm_calls() if argv[0] == "upgrade"]
        return str(sent["htpasswd"]).encode()


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    helm = tmp_path / "bin" / "helm"
    helm.parent.mkdir()
    log = tmp_path / "helm.log"
    log.touch()
    helm.write_text(HELM.format(python=sys.executable, log=str(log), run=json.dumps(RUN)))
    helm.chmod(0o755)
    labels = {"app.kubernetes.io/name": "maskfleet-notebook", "app.kubernetes.io/instance": "r50-notebook"}
    with FakeKube(tmp_path) as api, echo_server() as echo:
        set_pods(api, pod("nb-1", labels=labels), ports={"nb-1": echo})
        port = free_port()
        env = {**os.environ, "PATH": f"{helm.parent}:{os.environ['PATH']}", "KUBECONFIG": str(api.kubeconfig)}
        command = [sys.executable, "-c", START, "eks://kubeflow/r50", "--port", str(port), "--no-browser"]
        yield World(api, log, env, port, command)


@contextmanager
def echo_server() -> Iterator[int]:
    class Echo(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            for line in self.rfile:
                self.wfile.write(line)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Echo) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()
            thread.join()


def talk(port: int, line: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        connection.sendall(line)
        with connection.makefile("rb") as answer:
            return answer.readline()


@contextmanager
def ended_whatever_fails(process: subprocess.Popen[str]) -> Iterator[subprocess.Popen[str]]:
    """A process and its pipes, which do not outlive the block."""
    with process:
        try:
            yield process
        finally:
            process.terminate()  # and with it its servers


def test_a_piped_password_installs_forwards_and_ends_with_ctrl_c(world: World) -> None:
    command = subprocess.Popen(
        [*world.command, "--password-stdin"],
        env=world.env,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with ended_whatever_fails(command) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(f"{PASSWORD}\n")
        process.stdin.flush()
        assert process.stdout.readline() == f"JupyterLab   https://127.0.0.1:{world.port}/lab\n"
        assert process.stdout.readline() == f"TensorBoard  https://127.0.0.1:{world.port}/tensorboard/\n"
        assert talk(world.port, b"hello\n") == b"hello\n"
        process.send_signal(signal.SIGINT)
        rest, said = process.communicate(timeout=LONG_S)
    assert process.returncode == 0
    assert "nb-1 is ready" in said
    assert "Traceback" not in said
    assert PASSWORD not in rest + said + world.log.read_text()
    assert [call[0][0] for call in world.helm_calls()] == ["get", "get", "upgrade"]
    assert bcrypt.checkpw(PASSWORD.encode(), world.stored_hash())


@contextmanager
def terminal(world: World) -> Iterator[int]:
    """The command on a terminal of its own; gives the terminal's other end."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        world.command, env=world.env, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True
    )
    os.close(theirs)
    try:
        yield ours
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(LONG_S)
        os.close(ours)


def read_until(ours: int, pattern: str) -> str:
    text = ""
    deadline = time.monotonic() + LONG_S
    while not re.search(pattern, text):
        assert time.monotonic() < deadline, text
        if not select.select([ours], [], [], 1)[0]:
            continue
        try:
            text += os.read(ours, 4096).decode()
        except OSError as error:
            pytest.fail(f"{error} after:\n{text}")
    return text


def test_a_typed_password_is_asked_twice_and_not_shown(world: World) -> None:
    with terminal(world) as ours:
        seen = read_until(ours, r"generate one\): ")
        os.write(ours, f"{PASSWORD}\n".encode())
        seen += read_until(ours, "The same again: ")
        os.write(ours, f"{PASSWORD}\n".encode())
        seen += read_until(ours, "TensorBoard")
    assert PASSWORD not in seen
    assert bcrypt.checkpw(PASSWORD.encode(), world.stored_hash())


def test_two_different_passwords_install_nothing(world: World) -> None:
    with terminal(world) as ours:
        read_until(ours, r"generate one\): ")
        os.write(ours, f"{PASSWORD}\n".encode())
        read_until(ours, "The same again: ")
        os.write(ours, b"something else\n")
        read_until(ours, "the two passwords differ")
    assert [call[0][0] for call in world.helm_calls()] == ["get", "get"]


def test_an_empty_password_is_made_and_shown_once(world: World) -> None:
    with terminal(world) as ours:
        read_until(ours, r"generate one\): ")
        os.write(ours, b"\n")
        seen = read_until(ours, r"TensorBoard.*\n")
    [made] = re.findall(r"shown only now: (\S+)", seen)
    assert seen.count(made) == 1
    assert bcrypt.checkpw(made.encode(), world.stored_hash())


def test_without_a_terminal_a_password_must_be_piped(world: World) -> None:
    nothing = subprocess.DEVNULL
    done = subprocess.run(
        world.command, env=world.env, stdin=nothing, capture_output=True, text=True, timeout=LONG_S, check=False
    )
    assert done.returncode != 0
    assert "--password-stdin" in done.stderr
    assert [call[0][0] for call in world.helm_calls()] == ["get", "get"]


def test_stop_removes_the_release(world: World) -> None:
    done = subprocess.run(
        [*world.command, "--stop"], env=world.env, capture_output=True, text=True, timeout=LONG_S, check=False
    )
    assert done.stdout == "r50-notebook is removed\n"
    assert [call[0][:2] for call in world.helm_calls()] == [["uninstall", "r50-notebook"]]


def test_a_run_on_ssh_hosts_has_no_notebook() -> None:
    command = [sys.executable, "-c", START, "ssh://host1/fleet/runs/r50"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LONG_S, check=False)
    assert done.returncode != 0
    assert "no notebooks for runs on ssh" in done.stderr


def test_without_jupyterlab_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(LaunchError) as refused:
        servers_for(tmp_path, port=8443)
    assert "maskfleet[notebook]" in refused.value.remedy


def test_both_servers_listen_on_loopback_and_the_token_is_on_no_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    servers = servers_for(tmp_path, port=9000)
    assert "--ServerApp.ip=127.0.0.1" in servers.jupyter
    assert servers.tensorboard[servers.tensorboard.index("--host") + 1] == "127.0.0.1"
    assert all(servers.token not in argument for argument in (*servers.jupyter, *servers.tensorboard))
    assert servers.token in servers.jupyter_url
    assert servers.token != servers_for(tmp_path, port=9000).token


def test_notebooks_are_put_beside_the_run_once(tmp_path: Path) -> None:
    work = copied_notebooks(tmp_path)
    assert (work / "try_model.ipynb").read_bytes() == (ROOT / "notebooks/try_model.ipynb").read_bytes()
    (work / "try_model.ipynb").write_text("mine")
    copied_notebooks(tmp_path)
    assert (work / "try_model.ipynb").read_text() == "mine"


def test_a_server_that_ends_by_itself_ends_the_other_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = (sys.executable, "-c", "raise SystemExit('no such secret: s3cret')")
    servers = LocalServers(broken, ("sleep", "600"), "", "", token="s3cret")
    monkeypatch.setattr(notebook_local, "servers_for", lambda *_, **__: servers)
    with pytest.raises(LaunchError, match="JupyterLab ended with 1") as failed:
        notebook_local.serve(tmp_path, port=free_port(2), on_ready=lambda _: None)
    assert "no such secret: …" in failed.value.what
    assert sleepers(tmp_path) == 0


@pytest.mark.parametrize("told", [signal.SIGTERM, signal.SIGHUP])
def test_a_notebook_whose_terminal_closes_leaves_no_server_behind(told: signal.Signals, tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from maskfleet.launch.local import notebook as it;"
        "two = it.LocalServers(('sleep', '600'), ('sleep', '600'), '', '', '');"
        "it.servers_for = lambda *_, **__: two;"
        f"it.serve(Path(sys.argv[1]), port={free_port(2)}, on_ready=lambda _: print('up', flush=True))"
    )
    argv = ["env", "--ignore-signal=INT", "--default-signal=HUP", sys.executable, "-c", code, str(tmp_path)]
    with ended_whatever_fails(subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        assert sleepers(tmp_path) == 2
        process.send_signal(told)
        process.communicate(timeout=LONG_S)
    assert process.returncode == 128 + told
    assert sleepers(tmp_path) == 0


def sleepers(run_dir: Path) -> int:
    """Processes that work in the notebooks' folder of a run."""
    found = 0
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            found += (folder / "cwd").readlink() == run_dir / "notebooks"
    return found


def test_a_local_notebook_is_not_stopped_by_an_option(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="ends by itself"):
        CliRunner().invoke(app, ["notebook", str(tmp_path), "--stop"], catch_exceptions=False)


def test_local_servers_start_ask_for_the_token_and_end_together(tmp_path: Path) -> None:
    python = ROOT / ".tools" / "notebook" / "bin" / "python"
    if not python.exists():
        pytest.skip("JupyterLab is not here: make test-tools installs it into .tools/notebook")
    port = free_port(2)
    code = (
        "import sys; from pathlib import Path; from maskfleet.launch.local.notebook import serve;"
        "show = lambda it: print(it.jupyter_url, it.tensorboard_url, flush=True);"
        f"serve(Path(sys.argv[1]), port={port}, on_ready=show)"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "HOME": str(tmp_path)}
    server = subprocess.Popen(
        [python, "-c", code, tmp_path], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    with ended_whatever_fails(server) as process:
        assert process.stdout is not None
        lab, board = process.stdout.readline().split()
        assert status(board) == 200
        assert status(lab) == 200
        assert status(lab.partition("?")[0].replace("/lab", "/api/kernels")) == 403
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=LONG_S)
    for place in (lab, board):
        with pytest.raises(urllib.error.URLError):
            urllib.request.urlopen(place, timeout=5)


def status(url: str) -> int:
    """HTTP's status, as soon as somebody listens."""
    deadline = time.monotonic() + LONG_S
    while True:
        try:
            with urllib.request.urlopen(url, timeout=60) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            error.close()
            return error.code
        except OSError:
            assert time.monotonic() < deadline
            time.sleep(0.2)
