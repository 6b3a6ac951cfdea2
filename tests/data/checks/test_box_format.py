"""Boxes that are fractions or corners, and boxes that are not those of their polygons."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from coco_files import annotation, coco_tree, rectangle

from maskfleet.data.checks.annotations import check_annotations
from maskfleet.data.checks.box_format import PARTS_PER_BLOCK, outline_bounds
from maskfleet.data.checks.problems import Problem, bad_images
from maskfleet.data.store.annotations import open_store
from maskfleet.data.store.splits import SplitPaths

WriteSplit = Callable[..., SplitPaths]
BOXES = [[8, 6, 20, 20], [30, 20, 30, 22], [2, 25, 40, 20], [40, 4, 18, 30]]  # of an image of 64 x 48


def check(write_split: WriteSplit, *records: dict[str, Any], images: int = 2) -> list[Problem]:
    return check_annotations(open_store(write_split(coco_tree(*records, images=images), with_images=False)))


def corners(box: list[int]) -> list[int]:
    return [box[0], box[1], box[0] + box[2], box[1] + box[3]]


def fractions(box: list[int]) -> list[float]:
    return [box[0] / 64, box[1] / 48, box[2] / 64, box[3] / 48]


def centre_fractions(box: list[int]) -> list[float]:
    return [(box[0] + box[2] / 2) / 64, (box[1] + box[3] / 2) / 48, box[2] / 64, box[3] / 48]


@pytest.mark.parametrize("outlines", [False, True], ids=["boxes alone", "with polygons"])
@pytest.mark.parametrize("form", [fractions, centre_fractions])
def test_a_split_of_fractions_is_one_error_with_ids(
    form: Callable[[list[int]], list[float]], outlines: bool, write_split: WriteSplit
) -> None:
    records = [
        annotation(n, bbox=form(box), segmentation=[rectangle(box)] if outlines else None)
        for n, box in enumerate(BOXES, 11)
    ]
    problems = [problem for problem in check(write_split, *records) if problem.kind != "no-outline"]
    assert [(problem.kind, problem.severity, problem.image_id) for problem in problems] == [
        ("box-normalised", "error", None)
    ]
    assert "4 of 4 boxes" in problems[0].what
    assert "annotations 11, 12, 13, 14" in problems[0].what


def test_an_image_of_fractions_among_others_is_named_by_annotation(write_split: WriteSplit) -> None:
    sound = [annotation(n, bbox=box) for n, box in enumerate(BOXES, 1)]
    bad = [annotation(n, image_id=2, bbox=fractions(box)) for n, box in enumerate(BOXES[:2], 11)]
    problems = check(write_split, *sound, *bad)
    assert [(problem.kind, problem.annotation_id) for problem in problems] == [
        ("box-normalised", 11),
        ("box-normalised", 12),
    ]
    assert bad_images(problems) == {2}


def test_a_pixel_in_the_corner_is_not_a_fraction(write_split: WriteSplit) -> None:
    records = [annotation(n, bbox=box) for n, box in enumerate(BOXES, 1)]
    assert check(write_split, *records, annotation(9, image_id=2, bbox=[0, 0, 0.9, 0.8])) == []
    assert check(write_split, annotation(9, bbox=[0, 0, 1, 1])) == []


def test_corners_are_found_by_the_polygons(write_split: WriteSplit) -> None:
    records = [
        annotation(n, bbox=corners(box), segmentation=[rectangle(box)]) for n, box in enumerate([[4, 4, 9, 9]], 5)
    ]
    (problem,) = check(write_split, *records)
    assert (problem.kind, problem.severity, problem.image_id) == ("box-corners", "error", None)
    assert "box [4, 4, 13, 13] seems to be two corners" in problem.what
    sound = [annotation(n, bbox=box) for n, box in enumerate(BOXES, 11)]
    (problem,) = check(write_split, *records, *sound)
    assert (problem.kind, problem.image_id, problem.annotation_id) == ("box-corners", 1, 5)


def test_corners_without_polygons_are_found_by_the_borders_of_images(write_split: WriteSplit) -> None:
    records = [annotation(n, bbox=corners(box), segmentation=None) for n, box in enumerate(BOXES, 1)]
    kinds = [problem.kind for problem in check(write_split, *records)]
    assert kinds.count("box-corners") == 1
    assert "box-corners" not in [p.kind for p in check(write_split, *records[1:3])]  # too few to be sure


def test_sound_boxes_at_the_upper_left_are_not_corners(write_split: WriteSplit) -> None:
    boxes = [[1, 1, 40, 30], [2, 5, 50, 40], [0, 0, 64, 48], [3, 2, 61, 46]]
    for outline in ({}, {"segmentation": None}):
        records = [annotation(n, bbox=box, **outline) for n, box in enumerate(boxes, 1)]
        assert [p.kind for p in check(write_split, *records) if p.kind != "no-outline"] == []


def test_a_box_that_is_not_that_of_its_polygons_is_a_warning(write_split: WriteSplit) -> None:
    moved = annotation(5, bbox=[30, 20, 12, 12], segmentation=[rectangle([10, 20, 12, 12])])
    rounded = annotation(6, bbox=[10, 20, 12, 12], segmentation=[rectangle([10.6, 19.5, 12.5, 12.5])])
    (problem,) = check(write_split, moved, rounded, annotation(7))
    assert (problem.kind, problem.severity, problem.annotation_id) == ("box-polygon", "warning", 5)
    assert "box [30, 20, 12, 12] does not match its polygons, which span [10, 20, 12, 12]" in problem.what


def test_bounds_are_those_of_a_loop_over_the_polygons(write_split: WriteSplit, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(1)
    records = []
    for number in range(40):
        parts = [rng.uniform(0, 40, 2 * int(rng.integers(1, 7))).tolist() for _ in range(int(rng.integers(1, 4)))]
        parts += [[1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]] * (number % 5 == 0)  # an odd count moves what follows
        records.append(annotation(number, image_id=1 + number % 2, segmentation=parts))
    store = open_store(write_split(coco_tree(*records), with_images=False))
    assert PARTS_PER_BLOCK > 1000
    monkeypatch.setattr("maskfleet.data.checks.box_format.PARTS_PER_BLOCK", 7)
    bounds = outline_bounds(store)
    for row in range(40):
        parts = store.polygons(row)
        points = np.concatenate(parts) if parts else np.full((1, 2), np.nan)
        np.testing.assert_array_equal(bounds[row], [*points.min(axis=0), *points.max(axis=0)])
