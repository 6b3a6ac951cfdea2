"""Detections of one image: scale, rounding, masks, selection."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from pycocotools import mask as oracle_mask

from maskfleet.inference.detections import ImageDetections, unscale_boxes
from maskfleet.rle import rle_pixels

CATEGORIES = ((1, "circle"), (90, "square"))


def detections(**changes: Any) -> ImageDetections:
    """Two objects in an image of 20 x 30 pixels, the second one a filled square."""
    fields: dict[str, Any] = {
        "boxes": np.array([[1, 2, 9, 10], [10, 4, 18, 12]], np.float32),
        "scores": np.array([0.9, 0.4], np.float32),
        "labels": np.array([1, 2]),
        "image_size": (20, 30),
        "categories": CATEGORIES,
        "mask_probabilities": np.stack([np.eye(8, dtype=np.float32), np.ones((8, 8), np.float32)]),
    }
    return ImageDetections(**fields | changes)


def test_boxes_go_back_to_the_original_image_by_one_scale() -> None:
    boxes = np.array([[80, 40, 160, 80], [-5, -5, 2000, 2000]], np.float32)
    out = unscale_boxes(boxes, resized_hw=(800, 1067), original_hw=(480, 640))
    scale = (800 / 480 * 1067 / 640) ** 0.5
    np.testing.assert_allclose(out[0], np.array([80, 40, 160, 80]) / scale, rtol=1e-6)
    np.testing.assert_array_equal(out[1], [0, 0, 640, 480])
    assert out.dtype == np.float32


def test_results_are_rounded_as_tensorpack_rounds_them() -> None:
    found = detections(
        boxes=np.array([[1.23456, 2.00004, 11.98765, 22.5]], np.float32),
        scores=np.array([0.123456], np.float32),
        labels=np.array([2]),
        mask_probabilities=np.ones((1, 4, 4), np.float32),
        image_size=(24, 16),
    )
    (result,) = found.to_coco(42)
    assert found.masks is not None
    rle = oracle_mask.encode(np.asfortranarray(found.masks[0].astype(np.uint8)))
    assert result == {
        "image_id": 42,
        "category_id": 90,
        "bbox": [1.235, 2.0, 10.753, 20.5],  # 1.2346 -> 1.235; 11.9876 - 1.2346 = 10.753
        "score": 0.1235,
        "segmentation": {"size": [24, 16], "counts": rle["counts"].decode("ascii")},
    }
    assert json.loads(json.dumps(result)) == result


def test_a_model_without_a_mask_head_gives_no_masks() -> None:
    found = detections(mask_probabilities=None)
    assert found.masks is None
    assert found.rle is None
    assert "segmentation" not in found.to_coco(1)[0]


def test_a_padding_label_is_an_internal_error() -> None:
    with pytest.raises(AssertionError, match="label 0"):
        detections(labels=np.array([1, 0])).to_coco(1)


@pytest.mark.parametrize("accurate", [True, False])
def test_masks_are_the_same_as_arrays_and_as_rle(accurate: bool) -> None:
    found = detections(accurate_paste=accurate)
    assert found.masks is not None
    assert found.rle is not None
    assert found.masks.shape == (2, 20, 30)
    assert found.masks.dtype == np.bool_
    for mask, rle in zip(found.masks, found.rle, strict=True):
        np.testing.assert_array_equal(mask, rle_pixels(rle))
    expected = np.zeros((20, 30), bool)
    expected[4:12, 10:18] = True  # all ones fill their box
    np.testing.assert_array_equal(found.masks[1], expected)


def test_indexing_selects_every_field() -> None:
    found = detections()
    assert len(found) == 2
    for part in (found[1], found[-1], found[1:], found[[1]], found[found.scores < 0.5]):
        assert len(part) == 1
        assert part.boxes.tolist() == [[10, 4, 18, 12]]
        assert part.class_names == ["square"]
        assert part.category_ids.tolist() == [90]
        assert part.to_coco(3) == found.to_coco(3)[1:]
    assert [part.class_names for part in found] == [["circle"], ["square"]]
    with pytest.raises(IndexError):
        found[2]


def test_detections_name_themselves() -> None:
    assert repr(detections()) == "<2 detections in 20 x 30 pixels: circle 0.90, square 0.40>"
    assert repr(detections()[:0]) == "<0 detections in 20 x 30 pixels: none>"
