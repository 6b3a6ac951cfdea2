"""What users give as an image, checked, as the BGR pixels that the model takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from maskfleet.data.files.stored import StoredFile
from maskfleet.data.pipeline.decode import read_image
from maskfleet.errors import DataError


class PilImage(Protocol):
    """The part of a PIL image that is used here; maskfleet does not depend on PIL."""

    def convert(self, mode: str) -> Any: ...


ImageInput = str | Path | StoredFile | NDArray[np.uint8] | PilImage
"""A path, a file of a data set, an RGB array [height, width, 3] of uint8, or a PIL image."""


def bgr_pixels(image: ImageInput, *, max_mpx: float) -> NDArray[np.uint8]:
    """`image` as [H, W, 3] uint8 BGR; arrays are taken to be RGB, PIL images are converted from any mode.

    A file is turned upright as its EXIF data say: people look at the result, and no annotations refer to its pixels as
    they are stored. A file of more than `max_mpx` million pixels is not decoded.
    """
    if isinstance(image, StoredFile):
        return read_image(image, max_mpx=max_mpx, upright=True)
    if isinstance(image, (str, Path)):
        path = Path(image).expanduser()
        if not path.is_file():
            raise DataError(f"there is no image {path}", remedy="check the path")
        return read_image(path, max_mpx=max_mpx, upright=True)
    pixels = np.asarray(image.convert("RGB") if hasattr(image, "convert") else image)
    if pixels.ndim != 3 or pixels.shape[2] != 3 or not pixels.size:
        raise DataError(
            f"an image must be [height, width, 3], but this {type(image).__name__} is {list(pixels.shape)}",
            remedy="give a path, a PIL image or an RGB array; give several images as a list",
        )
    if pixels.dtype != np.uint8:
        raise DataError(
            f"an image must be uint8, 0 to 255, but this {type(image).__name__} is {pixels.dtype}",
            remedy="convert it first: (image * 255).astype(numpy.uint8) if its values are 0 to 1",
        )
    return np.ascontiguousarray(pixels[..., ::-1])
