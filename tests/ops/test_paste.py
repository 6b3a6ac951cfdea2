"""Pasted masks against TensorPack's bitmaps and a loop over pixels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from maskfleet.ops.paste import MASKS_AT_ONCE, Window, paste_mask_window_fast, paste_mask_windows
from reference_masks import paste as slow_paste


def paste_mask_window(mask: np.ndarray, box: np.ndarray, height: int, width: int) -> Window:
    [window] = paste_mask_windows(mask[None], box[None], height, width)
    return window


GOLDENS = Path(__file__).parents[1] / "goldens"
RULES = [paste_mask_window, paste_mask_window_fast]


def bitmap_of(rule: Any, mask: np.ndarray, box: np.ndarray, height: int, width: int) -> np.ndarray:
    """The window that `rule` pastes, in an image of its own -> [height, width]."""
    y0, x0, window = rule(mask, box, height, width)
    bitmap = np.zeros((height, width), dtype=bool)
    bitmap[y0 : y0 + window.shape[0], x0 : x0 + window.shape[1]] = window
    return bitmap


@pytest.fixture(scope="module")
def golden() -> dict[str, np.ndarray]:
    with np.load(GOLDENS / "ops_image.npz", allow_pickle=False) as file:
        return dict(file)


def smooth_mask(seed: int, side: int = 28) -> np.ndarray:
    """Probabilities of a wavy blob that reaches the mask's border -> [side, side]."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[0:side, 0:side] / side
    waves = sum(np.sin(2 * np.pi * (a * x + b * y) + c) for a, b, c in rng.uniform(-2, 2, (4, 3)))
    return (1 / (1 + np.exp(-3 * waves))).astype(np.float32)


def random_boxes(seed: int, num: int, height: int, width: int) -> np.ndarray:
    """Boxes inside the image, on its border, and across it -> [num, 4]."""
    rng = np.random.default_rng(seed)
    boxes = np.sort(rng.uniform(-0.2, 1.2, (num, 2, 2)), axis=1).reshape(num, 4) * [width, height, width, height]
    boxes[::2] = boxes[::2].clip(0, [width, height, width, height])
    return boxes.astype(np.float32)


@pytest.mark.parametrize(
    ("name", "rule"), [("paste_accurate", paste_mask_window), ("paste_fast", paste_mask_window_fast)]
)
def test_bitmaps_are_tensorpacks(golden, name, rule):
    height, width = golden["paste_hw"].tolist()
    expected = np.unpackbits(golden[name], axis=-1, count=width).astype(bool)
    for mask, box, bitmap in zip(golden["paste_masks"], golden["paste_boxes"], expected, strict=True):
        assert np.array_equal(bitmap_of(rule, mask, box, height, width), bitmap)


def test_accurate_bitmaps_equal_the_loop():
    height, width = 37, 53
    boxes = random_boxes(0, 12, height, width)
    masks = [smooth_mask(seed, side=14) for seed in range(12)]
    bitmaps = [bitmap_of(paste_mask_window, mask, box, height, width) for mask, box in zip(masks, boxes, strict=True)]
    assert 0.02 < np.mean(bitmaps) < 0.6
    for mask, box, bitmap in zip(masks, boxes, bitmaps, strict=True):
        assert np.array_equal(bitmap, slow_paste(mask, box, height, width))


def test_many_masks_give_the_windows_that_each_gives_alone():
    height, width, num = 37, 53, 2 * MASKS_AT_ONCE + 3
    boxes = random_boxes(2, num, height, width)
    boxes[3], boxes[MASKS_AT_ONCE] = 5, np.nan  # two that meet no pixel
    masks = np.stack([smooth_mask(seed, side=14) for seed in range(num)])
    windows = list(paste_mask_windows(masks, boxes, height, width))
    assert len(windows) == num
    for mask, box, (top, left, pixels) in zip(masks, boxes, windows, strict=True):
        alone_top, alone_left, alone = paste_mask_window(mask, box, height, width)
        assert (top, left) == (alone_top, alone_left)
        assert np.array_equal(pixels, alone)


@pytest.mark.parametrize("rule", RULES)
def test_a_window_stays_in_the_image_and_close_to_its_box(rule):
    height, width = 60, 80
    for seed, box in enumerate(random_boxes(1, 20, height, width)):
        mask = smooth_mask(seed)
        y0, x0, window = rule(mask, box, height, width)
        assert window.dtype == bool
        assert 0 <= y0 <= y0 + window.shape[0] <= height
        assert 0 <= x0 <= x0 + window.shape[1] <= width
        reach = (box[2:] - box[:2]) / 28 + 2  # half an enlarged cell and a pixel on each side
        assert window.shape[1] <= box[2] - box[0] + reach[0]
        assert window.shape[0] <= box[3] - box[1] + reach[1]


def test_a_full_mask_fills_its_whole_pixel_box():
    full = np.ones((28, 28), dtype=np.float32)
    box = np.array([10.0, 5.0, 38.0, 33.0], dtype=np.float32)
    expected = np.zeros((40, 50), dtype=bool)
    expected[5:33, 10:38] = True
    for rule in RULES:
        assert np.array_equal(bitmap_of(rule, full, box, 40, 50), expected)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("box", [[60, 5, 70, 9], [5, 60, 9, 70], [-30, 5, -20, 9], [5, -30, 9, -20]])
def test_a_box_outside_the_image_pastes_nothing(rule, box):
    mask, corners = np.ones((28, 28), dtype=np.float32), np.array(box, dtype=np.float32)
    assert rule(mask, corners, 40, 50)[2].size == 0


def test_an_empty_box_pastes_nothing_accurately_and_one_pixel_fast():
    mask, box = np.ones((28, 28), dtype=np.float32), np.array([7.2, 3.2, 7.2, 3.2], dtype=np.float32)
    assert paste_mask_window(mask, box, 40, 50)[2].size == 0
    y0, x0, window = paste_mask_window_fast(mask, box, 40, 50)
    assert (y0, x0, window.tolist()) == (3, 7, [[True]])


def test_masks_pasted_together_are_those_pasted_one_by_one():
    height, width = 60, 80
    boxes = np.concatenate([random_boxes(3, 12, height, width), [[5, 5, 5, 9], [np.nan, 1, 5, 9], [90, 1, 95, 9]]])
    masks = np.stack([smooth_mask(seed) for seed in range(len(boxes))])
    together = list(paste_mask_windows(masks, boxes.astype(np.float32), height, width))
    assert len(together) == len(boxes)
    assert [window[2].size for window in together[-3:]] == [0, 0, 0]
    for mask, box, (y0, x0, window) in zip(masks, boxes.astype(np.float32), together, strict=True):
        alone = paste_mask_window(mask, box, height, width)
        assert alone[:2] == (y0, x0)
        assert np.array_equal(alone[2], window)
