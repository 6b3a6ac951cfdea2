"""COCO results: numbers and rounding."""

from __future__ import annotations

import json

import numpy as np
import pytest
from pycocotools import mask as oracle_mask

from maskfleet.evaluation.results import coco_results, unscale_boxes


def test_boxes_go_back_to_the_original_image_by_one_scale() -> None:
    boxes = np.array([[80, 40, 160, 80], [-5, -5, 2000, 2000]], np.float32)
    out = unscale_boxes(boxes, resized_hw=(800, 1067), original_hw=(480, 640))
    scale = (800 / 480 * 1067 / 640) ** 0.5
    np.testing.assert_allclose(out[0], np.array([80, 40, 160, 80]) / scale, rtol=1e-6)
    np.testing.assert_array_equal(out[1], [0, 0, 640, 480])
    assert out.dtype == np.float32


def test_results_are_rounded_as_tensorpack_rounds_them() -> None:
    boxes = np.array([[1.23456, 2.00004, 11.98765, 22.5]], np.float32)
    window = (1, 2, np.ones((2, 3), bool))
    (result,) = coco_results(
        42,
        boxes,
        np.array([0.123456], np.float32),
        np.array([2]),
        category_ids=[1, 90],
        original_hw=(4, 6),
        masks=[window],
    )
    assert result == {
        "image_id": 42,
        "category_id": 90,
        "bbox": [1.235, 2.0, 10.753, 20.5],  # 1.2346 -> 1.235; 11.9876 - 1.2346 = 10.753
        "score": 0.1235,
        "segmentation": {"size": [4, 6], "counts": "9220003"},
    }
    assert json.loads(json.dumps(result)) == result


def test_masks_may_come_as_rles_and_may_be_absent() -> None:
    boxes, scores, labels = np.zeros((1, 4), np.float32), np.ones(1, np.float32), np.array([1])
    rle = oracle_mask.encode(np.asfortranarray(np.eye(5, dtype=np.uint8)))
    options = {"category_ids": [7], "original_hw": (5, 5)}
    (with_mask,) = coco_results(1, boxes, scores, labels, masks=[rle], **options)
    assert with_mask["segmentation"] == {"size": [5, 5], "counts": rle["counts"].decode("ascii")}
    (without,) = coco_results(1, boxes, scores, labels, **options)
    assert "segmentation" not in without


def test_a_padding_label_is_our_mistake() -> None:
    with pytest.raises(AssertionError, match="label 0"):
        coco_results(1, np.zeros((1, 4)), np.ones(1), np.array([0]), category_ids=[7], original_hw=(5, 5))
