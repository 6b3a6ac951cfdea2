"""Forward a port of 127.0.0.1 to whichever pod is ready; pods and API servers may restart meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from maskfleet.errors import LaunchError
from maskfleet.system.kube.client import ApiError, Json, Kube

POLL_S = 2.0
POD_WAIT_S = 60.0  # a connection waits this long for a pod
CHUNK = 32 * 1024
DATA, ERROR = 0, 1  # channels of the one forwarded port
Say = Callable[[str], None]
NEVER_STARTS = ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "CreateContainerConfigError")
_NORMAL_ENDS = TimeoutError | ConnectionError


@dataclass(frozen=True, slots=True)
class PodChoice:
    """The pod to use, or why there is none."""

    pod: str | None
    message: str


@contextlib.contextmanager
def bound_socket(port: int) -> Iterator[socket.socket]:
    """A socket bound to 127.0.0.1:`port`, so that a port in use is found before anything is installed."""
    with socket.socket() as bound:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            bound.bind(("127.0.0.1", port))
        except OSError as error:
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                raise
            raise LaunchError(
                f"port {port} of this machine cannot be used: {error.strerror}", remedy="choose another with --port"
            ) from error
        yield bound


class PortForward:
    """Forwards connections to one port of the ready pod among those that `selector` matches."""

    def __init__(self, kube: Kube, *, selector: str, port: int, say: Say, on_ready: Callable[[], None]) -> None:
        self._kube, self._selector, self._port = kube, selector, port
        self._say, self._on_ready = say, on_ready
        self._choice = PodChoice(None, "")
        self._ready = asyncio.Event()
        self._check_now = asyncio.Event()
        self._connections: set[asyncio.Task[None]] = set()

    async def serve(self, listener: socket.socket) -> None:
        """Serve until cancelled, or until the API refuses in a way that retrying does not fix."""
        server = await asyncio.start_server(self._accept, sock=listener)
        try:
            await self._watch()
        finally:
            server.close()
            for task in self._connections:
                task.cancel()
            await asyncio.gather(*self._connections, return_exceptions=True)

    async def _watch(self) -> None:
        announced = False
        while True:
            choice = await self._choose()
            if choice != self._choice:
                self._say(choice.message)
            self._choice = choice
            if choice.pod is None:
                self._ready.clear()
            else:
                self._ready.set()
                if not announced:
                    announced = True
                    self._on_ready()
            self._check_now.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._check_now.wait(), POLL_S)

    async def _choose(self) -> PodChoice:
        try:
            found = await self._kube.ask(
                "GET", self._kube.of_namespace("pods"), params={"labelSelector": self._selector}
            )
        except ApiError as error:
            if error.status in (400, 403, 404):
                raise
            return PodChoice(None, f"{error.what}; trying again")
        return choose_pod(found.get("items", []))

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._forward(reader, writer))
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        import httpx
        import httpx_ws

        try:
            async with asyncio.timeout(POD_WAIT_S):
                await self._ready.wait()
            pod = self._choice.pod
            api = await self._kube.api()
            url = f"pods/{pod}/portforward"
            async with api.open_websocket(
                version="v1", url=url, namespace=self._kube.namespace, params={"ports": str(self._port)}
            ) as channel:
                await _copy_both_ways(channel, reader, writer)
        except* (TimeoutError, httpx.HTTPError, httpx_ws.HTTPXWSException, OSError) as group:
            # The browser retries by itself; it only needs a fresh look at the pods.
            self._check_now.set()
            for error in _leaves(group):
                if not isinstance(error, _NORMAL_ENDS | httpx_ws.WebSocketDisconnect | httpx_ws.WebSocketNetworkError):
                    self._say(f"a connection to {self._choice.pod or 'the pod'} failed: {_first_line(error)}")
        finally:
            writer.close()


async def _copy_both_ways(channel: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Copy in both directions until one side ends."""
    copies = [asyncio.create_task(_send(channel, reader)), asyncio.create_task(_receive(channel, writer))]
    try:
        done, _ = await asyncio.wait(copies, return_when=asyncio.FIRST_COMPLETED)
        for copy in done:
            copy.result()
    finally:
        for copy in copies:
            copy.cancel()
        await asyncio.gather(*copies, return_exceptions=True)


async def _send(channel: Any, reader: asyncio.StreamReader) -> None:
    while data := await reader.read(CHUNK):
        await channel.send_bytes(bytes([DATA]) + data)


async def _receive(channel: Any, writer: asyncio.StreamWriter) -> None:
    started: set[int] = set()
    while True:
        message: bytes = await channel.receive_bytes()
        kind, data = message[0], message[1:]
        if kind not in started:
            started.add(kind)  # the first message of a channel is the number of its port
        elif kind == ERROR:
            raise ConnectionAbortedError(data.decode(errors="replace"))
        else:
            writer.write(data)
            await writer.drain()


def choose_pod(pods: list[Json]) -> PodChoice:
    """The pod to use among `pods`, or what it is waiting for."""
    alive = [pod for pod in pods if "deletionTimestamp" not in pod["metadata"]]
    for pod in alive:
        conditions = {item["type"]: item for item in pod.get("status", {}).get("conditions", [])}
        if conditions.get("Ready", {}).get("status") == "True":
            name = pod["metadata"]["name"]
            return PodChoice(name, f"{name} is ready")
    if not alive:
        return PodChoice(None, "there is no pod; waiting for one")
    return PodChoice(None, _why_not_ready(alive[-1]))


def _why_not_ready(pod: Json) -> str:
    name, status = pod["metadata"]["name"], pod.get("status", {})
    for item in status.get("conditions", []):
        if item["type"] == "PodScheduled" and item["status"] == "False":
            return f"{name} is waiting for a node: {item.get('message', item.get('reason', ''))}"
    for item in [*status.get("initContainerStatuses", []), *status.get("containerStatuses", [])]:
        state = item.get("state", {})
        waiting = state.get("waiting", {})
        ended = state.get("terminated") or item.get("lastState", {}).get("terminated")
        if waiting.get("reason") in NEVER_STARTS:
            why = f"{waiting['reason']}: {waiting.get('message', '')}".rstrip(": ")
            return f"{name}: {item['name']} cannot start: {why}"
        if ended and ended.get("exitCode"):
            return (
                f"{name}: {item['name']} exited with {ended['exitCode']} ({ended.get('reason', '')}); "
                f"see `kubectl logs {name} -c {item['name']} --previous`"
            )
    return f"{name} is starting"


def _leaves(group: BaseExceptionGroup[Any]) -> Iterator[BaseException]:
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _leaves(error)
        else:
            yield error


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
