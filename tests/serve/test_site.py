"""The page and its API without a browser: what is described is answered, and what is forbidden is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import cv2
import jsonschema
import numpy as np
import pytest
from numpy.typing import NDArray

from maskfleet.config.run import RunConfig
from maskfleet.data.synthetic.dataset import make_shapes
from maskfleet.errors import ConfigError, DataError
from maskfleet.inference.detector import Detector
from maskfleet.inference.load import load
from maskfleet.model.weights import save_weights
from maskfleet.serve.app import App, Request, RequestError, Response
from maskfleet.serve.batching import DetectionQueue
from maskfleet.serve.detection import DetectionService
from maskfleet.serve.page.guard import own_pages_only
from maskfleet.serve.page.site import SCRIPTS, STATIC, Site
from maskfleet.serve.page.start import checked_token, token_in
from maskfleet.serve.page.validation import open_validation

HOST = {"host": "127.0.0.1:8000"}
RED_AND_BLUE = np.zeros((48, 64, 3), np.uint8)
RED_AND_BLUE[:, :40, 0] = np.arange(40) * 6  # RGB
RED_AND_BLUE[10:30, 30:, 2] = 250


def png(rgb: NDArray[np.uint8] = RED_AND_BLUE) -> bytes:
    return cv2.imencode(".png", rgb[..., ::-1])[1].tobytes()


def get(app: App, path: str, **query: str) -> Response:
    return app.answer(Request("GET", path, query, HOST))


def post(app: App, path: str, body: bytes = b"", kind: str = "image/png", **query: str) -> Response:
    return app.answer(Request("POST", path, query, {**HOST, "content-type": kind}, body))


def said(response: Response) -> str:
    return str(json.loads(response.body)["error"])


@pytest.mark.parametrize(
    ("headers", "allowed"),
    [
        ({"host": "localhost:8000"}, True),
        ({"host": "127.0.0.1"}, True),
        ({"host": "[::1]:9"}, True),
        ({"host": "127.0.0.1:8000", "origin": "http://127.0.0.1:8000"}, True),
        ({"host": "localhost:8000", "sec-fetch-site": "same-origin"}, True),
        ({"host": "localhost:8000", "sec-fetch-site": "none", "sec-fetch-mode": "navigate"}, True),
        ({"host": "localhost:8000", "sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}, True),
        ({}, False),
        ({"host": "attacker.example:8000"}, False),  # DNS rebinding
        ({"host": "localhost.attacker.example"}, False),
        ({"host": "127.0.0.1.nip.io"}, False),
        ({"host": "10.0.0.1"}, False),
        ({"host": "workstation:8000"}, False),
        ({"host": "user@127.0.0.1@attacker.example"}, False),
        ({"host": "[::1"}, False),
        ({"host": "localhost:8000", "origin": "https://attacker.example"}, False),
        ({"host": "localhost:8000", "origin": "http://localhost:9000"}, False),
        ({"host": "localhost:8000", "origin": "null"}, False),
        ({"host": "localhost:8000", "origin": "http://[::1"}, False),
        ({"host": "localhost:8000", "origin": "http://[x]"}, False),
        ({"host": "localhost:8000", "sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors"}, False),
        ({"host": "localhost:8000", "sec-fetch-site": "same-site"}, False),
    ],
)
def test_requests_of_other_sites_are_refused(headers: dict[str, str], allowed: bool) -> None:
    app = App({("GET", "/model"): lambda _: Response(200, b"")}, guard=own_pages_only())
    assert app.answer(Request("GET", "/model", headers=headers)).status == (200 if allowed else 403)


def test_a_name_that_was_given_for_loopback_is_allowed() -> None:
    app = App({("GET", "/"): lambda _: Response(200, b"")}, guard=own_pages_only("Workstation"))
    for name, status in (("workstation:8000", 200), ("localhost", 200), ("attacker.example", 403)):
        assert app.answer(Request("GET", "/", headers={"host": name})).status == status


def test_the_app_of_the_page_has_the_guard(site_app: App) -> None:
    for path in ("/", "/model", "/nothing"):
        assert site_app.answer(Request("GET", path, headers={"host": "attacker.example"})).status == 403


def test_the_files_of_the_page_load_nothing_from_elsewhere(site_app: App) -> None:
    pages = {path: get(site_app, path) for path in ("/", "/api", "/page.css", *(f"/{name}" for name in SCRIPTS))}
    for path, response in pages.items():
        text = response.body.decode()
        assert response.status == 200
        policy = response.headers["Content-Security-Policy"]
        assert "unsafe" not in policy
        assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'")
        shown = re.sub(r"<pre>.*?</pre>", "", text, flags=re.DOTALL)
        assert not re.search(r"https?://|//[a-z]|url\(|@import", shown.replace("// ", "")), path
        assert not re.search(r"innerHTML|insertAdjacent|document\.write|eval\(|new Function", text), path
        assert not re.search(r"<script(?![^>]*src=)|\son\w+=|style=", text), path
    assert {path.name for path in STATIC.glob("*.js")} == set(SCRIPTS)


def test_validation_images_are_found_by_id_alone(site_app: App) -> None:
    listed = json.loads(get(site_app, "/images", start="1", count="2").body)
    assert (listed["total"], len(listed["images"])) == (5, 2)
    one = listed["images"][0]
    shown, small = get(site_app, "/image", id=str(one["id"])), get(site_app, "/thumbnail", id=str(one["id"]))
    for response in (shown, small):
        pixels = cv2.imdecode(np.frombuffer(response.body, np.uint8), cv2.IMREAD_COLOR)
        assert pixels.shape == (one["height"], one["width"], 3)
    for bad in ("", "../../etc/passwd", one["file_name"], "1.5", "1e9", "٣", "9" * 19, "0x10"):
        for path in ("/image", "/thumbnail"):
            assert get(site_app, path, id=bad).status == 400
        assert post(site_app, "/detect-image", id=bad).status == 400
    for missing in ("-1", "0", "9" * 18):
        assert get(site_app, "/image", id=missing).status == 404
        assert f"no image {missing}" in said(post(site_app, "/detect-image", id=missing))
    assert json.loads(get(site_app, "/images", start="-5", count="1").body)["images"]
    assert json.loads(get(site_app, "/images", start="99").body)["images"] == []
    for path in ("/image/../page.js", "/static/page.js", "/../etc/passwd", "/%2e%2e/etc/passwd", "//etc/passwd"):
        assert get(site_app, path).status == 404


def test_a_validation_image_that_is_missing_broken_or_no_jpeg(tmp_path: Path, micro: RunConfig) -> None:
    make_shapes(tmp_path, num_train=1, num_val=3, height=(40, 40), width=(50, 50), num_categories=2, seed=1)
    images = open_validation(micro, str(tmp_path))
    gone, broken, other = (one["id"] for one in images.listed(0, 3))
    paths = {path.stem.lstrip("0"): path for path in (tmp_path / "val").iterdir() if path.suffix == ".jpg"}
    paths[str(gone)].unlink()
    paths[str(broken)].write_bytes(b"<html><script>alert(1)</script>")
    paths[str(other)].write_bytes(png())
    for identity in (gone, broken):
        for read in (images.shown, images.thumbnail):
            with pytest.raises(RequestError, match=f"image {identity} cannot be shown") as caught:
                read(identity)
            assert caught.value.status == 422
    content, kind = images.shown(other)
    assert kind == "image/png"
    assert np.array_equal(cv2.imdecode(np.frombuffer(content, np.uint8), cv2.IMREAD_COLOR)[..., ::-1], RED_AND_BLUE)
    with pytest.raises(DataError):
        open_validation(micro, str(tmp_path / "none"))


def _matches(app: App, path: str, response: Response, method: str = "get") -> Any:
    """The content of a JSON answer, after a comparison with its schema."""
    document = json.loads(get(app, "/openapi.json").body)
    schema = document["paths"][path][method]["responses"]["200"]["content"]["application/json"]["schema"]
    content = json.loads(response.body)
    assert response.status == 200, content
    jsonschema.validate(content, {**schema, "components": document["components"]})
    return content


def test_every_path_of_the_api_is_described(site_app: App) -> None:
    document = json.loads(get(site_app, "/openapi.json").body)
    assert document["openapi"].startswith("3.1")
    described = {(method.upper(), path) for path, methods in document["paths"].items() for method in methods}
    files = {"/", "/api", "/page.css", "/icon.svg", *(f"/{name}" for name in SCRIPTS)}
    assert described == {route for route in site_app.routes if route[1] not in files}
    page = get(site_app, "/api").body.decode()
    assert all(f"{method} {path}" in page for method, path in described)
    for schema in document["components"]["schemas"].values():
        jsonschema.Draft202012Validator.check_schema(schema)
    for path in ("/model", "/images", "/ping"):
        _matches(site_app, path, get(site_app, path))
    model = json.loads(get(site_app, "/model").body)
    assert [(one["id"], one["name"], one["color"]) for one in model["classes"]] == [
        (1, "<b>disc</b>", "#e69f00"),
        (7, "ring", "#56b4e9"),
    ]


@pytest.mark.slow
def test_detections_are_those_of_the_model_and_depend_on_the_order_of_the_channels(
    site_app: App, page_detector: Detector
) -> None:
    answer = _matches(site_app, "/detect", post(site_app, "/detect", png()), "post")
    expected = page_detector.detect(RED_AND_BLUE)
    swapped = page_detector.detect(np.ascontiguousarray(RED_AND_BLUE[..., ::-1]))
    scores = [one["score"] for one in answer["detections"]]
    assert scores == [one["score"] for one in expected.to_coco(0)]
    assert scores != [one["score"] for one in swapped.to_coco(0)], "this image cannot tell RGB from BGR"
    drawn = post(site_app, "/draw", png(), score="0.2")
    shown = cv2.imdecode(np.frombuffer(drawn.body, np.uint8), cv2.IMREAD_COLOR)[..., ::-1]
    assert np.array_equal(shown, page_detector.draw(RED_AND_BLUE, expected[expected.scores > 0.2]))
    assert post(site_app, "/draw", json.dumps({"images": ["", ""]}).encode(), "application/json").status == 400
    identity = json.loads(get(site_app, "/images").body)["images"][0]["id"]
    found = _matches(site_app, "/detect-image", post(site_app, "/detect-image", id=str(identity)), "post")
    image = get(site_app, "/image", id=str(identity))
    assert found == json.loads(post(site_app, "/detect", image.body, image.content_type).body)
    assert json.loads(post(site_app, "/detect-image", id=str(identity), score="1").body)["detections"] == []


def test_weights_without_class_names_are_served_with_numbers(page_detector: Detector, tmp_path: Path) -> None:
    file = tmp_path / "plain.safetensors"
    save_weights(file, page_detector.model.state_dict(), page_detector.run.model)
    detector = load(file, "cpu")
    queue = DetectionQueue(detector, batch_size=1)
    service = DetectionService(queue, source="test", default_score=0.0)
    app = App(Site(detector, service, None, default_score=0.5).routes)
    model = _matches(app, "/model", get(app, "/model"))
    assert [(one["id"], one["name"]) for one in model["classes"]] == [(1, "1"), (2, "2")]
    assert (model["images"], model["default_score"]) == (None, 0.5)
    assert get(app, "/images").status == 404
    queue.close()


def test_a_token_is_made_once_and_only_its_owner_reads_it(tmp_path: Path) -> None:
    file = tmp_path / "new" / "token"
    token = token_in(file)
    assert (token_in(file), len(token) >= 32, file.stat().st_mode & 0o777) == (token, True, 0o600)
    file.chmod(0o640)
    with pytest.raises(ConfigError, match="others can read"):
        token_in(file)
    with pytest.raises(ConfigError, match="cannot be read"):
        token_in(tmp_path)
    for bad in ("short", "x" * 15, "pässwörter sind länger"):
        with pytest.raises(ConfigError, match="fewer than 16"):
            checked_token(bad)
