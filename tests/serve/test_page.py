"""The page in real headless Chromium: upload, slider, toggles, downloads, camera, errors as text."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import cv2
import numpy as np
import pytest
from chromium import Page, chromium

from maskfleet.inference.detector import Detector
from maskfleet.rle import encode_window
from maskfleet.serve.app import App
from maskfleet.serve.server import AppServer
from maskfleet.system.web.certificate import self_signed
from maskfleet.system.web.front import protected
from maskfleet.system.web.proxy import PasswordGate

CAMERA = ("--use-fake-device-for-media-stream", "--use-fake-ui-for-media-stream")
EXIF_ROTATED = bytes.fromhex("ffe1 0022 457869660000 4d4d002a00000008 0001 0112 0003 00000001 00060000 00000000")
SHOWN = "Number(document.getElementById('canvas').dataset.shown ?? -1)"
IDLE = "!document.getElementById('stage').classList.contains('busy')"


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory, page_url: str) -> Iterator[Page]:
    folder = tmp_path_factory.mktemp("chromium")
    with chromium(folder / "profile", CAMERA) as opened:
        opened.size(1200, 900)
        opened.downloads_to(folder)
        yield opened


@pytest.fixture
def fresh(page: Page, page_url: str) -> Iterator[Page]:
    """The page, just opened; a test fails if the console shows anything or a request leaves the server."""
    known = len(page.problems)
    page.open(page_url)
    page.wait("document.body.dataset.ready")
    yield page
    assert page.problems[known:] == []
    assert [url for url in page.requests if not url.startswith((page_url, "blob:", "about:"))] == []


@pytest.fixture(scope="module")
def photo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Red on the left, blue on the right, with a name that is no HTML."""
    image = np.zeros((60, 80, 3), np.uint8)
    image[:, :40, 2] = 255  # BGR
    image[:, 40:, 0] = 255
    path = tmp_path_factory.mktemp("photo") / "<i>photo<i>.png"
    path.write_bytes(cv2.imencode(".png", image)[1].tobytes())
    return path


def upload(page: Page, path: Path) -> None:
    page.choose_file("#file", path)
    page.wait(f"{IDLE} && ({SHOWN} >= 0 || !document.getElementById('error').hidden)")


def set_score(page: Page, percent: int) -> None:
    page.run(
        f"(() => {{ const one = document.getElementById('score'); one.value = {percent};"
        " one.dispatchEvent(new Event('input')); })()"
    )


def pixel(page: Page, x: float, y: float) -> list[int]:
    """The color of the drawing at a fraction of its size."""
    script = """(() => {
        const one = document.getElementById("canvas"), copy = document.createElement("canvas").getContext("2d");
        copy.drawImage(one, -Math.floor(one.width * X), -Math.floor(one.height * Y));
        return [...copy.getImageData(0, 0, 1, 1).data];
    })()"""
    return list(page.run(script.replace("X", str(x)).replace("Y", str(y))))


@pytest.mark.slow
def test_upload_slider_and_toggles(fresh: Page, photo: Path, page_detector: Detector) -> None:
    upload(fresh, photo)
    found = page_detector.detect(photo)
    scores = np.array([one["score"] for one in found.to_coco(0)])
    assert fresh.run(SHOWN) == len(scores) > 3
    middle = int(100 * np.median(scores))
    set_score(fresh, middle)
    assert fresh.run(SHOWN) == (scores > middle / 100).sum()
    assert fresh.text("#score-value") == f"{middle / 100:.2f}"
    assert fresh.text("#count") == f"{(scores > middle / 100).sum()} of {len(scores)} objects are shown"
    set_score(fresh, 0)
    of_ring = int((found.category_ids == 7).sum())
    assert "<b>disc</b>" in fresh.text("#classes")
    fresh.run("[...document.querySelectorAll('#classes label')].find(one => one.innerText.includes('disc')).click()")
    assert fresh.run(SHOWN) == of_ring
    fresh.click("#no-classes")
    assert fresh.run(SHOWN) == 0
    assert (pixel(fresh, 0.2, 0.5), pixel(fresh, 0.8, 0.5)) == ([255, 0, 0, 255], [0, 0, 255, 255])
    fresh.click("#all-classes")
    drawn = fresh.run("document.getElementById('canvas').toDataURL()")
    for part in ("masks", "boxes", "labels"):
        fresh.click(f"#show-{part}")
        now = fresh.run("document.getElementById('canvas').toDataURL()")
        assert now != drawn
        drawn = now
    assert "<i>photo<i>.png: 80 × 60 pixels" in fresh.text("#status")


@pytest.mark.slow
def test_hover_shows_what_is_under_the_pointer(fresh: Page, photo: Path) -> None:
    upload(fresh, photo)
    fresh.move_to(*fresh.middle("#canvas"))
    fresh.wait("!document.getElementById('tip').hidden")
    assert ", score 0." in fresh.text("#tip")
    fresh.move_to(5, 5)
    fresh.wait("document.getElementById('tip').hidden")


@pytest.mark.slow
def test_downloads_hold_what_is_shown(fresh: Page, photo: Path, tmp_path: Path, page_detector: Detector) -> None:
    fresh.downloads_to(tmp_path)
    upload(fresh, photo)
    found = page_detector.detect(photo)
    set_score(fresh, int(100 * np.median(found.scores)))
    for button in ("#save-json", "#save-png"):
        fresh.click(button)
    json_file, png_file = None, None
    while json_file is None or png_file is None:
        json_file = next((path for path in tmp_path.glob("*.json") if path.stat().st_size), None)
        png_file = next((path for path in tmp_path.glob("*-detections.png") if path.stat().st_size), None)
        fresh.run("new Promise(done => setTimeout(done, 50))")
    saved = json.loads(json_file.read_text("utf-8"))
    assert (saved["width"], saved["height"]) == (80, 60)
    assert len(saved["detections"]) == fresh.run(SHOWN)
    expected = found.to_coco(0)[0]
    first = saved["detections"][0]
    assert {name: first[name] for name in ("bbox", "score", "category_id", "segmentation")} == {
        name: expected[name] for name in ("bbox", "score", "category_id", "segmentation")
    }
    assert first["category_name"] in ("<b>disc</b>", "ring")
    assert not {"class", "mask", "tinted"} & set(first)  # what the page adds for itself
    picture = cv2.imread(str(png_file))
    assert picture is not None
    assert picture.shape == (480, 640, 3)  # small images are enlarged


@pytest.mark.slow
def test_masks_are_decoded_as_they_were_encoded(fresh: Page) -> None:
    random = np.random.default_rng(0)
    for height, width in ((1, 1), (7, 5), (40, 64), (300, 2)):
        for share in (0.0, 0.03, 0.5, 1.0):
            mask = random.random((height, width)) < share
            rle = encode_window(0, 0, mask, height, width)
            got = fresh.run(
                f"import('/picture.js').then(file => {{ const mask = file.maskFromRuns({json.dumps(rle)});"
                " return {...mask, pixels: [...mask.pixels]}; })"
            )
            whole = np.zeros((height, width), bool)
            rows, columns = slice(got["y"], got["y"] + got["height"]), slice(got["x"], got["x"] + got["width"])
            whole[rows, columns] = np.array(got["pixels"], bool).reshape(got["height"], got["width"])
            assert np.array_equal(whole, mask)


@pytest.mark.slow
def test_a_dropped_file_and_a_validation_image(fresh: Page) -> None:
    fresh.click("#thumbnails button:nth-child(2)")
    fresh.wait(f"{IDLE} && {SHOWN} > 0")
    assert "64 × 64 pixels" in fresh.text("#status")
    assert fresh.run("document.querySelectorAll('#thumbnails button').length") == 5
    assert fresh.text("#range") == "1 to 5 of 5"
    fresh.run(
        """(async () => {
            const source = document.createElement("canvas"), data = new DataTransfer();
            source.width = 33; source.height = 21; source.getContext("2d").fillRect(3, 3, 9, 9);
            const blob = await new Promise(done => source.toBlob(done));
            data.items.add(new File([blob], "dropped.png", {type: "image/png"}));
            document.getElementById("stage").dispatchEvent(
                new DragEvent("drop", {dataTransfer: data, bubbles: true, cancelable: true}));
        })()"""
    )
    fresh.wait("document.getElementById('status').innerText.includes('dropped.png: 33 × 21 pixels')")


@pytest.mark.slow
def test_the_camera_takes_pictures_and_detects_live(fresh: Page) -> None:
    fresh.click("#open-camera")
    fresh.wait("!document.getElementById('camera').hidden && document.getElementById('video').videoWidth")
    fresh.click("#snap")
    fresh.wait(f"{IDLE} && {SHOWN} >= 0")
    assert fresh.text("#status").startswith("camera.jpg: ")
    before = sum("/detect" in url for url in fresh.requests)
    fresh.click("#live")
    while sum("/detect" in url for url in fresh.requests) < before + 3:
        fresh.run("new Promise(done => setTimeout(done, 50))")
    fresh.click("#stop")
    fresh.wait(f"document.getElementById('camera').hidden && {IDLE}")
    assert fresh.run("document.getElementById('video').srcObject") is None


@pytest.mark.slow
def test_a_rotated_photo_is_shown_upright(fresh: Page, tmp_path: Path) -> None:
    image = np.zeros((40, 60, 3), np.uint8)
    image[:, :20] = 255  # on the left as stored: on top when turned by 90 degrees clockwise
    data = cv2.imencode(".jpg", image)[1].tobytes()
    (tmp_path / "rotated.jpg").write_bytes(data[:2] + EXIF_ROTATED + data[2:])
    upload(fresh, tmp_path / "rotated.jpg")
    fresh.click("#no-classes")
    assert "40 × 60 pixels" in fresh.text("#status")
    assert min(pixel(fresh, 0.5, 0.1)[:3]) > 200
    assert max(pixel(fresh, 0.1, 0.6)[:3]) < 50


@pytest.mark.slow
def test_it_works_behind_token_and_tls(site_app: App, photo: Path, tmp_path: Path) -> None:
    certificate, token = self_signed(tmp_path / "certificate", "127.0.0.1"), "a long token"
    with AppServer(site_app, "127.0.0.1", 0) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        front = protected(
            ("127.0.0.1", 0), upstream_port=server.server_port, gate=PasswordGate(token), certificate=certificate
        )
        with front as port, chromium(tmp_path / "profile", ("--ignore-certificate-errors",)) as page:
            page.open(f"https://me:{token.replace(' ', '%20')}@127.0.0.1:{port}/")
            page.wait("document.body.dataset.ready")
            upload(page, photo)
            assert page.run(SHOWN) > 0
            assert page.problems == []
        server.shutdown()
        thread.join()


@pytest.mark.slow
def test_errors_are_text(page: Page, page_url: str, tmp_path: Path) -> None:
    page.open(page_url)
    page.wait("document.body.dataset.ready")
    attack = "<img src=x onerror=alert(1)>"
    files = {
        "page.jpg": (f"<html>{attack}</html>".encode(), "not a JPEG, PNG"),
        "drawing.jpg": (b"<svg xmlns='http://www.w3.org/2000/svg'><script>alert(1)</script></svg>", "not a JPEG, PNG"),
        "empty.jpg": (b"", "The body is empty"),
        "cut.png": (b"\x89PNG\r\n\x1a\n", "not a complete image"),
        f"{attack.replace('/', '')}.jpg": (bytes(20_000_001), "the limit is 20.0 MB"),
    }
    for name, (content, said) in files.items():
        (tmp_path / name).write_bytes(content)
        page.choose_file("#file", tmp_path / name)
        page.wait(f"document.getElementById('error').innerText.includes({json.dumps(said)}) && {IDLE}")
    assert attack in page.text("#error")
    assert page.run("document.querySelector('#error *')") is None
    # The browser itself lists answers of 4xx on the console; nothing else may be there.
    assert all("the server responded with a status of 4" in problem for problem in page.problems)


@pytest.mark.slow
def test_the_commands_of_the_api_page_name_its_own_address(fresh: Page, page_url: str) -> None:
    fresh.open(f"{page_url.rstrip('/')}/api")
    fresh.wait(f"document.querySelector('pre').innerText.includes({json.dumps(page_url.rstrip('/') + '/detect')})")
    assert ":8000" not in fresh.text("main")


@pytest.mark.slow
@pytest.mark.parametrize("dark", [False, True])
def test_it_fits_a_phone_in_light_and_dark(fresh: Page, photo: Path, dark: bool) -> None:
    fresh.size(390, 844, dark=dark)
    upload(fresh, photo)
    assert fresh.run("document.documentElement.scrollWidth") == 390
    background = fresh.run("getComputedStyle(document.body).backgroundColor")
    assert background == ("rgb(14, 18, 23)" if dark else "rgb(245, 246, 248)")
    fresh.size(1200, 900)
