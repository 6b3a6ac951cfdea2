"""One HTTP/1.1 connection, for requests and answers of S3: it does little, and so takes little processor time.

`http.client` parses headers as those of e-mail, which takes a third of the time that a small object takes.
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Mapping

_TIMEOUT_S = 60.0
_CONNECT_TIMEOUT_S = 10.0
_MAX_LINE_BYTES = 65_536
_MAX_HEAD_BYTES = 65_536
_RECEIVED_BYTES = 65_536  # at once, with the headers
_MAX_RECEIVED_BYTES = 1 << 20  # at once, of a long content
_JOINED_BYTES = 65_536  # a smaller body is sent together with the headers

RawAnswer = tuple[int, dict[str, str], bytes]  # status, headers with names in lower case, content


class HttpConnection:
    """A connection that is kept between requests; only one thread may use it. OSError if anything goes wrong."""

    def __init__(self, host: str, port: int, tls: ssl.SSLContext | None) -> None:
        self._socket: socket.socket = socket.create_connection((host, port), _CONNECT_TIMEOUT_S)
        try:
            self._socket.settimeout(_TIMEOUT_S)
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if tls is not None:
                self._socket = tls.wrap_socket(self._socket, server_hostname=host)
        except BaseException:
            self._socket.close()
            raise
        self._received = b""  # and not yet used
        self.is_open = True

    def close(self) -> None:
        """Close the connection."""
        self.is_open = False
        self._socket.close()

    def exchange(self, method: str, path: str, headers: Mapping[str, str], content: bytes) -> RawAnswer:
        """Send a request and read all of its answer; the connection is closed if the server says so, or on errors."""
        try:
            self._send(method, path, headers, content)
            status, found = self._head()
            while status == 100:
                status, found = self._head()
            body = self._body(found)
        except BaseException:
            self.close()
            raise
        if found.get("connection", "").lower() == "close":
            self.close()
        return status, found, body

    def _send(self, method: str, path: str, headers: Mapping[str, str], content: bytes) -> None:
        lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
        if content or method == "PUT":
            lines.append(f"content-length: {len(content)}")
        if any("\r" in line or "\n" in line for line in lines):
            raise ConnectionError("a header contains a line break")
        head = "\r\n".join([*lines, "", ""]).encode("latin-1")
        if len(content) <= _JOINED_BYTES:
            self._socket.sendall(head + content)
        else:
            self._socket.sendall(head)
            self._socket.sendall(content)

    def _head(self) -> tuple[int, dict[str, str]]:
        """Status and headers, parsed at once: a line at a time takes twice as long."""
        while (end := self._received.find(b"\r\n\r\n")) < 0:
            if len(self._received) > _MAX_HEAD_BYTES:
                raise ConnectionError("the answer has too many headers")
            self._receive()
        lines = self._received[:end].decode("latin-1").split("\r\n")
        self._received = self._received[end + 4 :]
        first = lines[0].split(None, 2)
        if len(first) < 2 or not first[0].startswith("HTTP/1.") or not first[1].isdecimal():
            raise ConnectionError("the answer is not HTTP")
        found: dict[str, str] = {}
        for line in lines[1:]:
            name, _, value = line.partition(":")
            found[name.lower()] = value.strip()
        if first[0] == "HTTP/1.0":
            found.setdefault("connection", "close")
        return int(first[1]), found

    def _line(self) -> bytes:
        while (end := self._received.find(b"\n")) < 0:
            if len(self._received) > _MAX_LINE_BYTES:
                raise ConnectionError("a line of the answer is too long")
            self._receive()
        line, self._received = self._received[:end], self._received[end + 1 :]
        return line.rstrip(b"\r")

    def _body(self, headers: dict[str, str]) -> bytes:
        if headers.get("transfer-encoding", "").lower() == "chunked":
            return self._chunked()
        length = headers.get("content-length", "")
        if not length.isdecimal():
            headers["connection"] = "close"
            return self._to_the_end()
        return self._exactly(int(length))

    def _chunked(self) -> bytes:
        parts = []
        while size := int(self._line().partition(b";")[0] or b"x", 16):
            parts.append(self._exactly(size))
            self._line()
        while self._line():  # headers after the content
            pass
        return b"".join(parts)

    def _exactly(self, size: int) -> bytes:
        start, self._received = self._received[:size], self._received[size:]
        parts, missing = [start], size - len(start)
        while missing:
            part = self._socket.recv(min(missing, _MAX_RECEIVED_BYTES))
            if not part:
                raise ConnectionError(f"the answer was cut after {size - missing:,} of {size:,} bytes")
            parts.append(part)
            missing -= len(part)
        return b"".join(parts)

    def _to_the_end(self) -> bytes:
        parts, self._received = [self._received], b""
        while part := self._socket.recv(_MAX_RECEIVED_BYTES):
            parts.append(part)
        return b"".join(parts)

    def _receive(self) -> None:
        part = self._socket.recv(_RECEIVED_BYTES)
        if not part:
            raise ConnectionError("the answer was cut" if self._received else "the server closed the connection")
        self._received += part
