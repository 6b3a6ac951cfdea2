"""Files on web servers: ranges, breaks, refusals and servers that misbehave."""

from __future__ import annotations

import socket
import threading

import pytest
from web_server import Answer, Asked, WebServer

from maskfleet.system.web import ranges
from maskfleet.system.web.ranges import WebError, find_file, read_whole, shown

CONTENT = bytes(range(256)) * 40


@pytest.fixture
def url(web: WebServer) -> str:
    web.files["/file"] = CONTENT
    return f"{web.url}/file"


def test_a_range_is_read(url: str) -> None:
    found = find_file([url])
    assert (found.size, found.etag) == (len(CONTENT), '"one"')
    assert b"".join(found.read(100, 9000)) == CONTENT[100:9000]
    assert b"".join(found.read(5, 5)) == b""


def test_a_broken_connection_resumes_where_it_stopped(url: str, web: WebServer) -> None:
    found = find_file([url])
    web.fault = lambda asked: Answer(cut_after=1000)
    assert b"".join(found.read(0, len(CONTENT))) == CONTENT
    assert [one.start for one in web.asked[1:4]] == [0, 1000, 2000]


@pytest.mark.parametrize("status", [429, 500, 503])
def test_an_overloaded_server_is_asked_again(url: str, web: WebServer, status: int) -> None:
    found, failures = find_file([url]), [status] * 3
    web.fault = lambda asked: Answer(failures.pop(), body=b"") if failures else None
    assert b"".join(found.read(0, 10)) == CONTENT[:10]
    assert len(web.asked) == 5


def test_the_pause_is_the_one_that_the_server_names(url: str, web: WebServer, monkeypatch: pytest.MonkeyPatch) -> None:
    found, failures, pauses = find_file([url]), [1], list[float]()
    monkeypatch.setattr(ranges.time, "sleep", pauses.append)
    web.fault = lambda asked: Answer(429, {"Retry-After": "7"}, b"") if failures and failures.pop() else None
    assert b"".join(found.read(0, 10)) == CONTENT[:10]
    assert pauses == [7.0]


@pytest.mark.parametrize(
    ("status", "what"),
    [
        (429, "answers 429, also after 4 attempts"),
        (500, "answers 500, also after 4 attempts"),
        (403, r"may not be read \(403\)"),
        (404, r"does not exist \(404\)"),
        (418, "answers 418"),
    ],
)
def test_what_a_server_refuses(url: str, web: WebServer, status: int, what: str) -> None:
    web.fault = lambda asked: Answer(status, body=b"")
    with pytest.raises(WebError, match=what):
        find_file([url])


def test_a_file_that_ends_early_is_given_up(url: str, web: WebServer) -> None:
    found = find_file([url])

    def cut_at_5000(asked: Asked) -> Answer:
        return Answer(cut_after=max(0, 5000 - asked.start))

    web.fault = cut_at_5000
    with pytest.raises(WebError, match="ended at byte 5,000, also after 8 attempts"):
        b"".join(found.read(0, len(CONTENT)))


@pytest.mark.parametrize("change", ["etag", "grown", "shrunk"])
def test_a_file_that_changes_is_noticed(url: str, web: WebServer, change: str) -> None:
    found = find_file([url])
    match change:
        case "etag":
            web.etags["/file"] = '"two"'
        case "grown":
            web.files["/file"] = CONTENT + b"more"
        case "shrunk":
            web.files["/file"] = CONTENT[:-1]
    with pytest.raises(WebError, match="changed while it was read"):
        b"".join(found.read(0, 100))


def test_a_range_behind_the_end_is_a_change(url: str, web: WebServer) -> None:
    found = find_file([url])
    web.fault = lambda asked: Answer(416, body=b"")
    with pytest.raises(WebError, match="shorter than it was"):
        b"".join(found.read(0, 100))


@pytest.mark.parametrize("status", [200, 206])
def test_a_web_page_is_not_the_file(url: str, web: WebServer, status: int) -> None:
    web.fault = lambda asked: Answer(status, {"Content-Type": "text/html; charset=utf-8"}, b"<html>log in</html>")
    with pytest.raises(WebError, match="web page instead of the file"):
        find_file([url])


def test_a_server_without_ranges_is_refused(url: str, web: WebServer) -> None:
    web.fault = lambda asked: Answer(200)
    with pytest.raises(WebError, match="does not send parts"):
        find_file([url])


def test_another_address_is_tried_and_the_first_error_told(url: str, web: WebServer) -> None:
    assert find_file([f"{web.url}/absent", url]).url == url
    with pytest.raises(WebError, match="/absent does not exist"):
        find_file([f"{web.url}/absent", f"{web.url}/absent-too"])


def test_an_unknown_authority_is_refused(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SSL_CERT_FILE")
    with pytest.raises(WebError, match=r"certificate of 127\.0\.0\.1 is not trusted") as raised:
        find_file([url])
    assert "SSL_CERT_FILE" in raised.value.remedy


def test_a_redirect_is_followed_but_not_out_of_encryption(url: str, web: WebServer) -> None:
    web.files["/old"] = b""
    target = {"/old": url}
    web.fault = lambda asked: Answer(302, {"Location": target["/old"]}, b"") if asked.path == "/old" else None
    assert find_file([f"{web.url}/old"]).size == len(CONTENT)
    target["/old"] = url.replace("https:", "http:")
    with pytest.raises(WebError, match="not encrypted"):
        find_file([f"{web.url}/old"])


@pytest.mark.parametrize(
    "address",
    [
        "file:///etc/passwd",
        "ftp://host/file",
        "https://",
        "https://me:secret@host/file",
        "https://me:secret@[host/file",
    ],
)
def test_other_addresses_are_refused(address: str) -> None:
    with pytest.raises(WebError, match="not an address") as raised:
        find_file([address])
    assert "secret" not in str(raised.value)


def test_messages_hide_secrets() -> None:
    assert shown("https://me:secret@host/a.zip?X-Amz-Signature=secret") == "https://host/a.zip"


@pytest.mark.parametrize(("status", "what"), [("407 Proxy Authentication Required", "proxy refuses"), (None, "")])
def test_the_proxy_of_the_environment_is_used(
    url: str, web: WebServer, monkeypatch: pytest.MonkeyPatch, status: str | None, what: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        asked: list[str] = []
        thread = threading.Thread(target=_proxy, args=(listening, status, asked), daemon=True)
        thread.start()
        monkeypatch.setenv("HTTPS_PROXY", f"http://127.0.0.1:{listening.getsockname()[1]}")
        if status is None:
            assert find_file([url]).size == len(CONTENT)
        else:
            with pytest.raises(WebError, match=what):
                find_file([url])
        thread.join(timeout=30)
    assert asked[0].startswith("CONNECT 127.0.0.1:")


def _proxy(listening: socket.socket, refusal: str | None, asked: list[str]) -> None:
    """A proxy for one connection, in plain sockets."""
    client, _ = listening.accept()
    with client:
        request = b""
        while b"\r\n\r\n" not in request:
            request += client.recv(4096)
        asked.append(request.decode())
        if refusal is not None:
            client.sendall(f"HTTP/1.1 {refusal}\r\nContent-Length: 0\r\n\r\n".encode())
            return
        host, _, port = asked[0].split()[1].partition(":")
        client.sendall(b"HTTP/1.1 200 Connection established\r\n\r\n")
        with socket.create_connection((host, int(port))) as server:
            back = threading.Thread(target=_pump, args=(server, client), daemon=True)
            back.start()
            _pump(client, server)
            back.join()


def _pump(source: socket.socket, target: socket.socket) -> None:
    try:
        while data := source.recv(65536):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)
    except OSError:
        return  # the other side closed first


def test_a_small_file_is_read_whole_also_from_a_server_without_ranges(web: WebServer) -> None:
    web.files["/a"] = bytes(1000)
    assert read_whole(f"{web.url}/a", limit_bytes=1000) == bytes(1000)
    web.fault = lambda asked: Answer(status=200)
    assert len(read_whole(f"{web.url}/a", limit_bytes=1000)) == 1000
    web.fault = lambda asked: Answer(cut_after=500) if len(web.asked) < 5 else None
    assert len(read_whole(f"{web.url}/a", limit_bytes=1000)) == 1000, "a broken connection is opened again"
    with pytest.raises(WebError, match="more than 999 bytes"):
        read_whole(f"{web.url}/a", limit_bytes=999)
    web.fault = lambda asked: Answer(status=200, headers={"Content-Type": "text/html"})
    with pytest.raises(WebError, match="web page"):
        read_whole(f"{web.url}/a", limit_bytes=1000)
    with pytest.raises(WebError, match="not an address"):
        read_whole("file:///etc/passwd", limit_bytes=1000)
