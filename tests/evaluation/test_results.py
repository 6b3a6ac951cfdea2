"""COCO results: numbers, rounding, run lengths, and shards of ranks that may die."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from pycocotools import mask as oracle_mask

from maskfleet.errors import DataError
from maskfleet.evaluation.results import (
    ResultsWriter,
    Window,
    coco_results,
    encode_window,
    merge_results,
    unscale_boxes,
)
from maskfleet.evaluation.rle import bad_mask


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


def test_boxes_go_back_to_the_original_image_by_one_scale() -> None:
    boxes = np.array([[80, 40, 160, 80], [-5, -5, 2000, 2000]], np.float32)
    out = unscale_boxes(boxes, resized_hw=(800, 1067), original_hw=(480, 640))
    scale = (800 / 480 * 1067 / 640) ** 0.5
    np.testing.assert_allclose(out[0], np.array([80, 40, 160, 80]) / scale, rtol=1e-6)
    np.testing.assert_array_equal(out[1], [0, 0, 640, 480])
    assert out.dtype == np.float32


def test_results_are_rounded_as_tensorpack_rounds_them() -> None:
    boxes = np.array([[1.23456, 2.00004, 11.98765, 22.5]], np.float32)
    window = Window(1, 2, np.ones((2, 3), bool))
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
        "segmentation": expected_rle(pasted(*window, 4, 6)),
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


def found(image_id: int, score: float = 0.5) -> dict[str, object]:
    return {"image_id": image_id, "category_id": 1, "bbox": [0.0, 0.0, 1.0, 1.0], "score": score}


def write_shard(path: Path, *images: tuple[int, list[dict[str, object]]]) -> Path:
    with ResultsWriter(path) as writer:
        for image_id, results in images:
            writer.add(image_id, results)
    return path


def test_shards_merge_in_the_order_of_the_images_and_padding_counts_once(tmp_path: Path) -> None:
    shards = [
        write_shard(tmp_path / "deep" / "rank0.jsonl", (5, [found(5)]), (1, [found(1), found(1, 0.1)])),
        write_shard(tmp_path / "deep" / "rank1.jsonl", (3, []), (5, [found(5, 0.99)])),
    ]
    assert merge_results(shards, image_ids=[1, 3, 5]) == [found(1), found(1, 0.1), found(5)]


def test_a_rank_that_died_or_never_wrote_is_named(tmp_path: Path) -> None:
    whole = write_shard(tmp_path / "rank0.jsonl", (1, []))
    cut = write_shard(tmp_path / "rank1.jsonl", (2, [found(2)]), (3, [found(3)]), (4, []))
    text = cut.read_text()
    cut.write_text(text[: text.index('"image_id": 3') + 20])
    with pytest.raises(DataError) as caught:
        merge_results([whole, cut, tmp_path / "rank2.jsonl"], image_ids=list(range(1, 11)))
    assert "8 of 10 images are missing (image ids 3, 4, 5, 6, 7, ...)" in caught.value.what
    assert "rank 1 stopped after 1 images" in caught.value.what
    assert "rank 2 wrote no rank2.jsonl" in caught.value.what
    assert "rank 0" not in caught.value.what


def test_a_rank_that_fails_leaves_a_shard_without_an_end(tmp_path: Path) -> None:
    path = tmp_path / "rank0.jsonl"

    def fail() -> None:
        with ResultsWriter(path) as writer:
            writer.add(1, [])
            raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError):
        fail()
    with pytest.raises(DataError, match="rank 0 stopped after 1 images"):
        merge_results([path], image_ids=[1])


def test_images_nobody_was_given_and_images_nobody_asked_for_are_errors(tmp_path: Path) -> None:
    shard = write_shard(tmp_path / "rank0.jsonl", (1, []), (2, []))
    with pytest.raises(DataError, match=r"1 of 3 images are missing .image ids 3.: every rank finished"):
        merge_results([shard], image_ids=[1, 2, 3])
    with pytest.raises(DataError, match="1 images, first 2"):
        merge_results([shard], image_ids=[1])


def test_a_score_that_is_not_a_number_names_its_image(tmp_path: Path) -> None:
    with ResultsWriter(tmp_path / "rank0.jsonl") as writer, pytest.raises(DataError, match="image 8 "):
        writer.add(8, [found(8, float("nan"))])
