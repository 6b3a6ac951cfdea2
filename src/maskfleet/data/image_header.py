"""Reads size, channels, bit depth, orientation and completeness of an image file without decoding its pixels.

JPEG and PNG need a few hundred bytes each; any other format is decoded.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import cv2
import numpy as np

JPEG_START, JPEG_END = b"\xff\xd8", b"\xff\xd9"
PNG_START = b"\x89PNG\r\n\x1a\n"
SIZE_MARKERS = {*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC}  # start of frame, any coding
PNG_COLOURS = {0: "grey", 2: "colour", 3: "colour", 4: "grey", 6: "colour"}
MAX_HEADER_SEGMENTS = 10_000


@dataclass(frozen=True, slots=True)
class ImageHeader:
    """The properties of an image file that are known without its pixels."""

    width: int
    height: int
    colour: str  # "colour", "grey" or "cmyk"
    bits: int  # per channel
    has_alpha: bool
    orientation: int  # EXIF's 1..8; 1 is upright
    is_whole: bool  # False: the file is truncated


class ImageFileError(Exception):
    """The file is not a readable image; the message says why."""


def read_image_header(path: Path) -> ImageHeader:
    """The header of an image file; ImageFileError if it is not an image, OSError if it cannot be opened."""
    with path.open("rb") as file:
        start = file.read(len(PNG_START))
        if not start:
            raise ImageFileError("it is empty")
        file.seek(0)
        try:
            if start.startswith(JPEG_START):
                return _jpeg(file)
            if start == PNG_START:
                return _png(file)
        except struct.error:
            raise ImageFileError("it ends inside its header") from None
    return _decoded(path)


def _jpeg(file: BinaryIO) -> ImageHeader:
    file.seek(2)
    orientation, frame = 1, None
    for _ in range(MAX_HEADER_SEGMENTS):
        lead, marker = struct.unpack(">BB", file.read(2))
        if lead != 0xFF:
            raise ImageFileError(f"no JPEG marker at byte {file.tell() - 2}")
        if marker == 0xFF:  # a fill byte
            file.seek(-1, 1)
            continue
        if marker == 0xD9:
            raise ImageFileError("it ends before its pixels begin")
        (length,) = struct.unpack(">H", file.read(2))
        segment = file.read(length - 2) if marker == 0xE1 or marker in SIZE_MARKERS else b""
        if not segment:
            file.seek(length - 2, 1)
        if marker == 0xE1 and segment.startswith(b"Exif\0\0"):
            orientation = _exif_orientation(segment[6:])
        elif marker in SIZE_MARKERS:
            frame = struct.unpack(">BHHB", segment[:6])
        elif marker == 0xDA:
            break
    if frame is None:
        raise ImageFileError("its header has no size")
    bits, height, width, channels = frame
    colour = {1: "grey", 4: "cmyk"}.get(channels, "colour")
    return ImageHeader(width, height, colour, bits, False, orientation, _jpeg_ends(file))


def _jpeg_ends(file: BinaryIO) -> bool:
    """Whether the end marker follows the pixels, where it cannot occur; it is usually in the last bytes of the file."""
    pixels_start = file.tell()
    file.seek(0, 2)
    file.seek(max(pixels_start, file.tell() - 32))
    if JPEG_END in file.read():
        return True
    file.seek(pixels_start)
    return JPEG_END in file.read()


def _png(file: BinaryIO) -> ImageHeader:
    file.seek(8)
    orientation, has_alpha, frame = 1, False, None
    for _ in range(MAX_HEADER_SEGMENTS):
        length, kind = struct.unpack(">I4s", file.read(8))
        data = file.read(length) if kind in (b"IHDR", b"eXIf") else b""
        if kind == b"IHDR":
            frame = struct.unpack(">IIBB", data[:10])
        elif kind == b"eXIf":
            orientation = _exif_orientation(data)
        elif kind == b"tRNS":
            has_alpha = True
        if kind == b"IDAT":
            break
        file.seek(length - len(data) + 4, 1)
    if frame is None:
        raise ImageFileError("its header has no size")
    width, height, bits, colour_type = frame
    if colour_type not in PNG_COLOURS:
        raise ImageFileError(f"PNG has no colour type {colour_type}")
    file.seek(0, 2)
    file.seek(max(0, file.tell() - 32))
    is_whole = b"IEND" in file.read()
    return ImageHeader(
        width, height, PNG_COLOURS[colour_type], bits, has_alpha or colour_type >= 4, orientation, is_whole
    )


def _exif_orientation(tiff: bytes) -> int:
    """The orientation tag of EXIF data; 1 (upright) if there is none or the data are invalid."""
    order = {b"II": "<", b"MM": ">"}.get(tiff[:2])
    if order is None:
        return 1
    try:
        (first,) = struct.unpack_from(f"{order}I", tiff, 4)
        (count,) = struct.unpack_from(f"{order}H", tiff, first)
        for entry in range(count):
            tag, _, _, value = struct.unpack_from(f"{order}HHIH", tiff, first + 2 + 12 * entry)
            if tag == 0x0112:
                return value if 1 <= value <= 8 else 1
    except struct.error:
        return 1
    return 1


def _decoded(path: Path) -> ImageHeader:
    pixels = cv2.imread(str(path), cv2.IMREAD_UNCHANGED)
    if pixels is None:
        raise ImageFileError("unknown image format")
    channels = 1 if pixels.ndim == 2 else pixels.shape[2]
    colour = "grey" if channels <= 2 else "colour"
    bits = 8 * np.dtype(pixels.dtype).itemsize
    return ImageHeader(pixels.shape[1], pixels.shape[0], colour, bits, channels in (2, 4), 1, True)
