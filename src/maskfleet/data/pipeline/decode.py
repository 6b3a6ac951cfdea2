"""Decodes an image file to 8-bit BGR pixels."""

from __future__ import annotations

from typing import BinaryIO

import cv2
import numpy as np
import numpy.typing as npt

from maskfleet.data.files.stored import ImagePath
from maskfleet.data.image_formats import JPEG_END, JPEG_START, ImageFileError, ImageTooLargeError
from maskfleet.data.image_header import MAX_IMAGE_MPX, expect_decodable, image_header, open_image
from maskfleet.errors import DataError

# The EXIF orientation is ignored: COCO's boxes refer to the pixels as they are stored.
DECODE_FLAGS = cv2.IMREAD_COLOR | cv2.IMREAD_IGNORE_ORIENTATION

# Images of more pixels are decoded at a half, a quarter or an eighth of their size if that is no smaller than what they
# are resized to: 16 photos of 12 million pixels would take 580 MB of shared memory.
REDUCED_ABOVE_PX = 4_000_000
_REDUCED_FLAGS = {
    2: cv2.IMREAD_REDUCED_COLOR_2,
    4: cv2.IMREAD_REDUCED_COLOR_4,
    8: cv2.IMREAD_REDUCED_COLOR_8,
}

Pixels = npt.NDArray[np.uint8]


def read_image(
    path: ImagePath,
    *,
    image_id: int | None = None,
    size: tuple[int, int] | None = None,
    max_mpx: float = MAX_IMAGE_MPX,
    upright: bool = False,
    reduced: int = 1,
) -> Pixels:
    """Pixels [h, w, 3] of the image file; DataError if it is missing, broken, or not of (height, width) `size`.

    Grayscale and CMYK become BGR, alpha is dropped, 16 bits are cut to the upper 8. An image of more than `max_mpx`
    million pixels is not decoded. `image_id` is None outside a data set. `upright` turns it as its EXIF data say.
    With `reduced` 2, 4 or 8 the pixels are those of an image smaller by this factor, rounded up.
    """
    named = f"image {image_id}, {path}," if image_id is not None else f"image {path}"
    or_skip = ", or set data.on_bad=skip to train without it" if image_id is not None else ""
    try:
        flags = cv2.IMREAD_COLOR if upright else DECODE_FLAGS
        pixels = decoded_file(path, max_mpx=max_mpx, flags=flags, reduced=reduced)
    except OSError as error:
        raise DataError(
            f"{named} cannot be read: {error.strerror or error}",
            remedy=f"restore the file{or_skip}",
        ) from error
    except ImageTooLargeError as error:
        or_raise = ", or raise data.max_image_mpx" if image_id is not None else ""
        raise DataError(f"{named} is too large: {error}", remedy=f"scale it down{or_raise}{or_skip}") from error
    except ImageFileError as error:
        raise DataError(f"{named} is not a complete image: {error}", remedy=f"replace the file{or_skip}") from error
    if size is not None and pixels.shape[:2] != reduced_size(size, reduced):
        about = "about " if reduced > 1 else ""
        raise DataError(
            f"{named} is {about}{reduced * pixels.shape[0]} x {reduced * pixels.shape[1]} (height x width), but the "
            f"annotations say {size[0]} x {size[1]}",
            remedy=f"correct width and height in the annotation file{or_skip}",
        )
    return pixels


def reduction(source: tuple[int, int], resized: tuple[int, int]) -> int:
    """The factor by which an image of size `source` that will be `resized` is decoded smaller: 1, 2, 4 or 8."""
    if source[0] * source[1] <= REDUCED_ABOVE_PX:
        return 1
    fits = [factor for factor in _REDUCED_FLAGS if all(np.array(reduced_size(source, factor)) >= resized)]
    return max(fits, default=1)


def reduced_size(size: tuple[int, int], factor: int) -> tuple[int, int]:
    """The size of an image that is decoded smaller by `factor`."""
    return -(-size[0] // factor), -(-size[1] // factor)


def decoded_file(
    path: ImagePath, *, max_mpx: float, partly: bool = False, flags: int = DECODE_FLAGS, reduced: int = 1
) -> Pixels:
    """Pixels [h, w, 3] of an image file; ImageFileError or OSError if there are none.

    With `partly`, a truncated JPEG gives the part that exists; the decoder fills the rest with gray. A JPEG is decoded
    smaller by the factor `reduced` at once, which also saves time; other formats are decoded and then averaged.
    """
    with open_image(path) as file:
        return decoded_image(file, max_mpx=max_mpx, partly=partly, flags=flags, reduced=reduced)


def decoded_image(
    file: BinaryIO, *, max_mpx: float, partly: bool = False, flags: int = DECODE_FLAGS, reduced: int = 1
) -> Pixels:
    """Pixels of an encoded image, as `decoded_file` returns them."""
    header = image_header(file)
    expect_decodable(header, max_mpx)
    file.seek(0)
    data = np.frombuffer(file.read(), np.uint8)
    is_jpeg = data[:2].tobytes() == JPEG_START
    is_cut_jpeg = not header.is_whole and is_jpeg
    if reduced > 1 and is_jpeg:
        flags |= _REDUCED_FLAGS[reduced]
    if not header.is_whole and not (partly and is_cut_jpeg):
        raise ImageFileError("its end is missing")
    pixels = decoded(data, flags)
    if pixels is None and is_cut_jpeg:
        # With an end marker, the decoder returns what exists.
        pixels = decoded(np.append(data, np.frombuffer(JPEG_END, np.uint8)), flags)
    if pixels is None:
        raise ImageFileError("OpenCV cannot decode it")
    if reduced > 1 and not is_jpeg:
        height, width = reduced_size((pixels.shape[0], pixels.shape[1]), reduced)
        return np.asarray(cv2.resize(pixels, (width, height), interpolation=cv2.INTER_AREA), np.uint8)
    return pixels


def decoded(data: npt.NDArray[np.uint8], flags: int = DECODE_FLAGS) -> Pixels | None:
    """Pixels of an encoded image; None if OpenCV cannot decode it or it exceeds OpenCV's size limit."""
    try:
        pixels = cv2.imdecode(data, flags)
    except cv2.error:
        return None
    return None if pixels is None else np.asarray(pixels, np.uint8)
