"""Headers of JPEG, PNG, BMP, GIF, WebP, TIFF and PNM files: the fields from which a decoder takes the image's size."""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import BinaryIO

# of files that are packed into shards
IMAGE_SUFFIXES = frozenset(
    {".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".pnm", ".ppm", ".pgm", ".pbm"}
)
JPEG_START, JPEG_END = b"\xff\xd8", b"\xff\xd9"
PNG_START = b"\x89PNG\r\n\x1a\n"
SIZE_MARKERS = {*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC}  # start of frame, any coding
SEQUENTIAL_MARKERS = {0xC0, 0xC1, 0xC9}  # the start of a frame whose scans are not refined by later ones
MAX_JPEG_SCANS = 100  # encoders write 10 or so; a scan of 10 bytes costs the decoder a pass over the image
BARE_MARKERS = {0x01, *range(0xD0, 0xD9)}  # no length follows
PNG_COLOURS = {0: "grey", 2: "colour", 3: "colour", 4: "grey", 6: "colour"}
MAX_HEADER_SEGMENTS = 10_000
MAX_EXIF_BYTES = 1 << 16
MAX_PNG_CHUNKS = 1_000_000
BLOCK_BYTES = 1 << 20
SCAN_BLOCK_BYTES = 1 << 16  # read again after every marker
MAX_TAGS = 4096  # of a TIFF directory; usual are 10 to 40
MAX_PNM_HEADER = 4096  # bytes, comments included
TIFF_TYPES = {1: "B", 3: "H", 4: "I", 16: "Q"}
WIDTH, HEIGHT, BITS, PHOTOMETRIC, ORIENTATION, CHANNELS, EXTRA = 256, 257, 258, 262, 274, 277, 338
TILE_WIDTH, TILE_HEIGHT = 322, 323
CMYK = 5
_MARKER_IN_SCAN = re.compile(rb"\xff[^\x00\xff\xd0-\xd7]")  # neither a byte of pixels nor a restart
_PNM = re.compile(rb"P([1-6])(?:\s|#[^\r\n]*[\r\n])+(\d{1,10})(?:\s|#[^\r\n]*[\r\n])+(\d{1,10})(?:\s+(\d{1,5}))?\s")


@dataclass(frozen=True, slots=True)
class ImageHeader:
    """The properties of an image file that are known without its pixels."""

    width: int
    height: int
    colour: str  # "colour", "grey" or "cmyk"
    bits: int = 8  # per channel
    has_alpha: bool = False
    orientation: int = 1  # EXIF's 1..8; 1 is upright
    is_whole: bool = True  # False: the file is truncated
    tile_pixels: int = 0  # of a tiled TIFF: a decoder allocates a whole tile, however small the image is


class ImageFileError(Exception):
    """The file is not a readable image; the message says why."""


class ImageEmptyError(ImageFileError):
    """The file has no bytes."""


class ImageTooLargeError(ImageFileError):
    """The image has more pixels, or the file more bytes, than the limit."""


def _jpeg(file: BinaryIO) -> ImageHeader:
    file.seek(2)
    orientation, frame, is_single_scan = 1, None, False
    for _ in range(MAX_HEADER_SEGMENTS):
        lead, marker = struct.unpack(">BB", file.read(2))
        if lead != 0xFF:
            raise ImageFileError(f"no JPEG marker at byte {file.tell() - 2}")
        if marker == 0xFF:  # a fill byte
            file.seek(-1, 1)
            continue
        if marker == 0xD9:
            raise ImageFileError("it ends before its pixels begin")
        if marker in BARE_MARKERS:
            continue
        (length,) = struct.unpack(">H", file.read(2))
        if length < 2:
            raise ImageFileError(f"a segment of length {length} at byte {file.tell() - 2}")
        segment = file.read(length - 2)
        if marker == 0xE1 and segment.startswith(b"Exif\0\0"):
            orientation = _exif_orientation(segment[6:])
        elif marker in SIZE_MARKERS:
            if frame is not None:  # which of two sizes a decoder takes is not ours to guess
                raise ImageFileError("its header has two sizes")
            frame = struct.unpack(">BHHB", segment[:6])
            is_single_scan = marker in SEQUENTIAL_MARKERS
        elif marker == 0xDA:
            is_single_scan &= frame is not None and segment[:1] == bytes([frame[3]])
            break
    if frame is None:
        raise ImageFileError("its header has no size")
    if not is_single_scan:
        _expect_few_scans(file)
    bits, height, width, channels = frame
    colour = {1: "grey", 4: "cmyk"}.get(channels, "colour")
    return ImageHeader(width, height, colour, bits, False, orientation, _jpeg_ends(file))


def _expect_few_scans(file: BinaryIO) -> None:
    """ImageFileError if more than MAX_JPEG_SCANS scans follow; `file` is in the first one, and stays there."""
    start, scans = file.tell(), 1
    for _ in range(MAX_HEADER_SEGMENTS):
        marker = _next_marker(file)
        if marker in (None, 0xD9):
            file.seek(start)
            return
        if marker == 0xDA:
            scans += 1
        if scans > MAX_JPEG_SCANS:
            raise ImageFileError(f"it has more than {MAX_JPEG_SCANS} scans: decoding them could take minutes")
        if marker not in BARE_MARKERS:
            length = int.from_bytes(file.read(2), "big")
            file.seek(max(0, length - 2), 1)
    raise ImageFileError(f"it has more than {MAX_HEADER_SEGMENTS:,} segments")


def _next_marker(file: BinaryIO) -> int | None:
    """The next marker among the pixels of a JPEG; `file` is left behind it. None at the end."""
    while block := file.read(SCAN_BLOCK_BYTES):
        match = _MARKER_IN_SCAN.search(block)
        if match is not None:
            file.seek(match.end() - len(block), 1)
            return match[0][1]
        if block.endswith(b"\xff") and len(block) > 1:
            file.seek(-1, 1)  # the marker's second byte is in the next block
    return None


def _jpeg_ends(file: BinaryIO) -> bool:
    """Whether the end marker follows the pixels, where it cannot occur; it is usually in the last bytes of the file."""
    pixels_start = file.tell()
    file.seek(0, 2)
    file.seek(max(pixels_start, file.tell() - 32))
    if JPEG_END in file.read():
        return True
    file.seek(pixels_start)
    last = b""
    while block := file.read(BLOCK_BYTES):
        if JPEG_END in last + block:
            return True
        last = block[-1:]
    return False


def _png(file: BinaryIO) -> ImageHeader:
    file.seek(8)
    length, kind, *frame = struct.unpack(">I4sIIBB3xI", file.read(25))
    if kind != b"IHDR" or length != 13:
        raise ImageFileError("its header has no size")
    width, height, bits, colour_type, _ = frame
    if colour_type not in PNG_COLOURS:
        raise ImageFileError(f"PNG has no colour type {colour_type}")
    orientation, has_alpha, is_whole, end = 1, False, False, _length(file)
    for _ in range(MAX_PNG_CHUNKS):
        chunk = file.read(8)
        if len(chunk) < 8:
            break
        length, kind = struct.unpack(">I4s", chunk)
        after = file.tell() + length + 4
        if after > end:  # OpenCV would allocate its length
            break
        if kind == b"IEND":
            is_whole = True
            break
        if kind == b"IHDR":
            raise ImageFileError("its header has two sizes")
        if kind == b"eXIf":
            orientation = _exif_orientation(file.read(min(length, MAX_EXIF_BYTES)))
        elif kind == b"tRNS":
            has_alpha = True
        file.seek(after)
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


def _bmp(file: BinaryIO) -> ImageHeader:
    file.seek(10)
    offset, size = struct.unpack("<II", file.read(8))
    if size == 12:
        width, height, _, bits = struct.unpack("<HHHH", file.read(8))
        compression = 0
    elif size >= 36:
        width, height, _, bits, compression = struct.unpack("<iiHHI", file.read(16))
    else:
        raise ImageFileError(f"BMP has no header of {size} bytes")
    height = abs(height)  # negative: the top row comes first
    is_whole = True
    if compression in (0, 3):
        is_whole = _length(file) >= offset + (width * bits + 31) // 32 * 4 * height
    return ImageHeader(width, height, "colour", has_alpha=bits == 32, is_whole=is_whole)


def _gif(file: BinaryIO) -> ImageHeader:
    file.seek(6)
    width, height = struct.unpack("<HH", file.read(4))
    return ImageHeader(width, height, "colour")


def _webp(file: BinaryIO) -> ImageHeader:
    file.seek(0)
    _, riff_bytes, form, chunk = struct.unpack("<4sI4s4s4x", file.read(20))
    if form != b"WEBP":
        raise ImageFileError("it is a RIFF file, but not WebP")
    is_whole = _length(file) >= riff_bytes + 8
    data = file.read(10)
    if chunk == b"VP8X":
        flags, width, height = struct.unpack("<I3s3s", data)
        width, height = (int.from_bytes(side, "little") + 1 for side in (width, height))
        return ImageHeader(width, height, "colour", has_alpha=bool(flags & 0x10), is_whole=is_whole)
    if chunk == b"VP8L":
        signature, packed = struct.unpack("<BI", data[:5])
        if signature != 0x2F:
            raise ImageFileError("its WebP data do not begin with their signature")
        width, height = (packed & 0x3FFF) + 1, (packed >> 14 & 0x3FFF) + 1
        return ImageHeader(width, height, "colour", has_alpha=bool(packed >> 28 & 1), is_whole=is_whole)
    if chunk == b"VP8 ":
        signature, width, height = struct.unpack("<3x3sHH", data)
        if signature != b"\x9d\x01\x2a":
            raise ImageFileError("its WebP data do not begin with their signature")
        return ImageHeader(width & 0x3FFF, height & 0x3FFF, "colour", is_whole=is_whole)
    raise ImageFileError(f"WebP has no chunk {chunk!r} at its start")


def _tiff(file: BinaryIO) -> ImageHeader:
    file.seek(0)
    start = file.read(16)
    order = "<" if start[:2] == b"II" else ">"
    (version,) = struct.unpack_from(f"{order}H", start, 2)
    if version == 43:  # BigTIFF
        (first,) = struct.unpack_from(f"{order}Q", start, 8)
        count_form, entry_form = f"{order}Q", f"{order}HHQ8s"
    elif version == 42:
        (first,) = struct.unpack_from(f"{order}I", start, 4)
        count_form, entry_form = f"{order}H", f"{order}HHI4s"
    else:
        raise ImageFileError(f"TIFF has no version {version}")
    if first >= _length(file):
        raise ImageFileError("its TIFF directory is beyond its end")
    tags = _tiff_tags(file, first, order, count_form, entry_form)
    if WIDTH not in tags or HEIGHT not in tags:
        raise ImageFileError("its header has no size")
    channels = tags.get(CHANNELS, 1)
    colour = "cmyk" if tags.get(PHOTOMETRIC) == CMYK else "colour" if channels >= 3 else "grey"
    orientation = tags.get(ORIENTATION, 1)
    bits = tags.get(BITS, 1) if tags.get(BITS, 1) <= 64 else 8
    return ImageHeader(
        tags[WIDTH],
        tags[HEIGHT],
        colour,
        max(bits, 8),
        has_alpha=EXTRA in tags,
        orientation=orientation if 1 <= orientation <= 8 else 1,
        tile_pixels=tags.get(TILE_WIDTH, 0) * tags.get(TILE_HEIGHT, 0),
    )


def _tiff_tags(file: BinaryIO, first: int, order: str, count_form: str, entry_form: str) -> dict[int, int]:
    """The numbers of the first directory; of a tag that occurs twice, the larger one."""
    file.seek(first)
    (count,) = struct.unpack(count_form, file.read(struct.calcsize(count_form)))
    if count > MAX_TAGS:
        raise ImageFileError(f"its TIFF directory has {count} entries")
    size, tags = struct.calcsize(entry_form), dict[int, int]()
    rows = file.read(size * count)
    for index in range(count):
        tag, kind, number, value = struct.unpack_from(entry_form, rows, size * index)
        if kind not in TIFF_TYPES:
            continue
        form = f"{order}{TIFF_TYPES[kind]}"
        if number * struct.calcsize(form) > len(value):  # several values, such as the bits of three channels
            file.seek(struct.unpack(f"{order}{'I' if len(value) == 4 else 'Q'}", value)[0])
            value = file.read(struct.calcsize(form))
        if len(value) >= struct.calcsize(form):
            tags[tag] = max(tags.get(tag, 0), int(struct.unpack_from(form, value)[0]))
    return tags


def _pnm(file: BinaryIO) -> ImageHeader:
    file.seek(0)
    match = _PNM.match(file.read(MAX_PNM_HEADER))
    if match is None:
        raise ImageFileError("its PNM header cannot be read")
    kind, width, height, largest = int(match[1]), int(match[2]), int(match[3]), int(match[4] or 1)
    return ImageHeader(width, height, "colour" if kind in (3, 6) else "grey", 16 if largest > 255 else 8)


def _length(file: BinaryIO) -> int:
    position = file.tell()
    length = file.seek(0, os.SEEK_END)
    file.seek(position)
    return length


FORMATS: tuple[tuple[bytes, Callable[[BinaryIO], ImageHeader]], ...] = (
    (JPEG_START, _jpeg),
    (PNG_START, _png),
    (b"BM", _bmp),
    (b"GIF87a", _gif),
    (b"GIF89a", _gif),
    (b"RIFF", _webp),
    (b"II", _tiff),
    (b"MM", _tiff),
    *((f"P{kind}".encode(), _pnm) for kind in range(1, 7)),
)
