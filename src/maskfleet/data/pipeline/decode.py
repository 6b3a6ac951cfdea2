"""Decodes an image file to 8-bit BGR pixels."""

from __future__ import annotations

from pathlib import Path

import cv2
import numpy as np
import numpy.typing as npt

from maskfleet.data.image_header import JPEG_END, JPEG_START, ImageFileError, read_image_header
from maskfleet.errors import DataError

# The EXIF orientation is ignored: COCO's boxes refer to the pixels as they are stored.
DECODE_FLAGS = cv2.IMREAD_COLOR | cv2.IMREAD_IGNORE_ORIENTATION


def read_image(
    path: Path, *, image_id: int | None = None, size: tuple[int, int] | None = None
) -> npt.NDArray[np.uint8]:
    """Pixels [h, w, 3] of the image file; DataError if it is missing, broken, or not of (height, width) `size`.

    Grayscale and CMYK become BGR, alpha is dropped, 16 bits are cut to the upper 8.
    `image_id` is None outside a data set.
    """
    named = f"image {image_id}, {path}" if image_id is not None else f"image {path}"
    or_skip = ", or set data.on_bad=skip to train without it" if image_id is not None else ""
    try:
        data = np.fromfile(path, np.uint8)
    except OSError as error:
        raise DataError(
            f"{named}, cannot be read: {error.strerror or error}",
            remedy=f"restore the file{or_skip}",
        ) from error
    pixels = _decoded(data) if len(data) and not _is_truncated(path, data) else None
    if pixels is None:
        what = "is not a complete image that OpenCV can decode" if len(data) else "is empty"
        raise DataError(f"{named}, {what}", remedy=f"replace the file{or_skip}")
    if size is not None and pixels.shape[:2] != size:
        raise DataError(
            f"{named}, is {pixels.shape[0]} x {pixels.shape[1]} (height x width), but the annotations say "
            f"{size[0]} x {size[1]}",
            remedy=f"correct width and height in the annotation file{or_skip}",
        )
    return pixels


def _is_truncated(path: Path, data: npt.NDArray[np.uint8]) -> bool:
    """Whether the end of a JPEG is missing: OpenCV would fill the rest with gray."""
    if data[:2].tobytes() != JPEG_START or JPEG_END in data[-32:].tobytes():
        return False
    try:
        return not read_image_header(path).is_whole
    except (ImageFileError, OSError):
        return True


def _decoded(data: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8] | None:
    """Pixels of an encoded image; None if OpenCV cannot decode it or it exceeds OpenCV's size limit."""
    try:
        pixels = cv2.imdecode(data, DECODE_FLAGS)
    except cv2.error:
        return None
    return None if pixels is None else np.asarray(pixels, np.uint8)
