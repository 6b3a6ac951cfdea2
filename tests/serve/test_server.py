"""The HTTP server with a small model: what clients send right, wrong, too large and at the same time."""

from __future__ import annotations

import base64
import gc
import http.client
import json
import math
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from maskfleet.config.base import replaced
from maskfleet.config.run import RunConfig
from maskfleet.errors import MaskfleetError
from maskfleet.inference.detections import ImageDetections
from maskfleet.inference.detector import Detector
from maskfleet.model.build import build_mask_rcnn
from maskfleet.rle import rle_pixels
from maskfleet.serve.app import App, Request, Response
from maskfleet.serve.batching import DetectionQueue, Pixels
from maskfleet.serve.detection import MAX_IMAGES, MAX_WAITING, DetectionService
from maskfleet.serve.server import AppServer

Answer = tuple[int, Any]
IMAGE = np.random.default_rng(0).integers(0, 255, (48, 64, 3), dtype=np.uint8)


def encoded(suffix: str = ".jpg", image: NDArray[np.uint8] = IMAGE) -> bytes:
    return cv2.imencode(suffix, image)[1].tobytes()


JPEG, PNG = encoded(), encoded(".png")
TEXT = base64.b64encode(JPEG).decode()


@pytest.fixture(scope="module")
def detector(micro: RunConfig) -> Detector:
    torch.manual_seed(0)
    config = replaced(micro, {"model.num_categories": 2})
    return Detector(build_mask_rcnn(config.model).eval(), config, ((1, "a"), (7, "b")), "test", torch.device("cpu"))


@pytest.fixture(scope="module")
def server(detector: Detector) -> Iterator[AppServer]:
    queue = DetectionQueue(detector, batch_size=4)
    service = DetectionService(queue, source="test", default_score=0.0)
    with AppServer(App(service.routes), "127.0.0.1", 0) as running:
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield running
        running.shutdown()
        thread.join()
    queue.close()


def ask(
    server: AppServer, body: bytes | str, kind: str = "image/jpeg", *, method: str = "POST", path: str = "/invocations"
) -> Answer:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=240)
    try:
        connection.request(method, path, body, {"Content-Type": kind} if kind else {})
        response = connection.getresponse()
        return response.status, json.loads(response.read() or b"null")
    finally:
        connection.close()


def raw(server: AppServer, sent: bytes) -> bytes:
    """What the server answers to these bytes until it closes the connection."""
    with socket.create_connection(("127.0.0.1", server.server_port), timeout=240) as connection:
        connection.sendall(sent)
        received = b""
        while more := connection.recv(1 << 16):
            received += more
    return received


@pytest.mark.slow
def test_an_image_gives_what_the_detector_finds_in_it(server: AppServer, detector: Detector) -> None:
    assert ask(server, b"", "", method="GET", path="/ping") == (200, {"status": "ok", "model": "test"})
    status, answer = ask(server, PNG, "image/png")
    assert status == 200
    assert (answer["height"], answer["width"]) == (48, 64)
    expected = detector.detect(np.ascontiguousarray(IMAGE[..., ::-1]))
    assert len(answer["detections"]) == len(expected) > 0
    first, ours = answer["detections"][0], expected.to_coco(0)[0]
    assert (first["bbox"], first["score"], first["category_id"]) == (ours["bbox"], ours["score"], ours["category_id"])
    assert first["category_name"] in ("a", "b")
    masks = expected.masks
    assert masks is not None
    assert np.array_equal(rle_pixels(first["segmentation"]), masks[0])


@pytest.mark.slow
def test_a_batch_in_base64_is_answered_in_order(server: AppServer) -> None:
    other = base64.b64encode(encoded(".png", np.zeros((30, 40, 3), np.uint8))).decode()
    single = ask(server, json.dumps({"image": TEXT}), "application/json; charset=utf-8")[1]
    assert single == ask(server, JPEG)[1]
    assert single == ask(server, json.dumps({"img_id": 3, "img_data": TEXT}), "application/json")[1]
    old = {"img_id": 3, "img_data": TEXT, "score_threshold": 1, "mask_threshold": 0.5, "rpn": False}
    assert ask(server, json.dumps(old), "application/json")[1]["detections"] == []
    for body in ([TEXT, other], {"images": ["data:image/jpeg;base64," + TEXT, other]}):
        status, answer = ask(server, json.dumps(body), "application/json")
        assert status == 200
        assert answer[0] == single
        assert (answer[1]["height"], answer[1]["width"]) == (30, 40)
    assert ask(server, json.dumps({"image": TEXT, "score": 1}), "application/json")[1]["detections"] == []
    assert ask(server, JPEG, path="/invocations?score=1")[1]["detections"] == []


@pytest.mark.parametrize(
    ("body", "kind", "status", "said"),
    [
        (b"", "image/jpeg", 400, "empty"),
        (b"not an image", "image/jpeg", 400, "not a complete image"),
        (JPEG[: len(JPEG) // 2], "image/jpeg", 400, "its end is missing"),
        (PNG[:40], "image/png", 400, "not a complete image"),
        (JPEG, "text/plain", 415, "text/plain"),
        (JPEG, "", 415, "not given"),
        (b"{", "application/json", 400, "not JSON"),
        (b"[" * 100_000, "application/json", 400, "not JSON"),
        (b"\xff\xfe", "application/json", 400, "not JSON"),
        (b"3", "application/json", 400, "neither"),
        (b"{}", "application/json", 400, "no image"),
        (b"[]", "application/json", 400, "list of 1"),
        (json.dumps([TEXT] * (MAX_IMAGES + 1)), "application/json", 400, "list of 1"),
        (b'{"images": 3}', "application/json", 400, "list of 1"),
        (b"[3]", "application/json", 400, "image 0 is not base64: it is a int"),
        (b'["%%"]', "application/json", 400, "image 0 is not base64"),
        (b'[""]', "application/json", 400, "it is empty"),
        (json.dumps({"image": TEXT, "images": [TEXT]}), "application/json", 400, "several kinds"),
        (json.dumps({"image": TEXT, "score": "NaN"}), "application/json", 400, "score"),
        (json.dumps({"image": TEXT, "score": True}), "application/json", 400, "score"),
        (json.dumps({"image": TEXT, "score": 10**400}), "application/json", 400, "score"),
        (json.dumps({"image": TEXT, "score": math.inf}), "application/json", 400, "score"),
        (f'{{"image": "{TEXT}", "score": {"9" * 5000}}}', "application/json", 400, "not JSON"),
        (json.dumps([TEXT, base64.b64encode(b"bad").decode()]), "application/json", 400, "image 1"),
    ],
)
def test_a_bad_request_gets_a_clear_answer(
    server: AppServer, body: bytes | str, kind: str, status: int, said: str
) -> None:
    code, answer = ask(server, body, kind)
    assert code == status
    assert said in answer["error"]
    assert answer["remedy"]
    assert ask(server, b"", "", method="GET", path="/ping")[0] == 200


def test_wrong_paths_methods_and_lengths(server: AppServer) -> None:
    assert ask(server, b"", path="/etc/passwd")[0] == 404
    assert ask(server, b"", path="/invocations/../ping")[0] == 404
    assert ask(server, b"", method="GET")[0] == 405
    assert ask(server, b"", method="DELETE", path="/ping")[1]["remedy"] == "use GET"
    assert ask(server, b"", "", method="HEAD", path="/ping") == (200, None)
    head = b"POST /invocations HTTP/1.1\r\nHost: x\r\nContent-Type: image/jpeg\r\n"
    assert raw(server, head + b"\r\n").startswith(b"HTTP/1.1 411 ")
    assert raw(server, head + b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n").startswith(b"HTTP/1.1 411 ")
    for length in (b"-1", b"ten", b"1e3", "\u0663".encode(), b"9" * 5000):
        assert raw(server, head + b"Content-Length: " + length + b"\r\n\r\n").startswith(b"HTTP/1.1 400 ")
    assert raw(server, head + b"Content-Length: 3\r\nContent-Length: 4\r\n\r\nabcd").startswith(b"HTTP/1.1 400 ")
    expects = b"Expect: 100-continue\r\nContent-Length: 100000000\r\n\r\n"
    assert raw(server, head + expects).startswith(b"HTTP/1.1 413 ")


@pytest.mark.parametrize(
    ("path", "status"),
    [(b"/%00", 404), (b"//", 404), (b"/\xff", 404), (b"/ping%2f", 404), (b"/" + b"x" * 70_000, 414),
     (b"http://localhost/ping", 200), (b"/ping?a=%00&&=", 200)],
)  # fmt: skip
def test_an_odd_address_gets_a_status(server: AppServer, path: bytes, status: int) -> None:
    answer = raw(server, b"GET " + path + b" HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 %d " % status)


@pytest.mark.parametrize(
    ("request_line", "status"),
    [(b"GET //[ HTTP/1.1", 404), (b"GET http://[::1/ping HTTP/1.1", 400), (b"nonsense", 400), (b"GET / HTTP/9.9", 505)],
)
def test_a_malformed_request_line_gets_a_status_and_a_remedy(
    server: AppServer, request_line: bytes, status: int
) -> None:
    with socket.create_connection(("127.0.0.1", server.server_port), timeout=60) as connection:
        connection.sendall(request_line + b"\r\nHost: localhost\r\n\r\n")
        answer = http.client.HTTPResponse(connection)
        answer.begin()
        content = json.loads(answer.read())
    assert answer.status == status
    assert content["error"]
    assert content["remedy"]


@pytest.mark.slow
def test_a_body_of_100_mb_is_refused_without_keeping_it(server: AppServer) -> None:
    before = _peak_mib()
    status, answer = ask(server, bytes(100 * 10**6))  # the 100 MB of this process itself count once
    assert status == 413
    assert "100,000,000 bytes" in answer["error"]
    assert _peak_mib() - before < 150


@pytest.mark.slow
def test_an_image_that_would_fill_the_memory_is_not_decoded(server: AppServer) -> None:
    header = bytearray(PNG)
    header[16:24] = (60_000).to_bytes(4, "big") * 2
    status, answer = ask(server, bytes(header), "image/png")
    assert status == 413
    assert "image 0 is too large" in answer["error"]
    large = base64.b64encode(encoded(".png", np.zeros((5000, 6000, 3), np.uint8))).decode()
    assert ask(server, json.dumps([large, large]), "application/json")[0] == 413


@pytest.mark.slow
def test_fifty_at_once_are_all_answered_and_the_memory_stays_flat(server: AppServer) -> None:
    expected = ask(server, JPEG)
    with ThreadPoolExecutor(50) as clients:
        assert list(clients.map(lambda _: ask(server, JPEG), range(50))) == [expected] * 50
        gc.collect()
        before = _resident_mib()
        answers = list(clients.map(lambda number: ask(server, JPEG if number % 2 else b"bad"), range(100)))
        assert [status for status, _ in answers] == [400, 200] * 50
    gc.collect()
    assert _resident_mib() - before < 50


class Slow:
    """A model that waits, records the sizes of its batches, and fails for black images."""

    def __init__(self) -> None:
        self.batches: list[int] = []
        self.go = threading.Event()

    def detect(
        self, images: list[Pixels], *, score: float | None = None, batch_size: int | None = None
    ) -> list[ImageDetections]:
        self.batches.append(len(images))
        self.go.wait(240)
        if any(not image.any() for image in images):
            raise RuntimeError("black")
        empty = np.zeros((0,), np.float32)
        return [
            ImageDetections(empty.reshape(0, 4), empty, empty.astype(np.int64), image.shape[:2], (), None)
            for image in images
        ]


def test_images_that_wait_are_detected_together_and_one_that_fails_harms_no_other() -> None:
    model = Slow()
    queue = DetectionQueue(model, batch_size=4)
    app = App(DetectionService(queue, source="slow", default_score=0, at_once=MAX_WAITING).routes)
    post = {"content-type": "image/png"}
    bright, black = encoded(".png"), encoded(".png", np.zeros((8, 8, 3), np.uint8))
    requests = [Request("POST", "/invocations", headers=post, body=body) for body in [bright] * 5 + [black]]
    with ThreadPoolExecutor(MAX_WAITING) as clients:
        answers = [clients.submit(app.answer, request) for request in requests]
        more = [clients.submit(app.answer, requests[0]) for _ in range(MAX_WAITING - 6)]
        # The model has its first batch, of one image or more; all others wait.
        while not model.batches or queue._jobs.qsize() + model.batches[0] < MAX_WAITING:
            threading.Event().wait(0.01)
        refused = app.answer(requests[0])
        assert (refused.status, refused.headers["Retry-After"]) == (503, "1")
        model.go.set()
        assert [answer.result().status for answer in answers] == [200] * 5 + [500]
        assert {answer.result().status for answer in more} == {200}
    assert 4 in model.batches
    queue.close()
    assert app.answer(Request("GET", "/ping")).status == 503


def test_a_port_in_use_is_a_clear_error(server: AppServer) -> None:
    with pytest.raises(MaskfleetError, match="cannot listen on"):
        AppServer(server.app, "127.0.0.1", server.server_port)


def test_requests_in_progress_are_answered_before_the_server_ends() -> None:
    started, go = threading.Event(), threading.Event()

    def slow(request: Request) -> Response:
        started.set()
        go.wait(240)
        return Response(200, b"3")

    with AppServer(App({("GET", "/slow"): slow}), "127.0.0.1", 0) as running, ThreadPoolExecutor(2) as others:
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        answer = others.submit(ask, running, b"", "", method="GET", path="/slow")
        assert started.wait(240)
        running.shutdown()
        end = others.submit(running.finish, 240)
        waited = not wait([end], timeout=0.1).done
        go.set()
        assert waited
        end.result(240)
        assert answer.result(240) == (200, 3)
        thread.join()


def test_ipv6_loopback_is_served_too() -> None:
    try:
        running = AppServer(App({}), "::1", 0)
    except MaskfleetError:
        pytest.skip("this machine has no IPv6")
    with running:
        assert running.server_address[0] == "::1"


def _resident_mib() -> float:
    return _status("VmRSS")


def _peak_mib() -> float:
    return _status("VmHWM")


def _status(name: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(f"{name}:"))
