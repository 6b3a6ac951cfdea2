"""The proxy in front of TensorBoard, spoken to over real TLS."""

from __future__ import annotations

import base64
import http.client
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from maskfleet.errors import MaskfleetError
from maskfleet.system.web import proxy as module
from maskfleet.system.web.certificate import Certificate, self_signed
from maskfleet.system.web.proxy import FREE_ATTEMPTS, MAX_BODY, PasswordGate, PasswordProxy, is_loopback

PASSWORD = "correct horse: bätterie"


@dataclass
class Clock:
    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Behind:
    """A server on loopback that records what reaches it."""

    requests: list[tuple[str, str, dict[str, str], bytes]] = field(default_factory=list)


@dataclass(frozen=True)
class Front:
    port: int
    certificate: Certificate
    behind: Behind
    clock: Clock

    def request(
        self,
        path: str = "/",
        password: str | None = PASSWORD,
        method: str = "GET",
        body: bytes | None = None,
        **headers: str,
    ) -> tuple[int, dict[str, str], bytes]:
        context = ssl.create_default_context(cafile=str(self.certificate.chain))
        connection = http.client.HTTPSConnection("127.0.0.1", self.port, context=context, timeout=30)
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        if password is not None:
            sent["Authorization"] = f"Basic {base64.b64encode(f'me:{password}'.encode()).decode()}"
        try:
            connection.request(method, path, body=body, headers=sent)
            answer = connection.getresponse()
            return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()
        finally:
            connection.close()

    def raw(self, sent: bytes) -> bytes:
        """What the proxy answers to these lines of a request, with the password, until it closes the connection."""
        context = ssl.create_default_context(cafile=str(self.certificate.chain))
        credentials = base64.b64encode(f"me:{PASSWORD}".encode())
        with (
            socket.create_connection(("127.0.0.1", self.port), timeout=30) as plain,
            context.wrap_socket(plain, server_hostname="127.0.0.1") as connection,
        ):
            connection.sendall(sent + b"Authorization: Basic " + credentials + b"\r\nConnection: close\r\n\r\n")
            received = b""
            with suppress(ConnectionResetError, ssl.SSLError):  # what was not read of a line that is too long
                while more := connection.recv(1 << 16):
                    received += more
            return received


class _Recording(BaseHTTPRequestHandler):
    behind: Behind

    def do_GET(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.behind.requests.append((self.command, self.path, {k.lower(): v for k, v in self.headers.items()}, body))
        self.send_response(302 if self.path == "/moved" else 200)
        self.send_header("X-Frame-Options", "ALLOWALL")
        if self.path != "/streamed":
            self.send_header("Content-Length", "5")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(b"board")

    do_POST = do_HEAD = do_GET  # noqa: N815 - http.server's names

    def log_message(self, format: str, *args: object) -> None:
        return


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    return self_signed(tmp_path_factory.mktemp("tls"), "127.0.0.1")


@pytest.fixture
def front(certificate: Certificate) -> Iterator[Front]:
    behind, clock = Behind(), Clock()
    handler = type("Handler", (_Recording,), {"behind": behind})
    upstream = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    gate = PasswordGate(PASSWORD, clock=clock)
    proxy = PasswordProxy(
        ("127.0.0.1", 0), upstream_port=upstream.server_address[1], gate=gate, tls=certificate.server_context()
    )
    servers = (upstream, proxy)
    for server in servers:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    yield Front(proxy.port, certificate, behind, clock)
    for server in servers:
        server.shutdown()
        server.server_close()


def test_the_right_password_reaches_the_server_and_is_not_passed_on(front: Front) -> None:
    status, headers, body = front.request("/data?run=a", X_Own="1", Connection="X-Secret", X_Secret="2")
    assert (status, body) == (200, b"board")
    [(method, path, seen, _)] = front.behind.requests
    assert (method, path, seen["x-own"]) == ("GET", "/data?run=a", "1")
    assert not {"authorization", "x-secret"} & set(seen)
    assert headers["x-frame-options"] == "SAMEORIGIN"
    assert headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize("password", ["wrong", "", PASSWORD + "x", None])
def test_any_other_password_is_401_and_nothing_gets_through(front: Front, password: str | None) -> None:
    status, headers, _ = front.request(password=password)
    assert status == 401
    assert headers["www-authenticate"].startswith("Basic")
    assert front.behind.requests == []


def test_answers_of_all_kinds_are_returned(front: Front) -> None:
    assert front.request("/streamed")[2] == b"board"
    assert front.request("/moved")[0] == 302
    assert front.request(method="HEAD")[::2] == (200, b"")
    assert front.request(method="POST", body=b"x" * 70_000)[0] == 200
    assert front.behind.requests[-1][3] == b"x" * 70_000
    assert front.request(method="DELETE")[0] == 501


def test_guessing_is_slowed_after_five(front: Front) -> None:
    for _ in range(FREE_ATTEMPTS):
        assert front.request(password="guess")[0] == 401
    status, headers, _ = front.request()
    assert status == 429, "even the right one is not compared now"
    assert int(headers["retry-after"]) >= 1
    front.clock.now += 1.1
    assert front.request(password="guess")[0] == 401
    front.clock.now += 1.1
    assert front.request()[0] == 429, "each further one doubles the wait"
    front.clock.now += 1.1
    assert front.request()[0] == 200
    assert front.request(password="guess")[0] == 401, "the right one clears the record"


def test_the_gate_keeps_addresses_apart_and_its_memory_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_ADDRESSES", 3)
    gate = PasswordGate(PASSWORD, clock=Clock())
    right = f"Basic {base64.b64encode(f'a:{PASSWORD}'.encode()).decode()}"
    for number in range(FREE_ATTEMPTS):
        assert gate.answer(f"2001:db8::{number}", "Basic AAAA")[0] == HTTPStatus.UNAUTHORIZED
    assert gate.answer("2001:db8::99", right)[0] == HTTPStatus.TOO_MANY_REQUESTS, "one /64 is one machine"
    assert gate.answer("192.0.2.1", right)[0] == HTTPStatus.OK
    for number in range(5):
        gate.answer(f"192.0.2.{number}", "Basic AAAA")
    assert len(gate._failures) == 3
    assert PASSWORD not in repr(gate)
    for odd in ("Bearer x", "Basic", "Basic ä", "Basic " + "A" * 100_000):
        assert gate.answer("192.0.2.9", odd)[0] == HTTPStatus.UNAUTHORIZED


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "https://evil.example"},
        {"Origin": "null"},
        {"Sec_Fetch_Site": "cross-site", "Sec_Fetch_Mode": "no-cors"},
    ],
)
def test_requests_of_other_sites_are_refused(front: Front, headers: dict[str, str]) -> None:
    assert front.request(**headers)[0] == 403
    assert front.behind.requests == []


@pytest.mark.parametrize("origin", ["http://[::1", "https://[x]"])
def test_a_malformed_origin_is_another_site(origin: str, front: Front, capfd: pytest.CaptureFixture[str]) -> None:
    assert front.request(Origin=origin)[0] == 403
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize(
    ("path", "headers", "status"),
    [
        (b"/%00", b"", 200),
        (b"//evil.example/", b"", 200),
        (b"http://board.example/data?run=1", b"", 200),
        (b"http://board.example", b"", 200),
        (b"http://[::1/", b"", 400),
        (b"*", b"", 400),
        (b"nowhere", b"", 400),
        (b"/\xff", b"", 400),
        (b"/\x7f", b"", 400),
        (b"/" + b"x" * 70_000, b"", 414),
        (b"/", b"X-Folded: a\r\n b\r\n", 200),
        (b"/", b"X Y: a\r\n", 401),
        (b"/", b"X-Many: a\r\n" * 200, 431),
    ],
)
def test_odd_requests_get_a_clean_answer(
    path: bytes, headers: bytes, status: int, front: Front, capfd: pytest.CaptureFixture[str]
) -> None:
    answer = front.raw(b"GET " + path + b" HTTP/1.1\r\nHost: x\r\n" + headers)
    assert answer.startswith(b"HTTP/1.1 %d " % status)
    assert [asked for _, asked, *_ in front.behind.requests if not asked.startswith("/")] == []
    assert "Traceback" not in capfd.readouterr().err


def test_an_address_with_the_name_of_a_host_is_asked_for_by_its_path(front: Front) -> None:
    front.raw(b"GET http://board.example/data?run=1 HTTP/1.1\r\nHost: x\r\n")
    front.raw(b"GET http://board.example HTTP/1.1\r\nHost: x\r\n")
    assert [path for _, path, *_ in front.behind.requests] == ["/data?run=1", "/"]


def test_requests_of_the_board_itself_and_links_to_it_pass(front: Front) -> None:
    own = f"https://127.0.0.1:{front.port}"
    assert front.request(method="POST", body=b"", Origin=own, Sec_Fetch_Site="same-origin")[0] == 200
    assert front.request(Sec_Fetch_Site="cross-site", Sec_Fetch_Mode="navigate")[0] == 200


def test_bodies_are_bounded_and_lengths_clear(front: Front) -> None:
    assert front.request(method="POST", Content_Length=str(MAX_BODY + 1))[0] == 413
    assert front.request(method="POST", Content_Length="-1")[0] == 411
    assert front.request(method="POST", Content_Length="9" * 5000)[0] == 411
    assert front.request(method="POST", Transfer_Encoding="chunked")[0] == 411
    assert front.behind.requests == []


def test_a_client_that_says_nothing_stops_no_other(front: Front) -> None:
    with socket.create_connection(("127.0.0.1", front.port)):
        assert front.request()[0] == 200


def test_without_a_server_behind_it_the_answer_is_502(certificate: Certificate) -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    proxy = PasswordProxy(
        ("127.0.0.1", 0), upstream_port=port, gate=PasswordGate(PASSWORD), tls=certificate.server_context()
    )
    threading.Thread(target=proxy.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    try:
        assert Front(proxy.port, certificate, Behind(), Clock()).request()[0] == 502
    finally:
        proxy.shutdown()
        proxy.server_close()


def test_openssl_accepts_the_certificate_and_no_old_tls(front: Front) -> None:
    def s_client(*options: str) -> subprocess.CompletedProcess[str]:
        command = ["openssl", "s_client", "-connect", f"127.0.0.1:{front.port}", "-verify_return_error", *options]
        return subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=60
        )

    trusted = ("-CAfile", str(front.certificate.chain), "-verify_ip", "127.0.0.1")
    done = s_client(*trusted)
    assert done.returncode == 0, done.stderr
    assert "Verify return code: 0 (ok)" in done.stdout
    assert s_client("-CAfile", str(front.certificate.chain), "-verify_ip", "192.0.2.1").returncode != 0
    assert s_client(*trusted, "-tls1_1").returncode != 0
    shown = subprocess.run(
        ["openssl", "x509", "-in", str(front.certificate.chain), "-noout", "-fingerprint", "-sha256"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert shown.stdout.strip().endswith(front.certificate.fingerprint())


def test_a_self_signed_certificate_is_kept_and_its_key_private(tmp_path: Path) -> None:
    first = self_signed(tmp_path / "tls", "board.example")
    assert first.key.stat().st_mode & 0o777 == 0o600
    before = first.chain.read_bytes()
    assert self_signed(tmp_path / "tls", "board.example").chain.read_bytes() == before
    assert self_signed(tmp_path / "tls", "other.example").chain != first.chain
    first.key.write_text("damaged")
    assert self_signed(tmp_path / "tls", "board.example").chain.read_bytes() != before


def test_files_that_are_no_certificate_are_an_error(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("nothing")
    with pytest.raises(MaskfleetError, match="no certificate"):
        Certificate(tmp_path / "a", tmp_path / "a").server_context()


def test_loopback_is_told_from_the_rest() -> None:
    assert is_loopback("127.0.0.1")
    assert is_loopback("localhost")
    assert not is_loopback("192.0.2.1")


def test_programs_may_send_the_password_as_a_bearer_token() -> None:
    gate = PasswordGate("a long token")
    assert gate.answer("127.0.0.1", "Bearer a long token") == (HTTPStatus.OK, 0.0)
    for wrong in ("Bearer another", "Bearer ", "Digest a long token"):
        assert gate.answer("127.0.0.1", wrong)[0] is HTTPStatus.UNAUTHORIZED


def test_the_body_of_a_refused_request_is_read_so_that_its_sender_gets_the_answer(front: Front) -> None:
    large = bytes(MAX_BODY + 1)
    status, _, text = front.request(method="POST", body=large)
    assert (status, b"at most" in text) == (413, True)
    assert front.request(method="POST", body=large, Origin="https://attacker.example")[0] == 403
    assert front.request(method="POST", body=large, password=None)[0] == 401
    assert front.behind.requests == []


def test_the_server_behind_gets_no_origin_because_it_was_compared_here(front: Front) -> None:
    assert front.request(Origin=f"https://127.0.0.1:{front.port}")[0] == 200
    assert "Origin" not in front.behind.requests[0][2]
