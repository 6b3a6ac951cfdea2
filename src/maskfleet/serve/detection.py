"""`/ping` and `/invocations`: images in, boxes, classes, scores and masks out."""

from __future__ import annotations

import base64
import binascii
import io
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl

import cv2
import numpy as np

from maskfleet.data.image_formats import ImageFileError, ImageTooLargeError
from maskfleet.data.pipeline.decode import decoded_image
from maskfleet.inference.detections import ImageDetections
from maskfleet.serve.app import JSON, Handler, Request, RequestError, Response, json_response
from maskfleet.serve.batching import DetectionQueue, Pixels

IMAGE_TYPES = ("image/jpeg", "image/png", "application/x-image")
MAX_IMAGES = 64  # in one request
MAX_REQUEST_MPX = 50.0  # of all images of a request together; decoded they take 150 MB
MAX_WAITING = 64  # requests; further ones are told to come back
ATTRIBUTES = "x-amzn-sagemaker-custom-attributes"  # the only header that SageMaker lets clients choose; as a query
_JSON_REMEDY = 'send {"image": BASE64}, {"images": [BASE64, …]} or a list of BASE64'


@dataclass(frozen=True, slots=True)
class Query:
    """What a client asks for."""

    images: list[bytes]  # encoded
    is_batch: bool  # whether the answer is a list
    score: float  # detections must score above this


class DetectionService:
    """The handlers of one model; `default_score` is for clients that do not say which scores they want."""

    def __init__(self, queue: DetectionQueue, *, source: str, default_score: float, at_once: int = 8) -> None:
        self.queue = queue
        self._source = source
        self._default_score = default_score
        self._waiting = threading.BoundedSemaphore(MAX_WAITING)
        self._decoding = threading.BoundedSemaphore(at_once)  # bounds the memory of decoded images

    @property
    def routes(self) -> Mapping[tuple[str, str], Handler]:
        """The paths that SageMaker calls."""
        return {("GET", "/ping"): self.ping, ("POST", "/invocations"): self.invocations}

    def ping(self, request: Request) -> Response:
        """Whether the model answers."""
        if not self.queue.is_alive:
            raise RequestError(503, "the model no longer answers", remedy="restart the server")
        return json_response({"status": "ok", "model": self._source})

    def invocations(self, request: Request) -> Response:
        """The objects in the images of a request."""
        query = query_of(request, self._default_score)
        with self.admitted():
            pictures = decoded_images(query.images)
            found = self.queue.detect(pictures)
            answers = [described(one[one.scores > query.score]) for one in found]
        return json_response(answers if query.is_batch else answers[0])

    @contextmanager
    def admitted(self) -> Iterator[None]:
        """Inside the block a request may decode and detect; it waits for others, or is refused if too many wait."""
        if not self._waiting.acquire(blocking=False):
            raise RequestError(503, f"{MAX_WAITING} requests are waiting", remedy="send it again in a moment")
        try:
            with self._decoding:
                yield
        finally:
            self._waiting.release()


def query_of(request: Request, default_score: float) -> Query:
    """The images and options of a request: an image, or JSON with images in base64."""
    if not request.body:
        raise RequestError(400, "the body is empty", remedy="send an image, or JSON with images in base64")
    attributes = dict(parse_qsl(request.headers.get(ATTRIBUTES, "")))
    if request.content_type in IMAGE_TYPES:
        return Query([request.body], False, _score({**attributes, **request.query}.get("score", default_score)))
    if request.content_type != JSON:
        raise RequestError(
            415,
            f"Content-Type is {request.content_type[:80] or 'not given'}",
            remedy=f"send one of {', '.join((*IMAGE_TYPES, JSON))}",
        )
    return _query_of_json(request.body, attributes.get("score", default_score))


def _query_of_json(body: bytes, default_score: float | str) -> Query:
    try:
        content = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise RequestError(400, f"the body is not JSON: {str(error)[:200]}", remedy=_JSON_REMEDY) from error
    if isinstance(content, list):
        content = {"images": content}
    if not isinstance(content, dict):
        raise RequestError(400, "the JSON is neither an object nor a list", remedy=_JSON_REMEDY)
    known = [name for name in ("image", "images", "img_data") if name in content]
    if len(known) != 1:
        raise RequestError(400, "the JSON has no image, or several kinds of them", remedy=_JSON_REMEDY)
    given, is_batch = content[known[0]], known == ["images"]
    listed = given if is_batch else [given]
    if not isinstance(listed, list) or not 1 <= len(listed) <= MAX_IMAGES:
        raise RequestError(400, f"images is not a list of 1 to {MAX_IMAGES} images", remedy=_JSON_REMEDY)
    images = [_from_base64(one, number) for number, one in enumerate(listed)]
    old_score = content.get("score_threshold", default_score)  # beside `img_data` in AWS Samples' requests
    return Query(images, is_batch, _score(content.get("score", old_score)))


def decoded_images(images: list[bytes]) -> list[Pixels]:
    """RGB pixels of each image, turned upright; an error if they are broken or too large together."""
    pictures, left_mpx = [], MAX_REQUEST_MPX
    for number, data in enumerate(images):
        try:
            picture = decoded_image(io.BytesIO(data), max_mpx=left_mpx, flags=cv2.IMREAD_COLOR)
        except ImageTooLargeError as error:
            raise RequestError(
                413, f"image {number} is too large: {error}", remedy="scale it down, or send fewer at a time"
            ) from error
        except ImageFileError as error:
            raise RequestError(
                400, f"image {number} is not a complete image: {error}", remedy="send a whole JPEG or PNG"
            ) from error
        left_mpx -= picture.shape[0] * picture.shape[1] / 1e6
        pictures.append(np.ascontiguousarray(picture[..., ::-1]))
    return pictures


def described(found: ImageDetections) -> dict[str, Any]:
    """Detections as JSON: COCO results (bbox is x, y, width, height) with names and numbers of their classes."""
    height, width = found.image_size
    results = found.to_coco(image_id=0)
    for result, name, label in zip(results, found.class_names, found.labels.tolist(), strict=True):
        del result["image_id"]
        result |= {"category_name": name, "label": label}
    return {"height": height, "width": width, "detections": results}


def _from_base64(text: object, number: int) -> bytes:
    try:
        if not isinstance(text, str):
            raise ValueError(f"it is a {type(text).__name__}")
        data = base64.b64decode(text.partition(",")[2] if text.startswith("data:") else text, validate=True)
        if not data:
            raise ValueError("it is empty")
    except (ValueError, binascii.Error) as error:
        raise RequestError(400, f"image {number} is not base64: {error}", remedy=_JSON_REMEDY) from error
    return data


def _score(given: object) -> float:
    try:
        score = float(given) if isinstance(given, (str, int, float)) and not isinstance(given, bool) else -1.0
    except (ValueError, OverflowError):  # no number, or an integer of hundreds of digits
        score = -1.0
    if not 0 <= score <= 1:
        raise RequestError(400, "score is not a number from 0 to 1", remedy="send a number such as 0.5, or none")
    return score
