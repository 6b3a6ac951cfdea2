"""The largest ground truth of a data set is at least what its batches need."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from coco_files import annotation, coco_tree, square
from pycocotools import mask as coco_mask

from maskfleet.config.run import RunConfig
from maskfleet.data.pipeline.build import build_train_loader
from maskfleet.data.store.annotations import open_store
from maskfleet.data.store.dataset import open_stores
from maskfleet.data.store.largest import GroundTruthSize, largest_ground_truth
from maskfleet.data.store.splits import SplitPaths
from maskfleet.ops.outlines import bitmap_edges

WriteSplit = Callable[..., SplitPaths]


def test_each_count_is_the_largest_of_any_image(write_split: WriteSplit) -> None:
    split = write_split(
        coco_tree(
            annotation(1, segmentation=[square(1, 2, 3), square(5, 6, 7), [1, 1, 2, 2]]),  # 2 parts; the last is none
            annotation(2, segmentation=None),  # trained as its box: 4 edges
            annotation(3, image_id=2, segmentation=[square(1, 2, 3)]),
            annotation(4, image_id=2, iscrowd=1),
            annotation(5, image_id=2, iscrowd=1),
            annotation(6, image_id=2, area=0),  # not used
            annotation(7, image_id=2, ignore=1),  # not used
        )
    )
    stores = [open_store(split)]
    assert largest_ground_truth(stores, masks=True) == GroundTruthSize(objects=2, crowds=2, edges=12, parts=2)
    assert largest_ground_truth(stores, masks=False) == GroundTruthSize(objects=2, crowds=2, edges=0, parts=1)


@pytest.mark.parametrize("seed", range(8))
def test_the_edges_of_a_bitmap_are_never_underestimated(seed: int, write_split: WriteSplit) -> None:
    rng = np.random.default_rng(seed)
    bitmap = rng.random((48, 64)) < rng.random()
    bitmap[:, : rng.integers(0, 64)] = rng.random() < 0.5  # runs that cross columns
    rle = coco_mask.encode(np.asfortranarray(bitmap, np.uint8))
    outline = {"size": [48, 64], "counts": rle["counts"].decode()}
    split = write_split(coco_tree(annotation(1, segmentation=outline)), with_images=False)
    largest = largest_ground_truth([open_store(split)], masks=True)
    assert len(bitmap_edges(bitmap)[0]) <= largest.edges <= 2 * bitmap.sum()
    assert (largest.objects, largest.parts) == (1, 1)


def test_a_broken_bitmap_is_left_to_the_loader(write_split: WriteSplit) -> None:
    broken = {"size": [48, 64], "counts": "\x7f"}
    split = write_split(coco_tree(annotation(1, segmentation=broken), annotation(2)), with_images=False)
    assert largest_ground_truth([open_store(split)], masks=True).objects == 2


def test_batches_fit(micro: RunConfig) -> None:
    stores = open_stores(micro.data, micro.data.train)
    largest = largest_ground_truth(stores, masks=True)
    batches = list(build_train_loader(micro, stores).batches(0, 6))  # one pass
    assert largest.objects == max(int(batch.targets.valid.sum(dim=1).max()) for batch in batches)
    outlines = [batch.targets.outlines for batch in batches if batch.targets.outlines is not None]
    assert largest.edges == max(int(outline.count.sum(dim=1).max()) for outline in outlines)
