"""The HTTP server of an app: one thread per connection, a limit on connections, time and size."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socket import AF_INET, AF_INET6, socket
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from maskfleet.errors import MaskfleetError
from maskfleet.log import logger
from maskfleet.serve.app import App, Request, RequestError, Response, error_response
from maskfleet.system.signals import stop_request

MAX_CONNECTIONS = 128
IDLE_S = 60.0  # a client that sends nothing for so long is disconnected
DISCARD_S = 60.0  # how long a body that is too large is read and dropped, so that the client gets our answer
FINISH_S = 20.0  # how long requests in progress may take after a signal; SageMaker kills after 30 s
CHUNK = 1 << 16
_BUSY = b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


class AppServer(ThreadingHTTPServer):
    """Serves `app` on one address; port 0 takes a free one, `server_port` says which."""

    daemon_threads = True
    request_queue_size = MAX_CONNECTIONS

    def __init__(self, app: App, host: str, port: int) -> None:
        self.app = app
        self.address_family = AF_INET6 if ":" in host else AF_INET
        self._in_progress, self._changed = 0, threading.Condition()
        self._free = threading.BoundedSemaphore(MAX_CONNECTIONS)
        try:
            super().__init__((host, port), _Connection)
        except OSError as error:
            raise MaskfleetError(
                f"cannot listen on {host}, port {port}: {error.strerror or error}",
                remedy="choose another port with --port, or stop the program that has it",
            ) from error

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a thread, unless there are too many of them."""
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            _refuse(request)
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer all requests of a connection."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    @contextmanager
    def answering(self) -> Iterator[None]:
        """A request is answered inside the block."""
        with self._changed:
            self._in_progress += 1
        try:
            yield
        finally:
            with self._changed:
                self._in_progress -= 1
                self._changed.notify_all()

    def finish(self, timeout_s: float) -> None:
        """Wait until the requests in progress are answered, but not for longer than `timeout_s`."""
        with self._changed:
            self._changed.wait_for(lambda: not self._in_progress, timeout_s)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A connection that broke is no fault of ours."""
        logger.debug("a connection from %s ended early", client_address[0], exc_info=True)


class _Connection(BaseHTTPRequestHandler):
    server: AppServer
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "maskfleet", ""
    timeout = IDLE_S

    def do_GET(self) -> None:
        self._answer()

    do_HEAD = do_POST = do_PUT = do_DELETE = do_PATCH = do_OPTIONS = do_GET  # noqa: N815 - the names that http.server calls

    def handle_expect_100(self) -> bool:
        """Ask for the body only if its size is acceptable."""
        try:
            self._length()
        except RequestError as error:
            self._send(error_response(error), close=True)
            return False
        return super().handle_expect_100()

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """What http.server refuses by itself, such as a line that is no request, in the form of our own errors."""
        self.request_version = self.protocol_version  # http.server answers such a line without a status
        what = f"this is no valid HTTP request: {(message or explain or 'refused')[:200]}"
        self._send(error_response(RequestError(code, what, remedy="send a request of HTTP/1.1")), close=True)

    def log_message(self, format: str, *args: Any) -> None:
        logger.debug(format, *args)

    def _answer(self) -> None:
        try:
            path, query = self._path_and_query()
            length = self._length()
        except RequestError as error:
            if error.status == 413:
                self._discard()
            self._send(error_response(error), close=True)
            return
        body = self.rfile.read(length)
        if len(body) < length:
            self.close_connection = True
            return  # the client is gone
        headers = {name.lower(): value for name, value in self.headers.items()}
        request = Request(self.command, path, query, headers, body)
        with self.server.answering():
            self._send(self.server.app.answer(request))

    def _path_and_query(self) -> tuple[str, dict[str, str]]:
        try:
            parts = urlsplit(self.path)
            return parts.path, dict(parse_qsl(parts.query))
        except ValueError as error:  # such as brackets that enclose no address
            raise RequestError(400, f"the path is malformed: {error}", remedy="send a path such as /ping") from error

    def _length(self) -> int:
        """The size of the body, checked."""
        if "Transfer-Encoding" in self.headers or (self.command == "POST" and "Content-Length" not in self.headers):
            raise RequestError(411, "the request has no Content-Length", remedy="send one; chunks are not supported")
        text, *others = set(self.headers.get_all("Content-Length") or ["0"])
        if others:
            raise RequestError(400, "the request has two Content-Lengths", remedy="send the size of the body once")
        if not re.fullmatch("[0-9]{1,18}", text):  # Python refuses to convert thousands of digits
            raise RequestError(400, "Content-Length is not a number", remedy="send the size of the body in bytes")
        if int(text) > self.server.app.max_bytes:
            raise RequestError(
                413,
                f"the body has {int(text):,} bytes; the limit is {self.server.app.max_bytes:,}",
                remedy="send a smaller image, or fewer images at a time",
            )
        return int(text)

    def _discard(self) -> None:
        """Read what the client still sends: with an unread body it would see a reset instead of our answer."""
        left, deadline = int(self.headers["Content-Length"]), time.monotonic() + DISCARD_S
        while left > 0 and time.monotonic() < deadline:
            read = len(self.rfile.read1(min(left, CHUNK)))
            if not read:
                break
            left -= read

    def _send(self, response: Response, *, close: bool = False) -> None:
        self.send_response(response.status)
        self.send_header("Content-Type", response.content_type)
        self.send_header("Content-Length", str(len(response.body)))
        self.send_header("X-Content-Type-Options", "nosniff")
        for name, value in response.headers.items():
            self.send_header(name, value)
        if close:
            self.send_header("Connection", "close")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(response.body)


def _refuse(connection: socket) -> None:
    try:
        connection.sendall(_BUSY)
    except OSError:
        logger.debug("a connection above the limit ended early")


def serve_until_stopped(server: AppServer, ready: Callable[[], None]) -> None:
    """Serve until SIGTERM or SIGINT; `ready` is called once requests are answered."""
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.1}, name="http", daemon=True)
    with server, stop_request("stopping when the requests in progress are answered") as request:
        thread.start()
        ready()
        while not request.number:
            time.sleep(0.1)
        server.shutdown()
        server.finish(FINISH_S)
    thread.join()
