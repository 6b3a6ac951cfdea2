"""Shapes: V points, N boxes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from maskfleet.data.pipeline.geometry import (
    Geometry,
    clip_boxes,
    clip_polygon,
    move_boxes,
    move_points,
    place_image,
    resize_geometry,
    resized_sizes,
)

GOLDEN = np.load(Path(__file__).parents[2] / "goldens" / "ops_image.npz", allow_pickle=False)


def golden_image(height: int, width: int, seed: int) -> np.ndarray:
    """The picture that the goldens' README describes, float32 BGR."""
    y, x = np.arange(height)[:, None, None], np.arange(width)[None, :, None]
    c, s = np.arange(3)[None, None], float(seed)
    value = np.sin(0.045 * x * (1 + 0.3 * c) + 0.9 * s) * np.cos(0.06 * y - 0.5 * c + 0.37 * s)
    value = value + 0.6 * np.sin(0.23 * x + 0.19 * y + 1.7 * c + s)
    value = value + 0.5 * np.sign(np.sin(0.031 * x - 0.05 * y + 0.8 * s)) * np.cos(0.02 * (x + y) + c)
    return np.clip(127.5 + 60 * value, 0, 255).astype(np.float32)


def placed(image: np.ndarray, geometry: Geometry) -> np.ndarray:
    canvas = np.zeros((*geometry.size, 3), np.uint8)
    place_image(image, geometry, canvas)
    return canvas


def test_resized_sizes_are_tensorpacks() -> None:
    table = GOLDEN["resize_table"]
    for columns, max_px in ((slice(2, 4), 1333), (slice(4, 6), 1344)):
        sizes = resized_sizes(table[:, 0], table[:, 1], short_edge_px=800, max_px=max_px)
        np.testing.assert_array_equal(sizes, table[:, columns])


def test_a_resized_image_is_tensorpacks_to_the_pixel() -> None:
    height, width, seed = GOLDEN["resize_src_spec"].tolist()
    image = golden_image(height, width, seed)
    geometry = resize_geometry((height, width), short_edge_px=64, max_px=1344)
    moved = placed(image.astype(np.uint8), geometry)
    np.testing.assert_array_equal(moved, GOLDEN["resized_u8"])
    # TensorPack trains on float pixels; ours are whole numbers: at most one truncation and one rounding apart.
    assert np.abs(moved - GOLDEN["resized_f32"]).max() < 2


def test_resized_and_flipped_boxes_are_tensorpacks() -> None:
    geometry = resize_geometry((80, 100), short_edge_px=160, max_px=1344, flip=True)
    moved = move_boxes(GOLDEN["paste_boxes"], geometry)
    np.testing.assert_allclose(moved, GOLDEN["boxes_resized_flipped"], rtol=0, atol=1e-4)


def test_flip_mirrors_pixels_and_points_alike() -> None:
    image = np.zeros((20, 30, 3), np.uint8)
    image[4:7, 2:9] = 255
    geometry = Geometry((20, 30), (20, 30), (0, 0), (20, 30), flip=True)
    moved = placed(image, geometry)
    box = move_boxes(np.array([[2.0, 4.0, 9.0, 7.0]]), geometry)
    np.testing.assert_array_equal(box, [[21, 4, 28, 7]])
    assert moved[4:7, 21:28].min() == 255
    assert moved.sum() == image.sum()


def test_points_follow_the_pixels_through_a_crop_and_a_flip() -> None:
    geometry = Geometry((50, 100), (100, 200), (10, 30), (60, 80), flip=True)
    moved = move_points(np.array([[20.0, 10.0]]), geometry)
    np.testing.assert_array_equal(moved, [[80 - (40 - 30), 20 - 10]])
    image = np.zeros((50, 100, 3), np.uint8)
    image[9:12, 19:22] = 255
    weight = placed(image, geometry)[..., 0].astype(float)
    y, x = (float((grid * weight).sum() / weight.sum()) + 0.5 for grid in np.mgrid[:60, :80])
    np.testing.assert_allclose([[x, y]], move_points(np.array([[20.5, 10.5]]), geometry), atol=0.01)


def test_clip_boxes_keeps_only_what_is_a_pixel_wide() -> None:
    boxes = np.array([[-5, -5, 3, 4], [8, 2, 14, 6], [9.5, 0, 20, 5], [12, 0, 15, 3]], np.float32)
    clipped, keep = clip_boxes(boxes, (8, 10))
    assert keep.tolist() == [True, True, False, False]
    np.testing.assert_array_equal(clipped[:2], [[0, 0, 3, 4], [8, 2, 10, 6]])


def test_clip_polygon_of_a_triangle_over_a_corner() -> None:
    clipped = clip_polygon(np.array([[-4.0, 2.0], [4.0, 2.0], [4.0, 10.0]]), (8, 8))
    assert {tuple(point) for point in clipped.tolist()} == {(0, 2), (4, 2), (4, 8), (2, 8), (0, 6)}


def test_clip_polygon_agrees_with_a_raster_on_random_triangles() -> None:
    rng = np.random.default_rng(5)
    y, x = (grid + 0.5 for grid in np.mgrid[-40:80, -40:80].astype(float))
    for _ in range(50):
        a, b, c = corners = rng.uniform(-30, 70, (3, 2))
        turns = [
            (q[0] - p[0]) * (y - p[1]) - (q[1] - p[1]) * (x - p[0]) for p, q in ((a, b), (b, c), (c, a))
        ]  # fmt: skip
        inside = np.all([turn > 0 for turn in turns], axis=0) | np.all([turn < 0 for turn in turns], axis=0)
        seen = inside & (x > 0) & (x < 40) & (y > 0) & (y < 32)
        clipped = clip_polygon(corners, (32, 40))
        if seen.any():
            bounds = [x[seen].min(), y[seen].min(), x[seen].max(), y[seen].max()]
            found = [*clipped.min(axis=0), *clipped.max(axis=0)]
            assert found[0] <= bounds[0]
            assert found[1] <= bounds[1]
            assert found[2] >= bounds[2]
            assert found[3] >= bounds[3]
            assert _area(clipped) == pytest.approx(seen.sum(), abs=45)  # the border's pixels
        else:
            assert _area(clipped) < 45


def _area(points: np.ndarray) -> float:
    x, y = points[:, 0], points[:, 1]
    return abs(float((x * np.roll(y, -1) - y * np.roll(x, -1)).sum())) / 2
