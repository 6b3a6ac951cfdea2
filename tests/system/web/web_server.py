"""A real HTTPS server on loopback with a certificate authority of its own; tests say how it misbehaves."""

from __future__ import annotations

import datetime
import ipaddress
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


@dataclass(frozen=True)
class Asked:
    """One request: the path, and the first and last byte of its range."""

    path: str
    start: int
    end: int  # not included


@dataclass
class Answer:
    """How to answer; the defaults are right."""

    status: int = 206
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes | None = None  # in place of the file's bytes
    cut_after: int | None = None  # the connection breaks after so many bytes


@dataclass
class WebServer:
    """Files by path, and `fault`, which may change an answer."""

    url: str
    ca_file: Path
    files: dict[str, bytes] = field(default_factory=dict)
    etags: dict[str, str] = field(default_factory=dict)
    fault: Callable[[Asked], Answer | None] = lambda asked: None
    asked: list[Asked] = field(default_factory=list)

    def bytes_asked(self, path: str) -> int:
        return sum(one.end - one.start for one in self.asked if one.path == path)


def certificate(folder: Path) -> tuple[Path, Path]:
    """(authority's certificate, server's certificate with its key) for 127.0.0.1."""
    now = datetime.datetime.now(datetime.UTC)

    def build(name: str, issuer: str, key: ec.EllipticCurvePrivateKey, by: ec.EllipticCurvePrivateKey) -> bytes:
        is_ca = name == issuer
        builder = (
            x509.CertificateBuilder()
            .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
            .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, issuer)]))
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=1))
            .not_valid_after(now + datetime.timedelta(days=1))
            .add_extension(x509.BasicConstraints(ca=is_ca, path_length=None), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(by.public_key()), critical=False)
        )
        if is_ca:
            usage = x509.KeyUsage(True, False, False, False, False, True, True, False, False)
            builder = builder.add_extension(usage, critical=True)
        else:
            names = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
            builder = builder.add_extension(names, critical=False)
        return builder.sign(by, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)

    authority, server = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    private = server.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    (folder / "ca.pem").write_bytes(build("test authority", "test authority", authority, authority))
    (folder / "server.pem").write_bytes(build("127.0.0.1", "test authority", server, authority) + private)
    return folder / "ca.pem", folder / "server.pem"


@contextmanager
def web_server(folder: Path) -> Iterator[WebServer]:
    """An HTTPS server until the block ends."""
    ca_file, server_file = certificate(folder)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            content = state.files.get(self.path, b"")
            first, _, last = self.headers.get("Range", "").removeprefix("bytes=").partition("-")
            asked = Asked(self.path, int(first or 0), min(int(last) + 1 if last else len(content), len(content)))
            state.asked.append(asked)
            right = Answer() if self.path in state.files else Answer(404, body=b"")
            answer = state.fault(asked) or right
            body = content[asked.start : asked.end] if answer.body is None else answer.body
            self.send_response(answer.status)
            headers = {"Content-Length": str(len(body)), "ETag": state.etags.get(self.path, '"one"')}
            if answer.status == 206:
                headers["Content-Range"] = f"bytes {asked.start}-{asked.end - 1}/{len(content)}"
            for name, value in (headers | answer.headers).items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body if answer.cut_after is None else body[: answer.cut_after])
            self.close_connection = True

        def log_message(self, *args: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, *args: object) -> None:
            """A client that was killed, or that refuses the certificate, is no error of the test."""

    server = Server(("127.0.0.1", 0), Handler)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(server_file)
    server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    state = WebServer(f"https://127.0.0.1:{server.server_address[1]}", ca_file)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield state
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
