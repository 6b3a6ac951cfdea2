"""Images as data URIs, so that a page needs no other file."""

from __future__ import annotations

import base64

import cv2
import numpy as np
from numpy.typing import NDArray

JPEG_QUALITY = 85


def data_uri(image: NDArray[np.uint8], *, max_px: int | None = None) -> str:
    """`image` [H, W, 3] BGR as the data URI of a JPEG; shrunk if its longer side exceeds `max_px`."""
    scale = max_px / max(image.shape[:2]) if max_px else 1.0
    if scale < 1:
        image = np.asarray(cv2.resize(image, None, fx=scale, fy=scale, interpolation=cv2.INTER_AREA), np.uint8)
    encoded, jpeg = cv2.imencode(".jpg", image, [cv2.IMWRITE_JPEG_QUALITY, JPEG_QUALITY])
    assert encoded
    return f"data:image/jpeg;base64,{base64.b64encode(jpeg.tobytes()).decode('ascii')}"
