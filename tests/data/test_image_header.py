"""Image headers: the size that OpenCV would allocate, read before it does; limits; files that are no images."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import cv2
import numpy as np
import pytest
from coco_files import annotation, coco_tree
from typer.testing import CliRunner

from maskfleet.cli.data import app
from maskfleet.config.base import replaced
from maskfleet.config.run import RunConfig
from maskfleet.data.checks.annotations import check_split
from maskfleet.data.image_formats import SCAN_BLOCK_BYTES, ImageFileError, ImageTooLargeError
from maskfleet.data.image_header import MAX_FILE_BYTES, MAX_IMAGE_MPX, expect_decodable, read_image_header
from maskfleet.data.pipeline.decode import read_image
from maskfleet.data.store.annotations import ImageRules, open_store
from maskfleet.data.store.splits import SplitPaths
from maskfleet.errors import DataError
from maskfleet.inference.images import bgr_pixels

FORMATS = (".jpg", ".png", ".bmp", ".gif", ".webp", ".tif", ".ppm", ".pgm")


def png(width: int, height: int, pixels: bytes = b"") -> bytes:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


def bmp(width: int, height: int, *, size: int = 40, bits: int = 24) -> bytes:
    info = struct.pack("<IiiHHIIiiII", size, width, height, 1, bits, 0, 0, 0, 0, 0, 0)
    return b"BM" + struct.pack("<IHHI", 54, 0, 0, 54) + info


def gif(width: int, height: int) -> bytes:
    return b"GIF89a" + struct.pack("<HHBBB", width, height, 0, 0, 0) + b";"


def webp(width: int, height: int) -> bytes:
    sides = (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
    return b"RIFF" + struct.pack("<I", 22) + b"WEBPVP8X" + struct.pack("<II", 10, 0) + sides


def tiff(width: int, height: int, *, tile: int = 0, order: str = "<") -> bytes:
    rows = [(256, width), (257, height), (258, 8), (277, 1), *([(322, tile), (323, tile)] if tile else [])]
    body = b"".join(struct.pack(f"{order}HHII", tag, 4, 1, value) for tag, value in rows)
    start = b"II*\0" if order == "<" else b"MM\0*"
    return start + struct.pack(f"{order}IH", 8, len(rows)) + body + bytes(4)


def jpeg(width: int, height: int, *, before: bytes = b"") -> bytes:
    frame = struct.pack(">BHHBBBB", 8, height, width, 1, 1, 0x11, 0)
    return b"\xff\xd8" + before + b"\xff\xc0" + struct.pack(">H", len(frame) + 2) + frame + b"\xff\xda\x00\x02\xff\xd9"


BOMBS = {
    "png": png(100_000, 100_000),
    "bmp": bmp(50_000, 50_000),
    "bmp top-down": bmp(50_000, -50_000),
    "gif": gif(65_535, 65_535),
    "webp": webp(1 << 24, 1 << 24),
    "tiff": tiff(1_000_000, 1_000_000),
    "tiff big-endian": tiff(1_000_000, 1_000_000, order=">"),
    "tiff tile": tiff(16, 16, tile=1 << 20),
    "jpeg": jpeg(65_500, 65_500),
    "pgm": b"P5 # a comment\n100000 100000\n255\n\0",
}


def scan_bomb(scans: int, *, grey: bool = False) -> bytes:
    """A progressive JPEG that repeats the header of its last scan, `scans` in all."""
    pixels = np.full((64, 64) if grey else (64, 64, 3), 128, np.uint8)
    data = cv2.imencode(".jpg", pixels, [cv2.IMWRITE_JPEG_PROGRESSIVE, 1])[1].tobytes()
    last = data.rindex(b"\xff\xda")
    length = 2 + int.from_bytes(data[last + 2 : last + 4], "big")
    return data[:-2] + data[last : last + length] * (scans - data.count(b"\xff\xda")) + data[-2:]


def sequential_scans(scans: int, *, after: bytes = b"") -> bytes:
    """A sequential JPEG of three channels, each scan of one."""
    frame = struct.pack(">BHHB9B", 8, 8, 8, 3, 1, 0x11, 0, 2, 0x11, 0, 3, 0x11, 0)
    scan = b"\xff\xda\x00\x08\x01\x01\x00\x00\x3f\x00" + b"pixels\xff\x00\xff\xd0" * 9
    return b"\xff\xd8\xff\xc0" + struct.pack(">H", len(frame) + 2) + frame + scan * scans + b"\xff\xd9" + after


BROKEN = {
    "jpeg segment 0": jpeg(8, 8, before=b"\xff\xe0\x00\x00"),
    "jpeg segment 1": jpeg(8, 8, before=b"\xff\xe1\x00\x01"),
    "jpeg two sizes": jpeg(8, 8, before=jpeg(9, 9)[2:-6]),
    "jpeg of no height": jpeg(8, 0),
    "bmp negative width": bmp(-8, 8),
    "bmp smallest height": bmp(8, -(2**31)),
    "bmp no height": bmp(8, 0),
    "bmp odd header": bmp(8, 8, size=20),
    "bmp cut": bmp(8, 8)[:20],
    "png first chunk": png(8, 8).replace(b"IHDR", b"IDAT"),
    "png cut": png(8, 8)[:20],
    "png zero": png(0, 8),
    "png two sizes": (lambda data: data[:33] + png(30_000, 30_000)[8:33] + data[33:])(png(8, 8)),
    "jpeg scans": scan_bomb(101),
    "jpeg scans of grey": scan_bomb(20_000, grey=True),
    "jpeg sequential scans": sequential_scans(101),
    "tiff no size": b"II*\0" + struct.pack("<IH", 8, 0),
    "tiff far directory": b"II*\0" + struct.pack("<I", 2**31),
    "tiff many tags": b"II*\0" + struct.pack("<IH", 8, 65_535),
    "webp cut": webp(8, 8)[:22],
    "webp other": b"RIFF\0\0\0\0WAVEfmt \0\0\0\0" + bytes(10),
    "gif cut": b"GIF89a\x01",
    "pnm letters": b"P6 a b 255\n",
    "text": b"hello, world, this is not an image",
    "empty": b"",
}


@pytest.mark.parametrize("suffix", FORMATS)
@pytest.mark.parametrize(("height", "width"), [(1, 1), (7, 300), (129, 64)])
def test_the_header_has_the_size_that_opencv_decodes(suffix: str, height: int, width: int, tmp_path: Path) -> None:
    path = tmp_path / f"a{suffix}"
    pixels = np.random.default_rng(0).integers(0, 255, (height, width, 3), np.uint8)
    assert cv2.imwrite(str(path), pixels[..., 0] if suffix == ".pgm" else pixels)
    header = read_image_header(path)
    assert (header.height, header.width) == (height, width)
    assert header.is_whole
    assert read_image(path).shape == (height, width, 3)


@pytest.mark.parametrize("name", list(BOMBS))
def test_an_image_of_too_many_pixels_is_refused_by_its_header(name: str, tmp_path: Path) -> None:
    path = tmp_path / "bomb.img"
    path.write_bytes(BOMBS[name])
    with pytest.raises(ImageTooLargeError, match="pixels"):
        expect_decodable(read_image_header(path), MAX_IMAGE_MPX)
    with pytest.raises(DataError, match=r"bomb\.img is too large.* the limit is 179 million pixels"):
        read_image(path)
    with pytest.raises(DataError, match=r"bomb\.img is too large"):
        bgr_pixels(path, max_mpx=179)


@pytest.mark.parametrize("name", list(BROKEN))
def test_a_broken_header_is_an_error_that_names_the_file(name: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.img"
    path.write_bytes(BROKEN[name])
    with pytest.raises(DataError, match=r"image 3, .*bad\.img, is (not a complete image|too large)"):
        read_image(path, image_id=3)


@pytest.mark.parametrize("name", ["png two sizes", "jpeg two sizes"])
def test_a_second_size_is_found_without_decoding(name: str, tmp_path: Path) -> None:
    (tmp_path / "a.img").write_bytes(BROKEN[name])
    with pytest.raises(ImageFileError, match="two sizes"):
        read_image_header(tmp_path / "a.img")


@pytest.mark.parametrize("suffix", FORMATS)
def test_a_file_cut_anywhere_gives_pixels_or_an_error(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"a{suffix}"
    pixels = np.random.default_rng(0).integers(0, 255, (9, 11, 3), np.uint8)
    assert cv2.imwrite(str(path), pixels[..., 0] if suffix == ".pgm" else pixels)
    data = path.read_bytes()
    for length in range(0, len(data), max(1, len(data) // 40)):
        path.write_bytes(data[:length])
        with suppress(DataError):  # any other error fails the test
            assert read_image(path).shape[2] == 3


@pytest.mark.parametrize("grey", [False, True])
def test_a_jpeg_of_many_scans_is_read_up_to_the_limit(tmp_path: Path, grey: bool) -> None:
    (tmp_path / "a.jpg").write_bytes(scan_bomb(100, grey=grey))
    assert read_image_header(tmp_path / "a.jpg").is_whole
    assert read_image(tmp_path / "a.jpg").shape == (64, 64, 3)
    (tmp_path / "a.jpg").write_bytes(scan_bomb(101, grey=grey))
    with pytest.raises(DataError, match="more than 100 scans"):
        read_image(tmp_path / "a.jpg")


def test_a_jpeg_of_too_many_tables_is_refused(tmp_path: Path) -> None:
    tables = b"\xff\xdb\x00\x02" * 10_001
    (tmp_path / "a.jpg").write_bytes(sequential_scans(1).replace(b"\xff\xd9", tables + b"\xff\xd9"))
    with pytest.raises(ImageFileError, match="more than 10,000 segments"):
        read_image_header(tmp_path / "a.jpg")


def test_what_follows_the_end_of_a_jpeg_or_fills_its_pixels_is_no_scan(tmp_path: Path) -> None:
    path = tmp_path / "a.jpg"
    path.write_bytes(sequential_scans(3, after=b"\xff\xda\x00\x08" * 1000))  # such as the film of a motion photo
    assert read_image_header(path).width == 8
    for padding in range(SCAN_BLOCK_BYTES - 80, SCAN_BLOCK_BYTES - 40):  # a marker across two blocks
        data = sequential_scans(101)
        at = data.index(b"pixels")
        path.write_bytes(data[:at] + bytes(padding) + data[at:])
        with pytest.raises(ImageFileError, match="more than 100 scans"):
            read_image_header(path)


def test_a_file_of_too_many_bytes_a_pipe_and_a_device_are_not_read(tmp_path: Path) -> None:
    sparse = tmp_path / "sparse.png"
    sparse.write_bytes(png(8, 8))
    os.truncate(sparse, MAX_FILE_BYTES + 1)
    with pytest.raises(DataError, match="bytes; the limit is"):
        read_image(sparse)
    os.mkfifo(tmp_path / "pipe.png")
    for path in (tmp_path / "pipe.png", Path("/dev/zero")):
        with pytest.raises(DataError, match="not a regular file"):
            read_image(path)
    with pytest.raises(DataError, match="cannot be read"):
        read_image(tmp_path / "a\0b.png")


def test_a_tiled_tiff_keeps_its_size(tmp_path: Path) -> None:
    (tmp_path / "a.tif").write_bytes(tiff(10, 12, tile=256))
    header = read_image_header(tmp_path / "a.tif")
    assert (header.width, header.height) == (10, 12)


def test_inspection_reports_bombs_and_checks_all_images(write_split: Callable[..., SplitPaths]) -> None:
    split = write_split(coco_tree(annotation(1), annotation(2, image_id=2), images=4))
    (split.images / "2.jpg").write_bytes(BOMBS["png"])
    (split.images / "3.jpg").write_bytes(BROKEN["jpeg segment 0"])
    for decode in (False, True):
        found = {problem.image_id: problem.kind for problem in check_split(open_store(split), decode=decode)}
        assert found == {2: "image-too-large", 3: "image-corrupt"}
    strict = open_store(split, rules=ImageRules(max_mpx=0.001))
    kinds = {problem.kind for problem in check_split(strict) if problem.image_id in (1, 4)}
    assert kinds == {"image-too-large"}


def test_the_limit_is_a_field_of_the_configuration() -> None:
    assert RunConfig().data.max_image_mpx == MAX_IMAGE_MPX
    assert replaced(RunConfig(), {"data.max_image_mpx": 500}).data.max_image_mpx == 500


def test_the_page_of_a_data_set_with_bombs_is_written(write_split: Callable[..., SplitPaths], tmp_path: Path) -> None:
    split = write_split(coco_tree(annotation(1), annotation(2, image_id=2)))
    (split.images / "2.jpg").write_bytes(BOMBS["bmp"])
    files = ["--annotations", str(split.annotations), "--images", str(split.images)]
    result = CliRunner().invoke(app, ["inspect", *files, "--out", str(tmp_path / "page.html")])
    assert result.exit_code == 1, result.exception
    assert "image-too-large" in (tmp_path / "page.html").read_text()


MEASURE = """
import sys
from pathlib import Path
from maskfleet.data.pipeline.decode import read_image
from maskfleet.errors import DataError
def peak_kib():
    # ru_maxrss would count the process that started this one, which may be a large one.
    return int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0])
before = peak_kib()
try:
    read_image(Path(sys.argv[1]), max_mpx=float(sys.argv[2]))
except DataError as error:
    print(error.what)
print(peak_kib() - before)
"""


@pytest.mark.slow
def test_a_bomb_takes_no_memory(tmp_path: Path) -> None:
    side = 15_000
    path = tmp_path / "bomb.png"
    path.write_bytes(png(side, side, zlib.compress(bytes(side * (side + 1)), 1)))
    assert path.stat().st_size < 2_000_000

    def grown_kib(max_mpx: float) -> tuple[list[str], int]:
        argv = [sys.executable, "-c", MEASURE, str(path), str(max_mpx)]
        *lines, kib = subprocess.run(argv, capture_output=True, text=True, check=True).stdout.splitlines()
        return lines, int(kib)

    refused, small = grown_kib(MAX_IMAGE_MPX)
    assert "is too large" in refused[0]
    assert small < 20_000
    decoded, large = grown_kib(300)  # so that the test can fail
    assert decoded == []
    assert large > 500_000


def test_a_png_chunk_that_announces_gigabytes_is_not_given_to_the_decoder(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    assert cv2.imwrite(str(path), np.zeros((8, 8, 3), np.uint8))
    data = path.read_bytes()
    at = data.index(b"IDAT")
    path.write_bytes(data[: at - 4] + struct.pack(">I", 2**31 - 1) + data[at:])
    assert not read_image_header(path).is_whole
    with pytest.raises(DataError, match="its end is missing"):
        read_image(path)
