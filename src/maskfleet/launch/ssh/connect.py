"""SSH connections to hosts; uses ~/.ssh/config, the agent and jump hosts, and verifies host keys."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import Callable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any
from weakref import WeakKeyDictionary

import asyncssh

from maskfleet.errors import LaunchError
from maskfleet.launch.address import address_parts
from maskfleet.launch.ssh.route import DIRECT, Routes
from maskfleet.system.process import Finished

CONNECT_S = 15
MAX_JUMPS = 5
_SLOTS: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()
Ask = Callable[[str], bool]


def ask_on_terminal(question: str) -> bool:
    """Ask the user; without a terminal the answer is no."""
    if not sys.stdin.isatty():
        return False
    print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


class Connection:
    """An open connection to one host."""

    def __init__(
        self, address: str, connection: asyncssh.SSHClientConnection, *, jump: Connection | None = None
    ) -> None:
        self.address = address
        self.raw = connection
        self._jump = jump

    async def run(self, line: str, *, timeout_s: float = 60) -> Finished:
        """Run `line` on the host and wait for it."""
        try:
            done = await asyncio.wait_for(self.raw.run(line, stdin=asyncssh.DEVNULL), timeout_s)
        except TimeoutError as error:
            raise LaunchError(
                f"host {self.address} did not finish `{line}` within {timeout_s:.0f} s",
                remedy=f"log in with `ssh {self.address}` and check what keeps it busy",
            ) from error
        except (asyncssh.Error, OSError) as error:
            raise LaunchError(
                f"the connection to host {self.address} broke: {error}", remedy="try again; check that it is up"
            ) from error
        code = done.exit_status if done.exit_status is not None else 255
        return Finished(code, str(done.stdout or ""), str(done.stderr or ""))

    async def put(self, path: str, content: bytes) -> None:
        """Write a file on the host, atomically; a leading `~/` is the home directory."""
        target = path.removeprefix("~/")
        try:
            async with self.raw.start_sftp_client() as sftp:
                await sftp.makedirs(str(PurePosixPath(target).parent), exist_ok=True)
                draft = f"{target}.{os.getpid()}.part"
                async with sftp.open(draft, "wb") as file:
                    await file.write(content)
                await sftp.posix_rename(draft, target)
        except (asyncssh.Error, OSError) as error:
            raise LaunchError(
                f"host {self.address} cannot store {path}: {_reason(error)}",
                remedy="free disk space there, or choose another run_root that you may write to",
            ) from error

    async def get(self, path: str) -> bytes | None:
        """Content of a file on the host; None if it does not exist."""
        try:
            async with self.raw.start_sftp_client() as sftp, sftp.open(path.removeprefix("~/"), "rb") as file:
                content = await file.read()
                return content if isinstance(content, bytes) else content.encode()
        except asyncssh.SFTPNoSuchFile:
            return None
        except (asyncssh.Error, OSError) as error:
            raise LaunchError(
                f"host {self.address} cannot read {path}: {_reason(error)}", remedy="check its permissions there"
            ) from error

    def close(self) -> None:
        self.raw.close()
        if self._jump is not None:
            self._jump.close()


async def connect(
    address: str, *, accept_new: bool = False, ask: Ask = ask_on_terminal, routes: Routes = DIRECT
) -> Connection:
    """A connection to `address`, which is `host`, `user@host` or `user@host:port` with host as in ~/.ssh/config.

    `routes` knows hosts that are reached through another one, or by Session Manager.
    """
    user, host, _ = address_parts(address)
    jump_host = routes.jump_for(host)
    if jump_host is None:
        return await _connect_trusting(address, routes, None, accept_new=accept_new, ask=ask)
    async with _jump_slots():
        through = f"{user}@{jump_host}" if user else jump_host
        jump = await _connect_trusting(through, routes, None, accept_new=accept_new, ask=ask)
        try:
            return await _connect_trusting(address, routes, jump, accept_new=accept_new, ask=ask)
        except BaseException:
            jump.close()
            raise


def _jump_slots() -> asyncio.Semaphore:
    """Limits logins to a jump host: sshd refuses some of more than ten that begin at the same time."""
    return _SLOTS.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(MAX_JUMPS))


async def _connect_trusting(
    address: str, routes: Routes, jump: Connection | None, *, accept_new: bool, ask: Ask
) -> Connection:
    """A connection; the key of a new host is learnt if the user accepts it."""
    try:
        return await _connect(address, routes, jump)
    except LaunchError as error:
        if not isinstance(error.__cause__, asyncssh.HostKeyNotVerifiable):
            raise
        options = _options(address, routes, jump)
        await _learn_key(address, options, accept_new=accept_new, ask=ask, reason=error.__cause__)
    return await _connect(address, routes, jump)


def _options(address: str, routes: Routes, jump: Connection | None) -> dict[str, Any]:
    """asyncssh's arguments for a connection to `address`."""
    user, host, port = address_parts(address)
    given = {"username": user, "port": port, "tunnel": jump.raw if jump is not None else None}
    named = {name: value for name, value in given.items() if value is not None}
    return {"host": routes.target(host), **named, **routes.options(host)}


async def _connect(address: str, routes: Routes, jump: Connection | None) -> Connection:
    options = _options(address, routes, jump)
    try:
        raw = await asyncio.wait_for(
            asyncssh.connect(connect_timeout=CONNECT_S, login_timeout=CONNECT_S, keepalive_interval=5, **options),
            2 * CONNECT_S,
        )
    except asyncssh.HostKeyNotVerifiable as error:
        raise LaunchError(
            f"the key of host {address} is not known", remedy=f"check it with `ssh {address}`, or use --accept-new"
        ) from error
    except asyncssh.PermissionDenied as error:
        raise LaunchError(
            f"host {address} does not accept your key: {error.reason}",
            remedy=f"add your public key to ~/.ssh/authorized_keys there; `ssh -v {address}` shows what was tried",
        ) from error
    except (asyncssh.Error, OSError, TimeoutError) as error:
        raise LaunchError(
            f"host {address} cannot be reached{_by(options)}: {_reason(error)}", remedy=_reach_remedy(options)
        ) from error
    return Connection(address, raw, jump=jump)


def _by(options: Mapping[str, Any]) -> str:
    return (
        " by Session Manager" if "proxy_command" in options else " through the head node" if "tunnel" in options else ""
    )


def _reach_remedy(options: Mapping[str, Any]) -> str:
    if "proxy_command" in options:
        return (
            "install AWS's command line with its Session Manager plugin; `"
            + " ".join(options["proxy_command"][:5])
            + "` must open a shell on it"
        )
    return "check that it is up, that its name and port are right, and that you are in its network"


async def _learn_key(address: str, way: Mapping[str, Any], *, accept_new: bool, ask: Ask, reason: Exception) -> None:
    """Add the key of a new host to the known hosts if the user accepts it; a changed key is an error.

    `way` are asyncssh's arguments for a connection to it.
    """
    asked = {name: value for name, value in way.items() if name in ("host", "port", "tunnel", "proxy_command")}
    folder = Path.home() / ".ssh"
    config, file = folder / "config", folder / "known_hosts"
    files = [str(config)] if config.exists() else []
    given = {name: value for name, value in way.items() if name in ("host", "port")}
    options = asyncssh.SSHClientConnectionOptions(config=files, **given)
    host, port = options.host, options.port  # aliases of ~/.ssh/config resolved
    if "host_key_alias" in way:
        host, port = way["host_key_alias"], 22  # known by this name alone, whatever the port
    if _is_known(file, host, port):
        raise LaunchError(
            f"the key of host {address} is not the one it had before: {reason}",
            remedy=f"if the host was recreated, `ssh-keygen -R {host}`; if not, this may be a man-in-the-middle attack",
        ) from reason
    try:
        key = await asyncssh.get_server_host_key(**asked)
    except (asyncssh.Error, OSError) as error:
        raise LaunchError(
            f"host {address} cannot be reached, perhaps because of its jump host: {_reason(error)}",
            remedy=f"log in once with `ssh {address}`, which asks about all keys on the way",
        ) from error
    if key is None:
        raise LaunchError(f"host {address} shows no key", remedy=f"see `ssh -v {address}`") from reason
    if not accept_new and not ask(
        f"Host {address} was never seen before. Its key is {key.get_fingerprint()}. Trust it?"
    ):
        raise LaunchError(
            f"the key of host {address} is not known",
            remedy=f"check it with `ssh {address}`, or use --accept-new to trust hosts never seen before",
        ) from reason
    entry = f"[{host}]:{port}" if port != 22 else host
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with file.open("a", encoding="utf-8") as known:
        known.write(f"{entry} {key.export_public_key().decode().strip()}\n")


def _is_known(file: Path, host: str, port: int) -> bool:
    if not file.exists():
        return False
    try:
        addresses = {str(row[4][0]) for row in socket.getaddrinfo(host, port)}
    except OSError:
        addresses = {""}
    return any(
        any(asyncssh.match_known_hosts(str(file), host, one, None if port == 22 else port)[:3]) for one in addresses
    )


def _reason(error: BaseException) -> str:
    if isinstance(error, TimeoutError):
        return "no answer in time"
    if isinstance(error, asyncssh.SFTPFailure) and error.reason == "Failure":
        return "the write failed, most likely because its disk is full"
    if isinstance(error, asyncssh.Error):
        return error.reason or type(error).__name__
    return str(getattr(error, "strerror", None) or error)
