"""As much of a Kubernetes API as a port-forward needs: pods, other objects, and the websocket to a pod's port."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from wsproto import ConnectionType, WSConnection
from wsproto.events import AcceptConnection, BytesMessage, CloseConnection, Ping, Request
from wsproto.utilities import LocalProtocolError

from ports import free_port


def pod(name: str, *, ready: bool = True, **status: Any) -> dict[str, Any]:
    conditions = [{"type": "Ready", "status": "True" if ready else "False"}]
    return {"metadata": {"name": name}, "status": {"conditions": conditions, **status}}


class PortForwardApi:
    """Serves on 127.0.0.1 in a thread; `pods` are what it lists, `targets` the port of this machine behind each."""

    def __init__(self) -> None:
        self.pods: list[dict[str, Any]] = []
        self.targets: dict[str, int] = {}
        self.objects: dict[str, dict[str, Any]] = {}
        self.asked: list[str] = []
        self.port = free_port()  # its own also while it is stopped
        self.refusal = 0  # HTTP's status for everything, if not 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    def __enter__(self) -> PortForwardApi:
        self._thread.start()
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self._do(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def start(self) -> None:
        """Begin to serve; again on the same port after `stop`."""
        self._do(self._listen())

    def stop(self) -> None:
        """As when an API server dies: nothing listens, and every connection ends."""
        self._do(self._cut())

    def write_kubeconfig(self, path: Path) -> Path:
        cluster = {"name": "c", "cluster": {"server": f"http://127.0.0.1:{self.port}"}}
        context = {"name": "x", "context": {"cluster": "c", "user": "u", "namespace": "kubeflow"}}
        user = {"name": "u", "user": {"token": "t"}}
        config = {"apiVersion": "v1", "kind": "Config", "clusters": [cluster], "contexts": [context], "users": [user]}
        path.write_text(json.dumps({**config, "current-context": "x"}))
        return path

    def _do(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(120)

    async def _listen(self) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", self.port)

    async def _cut(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
        for writer in list(self._open):
            writer.transport.abort()

    async def _end(self) -> None:
        others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        for writer in list(self._open):
            writer.transport.abort()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open.add(writer)  # here, since a task that is cancelled before it begins closes nothing
        task = self._loop.create_task(self._answer(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                path = head.split(b" ", 2)[1].decode()
                self.asked.append(path)
                if "/portforward" in path and not self.refusal:
                    await self._forward(head, path.split("/pods/")[1].split("/")[0], reader, writer)
                    return
                writer.write(self._plain(path))
                await writer.drain()
                if self.refusal:
                    return  # kr8s begins anew after a refusal, and forgets to close what it had
        except (asyncio.IncompleteReadError, ConnectionError):
            return
        finally:
            self._open.discard(writer)
            writer.close()

    def _plain(self, path: str) -> bytes:
        status, body = 404, {"kind": "Status", "message": f"{path} not found", "code": 404}
        if self.refusal:
            status, body = self.refusal, {"kind": "Status", "message": "no", "code": self.refusal}
        elif path.startswith("/version"):
            status, body = 200, {"major": "1", "minor": "35", "gitVersion": "v1.35.0"}
        elif path.split("?")[0] in self.objects:
            status, body = 200, self.objects[path.split("?")[0]]
        elif path.split("?")[0].endswith("/namespaces/kubeflow/pods"):
            status, body = 200, {"kind": "PodList", "apiVersion": "v1", "metadata": {}, "items": self.pods}
        data = json.dumps(body).encode()
        head = f"HTTP/1.1 {status} X\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n"
        head += "Connection: close\r\n\r\n" if self.refusal else "\r\n"
        return head.encode() + data

    async def _forward(
        self, head: bytes, name: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        socket = WSConnection(ConnectionType.SERVER)
        socket.receive_data(head)
        [request] = list(socket.events())
        assert isinstance(request, Request)
        if name not in self.targets:
            writer.write(b"HTTP/1.1 404 X\r\nContent-Length: 0\r\n\r\n")
            await writer.drain()
            return
        back, forth = await asyncio.open_connection("127.0.0.1", self.targets[name])
        writer.write(socket.send(AcceptConnection()))
        for channel in (b"\x00", b"\x01"):
            writer.write(socket.send(BytesMessage(channel + (8443).to_bytes(2, "little"))))
        copying = asyncio.create_task(self._copy(socket, back, writer))
        message = b""
        try:
            while data := await reader.read(65536):
                socket.receive_data(data)
                for event in socket.events():
                    if isinstance(event, BytesMessage):
                        message += event.data
                        if event.message_finished:
                            assert message[0] == 0, "only the data channel is written to"
                            forth.write(message[1:])
                            message = b""
                    elif isinstance(event, Ping):
                        writer.write(socket.send(event.response()))
                    elif isinstance(event, CloseConnection):
                        writer.write(socket.send(event.response()))
                        return
                await forth.drain()
        finally:
            copying.cancel()
            forth.close()

    async def _copy(self, socket: WSConnection, back: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await back.read(30000):
            writer.write(socket.send(BytesMessage(b"\x00" + data)))
            await writer.drain()
        try:
            writer.write(socket.send(CloseConnection(code=1000)))
        except LocalProtocolError:
            return  # the other side has closed already
        await writer.drain()
