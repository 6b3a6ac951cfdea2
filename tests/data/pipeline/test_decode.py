from __future__ import annotations

from pathlib import Path

import cv2
import numpy as np
import pytest
from PIL import Image

from maskfleet.data.pipeline.decode import read_image
from maskfleet.errors import DataError

SMOOTH = cv2.resize(np.random.default_rng(0).integers(30, 220, (4, 6, 3), np.uint8), (60, 40))  # BGR


def saved(path: Path, pixels: np.ndarray) -> Path:
    assert cv2.imwrite(str(path), pixels)
    return path


def test_colour_comes_out_as_bgr(tmp_path: Path) -> None:
    pixels = read_image(saved(tmp_path / "a.png", SMOOTH), image_id=1, size=(40, 60))
    np.testing.assert_array_equal(pixels, SMOOTH)


def test_grey_is_repeated_over_three_channels(tmp_path: Path) -> None:
    grey = SMOOTH[..., 0]
    pixels = read_image(saved(tmp_path / "a.png", grey), image_id=1)
    np.testing.assert_array_equal(pixels, np.stack([grey] * 3, axis=-1))


def test_alpha_is_dropped(tmp_path: Path) -> None:
    with_alpha = np.concatenate([SMOOTH, np.full((40, 60, 1), 7, np.uint8)], axis=-1)
    pixels = read_image(saved(tmp_path / "a.png", with_alpha), image_id=1)
    np.testing.assert_array_equal(pixels, SMOOTH)


def test_sixteen_bits_are_cut_to_the_upper_eight(tmp_path: Path) -> None:
    deep = SMOOTH.astype(np.uint16) * 256 + 200
    pixels = read_image(saved(tmp_path / "a.png", deep), image_id=1)
    assert pixels.dtype == np.uint8
    assert np.abs(pixels.astype(int) - SMOOTH).max() <= 1


def test_cmyk_becomes_bgr(tmp_path: Path) -> None:
    Image.fromarray(SMOOTH[..., ::-1].copy()).convert("CMYK").save(tmp_path / "a.jpg", quality=98)
    pixels = read_image(tmp_path / "a.jpg", image_id=1)
    assert np.abs(pixels.astype(int) - SMOOTH).mean() < 4


def test_exif_orientation_is_ignored(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.fromarray(SMOOTH[..., ::-1].copy()).save(tmp_path / "a.jpg", quality=98, exif=exif)
    pixels = read_image(tmp_path / "a.jpg", image_id=1, size=(40, 60))
    assert np.abs(pixels.astype(int) - SMOOTH).mean() < 4


def test_a_missing_file_is_named_with_its_image_id(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"image 42, .*gone\.jpg, cannot be read: No such file"):
        read_image(tmp_path / "gone.jpg", image_id=42)


@pytest.mark.parametrize("content", [b"", b"not an image", b"\xff\xd8\xff\xd9"])
def test_a_broken_file_is_named_with_its_image_id(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "bad.jpg").write_bytes(content)
    with pytest.raises(DataError, match=r"image 42, .*bad\.jpg, is "):
        read_image(tmp_path / "bad.jpg", image_id=42)


def test_a_truncated_jpeg_is_refused_though_opencv_would_fill_it_up(tmp_path: Path) -> None:
    path = saved(tmp_path / "a.jpg", SMOOTH)
    data = path.read_bytes()
    path.write_bytes(data[: len(data) * 2 // 3])
    with pytest.raises(DataError, match="not a complete image"):
        read_image(path, image_id=1)


def test_bytes_after_the_end_of_a_jpeg_do_no_harm(tmp_path: Path) -> None:
    path = saved(tmp_path / "a.jpg", SMOOTH)
    clean = read_image(path, image_id=1)
    path.write_bytes(path.read_bytes() + bytes(100))
    np.testing.assert_array_equal(read_image(path, image_id=1), clean)


def test_a_size_unlike_the_annotations_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path / "a.png", SMOOTH)
    with pytest.raises(DataError, match=r"is 40 x 60 .* say 60 x 40"):
        read_image(path, image_id=1, size=(60, 40))
