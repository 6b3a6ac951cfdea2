"""Connections to a real SSH server on loopback: the question about a new key, and keys that only an agent holds."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import asyncssh
import pytest

from maskfleet.errors import LaunchError
from maskfleet.launch.ssh.connect import Connection, connect
from maskfleet.launch.ssh.route import Routes, Way


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home folder with a key that the server accepts, and nothing of this machine's own settings."""
    folder = tmp_path / "home"
    (folder / ".ssh").mkdir(parents=True, mode=0o700)
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    key = asyncssh.generate_private_key("ssh-ed25519")
    key.write_private_key(folder / ".ssh" / "id_ed25519")
    (folder / ".ssh" / "id_ed25519").chmod(0o600)
    key.write_public_key(tmp_path / "authorized_keys")
    return folder


@asynccontextmanager
async def server(folder: Path, host_key: asyncssh.SSHKey) -> AsyncIterator[int]:
    """The port of an SSH server that answers every command with its own words."""

    def answer(process: asyncssh.SSHServerProcess[str]) -> None:
        process.stdout.write(f"heard {process.command}\n")
        process.exit(0)

    connections: list[asyncssh.SSHServerConnection] = []

    class Server(asyncssh.SSHServer):
        def connection_made(self, conn: asyncssh.SSHServerConnection) -> None:
            connections.append(conn)

    listening = await asyncssh.listen(
        "127.0.0.1",
        0,
        server_factory=Server,
        server_host_keys=[host_key],
        authorized_client_keys=str(folder / "authorized_keys"),
        process_factory=answer,
    )
    try:
        yield listening.get_port()
    finally:
        listening.close()
        await listening.wait_closed()
        for connection in connections:  # of which the loop may not have heard yet that the client is gone
            connection.abort()
            await connection.wait_closed()


async def said(connection: Connection) -> str:
    try:
        return (await connection.run("hello")).out
    finally:
        connection.close()
        await connection.raw.wait_closed()


def test_a_new_host_is_asked_about_once_and_known_from_then_on(home: Path, tmp_path: Path) -> None:
    key = asyncssh.generate_private_key("ssh-ed25519")
    questions: list[str] = []

    def yes(question: str) -> bool:
        questions.append(question)
        return True

    async def twice() -> list[str]:
        async with server(tmp_path, key) as port:
            address = f"someone@127.0.0.1:{port}"
            return [await said(await connect(address, ask=yes)) for _ in range(2)]

    assert asyncio.run(twice()) == ["heard hello\n", "heard hello\n"]
    assert len(questions) == 1
    assert key.get_fingerprint() in questions[0]
    known = (home / ".ssh" / "known_hosts").read_text()
    assert key.export_public_key().decode().split()[1] in known
    assert known.startswith("[127.0.0.1]:")


def test_who_says_no_is_not_connected_and_nothing_is_remembered(home: Path, tmp_path: Path) -> None:
    async def refused() -> None:
        async with server(tmp_path, asyncssh.generate_private_key("ssh-ed25519")) as port:
            await connect(f"someone@127.0.0.1:{port}", ask=lambda _: False)

    with pytest.raises(LaunchError, match=r"the key of host someone@127.0.0.1:.* is not known") as caught:
        asyncio.run(refused())
    assert "--accept-new" in caught.value.remedy
    assert not (home / ".ssh" / "known_hosts").exists()


def test_a_key_that_changed_is_refused_without_a_question(home: Path, tmp_path: Path) -> None:
    def never(question: str) -> bool:
        raise AssertionError(question)

    async def changed() -> None:
        key, other = (asyncssh.generate_private_key("ssh-ed25519") for _ in range(2))
        async with server(tmp_path, key) as port:
            line = f"[127.0.0.1]:{port} {other.export_public_key().decode()}"
            (home / ".ssh" / "known_hosts").write_text(line)
            await connect(f"someone@127.0.0.1:{port}", accept_new=True, ask=never)

    with pytest.raises(LaunchError, match="is not the one it had before"):
        asyncio.run(changed())


@pytest.fixture
def agent(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An ssh-agent that alone holds the key."""
    if shutil.which("ssh-agent") is None or shutil.which("ssh-add") is None:
        pytest.skip("ssh-agent is not here: make test-tools installs it")
    socket = tmp_path / "agent"
    process = subprocess.Popen(["ssh-agent", "-D", "-a", str(socket)], stdout=subprocess.DEVNULL)
    try:
        monkeypatch.setenv("SSH_AUTH_SOCK", str(socket))
        deadline = time.monotonic() + 120
        while subprocess.run(["ssh-add", "-l"], capture_output=True, check=False).returncode == 2:  # nobody answers yet
            assert time.monotonic() < deadline, "ssh-agent did not start"
            time.sleep(0.05)
        own_key = home / ".ssh" / "id_ed25519"
        subprocess.run(["ssh-add", "-q", str(own_key)], check=True, capture_output=True)
        own_key.unlink()
        yield
    finally:
        process.terminate()
        process.wait()


@pytest.mark.usefixtures("agent")
def test_a_key_that_only_the_agent_holds_opens_the_host(tmp_path: Path) -> None:
    async def once() -> str:
        async with server(tmp_path, asyncssh.generate_private_key("ssh-ed25519")) as port:
            return await said(await connect(f"someone@127.0.0.1:{port}", accept_new=True))

    assert asyncio.run(once()) == "heard hello\n"


def test_without_key_and_agent_the_host_refuses_and_is_named(home: Path, tmp_path: Path) -> None:
    (home / ".ssh" / "id_ed25519").unlink()

    async def once() -> None:
        async with server(tmp_path, asyncssh.generate_private_key("ssh-ed25519")) as port:
            await connect(f"someone@127.0.0.1:{port}", accept_new=True)

    with pytest.raises(LaunchError, match=r"host someone@127.0.0.1:.* does not accept your key"):
        asyncio.run(once())


def test_names_of_the_ssh_config_are_followed(home: Path, tmp_path: Path) -> None:
    async def once() -> str:
        async with server(tmp_path, asyncssh.generate_private_key("ssh-ed25519")) as port:
            config = f"Host gpu-box\n  HostName 127.0.0.1\n  Port {port}\n  User someone\n"
            (home / ".ssh" / "config").write_text(config)
            return await said(await connect("gpu-box", accept_new=True))

    assert asyncio.run(once()) == "heard hello\n"


PRIVATE = "10.99.0.7"  # that nothing on this machine reaches


@asynccontextmanager
async def jump_server(folder: Path, host_key: asyncssh.SSHKey, port: int, opened: list[str]) -> AsyncIterator[int]:
    """The port of a head node from which the host PRIVATE, port 22, is reached: it is the server at `port`."""
    connections: list[asyncssh.SSHServerConnection] = []

    class Server(asyncssh.SSHServer):
        def connection_made(self, conn: asyncssh.SSHServerConnection) -> None:
            self._connection = conn
            connections.append(conn)

        def connection_requested(self, dest_host: str, dest_port: int, *_: object) -> object:
            opened.append(f"{dest_host}:{dest_port}")
            return self._connection.forward_connection("127.0.0.1", port)

    keys = str(folder / "authorized_keys")
    listening = await asyncssh.listen(
        "127.0.0.1", 0, server_factory=Server, server_host_keys=[host_key], authorized_client_keys=keys
    )
    try:
        yield listening.get_port()
    finally:
        listening.close()
        await listening.wait_closed()
        for connection in connections:
            connection.abort()
            await connection.wait_closed()


def test_a_host_without_a_public_address_is_reached_through_the_head_node(home: Path, tmp_path: Path) -> None:
    key, head_key = asyncssh.generate_private_key("ssh-ed25519"), asyncssh.generate_private_key("ssh-ed25519")
    opened: list[str] = []

    async def twice() -> list[str]:
        async with server(tmp_path, key) as port, jump_server(tmp_path, head_key, port, opened) as head:
            # The head node's public address is an alias of ~/.ssh/config, because its port is not 22 here.
            config = f"Host head\n  HostName 127.0.0.1\n  Port {head}\n"
            (home / ".ssh" / "config").write_text(config)
            ways = {"10.99.0.1": Way("i-0head", "head"), PRIVATE: Way("i-0worker")}
            routes = Routes(ways, jump="10.99.0.1")
            first = await said(await connect(PRIVATE, accept_new=True, routes=routes))
            return [first, await said(await connect(PRIVATE, ask=never, routes=routes))]

    def never(question: str) -> bool:
        raise AssertionError(question)

    assert asyncio.run(twice()) == ["heard hello\n", "heard hello\n"]
    assert set(opened) == {f"{PRIVATE}:22"}
    known = (home / ".ssh" / "known_hosts").read_text()
    assert [line.split()[0] for line in known.splitlines()] == ["i-0head", "i-0worker"]


def test_session_manager_carries_the_connection_and_gets_no_shell(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = asyncssh.generate_private_key("ssh-ed25519")
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")

    async def once() -> str:
        async with server(tmp_path, key) as port:
            program = tmp_path / "bin" / "aws"
            program.write_text(AWS.format(python=sys.executable, argv=tmp_path / "argv", port=port))
            program.chmod(0o755)
            routes = Routes({PRIVATE: Way("i-0123")}, session_region="us-west-2")
            return await said(await connect(PRIVATE, accept_new=True, routes=routes))

    assert asyncio.run(once()) == "heard hello\n"
    assert (tmp_path / "argv").read_text().split() == [
        *("ssm", "start-session", "--target", "i-0123", "--document-name", "AWS-StartSSHSession"),
        *("--parameters", "portNumber=22", "--region", "us-west-2"),
    ]
    assert (home / ".ssh" / "known_hosts").read_text().startswith("i-0123 ")


def test_a_session_that_does_not_open_names_what_is_missing(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    routes = Routes({PRIVATE: Way("i-0123")}, session_region="us-west-2")
    with pytest.raises(LaunchError, match=f"host {PRIVATE} cannot be reached by Session Manager") as caught:
        asyncio.run(connect(PRIVATE, routes=routes))
    assert "aws ssm start-session --target i-0123" in caught.value.remedy


AWS = """#!{python}
import os, socket, sys, threading
open("{argv}", "w").write(" ".join(sys.argv[1:]))
server = socket.create_connection(("127.0.0.1", {port}))
def send():
    while data := os.read(0, 65536):
        server.sendall(data)
    server.shutdown(socket.SHUT_WR)
threading.Thread(target=send, daemon=True).start()
while data := server.recv(65536):
    os.write(1, data)
"""
