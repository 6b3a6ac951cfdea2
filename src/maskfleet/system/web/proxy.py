"""A reverse proxy with TLS and a password in front of one server on loopback.

- A browser asks for the password with HTTP's Basic scheme; the user name does not matter. Programs may send it with
  the Bearer scheme.
- After five wrong passwords, a client address must wait, twice as long after each further one; until then no password
  of it is even compared.
- Pages of other sites cannot send requests with the password that the browser remembers.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import http.client
import ipaddress
import re
import socket
import ssl
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from maskfleet.system.network import LOOPBACK, listening_socket
from maskfleet.system.web.same_site import is_from_another_site, path_of

FREE_ATTEMPTS = 5
LONGEST_WAIT_S = 300.0
MAX_ADDRESSES = 10_000  # that are remembered for wrong passwords
MAX_CONNECTIONS = 128
MAX_BODY = 16 << 20  # bytes of a request, unless the server behind takes more
MAX_AUTHORIZATION = 4096  # characters of the header
HANDSHAKE_S, IDLE_S, UPSTREAM_S = 10.0, 60.0, 600.0
CHUNK = 1 << 16
_DIGITS = re.compile("[0-9]{1,18}")  # Python refuses to convert thousands of them
_HOP_BY_HOP = {"connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailer", "upgrade"}
_HOP_BY_HOP |= {"transfer-encoding", "proxy-connection"}
_OURS = {"authorization", "host", "origin", "content-length", "expect"}  # decided or checked here
_ADDED = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "SAMEORIGIN",
    "Referrer-Policy": "same-origin",
    "Cache-Control": "private",
}


@dataclass(slots=True)
class PasswordGate:
    """Compares passwords, and slows down clients that guess."""

    password: str = field(repr=False)
    clock: Callable[[], float] = time.monotonic
    _failures: OrderedDict[str, tuple[int, float]] = field(default_factory=OrderedDict)  # count, when to try again
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def answer(self, client: str, authorization: str | None) -> tuple[HTTPStatus, float]:
        """OK, UNAUTHORIZED or TOO_MANY_REQUESTS, and how many seconds `client` must wait before another attempt."""
        if authorization is None:
            return HTTPStatus.UNAUTHORIZED, 0.0
        who = _network(client)
        with self._lock:
            count, free_at = self._failures.get(who, (0, 0.0))
            left_s = free_at - self.clock()
            if left_s > 0:
                return HTTPStatus.TOO_MANY_REQUESTS, left_s
            if self._is_right(authorization):
                self._failures.pop(who, None)
                return HTTPStatus.OK, 0.0
            wait_s = min(LONGEST_WAIT_S, 2.0 ** (count + 1 - FREE_ATTEMPTS)) if count + 1 >= FREE_ATTEMPTS else 0.0
            self._failures[who] = count + 1, self.clock() + wait_s
            self._failures.move_to_end(who)
            while len(self._failures) > MAX_ADDRESSES:
                self._failures.popitem(last=False)
            return HTTPStatus.UNAUTHORIZED, wait_s

    def _is_right(self, authorization: str) -> bool:
        scheme, _, value = authorization.partition(" ")
        if len(value) > MAX_AUTHORIZATION:
            return False
        try:
            match scheme.lower():
                case "basic":
                    given = base64.b64decode(value, validate=True).partition(b":")[2]
                case "bearer":
                    given = value.strip().encode("latin-1")  # as http.server decodes headers
                case _:
                    return False
        except ValueError:
            return False
        # Hashes, because the time to compare texts depends on their lengths.
        return hmac.compare_digest(hashlib.sha256(given).digest(), hashlib.sha256(self.password.encode()).digest())


def _network(client: str) -> str:
    """The client's address; of IPv6 its /64, in which one machine has any number of addresses."""
    address = ipaddress.ip_address(client.partition("%")[0])
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    return str(address.ipv4_mapped or ipaddress.ip_network((address, 64), strict=False))


class PasswordProxy(ThreadingHTTPServer):
    """Serves `upstream_port` of loopback on one address of this machine, over TLS and behind a password."""

    daemon_threads = True
    block_on_close = False

    def __init__(
        self,
        address: tuple[str, int],
        *,
        upstream_port: int,
        gate: PasswordGate,
        tls: ssl.SSLContext,
        max_body: int = MAX_BODY,
    ) -> None:
        self.gate, self.tls, self.upstream_port, self.max_body = gate, tls, upstream_port, max_body
        self._connections = threading.BoundedSemaphore(MAX_CONNECTIONS)
        super().__init__(address, _Handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listening_socket(*address)
        self.server_address = self.socket.getsockname()

    @property
    def port(self) -> int:
        return int(self.socket.getsockname()[1])

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._connections.acquire(blocking=False):
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Handshake and requests of one connection, in its own thread: a client that stalls stops no other."""
        try:
            # What a broken client does is its own problem: it is disconnected, and nothing is logged.
            with suppress(OSError, http.client.HTTPException):  # ssl.SSLError and timeouts are OSErrors
                request.settimeout(HANDSHAKE_S)
                with self.tls.wrap_socket(request, server_side=True) as secure:
                    secure.settimeout(IDLE_S)
                    self.finish_request(secure, client_address)
        finally:
            self._connections.release()
            self.shutdown_request(request)


class _Handler(BaseHTTPRequestHandler):
    """One connection of a browser."""

    protocol_version = "HTTP/1.1"
    server_version, sys_version = "maskfleet", ""
    server: PasswordProxy
    _unread = 0  # bytes of the body that are still to come

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: addresses and queries of requests are nobody's business."""

    def _answer(self) -> None:
        length = self.headers.get("Content-Length", "0")
        self._unread = int(length) if _DIGITS.fullmatch(length) else 0
        status, wait_s = self.server.gate.answer(self.client_address[0], self.headers.get("Authorization"))
        if status is HTTPStatus.TOO_MANY_REQUESTS:
            text = f"too many wrong passwords: try again in {wait_s:.0f} s"
            self._refuse(status, text, {"Retry-After": str(int(wait_s) + 1)})
        elif status is not HTTPStatus.OK:
            self._refuse(status, "the password is needed", {"WWW-Authenticate": 'Basic realm="maskfleet"'})
        elif is_from_another_site(self.command, self.headers.get):
            self._refuse(HTTPStatus.FORBIDDEN, "requests of other sites are refused")
        elif (path := path_of(self.path)) is None or not path.isascii() or not path.isprintable():
            self._refuse(HTTPStatus.BAD_REQUEST, "the request must name a path of printable ASCII characters")
        elif (body := self._body()) is not None:
            self._forward(path, body)

    def _body(self) -> bytes | None:
        """The body of the request; None if it was refused."""
        lengths = set(self.headers.get_all("Content-Length") or ["0"])
        length = lengths.pop()
        if "Transfer-Encoding" in self.headers or lengths or not _DIGITS.fullmatch(length):
            self._refuse(HTTPStatus.LENGTH_REQUIRED, "the request must say its length once")
            return None
        if int(length) > self.server.max_body:
            self._refuse(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"a request has at most {self.server.max_body} bytes")
            return None
        self._unread = 0
        return self.rfile.read(int(length))

    def _discard(self) -> None:
        """Read what the client still sends: with an unread body it would see a reset instead of our answer."""
        deadline = time.monotonic() + IDLE_S
        while self._unread > 0 and time.monotonic() < deadline:
            read = len(self.rfile.read1(min(self._unread, CHUNK)))
            if not read:
                break
            self._unread -= read

    def _forward(self, path: str, body: bytes) -> None:
        upstream = http.client.HTTPConnection(LOOPBACK, self.server.upstream_port, timeout=UPSTREAM_S)
        try:
            try:
                upstream.putrequest(self.command, path, skip_accept_encoding=True)
                for name, value in self._passed_on():
                    upstream.putheader(name, value)
                upstream.putheader("Content-Length", str(len(body)))
                upstream.endheaders(body)
                answer = upstream.getresponse()
            except (OSError, http.client.HTTPException, ValueError):
                self._refuse(HTTPStatus.BAD_GATEWAY, "the server behind this one does not answer")
                return
            self._return(answer)
        finally:
            upstream.close()

    def _passed_on(self) -> list[tuple[str, str]]:
        dropped = _HOP_BY_HOP | _OURS
        dropped |= {name.strip().lower() for name in self.headers.get("Connection", "").split(",")}
        return [(name, value) for name, value in self.headers.items() if name.lower() not in dropped]

    def _return(self, answer: http.client.HTTPResponse) -> None:
        self.send_response_only(answer.status)
        has_length = answer.getheader("Content-Length") is not None
        for name, value in answer.getheaders():
            if name.lower() not in _HOP_BY_HOP and name.title() not in _ADDED:
                self.send_header(name, value)
        for name, value in _ADDED.items():
            self.send_header(name, value)
        has_no_body = self.command == "HEAD" or answer.status in (HTTPStatus.NO_CONTENT, HTTPStatus.NOT_MODIFIED)
        if not has_length and not has_no_body:
            self.close_connection = True  # its end is the end of the body
            self.send_header("Connection", "close")
        self.end_headers()
        if not has_no_body:
            while chunk := answer.read1(CHUNK):
                self.wfile.write(chunk)

    def _refuse(self, status: HTTPStatus, text: str, headers: dict[str, str] | None = None) -> None:
        content = f"{text}\n".encode()
        self.close_connection = True  # a body that was not read must not be taken for the next request
        self.send_response_only(status)
        for name, value in {**_ADDED, **(headers or {}), "Content-Type": "text/plain; charset=utf-8"}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Connection", "close")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)
        self._discard()


def is_loopback(host: str) -> bool:
    """Whether every address of `host` is reachable from this machine alone."""
    found = {entry[4][0] for entry in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    return all(ipaddress.ip_address(str(address).partition("%")[0]).is_loopback for address in found)
