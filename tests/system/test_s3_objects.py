"""The light S3 client signs as boto3 does, repeats what fails for a moment, and raises what boto3 raises."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from urllib.parse import quote

import pytest

from maskfleet.system.s3 import objects
from maskfleet.system.s3.objects import S3Objects
from maskfleet.system.s3.signature import EMPTY_SHA256, sign

pytestmark = pytest.mark.slow  # each test makes a client of boto3, which takes a while
botocore = pytest.importorskip("botocore", reason="boto3 is not installed: pip install 'maskfleet[aws]'")

Handle = Callable[[http.server.BaseHTTPRequestHandler, int], None]


@contextmanager
def server(handle: Handle) -> Iterator[tuple[str, list[http.server.BaseHTTPRequestHandler]]]:
    seen: list[http.server.BaseHTTPRequestHandler] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            seen.append(self)
            self.rfile.read(int(self.headers.get("Content-Length", "0")))
            handle(self, len(seen))

        do_PUT = do_GET  # noqa: N815

        def log_message(self, format: str, *args: object) -> None:
            """Nothing is printed."""

    found = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=found.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield f"http://127.0.0.1:{found.server_port}", seen
    finally:
        found.shutdown()
        thread.join()
        found.server_close()


def answer(handler: http.server.BaseHTTPRequestHandler, status: int, content: bytes, **headers: str) -> None:
    handler.send_response_only(status)
    for name, value in ({"Content_Length": str(len(content))} | headers).items():
        handler.send_header(name.replace("_", "-"), value)
    handler.end_headers()
    handler.wfile.write(content)


@pytest.fixture(autouse=True)
def account(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects, "_BACKOFF_S", 0.001)
    for name, value in (("ACCESS_KEY_ID", "AKID"), ("SECRET_ACCESS_KEY", "secret"), ("REGION", "eu-west-1")):
        monkeypatch.setenv(f"AWS_{name}", value)
    for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN", "HTTP_PROXY", "http_proxy"):
        monkeypatch.delenv(name, raising=False)


@contextmanager
def client(monkeypatch: pytest.MonkeyPatch, url: str, attempts: int = 4) -> Iterator[S3Objects]:
    monkeypatch.setenv("AWS_ENDPOINT_URL", url)
    found = S3Objects(connections=2, attempts=attempts)
    try:
        yield found
    finally:
        found.close()


@pytest.mark.parametrize("token", [None, "a-session-token"])
@pytest.mark.parametrize("key", ["a/b.jpg", "ä/ö ü+(1)~'*!.jpg", "a//b", "%41&=?#"])
def test_the_signature_is_the_one_that_boto3_makes(
    key: str, token: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from botocore import auth
    from botocore.awsrequest import AWSRequest
    from botocore.credentials import ReadOnlyCredentials

    now, host = datetime(2026, 5, 4, 3, 2, 1, tzinfo=UTC), "bucket.s3.eu-west-1.amazonaws.com"
    credentials = ReadOnlyCredentials("AKID", "secret", token)
    path = f"/{quote(key, safe='/~')}"
    headers = {"host": host, "range": "bytes=1-2", "x-amz-content-sha256": EMPTY_SHA256}
    sign(headers, ("GET", path), credentials, region="eu-west-1", now=now)
    request = AWSRequest("GET", f"https://{host}{path}", headers={"range": "bytes=1-2"})
    request.context["payload_signing_enabled"] = True
    monkeypatch.setattr(auth, "get_current_datetime", lambda: now.replace(tzinfo=None))
    auth.S3SigV4Auth(credentials, "s3", "eu-west-1").add_auth(request)
    assert headers["authorization"] == request.headers["Authorization"]


def test_an_object_and_a_range_of_it_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        server(lambda handler, number: answer(handler, 200, b"content", ETag='"e"', x_amz_version_id="v")) as (
            url,
            seen,
        ),
        client(monkeypatch, url) as s3,
    ):
        found = s3.get("bucket", "a b")
        assert (found.content, found.etag, found.version) == (b"content", "e", "v")
        s3.get("bucket", "a b", span=(3, 10), etag="e")
    assert [handler.path for handler in seen] == ["/bucket/a%20b"] * 2
    assert (seen[1].headers["range"], seen[1].headers["if-match"]) == ("bytes=3-9", '"e"')


FAULTS: dict[str, Handle] = {
    "503": lambda handler, number: answer(handler, 503, b"<Error><Code>SlowDown</Code></Error>"),
    "429": lambda handler, number: answer(handler, 429, b""),
    "cut": lambda handler, number: answer(handler, 200, b"cont", Content_Length="7") or handler.connection.close(),  # type: ignore[func-returns-value]
    "closed": lambda handler, number: handler.connection.close(),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_fails_for_a_moment_is_asked_again(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def handle(handler: http.server.BaseHTTPRequestHandler, number: int) -> None:
        if number <= 2:
            handler.close_connection = True
            FAULTS[fault](handler, number)
        else:
            answer(handler, 200, b"content")

    with server(handle) as (url, seen), client(monkeypatch, url) as s3:
        assert s3.get("bucket", "key").content == b"content"
    assert len(seen) == 3


def test_a_server_that_closes_idle_connections_costs_no_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    def handle(handler: http.server.BaseHTTPRequestHandler, number: int) -> None:
        answer(handler, 200, b"content")
        handler.close_connection = True  # without telling the client

    with server(handle) as (url, seen), client(monkeypatch, url, attempts=1) as s3:
        for _ in range(3):
            assert s3.get("bucket", "key").content == b"content"
    assert len(seen) == 3


@pytest.mark.parametrize(("status", "code"), [(404, "NoSuchKey"), (403, "AccessDenied"), (412, "PreconditionFailed")])
def test_an_error_is_the_one_of_boto3_and_is_not_repeated(
    status: int, code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from botocore.exceptions import ClientError

    text = f"<Error><Code>{code}</Code><Message>why</Message></Error>".encode()
    with (
        server(lambda handler, number: answer(handler, status, text)) as (url, seen),
        client(monkeypatch, url) as s3,
        pytest.raises(ClientError, match=f"{code}.*why"),
    ):
        s3.get("bucket", "key")
    assert len(seen) == 1


def test_it_gives_up_after_its_attempts(monkeypatch: pytest.MonkeyPatch) -> None:
    from botocore.exceptions import ClientError, EndpointConnectionError

    with server(FAULTS["503"]) as (url, seen), client(monkeypatch, url) as s3:
        with pytest.raises(ClientError, match="SlowDown"):
            s3.get("bucket", "key")
        assert len(seen) == 4
    with client(monkeypatch, url) as s3, pytest.raises(EndpointConnectionError):
        s3.get("bucket", "key")


def test_content_that_does_not_match_its_checksum_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from botocore.exceptions import FlexibleChecksumError

    with (
        server(lambda handler, number: answer(handler, 200, b"content", x_amz_checksum_crc32="AAAAAA==")) as (url, _),
        client(monkeypatch, url) as s3,
    ):
        with pytest.raises(FlexibleChecksumError):
            s3.get("bucket", "key")
        assert s3.get("bucket", "key", span=(0, 7)).content == b"content", "of a range it says nothing"


def test_requests_follow_a_bucket_to_its_region(monkeypatch: pytest.MonkeyPatch) -> None:
    def handle(handler: http.server.BaseHTTPRequestHandler, number: int) -> None:
        if "/us-west-2/" in handler.headers["authorization"]:
            answer(handler, 200, b"content")
        else:
            text = b"<Error><Code>AuthorizationHeaderMalformed</Code></Error>"
            answer(handler, 400, text, x_amz_bucket_region="us-west-2")

    with server(handle) as (url, seen), client(monkeypatch, url) as s3:
        assert s3.get("bucket", "key").content == b"content"
    assert len(seen) == 2


def test_a_proxy_is_used_where_boto3_would_use_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with server(lambda handler, number: answer(handler, 200, b"content")) as (url, seen):
        monkeypatch.setenv("http_proxy", url)
        monkeypatch.setenv("no_proxy", "")
        with client(monkeypatch, "http://s3.example") as s3:
            assert s3.get("bucket", "key").content == b"content"
    assert seen[0].path == "http://s3.example/bucket/key"
