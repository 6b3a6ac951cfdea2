"""The chart's own nginx, JupyterLab and TensorBoard, started as in the pod: who gets in, by what, and who does not."""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import signal
import socket
import ssl
import subprocess
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from httpx_ws import WebSocketUpgradeError, connect_ws
from notebook_release import (
    GOOD,
    HASH,
    MD5,
    NOBODY,
    PASSWORD,
    as_nobody,
    container,
    free_port,
    lay_out,
    notebook_tool,
    one,
    render,
)

from tools import tool

LOGIN = ("fleet", PASSWORD)
STARTUP_S = 120


@dataclass
class Stack:
    """The three processes of a pod, alive, with everything under one folder."""

    folder: Path
    port: int
    board_port: int
    authority: str
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self.port}"

    def client(self, **options: Any) -> httpx.Client:
        context = ssl.create_default_context(cadata=self.authority)
        return httpx.Client(base_url=self.url, verify=context, timeout=60, trust_env=False, **options)

    def said(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(encoding="utf-8", errors="replace")


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    tool("nginx")
    for program in ("jupyter", "tensorboard"):
        notebook_tool(program)
    # A short path: a socket's name has at most 107 characters.
    folder = Path(tempfile.mkdtemp(prefix="maskfleet-"))
    folder.chmod(0o755)
    values = {
        **GOOD,
        "proxy": {"port": free_port(), "bind": "127.0.0.1", "config_dir": f"{folder}/etc", "run_dir": f"{folder}/run"},
        "tensorboard": {"port": free_port()},
    }
    objects = render(tmp_path_factory.mktemp("values"), values)
    lay_out(objects, folder, owner=NOBODY)
    (folder / "etc" / "tls" / "tls.key").chmod(0o644)
    authority = base64.b64decode(one(objects, "Secret", "r50-notebook-tls")["data"]["ca.crt"]).decode()
    made = Stack(folder, values["proxy"]["port"], values["tensorboard"]["port"], authority)
    try:
        for name in ("jupyter", "tensorboard", "proxy"):
            _start(made, name, container(objects, name)["command"])
        _await_all(made)
        yield made
    finally:
        for process in made.processes.values():
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        shutil.rmtree(folder)


def _start(stack: Stack, name: str, command: list[str]) -> None:
    for place in ("work", "home", "fsx/logs/r50/tensorboard"):
        (stack.folder / place).mkdir(parents=True, exist_ok=True)
        (stack.folder / place).chmod(0o777)
    if name == "tensorboard":
        _write_events(stack.folder / "fsx/logs/r50/tensorboard")
    # Where the pod mounts the volume: the one path that is not the chart's to say.
    command = [part.replace("/fsx/", f"{stack.folder}/fsx/") for part in command]
    if name != "proxy":
        command[0] = notebook_tool(command[0])
    home = {
        "HOME": f"{stack.folder}/home",
        "TMPDIR": f"{stack.folder}/home",
        "JUPYTER_RUNTIME_DIR": f"{stack.folder}/home/j",
    }
    with (stack.folder / f"{name}.log").open("wb") as log:
        stack.processes[name] = subprocess.Popen(
            as_nobody(command),
            cwd=stack.folder / "work",
            env={"PATH": os.environ["PATH"] + ":/usr/sbin", **home},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


def _write_events(folder: Path) -> None:
    from maskfleet.training.tensorboard import TensorBoard

    board = TensorBoard(folder, purge_step=None)
    board.scalars(1, {"loss/total": 2.5}, at=1.0)
    board.close()


def _await_all(stack: Stack) -> None:
    deadline = time.monotonic() + STARTUP_S
    with stack.client(auth=LOGIN) as client:
        for path in ("/api", "/tensorboard/data/environment"):
            while True:
                for name, process in stack.processes.items():
                    assert process.poll() is None, f"{name} ended:\n{stack.said(name)}"
                try:
                    if client.get(path).status_code == 200:
                        break
                except httpx.TransportError:
                    pass  # not up yet
                assert time.monotonic() < deadline, {name: stack.said(name) for name in stack.processes}
                time.sleep(0.2)


def session_cookies(response: httpx.Response) -> list[str]:
    return [value for value in response.headers.get_list("set-cookie") if value.startswith("maskfleet_")]


PATHS = ["/", "/lab", "/api", "/api/kernels", "/api/contents", "/terminals/1", "/tensorboard", "/tensorboard/", "/x"]


@pytest.mark.parametrize("path", PATHS)
def test_without_a_password_nothing_answers(stack: Stack, path: str) -> None:
    with stack.client() as client:
        answer = client.get(path)
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"] == 'Basic realm="maskfleet"'
    assert not session_cookies(answer)
    assert "jupyter" not in answer.text.lower()
    assert "tensorboard" not in answer.text.lower()


@pytest.mark.parametrize("login", [("fleet", "wrong"), ("fleet", ""), ("root", PASSWORD), ("fleet", HASH)])
def test_a_wrong_password_is_refused(stack: Stack, login: tuple[str, str]) -> None:
    with stack.client(auth=login) as client:
        for path in ("/lab", "/tensorboard/", "/api/kernels"):
            answer = client.get(path)
            assert answer.status_code == 401
            assert not session_cookies(answer)


def test_the_right_password_opens_jupyter_and_tensorboard(stack: Stack) -> None:
    with stack.client(auth=LOGIN) as client:
        lab = client.get("/lab", follow_redirects=True)
        assert lab.status_code == 200
        assert "JupyterLab" in lab.text
        board = client.get("/tensorboard/")
        assert board.status_code == 200
        assert "TensorBoard" in board.text
        assert client.get("/tensorboard", follow_redirects=True).url.path == "/tensorboard/"
        runs = client.get("/tensorboard/data/runs").json()
        assert runs == ["r50/tensorboard"]


def test_one_login_opens_a_session(stack: Stack) -> None:
    with stack.client() as client:
        first = client.get("/api", auth=LOGIN)
        [cookie] = session_cookies(first)
        assert re.fullmatch(
            r"maskfleet_r50_notebook=[0-9a-f]{64}; Path=/; Secure; HttpOnly; SameSite=Strict", cookie
        ), cookie
        again = client.get("/api/kernels")
        assert again.status_code == 200
        assert not session_cookies(again)


@pytest.mark.parametrize("value", ["0" * 64, "", ":", "~^", "a:a", "0" * 64 + ":" + "0" * 64])
def test_an_invented_session_is_none(stack: Stack, value: str) -> None:
    with stack.client(headers={"Cookie": f"maskfleet_r50_notebook={value}"}) as client:
        answer = client.get("/api/kernels")
    assert answer.status_code == 401
    assert not session_cookies(answer)


def test_the_health_page_needs_no_password_and_says_nothing(stack: Stack) -> None:
    with stack.client() as client:
        answer = client.get("/healthz")
        below = client.get("/healthz/x")
    assert (answer.status_code, answer.text) == (200, "ok\n")
    assert answer.headers["server"] == "nginx"
    assert not session_cookies(answer)
    assert below.status_code == 401


def test_a_kernel_answers_through_the_proxy(stack: Stack) -> None:
    with stack.client(auth=LOGIN) as client:
        client.get("/lab", follow_redirects=True)
        token = client.cookies["_xsrf"]
        kernel = client.post("/api/kernels", json={}, headers={"X-XSRFToken": token}).json()["id"]
        place = f"{stack.url.replace('https', 'wss')}/api/kernels/{kernel}/channels"
        try:
            with connect_ws(place, client, headers={"Origin": stack.url}) as channel:
                channel.send_text(json.dumps(_execute("print(6 * 7)")))
                assert _printed(channel) == "42\n"
                # Messages go over sockets in a folder; one port is the debugger's, and loopback is the pod's own.
                assert _kernel_ports(stack) in ([], ["127.0.0.1"])
            with stack.client() as stranger, pytest.raises(WebSocketUpgradeError) as refused:
                connect_ws(place, stranger).__enter__()
            assert refused.value.response.status_code == 401
            with pytest.raises(WebSocketUpgradeError) as foreign:
                connect_ws(place, client, headers={"Origin": "https://elsewhere.example"}).__enter__()
            assert foreign.value.response.status_code == 403
        finally:
            client.delete(f"/api/kernels/{kernel}", headers={"X-XSRFToken": token})


def _kernel_ports(stack: Stack) -> list[str]:
    """Where processes listen that Jupyter started."""
    parents = {pid: int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1]) for _, pid in _listeners()}
    return [address for address, pid in _listeners() if parents.get(pid) == stack.processes["jupyter"].pid]


def _execute(code: str) -> dict[str, Any]:
    header = {
        "msg_id": uuid.uuid4().hex,
        "msg_type": "execute_request",
        "username": "",
        "session": "s",
        "version": "5.3",
    }
    content = {"code": code, "silent": False, "store_history": False, "allow_stdin": False, "user_expressions": {}}
    return {"header": header, "parent_header": {}, "metadata": {}, "content": content, "channel": "shell"}


def _printed(channel: Any) -> str:
    while True:
        message = json.loads(channel.receive_text(timeout=60))
        if message["msg_type"] == "stream":
            return str(message["content"]["text"])


def test_a_page_elsewhere_cannot_use_a_login(stack: Stack) -> None:
    with stack.client(auth=LOGIN) as client:
        client.get("/lab", follow_redirects=True)
        bare = client.post("/api/kernels", json={})
        foreign = client.post("/api/kernels", json={}, headers={"Origin": "https://elsewhere.example"})
    assert bare.status_code == 403
    assert foreign.status_code in (403, 404)


@pytest.mark.parametrize(("version", "works"), [("tls1", False), ("tls1_1", False), ("tls1_2", True), ("tls1_3", True)])
def test_only_new_tls_is_spoken(stack: Stack, version: str, works: bool) -> None:
    # SECLEVEL=0 lets this client offer the old versions at all; otherwise it would be the one to refuse.
    done = subprocess.run(
        [
            tool("openssl"),
            "s_client",
            "-connect",
            f"127.0.0.1:{stack.port}",
            f"-{version}",
            "-cipher",
            "ALL:@SECLEVEL=0",
        ],
        input=b"",
        capture_output=True,
        timeout=30,
        check=False,
    )
    assert (done.returncode == 0) is works, done.stderr
    if not works:
        assert b"alert protocol version" in done.stderr


def test_plain_http_gets_no_page(stack: Stack) -> None:
    answer = httpx.get(f"http://127.0.0.1:{stack.port}/lab", auth=LOGIN, trust_env=False)
    assert answer.status_code == 400


def test_pages_forbid_foreign_frames_and_guesses(stack: Stack) -> None:
    with stack.client(auth=LOGIN) as client:
        for path in ("/lab", "/tensorboard/"):
            headers = client.get(path).headers
            assert headers["x-content-type-options"] == "nosniff"
            assert headers["x-frame-options"] == "SAMEORIGIN"
            assert "frame-ancestors 'self'" in headers.get_list("content-security-policy")
            assert "strict-transport-security" not in headers


def test_too_many_guesses_are_turned_away_but_not_who_is_in(stack: Stack) -> None:
    with second_proxy(stack) as other, stack.client() as known, stack.client() as stranger:
        _until(lambda: known.get(f"{other}/api", auth=LOGIN).status_code == 200)
        codes = [stranger.get(f"{other}/lab").status_code for _ in range(200)]
        assert set(codes) == {401, 429}
        assert known.get(f"{other}/api/kernels").status_code == 200


def test_only_the_proxy_listens_beyond_the_pods_own_addresses(stack: Stack) -> None:
    group = {_session(pid) for pid in (process.pid for process in stack.processes.values())}
    listening = [entry for entry in _listeners() if _session(entry[1]) in group]
    assert {address for address, _ in listening} == {"127.0.0.1"}, listening
    assert stack.processes["jupyter"].pid not in {pid for _, pid in listening}, "Jupyter itself has a port"
    mode = (stack.folder / "run/jupyter/jupyter.sock").stat().st_mode
    assert mode & 0o777 == 0o600


def _session(pid: int) -> int:
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return -1


def _listeners() -> list[tuple[str, int]]:
    """(address, process id) of every listening TCP socket, by /proc."""
    sockets: dict[str, str] = {}
    for table, family, width in (("tcp", socket.AF_INET, 4), ("tcp6", socket.AF_INET6, 16)):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            parts = line.split()
            if parts[3] == "0A":
                raw = bytes.fromhex(parts[1].split(":")[0])
                words = b"".join(raw[at : at + 4][::-1] for at in range(0, width, 4))
                sockets[f"socket:[{parts[9]}]"] = socket.inet_ntop(family, words)
    found = []
    for entry in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            target = str(entry.readlink())
        except OSError:
            continue  # the process or the file is gone, or is not ours
        if target in sockets:
            found.append((sockets[target], int(entry.parts[2])))
    return found


def test_nothing_secret_is_in_the_logs(stack: Stack) -> None:
    for name in stack.processes:
        text = stack.said(name)
        assert "token=" not in text
        assert PASSWORD not in text
        assert HASH not in text
    assert "password mismatch" in stack.said("proxy")


def test_processes_are_not_root(stack: Stack) -> None:
    for process in stack.processes.values():
        assert Path(f"/proc/{process.pid}").stat().st_uid != 0 or os.geteuid() != 0


def test_a_new_login_ends_old_sessions(stack: Stack) -> None:
    with second_proxy(stack) as other, stack.client() as client:
        _until(lambda: client.get(f"{other}/api", auth=LOGIN).status_code == 200)
        assert client.get(f"{other}/api/kernels").status_code == 200
        (stack.folder / "etc2/login/htpasswd").write_text(f"other:{HASH}\n")
        _until(lambda: client.get(f"{other}/api/kernels").status_code == 401)
        assert client.get(f"{other}/api", auth=LOGIN).status_code == 401
        assert client.get(f"{other}/api", auth=("other", PASSWORD)).status_code == 200


def test_a_renewed_certificate_is_used_without_a_restart(stack: Stack, tmp_path: Path) -> None:
    objects = render(tmp_path, GOOD)
    with second_proxy(stack) as other:
        port = int(other.rpartition(":")[2])
        _until(lambda: bool(ssl.get_server_certificate(("127.0.0.1", port))))
        before = ssl.get_server_certificate(("127.0.0.1", port))
        data = one(objects, "Secret", "r50-notebook-tls")["data"]
        for name in ("tls.key", "tls.crt"):
            (stack.folder / "etc2/tls" / name).write_bytes(base64.b64decode(data[name]))
        renewed = base64.b64decode(data["tls.crt"]).decode()
        assert before.strip() != renewed.strip()
        _until(lambda: ssl.get_server_certificate(("127.0.0.1", port)).strip() == renewed.strip())


def test_what_is_behind_the_proxy_never_sees_the_password(stack: Stack) -> None:
    with echo_server() as echo, second_proxy(stack, board_port=echo) as other, stack.client() as client:
        _until(lambda: client.get(f"{other}/tensorboard/x", auth=LOGIN).status_code == 200)
        seen = client.get(f"{other}/tensorboard/x", auth=LOGIN, headers={"X-Forwarded-For": "6.6.6.6"}).json()
    assert "authorization" not in seen
    assert seen["host"] == other.removeprefix("https://")
    assert (seen["x-forwarded-proto"], seen["x-forwarded-for"]) == ("https", "127.0.0.1")


@contextmanager
def echo_server() -> Iterator[int]:
    """A server that answers with the headers of the request."""

    class Echo(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = json.dumps({name.lower(): value for name, value in self.headers.items()}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            return

    with ThreadingHTTPServer(("127.0.0.1", 0), Echo) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()


@contextmanager
def second_proxy(stack: Stack, *, board_port: int | None = None) -> Iterator[str]:
    """Another proxy in front of the same processes, which looks every 0.2 s whether login or certificate changed."""
    port = free_port()
    config, run = stack.folder / "etc2", stack.folder / "run2"
    shutil.copytree(stack.folder / "etc", config)
    run.mkdir()
    run.chmod(0o777)
    file = config / "proxy/nginx.conf"
    text = file.read_text().replace(f"{stack.folder}/etc", str(config)).replace(f"{stack.folder}/run/proxy", str(run))
    text = text.replace(f"127.0.0.1:{stack.board_port}", f"127.0.0.1:{board_port or stack.board_port}")
    file.write_text(text.replace(f"127.0.0.1:{stack.port}", f"127.0.0.1:{port}"))
    command = ["sh", str(config / "proxy/proxy.sh"), str(config), str(run), "0.2"]
    env = {"PATH": os.environ["PATH"] + ":/usr/sbin"}
    with (stack.folder / "second.log").open("wb") as log:
        process = subprocess.Popen(as_nobody(command), env=env, stdout=log, stderr=log, start_new_session=True)
    try:
        yield f"https://127.0.0.1:{port}"
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        shutil.rmtree(config)
        shutil.rmtree(run)


def _until(true: Any) -> None:
    deadline = time.monotonic() + 30
    while True:
        try:
            if true():
                return
        except (httpx.TransportError, OSError):
            pass  # not up yet
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.parametrize("line", ["", f"fleet:{MD5}\n", "fleet:{PLAIN}secret\n", f"fleet:{HASH}\nx:{MD5}\n"])
def test_the_proxy_does_not_start_with_a_weak_login(tmp_path: Path, line: str) -> None:
    objects = render(tmp_path, GOOD)
    (tmp_path / "login").mkdir()
    (tmp_path / "login/htpasswd").write_text(line)
    (tmp_path / "proxy.sh").write_text(one(objects, "ConfigMap", "r50-notebook-proxy")["data"]["proxy.sh"])
    done = subprocess.run(
        ["sh", tmp_path / "proxy.sh", tmp_path, tmp_path], capture_output=True, text=True, timeout=30, check=False
    )
    assert done.returncode == 2
    assert "htpasswd" in done.stderr
    assert not (tmp_path / "session.conf").exists()
