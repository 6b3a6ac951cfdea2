"""A real moto S3 server, and a proxy before it that counts requests and breaks those a test wants broken."""

from __future__ import annotations

import http.client
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit


@dataclass(frozen=True)
class Answer:
    """An answer of S3's own kind in place of the real one."""

    status: int
    code: str


@dataclass(frozen=True)
class Cut:
    """The real answer, but the connection breaks after so many bytes of it."""

    after_bytes: int


@dataclass(frozen=True)
class Spoil:
    """The real answer with its first byte changed."""


@dataclass(frozen=True)
class Page:
    """The page of a proxy, with status 200, in place of an answer of S3."""


@dataclass(frozen=True)
class Keep:
    """Instead of deleting objects, S3's answer to those who may not: a success that lists an error for each."""


@dataclass(frozen=True)
class Request:
    """What the proxy saw."""

    method: str
    path: str  # decoded, with the bucket, without the query
    query: str
    range: str

    @property
    def is_get(self) -> bool:
        return self.method == "GET" and "list-type" not in self.query


Fault = Answer | Cut | Keep | Page | Spoil


@dataclass
class FlakyS3:
    """The proxy: `fault` says what to do to a request, None to leave it alone."""

    url: str
    behind: str
    requests: list[Request] = field(default_factory=list)
    fault: Callable[[Request], Fault | None] = lambda request: None

    def gets(self) -> list[str]:
        return [request.path for request in self.requests if request.is_get]

    def puts(self) -> list[str]:
        return [request.path for request in self.requests if request.method == "PUT"]


@contextmanager
def flaky_s3(behind: str) -> Iterator[FlakyS3]:
    """A proxy on loopback before the S3 at `behind`."""
    flaky = FlakyS3("", behind)

    class Handler(_Handler):
        s3 = flaky

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    flaky.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield flaky
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    s3: FlakyS3
    protocol_version = "HTTP/1.1"

    def forward(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", "0")))
        parts = urlsplit(self.path)
        request = Request(self.command, unquote(parts.path), parts.query, self.headers.get("Range", ""))
        self.s3.requests.append(request)
        fault = self.s3.fault(request)
        if isinstance(fault, Answer):
            text = f"<Error><Code>{fault.code}</Code><Message>{fault.code}</Message></Error>".encode()
            self.reply(fault.status, [("Content-Type", "application/xml")], text)
            return
        if isinstance(fault, Page):
            self.reply(200, [("Content-Type", "text/html")], b"<!doctype html><p>Log in to <b>our network</b>")
            return
        if isinstance(fault, Keep):
            error = "<Error><Key>{}</Key><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"
            errors = "".join(map(error.format, re.findall("<Key>([^<]*)</Key>", body.decode())))
            self.reply(200, [("Content-Type", "application/xml")], f"<DeleteResult>{errors}</DeleteResult>".encode())
            return
        with closing(http.client.HTTPConnection(urlsplit(self.s3.behind).netloc)) as inner:
            inner.request(self.command, self.path, body, dict(self.headers.items()))
            answer = inner.getresponse()
            content = answer.read()
        if isinstance(fault, Spoil):
            content = bytes([content[0] ^ 1]) + content[1:]
        self.reply(answer.status, answer.getheaders(), content, fault)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = forward  # noqa: N815 - the names that http.server looks for

    def reply(self, status: int, headers: list[tuple[str, str]], content: bytes, fault: Fault | None = None) -> None:
        self.send_response_only(status)
        for name, value in headers:
            if name.lower() not in ("content-length", "connection", "transfer-encoding"):
                self.send_header(name, value)
        length = len(content)
        if self.command == "HEAD":
            length = int({name.lower(): value for name, value in headers}.get("content-length", "0"))
        self.send_header("Content-Length", str(length))
        self.end_headers()
        if isinstance(fault, Cut):
            content = content[: fault.after_bytes]
            self.close_connection = True
        try:
            self.wfile.write(content)
        except ConnectionError:  # the client was killed, or does not want the rest
            self.close_connection = True

    def log_message(self, format: str, *args: object) -> None:
        """Requests are kept, not printed."""
