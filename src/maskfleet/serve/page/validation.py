"""The images of a run's validation set, found by their ids alone: no path comes from a request."""

from __future__ import annotations

import io
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import cv2
import numpy as np

from maskfleet.config.base import replaced
from maskfleet.config.run import RunConfig
from maskfleet.data.image_formats import JPEG_START, ImageFileError
from maskfleet.data.image_header import image_header, open_image
from maskfleet.data.pipeline.decode import decoded_image, read_image, reduction
from maskfleet.data.store.annotations import AnnotationStore, ImageRecord
from maskfleet.data.store.dataset import open_stores, with_found_splits
from maskfleet.errors import DataError, MaskfleetError
from maskfleet.serve.app import MAX_BODY_BYTES, RequestError
from maskfleet.serve.detection import MAX_REQUEST_MPX

THUMBNAIL_PX = 160  # longer side
MAX_THUMBNAILS = 1000  # that are kept; each has a few kilobytes
AT_ONCE = 4  # images that are decoded at the same time


class ValidationImages:
    """Images of one annotation store."""

    def __init__(self, store: AnnotationStore) -> None:
        self._store = store
        self._decoding = threading.BoundedSemaphore(AT_ONCE)  # bounds the memory of decoded images
        self.thumbnail = lru_cache(MAX_THUMBNAILS)(self._new_thumbnail)

    def __len__(self) -> int:
        return len(self._store)

    @property
    def name(self) -> str:
        """The file name of the annotations."""
        return self._store.split.annotations.name

    def listed(self, start: int, count: int) -> list[dict[str, Any]]:
        """Id, name and size of `count` images from number `start` on, by ascending id."""
        store = self._store
        return [
            {
                "id": int(store.image_ids[index]),
                "file_name": store.image_name(index),
                "width": int(store.widths[index]),
                "height": int(store.heights[index]),
            }
            for index in range(start, min(start + count, len(store)))
        ]

    def content(self, image_id: int) -> bytes:
        """The bytes of an image file."""
        record = self._record(image_id)
        with _readable(image_id), open_image(record.path) as file:
            data = file.read(MAX_BODY_BYTES + 1)
        if len(data) > MAX_BODY_BYTES:
            raise RequestError(413, f"image {image_id} has too many bytes", remedy="choose another one")
        return data

    def shown(self, image_id: int) -> tuple[bytes, str]:
        """An image in a format that every browser shows, and its media type."""
        data = self.content(image_id)
        with _readable(image_id), self._decoding:
            image_header(io.BytesIO(data))
            if data.startswith(JPEG_START):
                return data, "image/jpeg"
            pixels = decoded_image(io.BytesIO(data), max_mpx=MAX_REQUEST_MPX, flags=cv2.IMREAD_COLOR)
            return cv2.imencode(".png", pixels)[1].tobytes(), "image/png"

    def _new_thumbnail(self, image_id: int) -> bytes:
        """A small JPEG of an image."""
        record = self._record(image_id)
        reduced = reduction((record.height, record.width), (THUMBNAIL_PX, THUMBNAIL_PX))
        with _readable(image_id), self._decoding:
            pixels = read_image(record.path, max_mpx=MAX_REQUEST_MPX, upright=True, reduced=reduced)
        scale = min(1.0, THUMBNAIL_PX / max(pixels.shape))
        height, width = (max(1, round(side * scale)) for side in pixels.shape[:2])
        small = np.asarray(cv2.resize(pixels, (width, height), interpolation=cv2.INTER_AREA), np.uint8)
        return cv2.imencode(".jpg", small)[1].tobytes()

    def _record(self, image_id: int) -> ImageRecord:
        try:
            return self._store.image(self._store.index_of(image_id))
        except KeyError:
            raise RequestError(
                404, f"the validation set has no image {image_id}", remedy="/images lists those that it has"
            ) from None


def open_validation(run: RunConfig, data: str | None) -> ValidationImages:
    """The images of the first validation set of `run`, below `data` if that is given; DataError if there are none."""
    config = with_found_splits(run if data is None else replaced(run, {"data.root": data}))
    if not config.data.val:
        raise DataError("the run has no validation set", remedy="give data with --data")
    [store] = open_stores(config.data, config.data.val[:1])
    return ValidationImages(store)


@contextmanager
def _readable(image_id: int) -> Iterator[None]:
    """A file that is missing or broken is an error of the request."""
    try:
        yield
    except (OSError, ImageFileError, DataError) as error:
        why = error.what if isinstance(error, MaskfleetError) else str(error)
        raise RequestError(422, f"image {image_id} cannot be shown: {why}", remedy="choose another one") from error
