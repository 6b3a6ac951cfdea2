"""Run-length masks, against pycocotools."""

from __future__ import annotations

import numpy as np
import pytest
from pycocotools import mask as oracle_mask

from maskfleet.rle import bad_mask, encode_window, rle_pixels


def pasted(y0: int, x0: int, window: np.ndarray, height: int, width: int) -> np.ndarray:
    """The full bitmap, a pixel at a time."""
    bitmap = np.zeros((height, width), np.uint8)
    for row, column in np.argwhere(window):
        if 0 <= y0 + row < height and 0 <= x0 + column < width:
            bitmap[y0 + row, x0 + column] = 1
    return bitmap


def random_window(rng: np.random.Generator, height: int, width: int) -> tuple[int, int, np.ndarray]:
    """A window inside the image, often as tall or as wide as it, of noise, nothing, or everything."""
    h = height if rng.random() < 0.3 else int(rng.integers(0, height + 1))
    w = width if rng.random() < 0.3 else int(rng.integers(0, width + 1))
    y0, x0 = int(rng.integers(0, height - h + 1)), int(rng.integers(0, width - w + 1))
    return y0, x0, rng.random((h, w)) < rng.choice([0.0, 0.1, 0.5, 0.9, 1.0])


def expected_rle(bitmap: np.ndarray) -> dict[str, object]:
    rle = oracle_mask.encode(np.asfortranarray(bitmap))
    return {"size": list(rle["size"]), "counts": rle["counts"].decode("ascii")}


@pytest.mark.parametrize("seed", range(8))
def test_a_window_gives_the_same_string_as_pycocotools_of_the_full_bitmap(seed: int) -> None:
    rng = np.random.default_rng(seed)
    for _ in range(100):
        height, width = int(rng.integers(1, 40)), int(rng.integers(1, 40))
        y0, x0, window = random_window(rng, height, width)
        assert encode_window(y0, x0, window, height, width) == expected_rle(pasted(y0, x0, window, height, width))


def test_a_large_image_needs_long_numbers_and_still_agrees() -> None:
    window = np.random.default_rng(0).random((300, 200)) < 0.5
    bitmap = pasted(2000, 3000, window, 3000, 4000)
    assert encode_window(2000, 3000, window, 3000, 4000) == expected_rle(bitmap)


@pytest.mark.parametrize(("y0", "x0"), [(-3, -2), (6, 5), (-20, 0), (0, 40), (-3, 5)])
def test_what_sticks_out_of_the_image_is_cut_off(y0: int, x0: int) -> None:
    window = np.random.default_rng(1).random((9, 8)) < 0.6
    assert encode_window(y0, x0, window, 10, 11) == expected_rle(pasted(y0, x0, window, 10, 11))


def test_every_mask_that_pycocotools_writes_is_accepted_and_every_shorter_one_refused() -> None:
    rng = np.random.default_rng(3)
    for _ in range(150):
        height, width = int(rng.integers(1, 60)), int(rng.integers(1, 60))
        bitmaps = [pasted(*random_window(rng, height, width), height, width) for _ in range(int(rng.integers(1, 5)))]
        masks = [expected_rle(bitmap) for bitmap in bitmaps]
        sizes = [(height, width)] * len(masks)
        assert bad_mask(masks, sizes) is None
        broken = int(rng.integers(len(masks)))
        masks[broken] = {**masks[broken], "counts": str(masks[broken]["counts"])[:-1]}
        found = bad_mask(masks, sizes)
        assert found is not None
        assert found[0] == broken


@pytest.mark.parametrize("seed", range(4))
def test_decoding_gives_back_the_pixels(seed: int) -> None:
    rng = np.random.default_rng(seed)
    for _ in range(50):
        height, width = int(rng.integers(1, 40)), int(rng.integers(1, 40))
        y0, x0, window = random_window(rng, height, width)
        rle = encode_window(y0, x0, window, height, width)
        assert np.array_equal(rle_pixels(rle), pasted(y0, x0, window, height, width))
        assert np.array_equal(rle_pixels({**rle, "counts": rle["counts"].encode()}), rle_pixels(rle))
