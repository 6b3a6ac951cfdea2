"""Reads size, channels, bit depth, orientation and completeness of an image file without decoding its pixels.

A file of a kilobyte can announce an image of many gigabytes. What decodes images calls `expect_decodable` first, so no
memory is allocated for such an image.
"""

from __future__ import annotations

import errno
import io
import stat
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO

from maskfleet.config.run import DataConfig
from maskfleet.data.files.stored import ImagePath, StoredFile
from maskfleet.data.image_formats import FORMATS, ImageEmptyError, ImageFileError, ImageHeader, ImageTooLargeError

MAX_FILE_BYTES = 1 << 30  # an uncompressed image of 179 megapixels with 16-bit channels
MAX_IMAGE_MPX = DataConfig().max_image_mpx  # where Pillow refuses an image too; decoded, it takes 537 MB


def read_image_header(path: ImagePath) -> ImageHeader:
    """The header of an image file; ImageFileError if it is not an image, OSError if it cannot be opened."""
    with open_image(path) as file:
        return image_header(file)


@contextmanager
def open_image(path: ImagePath) -> Iterator[BinaryIO]:
    """The file, open to read; ImageFileError if it is a device or a pipe, or has more than MAX_FILE_BYTES."""
    if isinstance(path, StoredFile):
        _expect_readable(path.size)
        yield io.BytesIO(path.read())
        return
    try:
        status = path.stat()
    except ValueError:  # a NUL in its name
        raise FileNotFoundError(errno.ENOENT, "no file can have this name") from None
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, "Is a directory", str(path))
    if not stat.S_ISREG(status.st_mode):
        raise ImageFileError("it is not a regular file")
    _expect_readable(status.st_size)
    with path.open("rb") as file:
        yield file


def _expect_readable(size: int) -> None:
    if size > MAX_FILE_BYTES:
        raise ImageTooLargeError(f"it has {size:,} bytes; the limit is {MAX_FILE_BYTES:,}")


def image_header(file: BinaryIO) -> ImageHeader:
    """The header of an encoded image; ImageFileError if it is none."""
    file.seek(0)
    start = file.read(16)
    if not start:
        raise ImageEmptyError("it is empty")
    for begins, read in FORMATS:
        if start.startswith(begins):
            try:
                header = read(file)
            except struct.error:
                raise ImageFileError("it ends inside its header") from None
            if header.width <= 0 or header.height <= 0:
                raise ImageFileError(f"its header says {header.width} x {header.height} pixels")
            return header
    raise ImageFileError("it is not a JPEG, PNG, BMP, GIF, WebP, TIFF or PNM image")


def expect_decodable(header: ImageHeader, max_mpx: float) -> None:
    """ImageTooLargeError if the image has more than `max_mpx` million pixels."""
    if max(header.width * header.height, header.tile_pixels) > max_mpx * 1e6:
        tile = f", and tiles of {header.tile_pixels:,} pixels" if header.tile_pixels else ""
        raise ImageTooLargeError(
            f"it has {header.width} x {header.height} pixels{tile}; the limit is {max_mpx:g} million pixels"
        )
