"""The chart's nginx, JupyterLab and TensorBoard, started as in the pod: who gets in and who does not."""

from __future__ import annotations

import asyncio
import base64
import os
import re
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from notebook_release import GOOD, HASH, MD5, PASSWORD, one, render
from notebook_stack import LOGIN, Stack, ask, echo_server, listeners, running_stack, second_proxy, session_of, until

from tools import tool

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with running_stack(tmp_path_factory.mktemp("values")) as made:
        yield made


def session_cookies(response: httpx.Response) -> list[str]:
    return [value for value in response.headers.get_list("set-cookie") if value.startswith("maskfleet_")]


PATHS = [
    "/",
    "/lab",
    "/api",
    "/api/kernels",
    "/api/contents",
    "/terminals/1",
    "/tensorboard",
    "/tensorboard/",
    "/font-roboto",
    "/x",
]


@pytest.mark.parametrize("path", PATHS)
def test_without_a_password_nothing_answers(stack: Stack, path: str) -> None:
    with stack.client() as client:
        answer = client.get(path)
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"] == 'Basic realm="maskfleet"'
    assert not session_cookies(answer)
    assert "jupyter" not in answer.text.lower()
    assert "tensorboard" not in answer.text.lower()


@pytest.mark.parametrize("login", [("fleet", "wrong"), ("fleet", ""), ("root", PASSWORD), ("fleet", HASH)])
def test_a_wrong_password_is_rejected(stack: Stack, login: tuple[str, str]) -> None:
    with stack.client(auth=login) as client:
        for path in ("/lab", "/tensorboard/", "/api/kernels"):
            answer = client.get(path)
            assert answer.status_code == 401
            assert not session_cookies(answer)


def test_the_right_password_opens_jupyter_and_tensorboard(stack: Stack) -> None:
    with stack.client(auth=LOGIN) as client:
        lab = client.get("/lab", follow_redirects=True)
        assert lab.status_code == 200
        assert "JupyterLab" in lab.text
        board = client.get("/tensorboard/")
        assert board.status_code == 200
        assert "TensorBoard" in board.text
        fonts = re.findall(r"/font-roboto/[\w-]+\.woff2", board.text)
        assert fonts
        assert client.get(fonts[0]).status_code == 200
        assert client.get("/tensorboard", follow_redirects=True).url.path == "/tensorboard/"
        runs = client.get("/tensorboard/data/runs").json()
        assert runs == ["r50/tensorboard"]


def test_one_login_opens_a_session(stack: Stack) -> None:
    with stack.client() as client:
        first = client.get("/api", auth=LOGIN)
        [cookie] = session_cookies(first)
        assert re.fullmatch(
            r"maskfleet_r50_notebook=[0-9a-f]{64}; Path=/; Secure; HttpOnly; SameSite=Strict", cookie
        ), cookie
        again = client.get("/api/kernels")
        assert again.status_code == 200
        assert not session_cookies(again)


@pytest.mark.parametrize("value", ["0" * 64, "", ":", "~^", "a:a", "0" * 64 + ":" + "0" * 64])
def test_an_invented_session_cookie_is_rejected(stack: Stack, value: str) -> None:
    with stack.client(headers={"Cookie": f"maskfleet_r50_notebook={value}"}) as client:
        answer = client.get("/api/kernels")
    assert answer.status_code == 401
    assert not session_cookies(answer)


def test_the_health_page_needs_no_password_and_says_nothing(stack: Stack) -> None:
    with stack.client() as client:
        answer = client.get("/healthz")
        below = client.get("/healthz/x")
    assert (answer.status_code, answer.text) == (200, "ok\n")
    assert answer.headers["server"] == "nginx"
    assert not session_cookies(answer)
    assert below.status_code == 401


def test_a_kernel_answers_through_the_proxy(stack: Stack) -> None:
    with stack.client(auth=LOGIN) as client:
        client.get("/lab", follow_redirects=True)
        token = client.cookies["_xsrf"]
        kernel = client.post("/api/kernels", json={}, headers={"X-XSRFToken": token}).json()["id"]
        path = f"/api/kernels/{kernel}/channels"
        try:
            upgrade = {"Upgrade": "websocket", "Connection": "Upgrade", "Sec-WebSocket-Version": "13"}
            upgrade |= {"Sec-WebSocket-Key": "AAAAAAAAAAAAAAAAAAAAAA=="}
            with stack.client(headers=upgrade) as stranger:
                assert stranger.get(path).status_code == 401
            assert client.get(path, headers={**upgrade, "Origin": "https://elsewhere.example"}).status_code == 403
            assert asyncio.run(ask(stack, path, "print(6 * 7)")) == "42\n"
        finally:
            client.delete(f"/api/kernels/{kernel}", headers={"X-XSRFToken": token})


def test_a_page_of_another_site_cannot_use_a_login(stack: Stack) -> None:
    with stack.client(auth=LOGIN) as client:
        client.get("/lab", follow_redirects=True)
        bare = client.post("/api/kernels", json={})
        foreign = client.post("/api/kernels", json={}, headers={"Origin": "https://elsewhere.example"})
    assert bare.status_code == 403
    assert foreign.status_code in (403, 404)


@pytest.mark.parametrize(("version", "works"), [("tls1", False), ("tls1_1", False), ("tls1_2", True), ("tls1_3", True)])
def test_only_tls_1_2_and_1_3_are_accepted(stack: Stack, version: str, works: bool) -> None:
    # Without SECLEVEL=0 the client would reject the old versions, not the server.
    done = subprocess.run(
        [
            tool("openssl"),
            "s_client",
            "-connect",
            f"127.0.0.1:{stack.port}",
            f"-{version}",
            "-cipher",
            "ALL:@SECLEVEL=0",
        ],
        input=b"",
        capture_output=True,
        timeout=240,
        check=False,
    )
    assert (done.returncode == 0) is works, done.stderr
    if not works:
        assert b"alert protocol version" in done.stderr


def test_plain_http_gets_no_page(stack: Stack) -> None:
    answer = httpx.get(f"http://127.0.0.1:{stack.port}/lab", auth=LOGIN, trust_env=False, timeout=240)
    assert answer.status_code == 400


def test_pages_forbid_foreign_frames_and_content_sniffing(stack: Stack) -> None:
    with stack.client(auth=LOGIN) as client:
        for path in ("/lab", "/tensorboard/"):
            headers = client.get(path).headers
            assert headers["x-content-type-options"] == "nosniff"
            assert headers["x-frame-options"] == "SAMEORIGIN"
            assert "frame-ancestors 'self'" in headers.get_list("content-security-policy")
            assert "strict-transport-security" not in headers


def test_too_many_guesses_are_rejected_but_not_a_session(stack: Stack) -> None:
    with second_proxy(stack) as other, stack.client() as known, stack.client() as stranger:
        until(lambda: known.get(f"{other}/api", auth=LOGIN).status_code == 200)
        codes = [stranger.get(f"{other}/lab").status_code for _ in range(200)]
        assert set(codes) == {401, 429}
        assert known.get(f"{other}/api/kernels").status_code == 200


def test_only_the_proxy_listens_outside_of_loopback(stack: Stack) -> None:
    group = {session_of(pid) for pid in (process.pid for process in stack.processes.values())}
    listening = [entry for entry in listeners() if session_of(entry[1]) in group]
    assert {address for address, _ in listening} == {"127.0.0.1"}, listening
    assert stack.processes["jupyter"].pid not in {pid for _, pid in listening}, "Jupyter itself has a port"
    mode = (stack.folder / "run/jupyter/jupyter.sock").stat().st_mode
    assert mode & 0o777 == 0o600


def test_nothing_secret_is_in_the_logs(stack: Stack) -> None:
    with stack.client(auth=("fleet", "wrong")) as client:
        assert client.get("/lab").status_code == 401
    for name in stack.processes:
        text = stack.log(name)
        assert "token=" not in text
        assert PASSWORD not in text
        assert HASH not in text
    assert "password mismatch" in stack.log("proxy")


def test_processes_are_not_root(stack: Stack) -> None:
    for process in stack.processes.values():
        assert Path(f"/proc/{process.pid}").stat().st_uid != 0 or os.geteuid() != 0


def renew(file: Path, content: bytes) -> None:
    """Replace a file atomically, as the kubelet does."""
    draft = file.with_suffix(".new")
    draft.write_bytes(content)
    draft.chmod(file.stat().st_mode)
    draft.replace(file)


def test_a_new_login_ends_old_sessions(stack: Stack) -> None:
    with second_proxy(stack) as other, stack.client() as client:
        until(lambda: client.get(f"{other}/api", auth=LOGIN).status_code == 200)
        assert client.get(f"{other}/api/kernels").status_code == 200
        renew(stack.folder / "etc2/login/htpasswd", f"other:{HASH}\n".encode())
        until(lambda: client.get(f"{other}/api/kernels").status_code == 401)
        assert client.get(f"{other}/api", auth=LOGIN).status_code == 401
        assert client.get(f"{other}/api", auth=("other", PASSWORD)).status_code == 200


def test_a_renewed_certificate_is_used_without_a_restart(stack: Stack, tmp_path: Path) -> None:
    objects = render(tmp_path, GOOD)
    with second_proxy(stack) as other:
        port = int(other.rpartition(":")[2])
        until(lambda: bool(ssl.get_server_certificate(("127.0.0.1", port))))
        before = ssl.get_server_certificate(("127.0.0.1", port))
        data = one(objects, "Secret", "r50-notebook-tls")["data"]
        for name in ("tls.key", "tls.crt"):
            renew(stack.folder / "etc2/tls" / name, base64.b64decode(data[name]))
        renewed = base64.b64decode(data["tls.crt"]).decode()
        assert before.strip() != renewed.strip()
        until(lambda: ssl.get_server_certificate(("127.0.0.1", port)).strip() == renewed.strip())


def test_servers_behind_the_proxy_never_see_the_password(stack: Stack) -> None:
    with echo_server() as echo, second_proxy(stack, board_port=echo) as other, stack.client() as client:
        until(lambda: client.get(f"{other}/tensorboard/x", auth=LOGIN).status_code == 200)
        seen = client.get(f"{other}/tensorboard/x", auth=LOGIN, headers={"X-Forwarded-For": "6.6.6.6"}).json()
    assert "authorization" not in seen
    assert seen["host"] == other.removeprefix("https://")
    assert (seen["x-forwarded-proto"], seen["x-forwarded-for"]) == ("https", "127.0.0.1")


@pytest.mark.parametrize("line", ["", f"fleet:{MD5}\n", "fleet:{PLAIN}secret\n", f"fleet:{HASH}\nx:{MD5}\n"])
def test_the_proxy_does_not_start_with_a_weak_login(tmp_path: Path, line: str) -> None:
    objects = render(tmp_path, GOOD)
    (tmp_path / "login").mkdir()
    (tmp_path / "login/htpasswd").write_text(line)
    (tmp_path / "proxy.sh").write_text(one(objects, "ConfigMap", "r50-notebook-proxy")["data"]["proxy.sh"])
    done = subprocess.run(
        ["sh", tmp_path / "proxy.sh", tmp_path, tmp_path], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 2
    assert "htpasswd" in done.stderr
    assert not (tmp_path / "session.conf").exists()
