"""The websockets of the fake API: exec with real processes, and port-forward to ports of this machine."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import threading
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler
from typing import TYPE_CHECKING

from wsproto import ConnectionType, WSConnection
from wsproto.events import AcceptConnection, BytesMessage, CloseConnection, Event, Ping, Request
from wsproto.utilities import LocalProtocolError, ProtocolError

from maskfleet.system.kube.exec import PROTOCOLS, STDERR, STDOUT
from maskfleet.system.kube.exec import STATUS as STATUS_CHANNEL
from maskfleet.system.kube.port_forward import DATA, ERROR

if TYPE_CHECKING:
    from maskfleet.system.kube.fake import FakeKube

CHUNK = 30_000


class ServerWebSocket:
    """The server's side of a websocket, on the connection of the request that asks for it."""

    def __init__(self, handler: BaseHTTPRequestHandler) -> None:
        handler.close_connection = True  # nothing follows a websocket
        self._socket = handler.connection
        self._lock = threading.Lock()
        self._protocol = WSConnection(ConnectionType.SERVER)
        headers = "".join(f"{name}: {value}\r\n" for name, value in handler.headers.items())
        self._protocol.receive_data(f"GET {handler.path} HTTP/1.1\r\n{headers}\r\n".encode())
        [request] = self._protocol.events()
        assert isinstance(request, Request)
        self.subprotocols = request.subprotocols

    def accept(self, subprotocol: str | None = None) -> None:
        self._write(AcceptConnection(subprotocol=subprotocol))

    def send(self, channel: int, data: bytes) -> None:
        self._write(BytesMessage(bytes([channel]) + data))

    def close(self) -> None:
        self._write(CloseConnection(code=1000))

    def cut(self) -> None:
        """Break the connection without a word."""
        self._socket.shutdown(socket.SHUT_RDWR)

    def input(self) -> Iterator[bytes]:
        """What the client writes to channel 0, until it closes the websocket or is gone."""
        message = b""
        while data := self._socket.recv(65536):
            with self._lock:
                self._protocol.receive_data(data)
                events = list(self._protocol.events())
            for event in events:
                if isinstance(event, BytesMessage):
                    message += event.data
                    if event.message_finished:
                        assert message[0] == 0, "clients write to channel 0 only"
                        yield message[1:]
                        message = b""
                elif isinstance(event, Ping):
                    self._write(event.response())
                elif isinstance(event, CloseConnection):
                    with contextlib.suppress(LocalProtocolError):  # this side has closed it already
                        self._write(event.response())
                    return

    def _write(self, event: Event) -> None:
        with self._lock:
            self._socket.sendall(self._protocol.send(event))


def serve_exec(api: FakeKube, websocket: ServerWebSocket, argv: Sequence[str]) -> None:
    """Run `argv` here, with `api.volume` in place of /fsx, until it exits or the client disconnects."""
    assert websocket.subprotocols == list(PROTOCOLS)
    websocket.accept(PROTOCOLS[0])
    pipe = subprocess.PIPE
    with subprocess.Popen(list(argv), stdin=pipe, stdout=pipe, stderr=pipe) as process:
        threading.Thread(target=_copy_input, args=(api, websocket, process), daemon=True).start()
        try:
            _copy_output(api, websocket, process)
        except (OSError, LocalProtocolError):  # the client disconnected
            process.kill()


def serve_port_forward(websocket: ServerWebSocket, port: int, target: int) -> None:
    """Copy between the client and `target`, a port of this machine, until one of them closes."""
    with socket.create_connection(("127.0.0.1", target)) as backend:
        websocket.accept()
        for channel in (DATA, ERROR):
            websocket.send(channel, port.to_bytes(2, "little"))
        answers = threading.Thread(target=_copy_answers, args=(websocket, backend), daemon=True)
        answers.start()
        with contextlib.suppress(OSError, ProtocolError):  # the client disconnected
            for data in websocket.input():
                backend.sendall(data)
        with contextlib.suppress(OSError):  # the backend was faster
            backend.shutdown(socket.SHUT_RDWR)
        answers.join()


def _copy_answers(websocket: ServerWebSocket, backend: socket.socket) -> None:
    with contextlib.suppress(OSError, LocalProtocolError):  # the client disconnected
        while data := backend.recv(CHUNK):
            websocket.send(DATA, data)
        websocket.close()


def _copy_input(api: FakeKube, websocket: ServerWebSocket, process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None
    root = f'"root": {json.dumps(str(api.volume))}'.encode()
    with contextlib.suppress(OSError, ValueError, ProtocolError):  # the client disconnected, or the process exited
        for data in websocket.input():
            process.stdin.write(data.replace(b'"root": "/fsx"', root))
            process.stdin.flush()
    process.kill()


def _copy_output(api: FakeKube, websocket: ServerWebSocket, process: subprocess.Popen[bytes]) -> None:
    assert process.stdout is not None
    assert process.stderr is not None
    sent = 0
    while data := os.read(process.stdout.fileno(), CHUNK):
        websocket.send(STDOUT, data)
        sent += len(data)
        if api.cut_exec_after is not None and sent > api.cut_exec_after:
            api.cut_exec_after = None
            websocket.cut()
            raise BrokenPipeError
    code, errors = process.wait(), process.stderr.read()
    if errors:
        websocket.send(STDERR, errors)
    status: dict[str, object] = {"status": "Success"}
    if code != 0:
        causes = [{"reason": "ExitCode", "message": str(code)}]
        status = {"status": "Failure", "message": "command terminated", "details": {"causes": causes}}
    websocket.send(STATUS_CHANNEL, json.dumps(status).encode())
    websocket.close()
