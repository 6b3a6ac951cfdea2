"""A model that answers over HTTP, used as a detector: images go out as files, detections come back as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray

from maskfleet.errors import DataError, LaunchError
from maskfleet.inference.detections import Categories, Result
from maskfleet.inference.draw import drawn_detections
from maskfleet.inference.images import bgr_pixels
from maskfleet.rle import bad_mask
from maskfleet.serve.detection import IMAGE_TYPES, MAX_REQUEST_MPX

Picture = NDArray[np.uint8]
Send = Callable[[bytes, str, str], bytes]  # (body, content type, attributes) -> answer
EVERY_SCORE = "score=0"
MAX_LABEL = 100_000
_BY_CONTENT = "application/x-image"
_TYPES = {".jpg": "image/jpeg", ".jpeg": "image/jpeg", ".png": "image/png"}
_REMEDY = "check its name; the endpoint must run `maskfleet sagemaker serve` of the same version"


@dataclass(frozen=True, slots=True)
class SentImage:
    """An image as it is sent, and its BGR pixels."""

    body: bytes
    content_type: str
    pixels: Picture


@dataclass(frozen=True, slots=True)
class RemoteDetections:
    """The objects that the remote model detected in one image; index it with a mask of booleans."""

    results: tuple[dict[str, Any], ...]  # COCO results with category_name and label

    def __len__(self) -> int:
        return len(self.results)

    def __getitem__(self, chosen: NDArray[np.bool_]) -> RemoteDetections:
        return replace(
            self, results=tuple(one for one, is_chosen in zip(self.results, chosen, strict=True) if is_chosen)
        )

    @property
    def scores(self) -> NDArray[np.float64]:
        return np.array([one["score"] for one in self.results], np.float64)

    @property
    def class_names(self) -> list[str]:
        return [one["category_name"] for one in self.results]

    def to_coco(self, image_id: int) -> list[Result]:
        """COCO results, as those of a detector on this machine."""
        names = ("category_id", "bbox", "score", "segmentation")
        return [{"image_id": image_id} | {name: one[name] for name in names if name in one} for one in self.results]

    @property
    def categories(self) -> Categories:
        """(id, name) by label, as far as they occur here; the others have ids that do not occur."""
        known = {one["label"]: (one["category_id"], one["category_name"]) for one in self.results}
        return [known.get(label, (-label, "")) for label in range(1, max(known, default=0) + 1)]


class RemoteModel:
    """Detects by `send`, with up to `at_once` images on their way; `max_bytes` is the largest that can be sent."""

    max_mpx = MAX_REQUEST_MPX

    def __init__(self, send: Send, *, at_once: int, max_bytes: int, size_remedy: str) -> None:
        self._send, self._max_bytes, self._size_remedy = send, max_bytes, size_remedy
        self._threads = ThreadPoolExecutor(at_once, thread_name_prefix="endpoint")
        self.group = 4 * at_once  # so that most of the time all of `at_once` are on their way

    def read(self, path: Path) -> SentImage:
        """The image file at `path`, checked before it is sent."""
        pixels = bgr_pixels(path, max_mpx=self.max_mpx)
        kind = _TYPES.get(path.suffix.lower(), _BY_CONTENT)
        assert kind in IMAGE_TYPES
        return self._checked(SentImage(path.read_bytes(), kind, pixels), str(path))

    def frame(self, picture: Picture) -> SentImage:
        """An RGB frame of a video, which is sent without loss."""
        pixels = np.ascontiguousarray(picture[..., ::-1])
        body = cv2.imencode(".png", pixels)[1].tobytes()
        return self._checked(SentImage(body, "image/png", pixels), "a frame")

    def start(self, images: Sequence[SentImage]) -> list[Future[RemoteDetections]]:
        """Send `images`; each result is there when its answer has arrived, and raises what was wrong with it."""
        return [self._threads.submit(self._detect, image) for image in images]

    def draw(self, image: SentImage, found: RemoteDetections) -> Picture:
        """`image` with `found` drawn on it, as an RGB array."""
        drawn = drawn_detections(image.pixels, found.to_coco(0), found.categories)
        return np.ascontiguousarray(drawn[..., ::-1])

    def close(self) -> None:
        """Wait for what is on its way, and send nothing more."""
        self._threads.shutdown(cancel_futures=True)

    def _checked(self, image: SentImage, named: str) -> SentImage:
        if len(image.body) > self._max_bytes:
            raise DataError(
                f"{named} has {len(image.body):,} bytes, and the endpoint takes {self._max_bytes:,}",
                remedy=self._size_remedy,
            )
        return image

    def _detect(self, image: SentImage) -> RemoteDetections:
        return parsed_answer(self._send(image.body, image.content_type, EVERY_SCORE), image.pixels.shape[:2])


def parsed_answer(data: bytes, image_size: tuple[int, ...]) -> RemoteDetections:
    """The detections in an answer of `maskfleet sagemaker serve` about an image of `image_size` (height, width)."""
    try:
        answer = json.loads(data)
        if (answer["height"], answer["width"]) != tuple(image_size):
            raise ValueError(f"it is about an image of {answer['height']} x {answer['width']} pixels")
        results = tuple(_result(one) for one in answer["detections"])
        masks = [one["segmentation"] for one in results if "segmentation" in one]
        wrong = bad_mask(masks, [(int(image_size[0]), int(image_size[1]))] * len(masks))
        if wrong is not None:
            raise ValueError(f"mask {wrong[0]}: {wrong[1]}")
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise LaunchError(f"the answer is not that of a maskfleet model: {error}", remedy=_REMEDY) from error
    return RemoteDetections(results)


def _result(given: Any) -> dict[str, Any]:
    """One detection, checked: it is drawn and written, and the answer may come from another program."""
    x, y, width, height = (float(value) for value in given["bbox"])
    label, score = int(given["label"]), float(given["score"])
    if not 1 <= label <= MAX_LABEL or not all(map(math.isfinite, (x, y, width, height, score))):
        raise ValueError(f"label {label}, box {given['bbox']}, score {score}")
    result: dict[str, Any] = {
        "category_id": int(given["category_id"]),
        "bbox": [x, y, width, height],
        "score": score,
        "category_name": str(given["category_name"]),
        "label": label,
    }
    if "segmentation" in given:
        result["segmentation"] = dict(given["segmentation"])
    return result
