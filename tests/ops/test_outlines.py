"""Edges of polygons and bitmaps, and how a batch packs them."""

from __future__ import annotations

import numpy as np
import pytest

from maskfleet.ops.outlines import bitmap_edges, pack_outlines, polygon_edges

TRIANGLE = np.array([[0.0, 0.0], [4.0, 0.0], [0.0, 3.0]])


def test_a_polygon_gives_its_closed_sides():
    edges, part = polygon_edges([TRIANGLE, TRIANGLE + 10])
    assert edges.dtype == np.float32
    assert part.dtype == np.int32
    assert edges[:3].tolist() == [[0, 0, 4, 0], [4, 0, 0, 3], [0, 3, 0, 0]]
    assert part.tolist() == [0, 0, 0, 1, 1, 1]


def test_no_polygons_give_no_edges():
    edges, part = polygon_edges([])
    assert edges.shape == (0, 4)
    assert part.shape == (0,)


def test_a_bitmap_gives_its_horizontal_borders_with_runs_merged():
    mask = np.array([[0, 1, 1, 0], [0, 1, 0, 0]], dtype=bool)
    edges, part = bitmap_edges(mask)
    assert sorted(edges.tolist()) == [[1, 0, 3, 0], [1, 2, 2, 2], [2, 1, 3, 1]]
    assert part.tolist() == [0, 0, 0]


def test_an_empty_bitmap_has_no_border():
    edges, part = bitmap_edges(np.zeros((3, 5), dtype=bool))
    assert edges.shape == (0, 4)
    assert part.shape == (0,)


def test_packing_keeps_each_instances_edges_together():
    square = np.array([[0.0, 0], [2, 0], [2, 2], [0, 2]])
    images = [[polygon_edges([TRIANGLE]), polygon_edges([square, TRIANGLE, TRIANGLE])], [polygon_edges([square])]]
    packed = pack_outlines(images, num_instances=3)
    assert packed.count.tolist() == [[3, 10, 0], [4, 0, 0]]
    assert packed.start.tolist() == [[0, 3, 13], [0, 4, 4]]
    assert packed.edges.shape == (2, 16, 4)
    assert (packed.max_count, packed.max_parts) == (16, 4)
    assert np.array_equal(packed.edges[0, 3:13].numpy(), images[0][1][0])
    assert packed.part[0, 3:13].tolist() == [0, 0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert packed.edges[1, 4:].eq(0).all()


def test_packing_nothing_still_has_a_shape():
    packed = pack_outlines([[], []], num_instances=0)
    assert packed.edges.shape == (2, 1, 4)
    assert packed.count.shape == (2, 0)
    assert (packed.max_count, packed.max_parts) == (1, 1)


def test_more_instances_than_places_is_a_mistake():
    with pytest.raises(AssertionError, match="more instances"):
        pack_outlines([[polygon_edges([TRIANGLE])] * 2], num_instances=1)
