"""127.0.0.1 forwarded to a port of whichever pod is ready; pods and API servers may come and go meanwhile."""

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
PATIENCE_S = 60.0  # a connection waits so long for a pod
CHUNK = 32 * 1024
DATA, ERROR = 0, 1  # channels of the one port that is asked for
Say = Callable[[str], None]
_USUAL_ENDS = TimeoutError | ConnectionError


@dataclass(frozen=True, slots=True)
class Seen:
    """What is known of the pods at a moment: the one to use, or why there is none."""

    pod: str | None
    words: str


@contextlib.contextmanager
def bound_socket(port: int) -> Iterator[socket.socket]:
    """A socket on 127.0.0.1:`port`, taken before anything is installed."""
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            taken.bind(("127.0.0.1", port))
        except OSError as error:
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                raise
            raise LaunchError(
                f"port {port} of this machine cannot be used: {error.strerror}", remedy="choose another with --port"
            ) from error
        yield taken


class Forward:
    """Carries connections to one port of the ready pod among those that `selector` chooses."""

    def __init__(self, kube: Kube, *, selector: str, port: int, say: Say, on_ready: Callable[[], None]) -> None:
        self._kube, self._selector, self._port = kube, selector, port
        self._say, self._on_ready = say, on_ready
        self._seen = Seen(None, "")
        self._ready = asyncio.Event()
        self._look = asyncio.Event()
        self._carrying: set[asyncio.Task[None]] = set()

    async def serve(self, listener: socket.socket) -> None:
        """Until cancelled, or until the API refuses what no patience mends."""
        server = await asyncio.start_server(self._accept, sock=listener)
        try:
            await self._watch()
        finally:
            server.close()
            for task in self._carrying:
                task.cancel()
            await asyncio.gather(*self._carrying, return_exceptions=True)

    async def _watch(self) -> None:
        announced = False
        while True:
            seen = await self._looked()
            if seen != self._seen:
                self._say(seen.words)
            self._seen = seen
            if seen.pod is None:
                self._ready.clear()
            else:
                self._ready.set()
                if not announced:
                    announced = True
                    self._on_ready()
            self._look.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._look.wait(), POLL_S)

    async def _looked(self) -> Seen:
        try:
            found = await self._kube.ask(
                "GET", self._kube.of_namespace("pods"), params={"labelSelector": self._selector}
            )
        except ApiError as error:
            if error.status in (400, 403, 404):
                raise
            return Seen(None, f"{error.what}; trying again")
        return seen_of(found.get("items", []))

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._carry(reader, writer))
        self._carrying.add(task)
        task.add_done_callback(self._carrying.discard)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        import httpx
        import httpx_ws

        try:
            async with asyncio.timeout(PATIENCE_S):
                await self._ready.wait()
            pod = self._seen.pod
            api = await self._kube.api()
            url = f"pods/{pod}/portforward"
            async with api.open_websocket(
                version="v1", url=url, namespace=self._kube.namespace, params={"ports": str(self._port)}
            ) as channel:
                await _pump(channel, reader, writer)
        except* (TimeoutError, httpx.HTTPError, httpx_ws.HTTPXWSException, OSError) as group:
            # The browser tries again by itself; what it needs is that the pods are looked at anew.
            self._look.set()
            for error in _leaves(group):
                if not isinstance(error, _USUAL_ENDS | httpx_ws.WebSocketDisconnect | httpx_ws.WebSocketNetworkError):
                    self._say(f"a connection to {self._seen.pod or 'the pod'} failed: {_first_line(error)}")
        finally:
            writer.close()


async def _pump(channel: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Both ways, until one side has no more to say."""
    ways = [asyncio.create_task(_send(channel, reader)), asyncio.create_task(_receive(channel, writer))]
    try:
        done, _ = await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        for way in done:
            way.result()
    finally:
        for way in ways:
            way.cancel()
        await asyncio.gather(*ways, return_exceptions=True)


async def _send(channel: Any, reader: asyncio.StreamReader) -> None:
    while data := await reader.read(CHUNK):
        await channel.send_bytes(bytes([DATA]) + data)


async def _receive(channel: Any, writer: asyncio.StreamWriter) -> None:
    begun: set[int] = set()
    while True:
        message: bytes = await channel.receive_bytes()
        kind, data = message[0], message[1:]
        if kind not in begun:
            begun.add(kind)  # each channel begins with the number of its port
        elif kind == ERROR:
            raise ConnectionAbortedError(data.decode(errors="replace"))
        else:
            writer.write(data)
            await writer.drain()


def seen_of(pods: list[Json]) -> Seen:
    """The pod to use among `pods`, or in plain words what it waits for."""
    alive = [pod for pod in pods if "deletionTimestamp" not in pod["metadata"]]
    for pod in alive:
        conditions = {item["type"]: item for item in pod.get("status", {}).get("conditions", [])}
        if conditions.get("Ready", {}).get("status") == "True":
            name = pod["metadata"]["name"]
            return Seen(name, f"{name} is ready")
    if not alive:
        return Seen(None, "there is no pod; waiting for one")
    return Seen(None, _why_not_ready(alive[-1]))


def _why_not_ready(pod: Json) -> str:
    name, status = pod["metadata"]["name"], pod.get("status", {})
    for item in status.get("conditions", []):
        if item["type"] == "PodScheduled" and item["status"] == "False":
            return f"{name} waits for a node: {item.get('message', item.get('reason', ''))}"
    for item in [*status.get("initContainerStatuses", []), *status.get("containerStatuses", [])]:
        state = item.get("state", {})
        waiting, ended = (
            state.get("waiting", {}),
            state.get("terminated") or item.get("lastState", {}).get("terminated"),
        )
        if waiting.get("reason") in (
            "ErrImagePull",
            "ImagePullBackOff",
            "InvalidImageName",
            "CreateContainerConfigError",
        ):
            return f"{name}: {item['name']} cannot start: {waiting['reason']}: {waiting.get('message', '')}".rstrip(
                ": "
            )
        if ended and ended.get("exitCode"):
            return (
                f"{name}: {item['name']} ended with {ended['exitCode']} ({ended.get('reason', '')}); "
                f"`kubectl logs {name} -c {item['name']} --previous` says why"
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
