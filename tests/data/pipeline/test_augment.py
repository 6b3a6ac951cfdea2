from __future__ import annotations

from collections.abc import Sequence

import cv2
import numpy as np
import pytest

from maskfleet.config.base import replaced
from maskfleet.config.run import RunConfig
from maskfleet.data.pipeline.augment import (
    Augmentation,
    AugmentedImage,
    ColorJitter,
    Flip,
    ResizeShortEdge,
    ScaleJitter,
    augmented,
)
from maskfleet.data.pipeline.build import augmentations
from maskfleet.data.pipeline.geometry import Geometry, place_image


def geometry_of(
    source: tuple[int, int], chain: Sequence[Augmentation], seed: int, *, canvas: tuple[int, int] | None = None
) -> Geometry:
    return augmented(np.zeros((*source, 3), np.uint8), chain, canvas=canvas, seed=seed).geometry


def result_of(image: np.ndarray, *chain: Augmentation) -> AugmentedImage:
    return augmented(image, chain, canvas=None, seed=0)


def placed(image: np.ndarray, geometry: Geometry) -> np.ndarray:
    canvas = np.zeros((*geometry.size, 3), np.uint8)
    place_image(image, geometry, canvas)
    return canvas


def test_the_list_draws_the_eight_numbers_of_its_seed_in_order() -> None:
    """As when all were drawn at once: short edge, flip, scale, crop y, crop x, brightness, contrast, saturation."""
    rng = np.random.default_rng(11)
    drawn = np.concatenate([augmentation.draw(rng) for augmentation in augmentations(RunConfig())])
    np.testing.assert_array_equal(drawn, np.random.default_rng(11).random(8))


@pytest.mark.parametrize("seed", range(8))
def test_an_image_is_augmented_by_the_numbers_of_its_own_seed(seed: int) -> None:
    short_edge, flip, *window, brightness, contrast, saturation = np.random.default_rng(seed).random(8)
    image = np.random.default_rng(1).integers(0, 255, (30, 40, 3), np.uint8)
    settings = {"data.train_short_edge_px": (40, 60), "data.color_jitter": 0.5}
    result = augmented(image, augmentations(replaced(RunConfig(), settings)), canvas=None, seed=seed)
    assert result.geometry.resized[0] == 40 + int(short_edge * 21)
    assert result.geometry.flip == (flip < 0.5)
    jittered = ColorJitter(0.5).apply(result_of(image), np.array([brightness, contrast, saturation]))
    np.testing.assert_array_equal(result.pixels, jittered.pixels)

    settings |= {"data.scale_jitter": (1.5, 2.0)}
    cropped = augmented(image, augmentations(replaced(RunConfig(), settings)), canvas=(30, 40), seed=seed).geometry
    height = int(30 * (1.5 + window[0] * 0.5) + 0.5)
    assert cropped.resized[0] == height
    assert cropped.offset[0] == int(window[1] * (height - 30 + 1))
    assert cropped.flip == result.geometry.flip


def test_no_setting_changes_what_the_others_draw() -> None:
    everything = {"data.train_short_edge_px": (9, 40), "data.scale_jitter": (0.5, 2.0), "data.color_jitter": 0.5}
    rngs = [np.random.default_rng(3), np.random.default_rng(3)]
    for off, on in zip(augmentations(RunConfig()), augmentations(replaced(RunConfig(), everything)), strict=True):
        np.testing.assert_array_equal(off.draw(rngs[0]), on.draw(rngs[1]))


def test_every_short_edge_of_the_range_is_drawn_including_both_ends() -> None:
    resize = ResizeShortEdge((40, 44), 1000)
    assert {geometry_of((100, 200), [resize], seed).resized[0] for seed in range(200)} == {40, 41, 42, 43, 44}


def test_an_image_is_mirrored_as_often_as_asked() -> None:
    def share(probability: float) -> float:
        chain = [ResizeShortEdge((9, 9), 9), Flip(probability)]
        return sum(geometry_of((9, 9), chain, seed).flip for seed in range(400)) / 400

    assert share(0.0) == 0
    assert share(1.0) == 1
    assert abs(share(0.5) - 0.5) < 0.1


def test_the_range_of_short_edges_does_not_change_which_images_are_mirrored() -> None:
    for seed in range(50):
        fixed = geometry_of((9, 12), [ResizeShortEdge((9, 9), 99), Flip(0.5)], seed)
        drawn = geometry_of((9, 12), [ResizeShortEdge((9, 40), 99), Flip(0.5)], seed)
        assert fixed.flip == drawn.flip


@pytest.mark.parametrize("flip", [0.0, 1.0])
def test_scale_jitter_crops_a_window_out_of_the_enlarged_image(flip: float) -> None:
    image = cv2.GaussianBlur(np.random.default_rng(0).integers(0, 255, (60, 90, 3), np.uint8), (9, 9), 0)
    chain = [ResizeShortEdge((9, 9), 99), Flip(flip), ScaleJitter((2.0, 2.0))]
    seen_offsets = set()
    for seed in range(20):
        geometry = geometry_of((60, 90), chain, seed, canvas=(64, 64))
        assert geometry.resized == (85, 128)
        assert geometry.size == (64, 64)
        top, left = geometry.offset
        assert 0 <= top <= 21
        assert 0 <= left <= 64
        seen_offsets.add(geometry.offset)
        window = cv2.resize(image, (128, 85))[top : top + 64, left : left + 64]
        np.testing.assert_array_equal(placed(image, geometry), window[:, ::-1] if flip else window)
    assert len(seen_offsets) > 10


def test_scale_jitter_pads_a_shrunken_image() -> None:
    geometry = geometry_of((60, 90), [ScaleJitter((0.5, 0.5))], 3, canvas=(64, 128))
    # min(64 / 60, 128 / 90) / 2 = 0.5333
    assert (geometry.resized, geometry.size, geometry.offset) == ((32, 48), (32, 48), (0, 0))
    assert not geometry.cropped


def test_color_jitter_of_strength_zero_changes_nothing_and_more_changes_all_three() -> None:
    image = np.random.default_rng(1).integers(0, 255, (16, 16, 3), np.uint8)
    start = result_of(image)
    assert ColorJitter(0.0).apply(start, np.array([0.0, 1.0, 0.3])).pixels is image

    def jittered(brightness: float = 0.5, contrast: float = 0.5, saturation: float = 0.5) -> np.ndarray:
        return ColorJitter(0.4).apply(start, np.array([brightness, contrast, saturation])).pixels

    np.testing.assert_array_equal(jittered(), image)
    assert jittered(brightness=0.0).mean() == pytest.approx(image.mean() * 0.6, rel=0.01)
    flat = jittered(contrast=0.0)
    assert flat.std() == pytest.approx(image.std() * 0.6, rel=0.02)
    gray = jittered(saturation=0.0).astype(float)
    assert gray.std(axis=-1).mean() == pytest.approx(image.std(axis=-1).mean() * 0.6, rel=0.02)
