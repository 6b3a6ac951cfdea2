from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from maskfleet.data.pipeline.buckets import choose_buckets, with_fallback
from maskfleet.errors import ConfigError, DataError

DEFAULT = {"short_edge_px": 800, "max_px": 1344, "divisor": 32}
sides = st.lists(st.tuples(st.integers(1, 4000), st.integers(1, 4000)), min_size=1, max_size=60)


def test_orientation_is_one_landscape_and_one_portrait_canvas() -> None:
    buckets = choose_buckets("orientation", [], [], **DEFAULT)
    assert buckets.canvases == ((800, 1344), (1344, 800))
    assert buckets.of([480, 640, 500, 100], [640, 480, 500, 3000]).tolist() == [0, 1, 0, 0]


def test_without_a_pyramid_the_canvas_is_not_rounded() -> None:
    buckets = choose_buckets("orientation", [], [], short_edge_px=800, max_px=1333, divisor=1)
    assert buckets.canvases == ((800, 1333), (1333, 800))


def test_equal_sides_need_one_canvas_only() -> None:
    assert choose_buckets("orientation", [], [], short_edge_px=512, max_px=512, divisor=32).canvases == ((512, 512),)


def test_tight_canvases_follow_the_aspects_of_the_set() -> None:
    heights = np.array([480] * 60 + [427] * 30 + [640] * 10)
    widths = np.array([640] * 60 + [640] * 30 + [480] * 10)
    buckets = choose_buckets("tight", heights, widths, **DEFAULT)
    # 480 x 640 -> 800 x 1067 -> 1088; 427 x 640 -> 800 x 1199 -> 1216
    assert buckets.canvases == ((800, 1088), (800, 1216), (1088, 800))
    assert np.bincount(buckets.of(heights, widths)).tolist() == [60, 30, 10]
    assert buckets.padded_pixels(heights, widths) == 800 * (1088 * 70 + 1216 * 30)


def test_tight_adds_no_canvas_that_does_not_pay() -> None:
    heights, widths = np.array([480] * 99 + [470]), np.array([640] * 100)
    assert choose_buckets("tight", heights, widths, **DEFAULT).canvases == ((800, 1120),)


@given(sides, st.sampled_from(["orientation", "tight"]), st.sampled_from([1, 32]))
def test_every_image_fits_the_canvas_it_is_given(sizes: list[tuple[int, int]], rule: str, divisor: int) -> None:
    heights, widths = np.array(sizes).T
    buckets = choose_buckets(rule, heights, widths, short_edge_px=800, max_px=1344, divisor=divisor)
    canvases = np.array(buckets.canvases)[buckets.of(heights, widths)]
    assert (buckets.resized(heights, widths) <= canvases).all()
    assert (canvases % divisor == 0).all()
    assert len(buckets.canvases) <= 6
    if rule == "tight":
        plain = choose_buckets("orientation", [], [], short_edge_px=800, max_px=1344, divisor=divisor)
        assert buckets.padded_pixels(heights, widths) <= plain.padded_pixels(heights, widths)


def test_listed_canvases_are_taken_first_fit_and_rounded_up() -> None:
    buckets = choose_buckets([(800, 1000), (800, 1344), (1344, 1344)], [], [], **DEFAULT)
    assert buckets.canvases == ((800, 1024), (800, 1344), (1344, 1344))
    assert buckets.of([600, 480, 640], [600, 640, 480]).tolist() == [0, 1, 2]


def test_an_image_that_fits_no_listed_canvas_is_named_with_its_size() -> None:
    buckets = choose_buckets([(800, 1024)], [], [], **DEFAULT)
    with pytest.raises(DataError, match="480 x 640 is resized to 800 x 1067"):
        buckets.of([600, 480], [600, 640])


def test_evaluation_takes_images_that_fit_no_listed_canvas() -> None:
    buckets = with_fallback(choose_buckets([(800, 1024)], [], [], **DEFAULT))
    assert buckets.canvases == ((800, 1024), (800, 1344), (1344, 800))
    assert buckets.of([600, 480, 640], [600, 640, 480]).tolist() == [0, 1, 2]


def test_without_buckets_a_batch_has_its_own_size() -> None:
    buckets = choose_buckets("none", [], [], **DEFAULT)
    assert buckets.of([480, 640], [640, 480]).tolist() == [0, 1]
    assert buckets.canvas(0, [(800, 1067), (790, 1100)]) == (800, 1120)


def test_a_cropped_image_goes_where_it_is_shown_largest() -> None:
    buckets = choose_buckets("orientation", [], [], **DEFAULT, crops=True)
    assert buckets.of([480, 640, 4000], [640, 480, 100]).tolist() == [0, 1, 1]


def test_large_scale_jitter_needs_a_canvas() -> None:
    with pytest.raises(ConfigError, match="scale_jitter"):
        choose_buckets("none", [], [], **DEFAULT, crops=True)
