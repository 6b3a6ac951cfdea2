"""The paths of the page and of its API."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import cv2
import numpy as np

from maskfleet import __version__, viz
from maskfleet.html.page import FOLDER as SHELL
from maskfleet.inference.detector import Detector
from maskfleet.serve.app import MAX_BODY_BYTES, Handler, Request, RequestError, Response, json_response
from maskfleet.serve.detection import (
    MAX_IMAGES,
    MAX_REQUEST_MPX,
    DetectionService,
    decoded_images,
    query_of,
)
from maskfleet.serve.page.openapi import description, description_page
from maskfleet.serve.page.validation import ValidationImages

STATIC = Path(__file__).parent / "static"
HTML, CSS, SCRIPT = "text/html; charset=utf-8", "text/css; charset=utf-8", "text/javascript; charset=utf-8"
SCRIPTS = ("api.js", "camera.js", "gallery.js", "origin.js", "page.js", "picture.js")
MAX_LISTED = 200
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob:; "
    "connect-src 'self'; media-src 'self' blob:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cache-Control": "no-store",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(self), microphone=(), geolocation=()",
    "Referrer-Policy": "no-referrer",
    "X-Frame-Options": "DENY",
}


class Site:
    """The handlers of the page of one model; `images` is its validation set, if there is one."""

    def __init__(
        self, detector: Detector, service: DetectionService, images: ValidationImages | None, *, default_score: float
    ) -> None:
        self._detector = detector
        self._service = service
        self._images = images
        self._default_score = default_score

    @property
    def routes(self) -> Mapping[tuple[str, str], Handler]:
        """Every path with its method: what `/openapi.json` describes, and the files of the page."""
        files: dict[str, tuple[bytes, str]] = {
            "/": ((STATIC / "index.html").read_bytes(), HTML),
            "/page.css": ((SHELL / "shell.css").read_bytes() + (STATIC / "page.css").read_bytes(), CSS),
            "/icon.svg": ((STATIC / "icon.svg").read_bytes(), "image/svg+xml"),
            "/api": (description_page().encode(), HTML),
            **{f"/{name}": ((STATIC / name).read_bytes(), SCRIPT) for name in SCRIPTS},
        }
        api: dict[tuple[str, str], Handler] = {
            ("GET", "/model"): self.model,
            ("GET", "/images"): self.images,
            ("GET", "/image"): self.image,
            ("GET", "/thumbnail"): self.thumbnail,
            ("POST", "/detect"): self._service.invocations,
            ("POST", "/detect-image"): self.detect_image,
            ("POST", "/draw"): self.draw,
            ("GET", "/openapi.json"): lambda _: json_response(description()),
            **self._service.routes,
        }
        every = {("GET", path): _file(*content) for path, content in files.items()} | api
        return {route: _with_headers(handler) for route, handler in every.items()}

    def model(self, request: Request) -> Response:
        """What the page must know before the first image."""
        classes = [
            {"id": identity, "name": name, "color": _html_color(viz.color_of(label))}
            for label, (identity, name) in enumerate(self._detector.categories, 1)
        ]
        images = None if self._images is None else {"name": self._images.name, "count": len(self._images)}
        return json_response(
            {
                "source": self._detector.source,
                "device": str(self._detector.device),
                "version": __version__,
                "classes": classes,
                "has_masks": self._detector.run.model.mask,
                "default_score": self._default_score,
                "limits": {"bytes": MAX_BODY_BYTES, "megapixels": MAX_REQUEST_MPX, "images": MAX_IMAGES},
                "images": images,
            }
        )

    def images(self, request: Request) -> Response:
        """Part of the list of validation images."""
        start = _whole(request, "start", default=0)
        count = min(_whole(request, "count", default=24), MAX_LISTED)
        images = self._validation()
        return json_response({"total": len(images), "images": images.listed(max(start, 0), max(count, 0))})

    def image(self, request: Request) -> Response:
        """One validation image."""
        content, kind = self._validation().shown(_whole(request, "id"))
        return Response(200, content, kind)

    def thumbnail(self, request: Request) -> Response:
        """One validation image, small."""
        return Response(200, self._validation().thumbnail(_whole(request, "id")), "image/jpeg")

    def detect_image(self, request: Request) -> Response:
        """The objects in one validation image."""
        data = self._validation().content(_whole(request, "id"))
        with_image = Request(request.method, request.path, request.query, {"content-type": "image/jpeg"}, data)
        return self._service.invocations(with_image)

    def draw(self, request: Request) -> Response:
        """The image of the request with its objects drawn on it, as PNG."""
        query = query_of(request, self._default_score)
        if len(query.images) != 1:
            raise RequestError(400, f"there are {len(query.images)} images", remedy="send one image at a time")
        with self._service.admitted():
            [picture] = decoded_images(query.images)
            [found] = self._service.queue.detect([picture])
            drawn = self._detector.draw(picture, found[found.scores > query.score])
            png = cv2.imencode(".png", np.ascontiguousarray(drawn[..., ::-1]))[1].tobytes()
        return Response(200, png, "image/png")

    def _validation(self) -> ValidationImages:
        if self._images is None:
            raise RequestError(404, "there is no validation set", remedy="start `maskfleet serve` with --data")
        return self._images


def _file(content: bytes, kind: str) -> Handler:
    return lambda _: Response(200, content, kind)


def _with_headers(handler: Handler) -> Handler:
    def answer(request: Request) -> Response:
        response = handler(request)
        return Response(response.status, response.body, response.content_type, {**HEADERS, **response.headers})

    return answer


def _whole(request: Request, name: str, default: int | None = None) -> int:
    """A whole number of the query."""
    text = request.query.get(name, "" if default is None else str(default))
    if not re.fullmatch(r"-?[0-9]{1,18}", text):
        raise RequestError(400, f"{name} is not a whole number", remedy=f"send {name}=1, for example")
    return int(text)


def _html_color(bgr: tuple[int, int, int]) -> str:
    return "#{2:02x}{1:02x}{0:02x}".format(*bgr)
