"""Drawings, by facts about their pixels."""

from __future__ import annotations

import numpy as np
import pytest

from maskfleet.viz import BACKGROUND, FILL, PALETTE, color_of, draw, grid


def grey(height: int = 200, width: int = 300, value: int = 100) -> np.ndarray:
    return np.full((height, width, 3), value, np.uint8)


def disc(height: int = 200, width: int = 300, centre: tuple[int, int] = (120, 150), radius: int = 40) -> np.ndarray:
    rows, columns = np.mgrid[:height, :width]
    return (rows - centre[0]) ** 2 + (columns - centre[1]) ** 2 <= radius**2


DISC_BOX = np.array([[110, 80, 191, 161]], np.float32)


def tinted(value: int, label: int) -> list[int]:
    return [round(value * (1 - FILL) + channel * FILL) for channel in color_of(label)]


def test_a_mask_is_tinted_inside_and_the_rest_is_untouched() -> None:
    image = grey()
    out = draw(image, DISC_BOX, [1], [0.9], masks=[disc()], names=["disc"])
    assert out[120, 150].tolist() == tinted(100, 1)
    np.testing.assert_array_equal(image, grey())
    far = np.ones((200, 300), bool)
    far[50:165, 106:230] = False  # box, outline and tag
    np.testing.assert_array_equal(out[far], image[far])
    assert (out[90, 112] == 100).all()  # inside the box, outside the disc


def test_a_mask_has_an_outline_in_its_full_colour() -> None:
    out = draw(grey(), DISC_BOX, [2], masks=[disc()])
    assert np.abs(out[120, 110].astype(int) - color_of(2)).max() <= 40  # the leftmost pixel of the disc
    assert out[120, 150].tolist() == tinted(100, 2)


def test_a_window_draws_the_same_as_the_full_mask() -> None:
    full = disc()
    whole = draw(grey(), DISC_BOX, [1], [0.9], masks=[full])
    np.testing.assert_array_equal(draw(grey(), DISC_BOX, [1], [0.9], masks=[(80, 110, full[80:161, 110:191])]), whole)


def test_a_window_may_stick_out_of_the_image() -> None:
    out = draw(grey(40, 40), np.array([[0, 0, 10, 10]]), [1], masks=[(-5, -5, np.ones((20, 20), bool))])
    assert out[11, 11].tolist() == tinted(100, 1)
    assert (out[30:, 30:] == 100).all()


def test_small_masks_lie_on_large_ones() -> None:
    boxes = np.array([[130, 100, 171, 141], [0, 0, 300, 200]])
    small = disc(radius=20)
    for order in ([0, 1], [1, 0]):
        masks = [[small, np.ones((200, 300), bool)][i] for i in order]
        out = draw(grey(), boxes[order], [[1, 2][i] for i in order], masks=masks)
        large = tinted(100, 2)
        assert out[120, 150].tolist() == [
            round(b * (1 - FILL) + c * FILL) for b, c in zip(large, color_of(1), strict=True)
        ]


def test_a_box_is_drawn_on_its_edge() -> None:
    out = draw(grey(), np.array([[50, 60, 150, 160]]), [3])
    for row, column in ((110, 50), (110, 149), (159, 100)):
        assert out[row, column].tolist() == list(color_of(3))
    assert (out[110, 100] == 100).all()


CORNERS = [(0, 0, 20, 20), (580, 0, 600, 20), (0, 380, 20, 400), (580, 380, 600, 400), (0, 0, 600, 400)]


def num_ink(image: np.ndarray) -> int:
    """Dark pixels: the letters of tags whose colour is light."""
    return int((image.sum(axis=-1) < 120).sum())


@pytest.mark.parametrize("box", CORNERS)
def test_a_tag_stays_whole_inside_the_image(box: tuple[int, int, int, int]) -> None:
    in_the_middle = draw(grey(400, 600), np.array([[200, 200, 210, 210]]), [1], [0.5], names=["traffic light"])
    at_the_edge = draw(grey(400, 600), np.array([box]), [1], [0.5], names=["traffic light"])
    assert num_ink(in_the_middle) > 100
    assert num_ink(at_the_edge) == pytest.approx(num_ink(in_the_middle), abs=3)


def test_a_tag_wider_than_the_image_is_cut_to_it() -> None:
    out = draw(grey(60, 64), np.array([[5, 30, 20, 50]]), [1], [0.5], names=["a name of very many letters"])
    columns = (out == color_of(1)).all(axis=-1).any(axis=0)
    assert 50 < columns.sum() <= 64
    assert num_ink(out) > 5


def test_tags_of_boxes_at_one_place_do_not_cover_each_other() -> None:
    one = draw(grey(400, 600), np.array([[200, 200, 210, 210]]), [1], [0.5], names=["cat"])
    two = draw(grey(400, 600), np.array([[200, 200, 210, 210]] * 2), [1, 1], [0.5, 0.5], names=["cat"])
    assert num_ink(one) > 50
    assert num_ink(two) == pytest.approx(2 * num_ink(one), abs=3)


def test_the_same_input_gives_the_same_pixels() -> None:
    rng = np.random.default_rng(0)
    corner = rng.uniform(0, 150, (20, 2))
    boxes = np.concatenate([corner, corner + rng.uniform(5, 100, (20, 2))], axis=1)
    arguments = (boxes, rng.integers(1, 81, 20), rng.random(20))
    np.testing.assert_array_equal(draw(grey(), *arguments), draw(grey(), *arguments))


def test_nothing_found_leaves_the_image_as_it_was() -> None:
    np.testing.assert_array_equal(draw(grey(), np.zeros((0, 4)), [], [], masks=[]), grey())


def test_boxes_beyond_the_image_and_unknown_labels_are_drawn_as_well_as_may_be() -> None:
    boxes = np.array([[-50, -50, 900, 900], [299.6, 199.7, 299.9, 199.9]])
    out = draw(grey(), boxes, [0, 500], [0.1, 1.0], names=["küche"])
    assert out.shape == (200, 300, 3)
    assert (out != 100).any()


def test_lines_grow_with_the_image() -> None:
    painted = []
    for scale in (1, 8):
        out = draw(grey(200 * scale, 300 * scale), DISC_BOX * scale, [1], masks=[disc(radius=0)])
        column = out[:, 150 * scale] != 100
        painted.append(int(column[-60 * scale :].any(axis=-1).sum()))  # the lower edge of the box
    assert painted[0] >= 1
    assert painted[1] > painted[0]


def test_eighty_labels_have_eighty_colours() -> None:
    assert len({color_of(label) for label in range(1, 81)}) == 80
    assert color_of(1) == PALETTE[0]


def test_a_grid_keeps_proportions_and_fills_rows_first() -> None:
    red, blue = grey(100, 200, 0), grey(200, 100, 255)
    sheet = grid([red, blue, red], columns=2, tile=(120, 120))
    gap = 2
    assert sheet.shape == (2 * 120 + 3 * gap, 2 * 120 + 3 * gap, 3)
    assert int((sheet == 0).all(axis=-1).sum()) == 2 * 60 * 120
    assert int((sheet == 255).all(axis=-1).sum()) == 60 * 120
    assert (sheet[gap + 60, gap + 60] == 0).all()
    assert (sheet[gap + 60, 2 * gap + 120 + 60] == 255).all()
    assert (sheet[-gap - 60, -gap - 60] == BACKGROUND).all()  # the empty place


def test_a_grid_of_one_is_one_tile_wide() -> None:
    assert grid([grey(50, 50)], columns=4, tile=(60, 90)).shape == (64, 94, 3)
