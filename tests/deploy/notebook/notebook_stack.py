"""The three processes of the notebook's pod, started on this machine by the chart's own commands."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import signal
import socket
import ssl
import subprocess
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
from httpx_ws import aconnect_ws
from notebook_release import (
    GOOD,
    NOBODY,
    PASSWORD,
    as_nobody,
    container,
    lay_out,
    notebook_command,
    notebook_tool,
    one,
    render,
)

from ports import free_port
from tools import tool

LOGIN = ("fleet", PASSWORD)
STARTUP_S = 240


@dataclass
class Stack:
    """The three running processes of a pod, with all their files in one folder."""

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
        return httpx.Client(base_url=self.url, verify=context, timeout=STARTUP_S, trust_env=False, **options)

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(encoding="utf-8", errors="replace")


@contextmanager
def running_stack(values_folder: Path) -> Iterator[Stack]:
    """Starts JupyterLab, TensorBoard and the proxy with the commands of the chart and waits until they answer."""
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
    objects = render(values_folder, values)
    lay_out(objects, folder, owner=NOBODY)
    (folder / "etc" / "tls" / "tls.key").chmod(0o644)
    authority = base64.b64decode(one(objects, "Secret", "r50-notebook-tls")["data"]["ca.crt"]).decode()
    made = Stack(folder, values["proxy"]["port"], values["tensorboard"]["port"], authority)
    try:
        for name in ("jupyter", "tensorboard", "proxy"):
            _start(made, name, container(objects, name)["command"])
        await_all(made)
        yield made
    finally:
        for process in made.processes.values():
            kill_group(process)
        shutil.rmtree(folder)


def _start(stack: Stack, name: str, command: list[str]) -> None:
    for folder in ("work", "home", "fsx/logs/r50/tensorboard"):
        (stack.folder / folder).mkdir(parents=True, exist_ok=True)
        (stack.folder / folder).chmod(0o777)
    if name == "tensorboard":
        _write_events(stack.folder / "fsx/logs/r50/tensorboard")
    # The pod mounts its volume at /fsx.
    command = [part.replace("/fsx/", f"{stack.folder}/fsx/") for part in command]
    if name != "proxy":
        command = notebook_command(command)
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


def kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kill a process that leads its own session and all it started, whether or not it has exited by itself."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _write_events(folder: Path) -> None:
    from maskfleet.training.output.measurement import Measurement
    from maskfleet.training.output.tensorboard import TensorBoard

    board = TensorBoard(folder)
    board.write(Measurement(step=1, time=1.0, values={"loss/total": 2.5}))
    board.close()


def await_all(stack: Stack) -> None:
    deadline = time.monotonic() + STARTUP_S
    with stack.client(auth=LOGIN) as client:
        for path in ("/api", "/tensorboard/data/environment"):
            while True:
                for name, process in stack.processes.items():
                    assert process.poll() is None, f"{name} exited:\n{stack.log(name)}"
                try:
                    if client.get(path).status_code == 200:
                        break
                except httpx.TransportError:
                    pass  # not up yet
                assert time.monotonic() < deadline, {name: stack.log(name) for name in stack.processes}
                time.sleep(0.2)


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
    """Another proxy for the same processes; it checks every 0.2 s whether login or certificate changed."""
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
        kill_group(process)
        shutil.rmtree(config)
        shutil.rmtree(run)


def until(true: Callable[[], bool]) -> None:
    """Wait until `true()`, some minutes at most."""
    deadline = time.monotonic() + STARTUP_S
    while True:
        try:
            if true():
                return
        except (httpx.TransportError, OSError):
            pass  # not up yet
        assert time.monotonic() < deadline
        time.sleep(0.1)


async def ask(stack: Stack, path: str, code: str) -> str:
    """What `code` prints in a kernel, run over a websocket through the proxy."""
    context = ssl.create_default_context(cadata=stack.authority)
    async with (
        # Jupyter answers when the kernel is up; on a busy machine that takes longer than the default timeout of httpx.
        httpx.AsyncClient(verify=context, auth=LOGIN, trust_env=False, timeout=STARTUP_S) as client,
        aconnect_ws(f"{stack.url}{path}", client, headers={"Origin": stack.url}) as channel,
    ):
        await channel.send_text(json.dumps(_request(code)))
        while True:
            message = json.loads(await channel.receive_text(timeout=STARTUP_S))
            if message["msg_type"] == "stream":
                # Messages use socket files. One TCP port belongs to the debugger, on the loopback of the pod.
                assert kernel_ports(stack) in ([], ["127.0.0.1"])
                return str(message["content"]["text"])


def _request(code: str) -> dict[str, Any]:
    header = {
        "msg_id": uuid.uuid4().hex,
        "msg_type": "execute_request",
        "username": "",
        "session": "s",
        "version": "5.3",
    }
    content = {"code": code, "silent": False, "store_history": False, "allow_stdin": False, "user_expressions": {}}
    return {"header": header, "parent_header": {}, "metadata": {}, "content": content, "channel": "shell"}


def kernel_ports(stack: Stack) -> list[str]:
    """Addresses on which the children of Jupyter listen."""
    return [address for address, pid in listeners() if parent_of(pid) == stack.processes["jupyter"].pid]


def parent_of(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return -1  # it has exited: servers of other tests come and go


def session_of(pid: int) -> int:
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return -1


def listeners() -> list[tuple[str, int]]:
    """(address, process id) of every listening TCP socket, from /proc."""
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
            continue  # the process exited, the file is closed, or we may not read it
        if target in sockets:
            found.append((sockets[target], int(entry.parts[2])))
    return found
