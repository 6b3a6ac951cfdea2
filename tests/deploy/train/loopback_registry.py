"""A registry on the loopback interface: takes what docker, podman and buildah push, from users with a password."""

from __future__ import annotations

import base64
import hashlib
import itertools
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit


@dataclass
class LoopbackRegistry:
    """What was pushed: content by its digest, and manifests by repository and tag."""

    login: str  # user:password
    host: str = ""
    blobs: dict[str, bytes] = field(default_factory=dict)
    manifests: dict[str, bytes] = field(default_factory=dict)


@contextmanager
def loopback_registry(login: str) -> Iterator[LoopbackRegistry]:
    """A registry that runs until the block ends."""
    registry = LoopbackRegistry(login)
    uploads, parts = itertools.count(), dict[str, bytes]()
    expected = f"Basic {base64.b64encode(login.encode()).decode()}"

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def answer(self, code: int, **headers: str) -> None:
            self.send_response(code)
            for name, value in {"Content_Length": "0", **headers}.items():
                self.send_header(name.replace("_", "-"), value)
            self.end_headers()

        def body(self) -> bytes:
            if self.headers.get("Transfer-Encoding") != "chunked":
                return self.rfile.read(int(self.headers.get("Content-Length", 0)))
            chunks = []
            while size := int(self.rfile.readline(), 16):
                chunks.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(chunks)

        def handle_request(self) -> None:
            content, url = self.body(), urlsplit(self.path)
            if self.headers.get("Authorization") != expected:
                self.answer(401, WWW_Authenticate='Basic realm="images"')
            elif match := re.fullmatch(r"/v2/(.+)/manifests/(.+)", url.path):
                self.manifest(f"{match[1]}:{match[2]}", content)
            elif match := re.fullmatch(r"/v2/(.+)/blobs/(sha256:.+)", url.path):
                known = registry.blobs.get(match[2])
                self.answer(404) if known is None else self.answer(200, Content_Length=str(len(known)))
            elif "/blobs/uploads/" in url.path:
                self.upload(url.path, parse_qs(url.query).get("digest", [""])[0], content)
            else:
                self.answer(200)

        def manifest(self, name: str, content: bytes) -> None:
            if self.command != "PUT":
                self.answer(404)
                return
            registry.manifests[name] = content
            self.answer(201, Docker_Content_Digest=f"sha256:{hashlib.sha256(content).hexdigest()}")

        def upload(self, path: str, digest: str, content: bytes) -> None:
            """POST opens an upload, PATCH sends a part of it, and PUT names its digest."""
            if self.command == "POST":
                self.answer(202, Location=f"{path}{next(uploads)}", Range="0-0")
            elif self.command == "PATCH":
                parts[path] = parts.get(path, b"") + content
                self.answer(202, Location=path, Range=f"0-{len(parts[path]) - 1}")
            else:
                registry.blobs[digest] = parts.pop(path, b"") + content
                self.answer(201, Docker_Content_Digest=digest)

        do_GET = do_HEAD = do_POST = do_PATCH = do_PUT = handle_request  # noqa: N815

        def log_message(self, *args: object) -> None:
            """Print nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        registry.host = f"127.0.0.1:{server.server_port}"
        try:
            yield registry
        finally:
            server.shutdown()
            thread.join()
