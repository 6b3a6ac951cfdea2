"""Samples from a store, and batches from samples."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from coco_files import annotation, coco_tree, square

from maskfleet.batch import Batch
from maskfleet.data.pipeline import collate
from maskfleet.data.pipeline.augment import Augmentation, Flip, ResizeShortEdge, ScaleJitter
from maskfleet.data.pipeline.device_resize import resize_on_device
from maskfleet.data.pipeline.geometry import Geometry
from maskfleet.data.pipeline.samples import Preparation, Sample, train_sample
from maskfleet.data.store.annotations import open_store
from maskfleet.data.store.splits import SplitPaths
from maskfleet.errors import DataError
from maskfleet.ops.masks import mask_targets
from maskfleet.ops.outlines import bitmap_edges
from maskfleet.rle import text_from_runs

WriteSplit = Callable[..., SplitPaths]


def prepared(*augmentations: Augmentation) -> Preparation:
    return Preparation(augmentations, masks=True, crowds=True)


DOUBLED = ResizeShortEdge((96, 96), 128)  # of 48 x 64 sources
PLAIN, FLIPPED = prepared(DOUBLED), prepared(DOUBLED, Flip(1.0))


def sample_of(split: SplitPaths, preparation: Preparation = PLAIN, **arguments: Any) -> Sample:
    arguments = {"canvas": None, "seed": 5} | arguments
    return train_sample(open_store(split), 0, preparation=preparation, **arguments)


def batch_of(samples: list[Sample], canvas: tuple[int, int] = (96, 128), *, crowds: bool = True) -> Batch:
    return collate.training_batch(samples, collate.images_on_canvas(samples, canvas), masks=True, crowds=crowds)


def packed(mask: np.ndarray) -> dict[str, Any]:
    """`mask` as a COCO run-length mask."""
    flat = mask.T.ravel()
    borders = np.flatnonzero(np.diff(np.concatenate([[0], flat.astype(int), [2]])))
    runs = np.diff(np.concatenate([[0], borders])).tolist()
    return {"size": list(mask.shape), "counts": text_from_runs(runs).decode()}


def drawn_mask(batch: Batch, image: int, instance: int) -> np.ndarray:
    """The instance's mask over the whole canvas, sampled at pixel centres."""
    height, width = batch.images.pixels.shape[-2:]
    side = max(height, width)
    whole = torch.zeros(batch.num_images, 1, 4)
    whole[..., 2:] = side
    matched = torch.full((batch.num_images, 1), instance)
    outlines = batch.targets.outlines
    assert outlines is not None
    valid = torch.ones(batch.num_images, 1, dtype=torch.bool)
    targets = mask_targets(outlines, batch.images.sizes, whole, matched, valid, resolution=side)
    return targets[image, 0, :height, :width].numpy()


def test_boxes_labels_and_polygons_are_resized_with_the_image(write_split: WriteSplit) -> None:
    sample = sample_of(write_split(coco_tree(annotation(1), annotation(2, category_id=3, bbox=[0, 0, 5, 6]))))
    np.testing.assert_array_equal(sample.boxes, [[20, 20, 60, 60], [0, 0, 10, 12]])
    assert sample.labels.tolist() == [2, 1]
    edges, part = sample.outlines[0]
    np.testing.assert_array_equal(edges[0], [20, 20, 60, 20])
    assert part.tolist() == [0, 0, 0, 0]


def test_a_flipped_sample_is_the_mirror_image_in_all_its_parts(write_split: WriteSplit) -> None:
    split = write_split(coco_tree(annotation(1), annotation(2, iscrowd=1, bbox=[0, 0, 8, 8], area=64)))
    plain, flipped = batch_of([sample_of(split)]), batch_of([sample_of(split, FLIPPED)])
    torch.testing.assert_close(flipped.images.pixels, plain.images.pixels.flip(-1))
    assert flipped.targets.boxes[0, 0].tolist() == [68, 20, 108, 60]
    assert flipped.targets.crowd_boxes[0, 0].tolist() == [112, 0, 128, 16]
    np.testing.assert_allclose(drawn_mask(flipped, 0, 0), drawn_mask(plain, 0, 0)[:, ::-1], atol=1e-6)


@pytest.mark.parametrize("preparation", [PLAIN, FLIPPED])
def test_a_run_length_mask_of_an_object_is_drawn_like_the_resized_bitmap(
    write_split: WriteSplit, preparation: Preparation
) -> None:
    y, x = np.mgrid[:48, :64]
    disc = (x - 30) ** 2 + (y - 20) ** 2 < 15**2
    disc &= (x - 30) ** 2 + (y - 20) ** 2 > 6**2
    tree = coco_tree(annotation(1, segmentation=packed(disc), bbox=[15, 5, 30, 30], area=int(disc.sum())))
    drawn = drawn_mask(batch_of([sample_of(write_split(tree), preparation)]), 0, 0) > 0.5
    wanted = cv2.resize(disc.astype(np.uint8), (128, 96), interpolation=cv2.INTER_NEAREST).astype(bool)
    wanted = wanted[:, ::-1] if preparation is FLIPPED else wanted
    assert (drawn & wanted).sum() / (drawn | wanted).sum() > 0.97


@pytest.mark.parametrize("seed", range(6))
def test_the_edges_of_a_run_length_mask_are_those_of_its_whole_bitmap(write_split: WriteSplit, seed: int) -> None:
    rng = np.random.default_rng(seed)
    top, left = rng.integers(0, 30, 2)
    mask = np.zeros((48, 64), bool)
    mask[top : top + 15, left : left + 20] = rng.random((15, 20))[: 48 - top, : 64 - left] < 0.6
    tree = coco_tree(annotation(1, segmentation=packed(mask), bbox=[0, 0, 64, 48], area=9))
    sample = sample_of(write_split(tree), prepared(ResizeShortEdge((48, 48), 128)))
    np.testing.assert_array_equal(sample.outlines[0][0], bitmap_edges(mask)[0])


def test_an_empty_run_length_mask_has_no_edges(write_split: WriteSplit) -> None:
    tree = coco_tree(annotation(1, segmentation=packed(np.zeros((48, 64), bool))))
    assert len(sample_of(write_split(tree)).outlines[0][0]) == 0


def test_an_annotation_without_an_outline_has_the_mask_of_its_box(write_split: WriteSplit) -> None:
    sample = sample_of(write_split(coco_tree(annotation(1, segmentation=None), annotation(2))))
    np.testing.assert_array_equal(sample.outlines[0][0], sample.outlines[1][0])


def test_a_broken_run_length_mask_is_named(write_split: WriteSplit) -> None:
    tree = coco_tree(annotation(9, segmentation={"size": [48, 64], "counts": "04"}))
    with pytest.raises(DataError, match="annotation 9 of image 1"):
        sample_of(write_split(tree))


JITTER = prepared(DOUBLED, Flip(0.0), ScaleJitter((2.0, 2.0)))


def sample_with_offset(wanted: Callable[[Geometry], bool], split: SplitPaths, canvas: tuple[int, int]) -> Sample:
    """The sample of the first seed whose window is as `wanted`."""
    for seed in range(300):
        sample = sample_of(split, JITTER, canvas=canvas, seed=seed)
        if wanted(sample.geometry):
            return sample
    raise AssertionError("no seed gives such a window")


def test_a_crop_drops_objects_outside_it_and_clips_the_rest(write_split: WriteSplit) -> None:
    corner = annotation(1, bbox=[0, 0, 10, 10], area=100, segmentation=[square(0, 0, 10)])
    wide = annotation(2, bbox=[20, 20, 40, 20], area=800, segmentation=[[20, 20, 60, 20, 60, 40, 20, 40]])
    split = write_split(coco_tree(corner, wide))
    # 48 x 64 on a 48 x 64 canvas, times 2: 96 x 128, of which the window shows a quarter
    sample = sample_with_offset(
        lambda geometry: 25 < geometry.offset[0] < 40 and geometry.offset[1] > 50, split, (48, 64)
    )
    top, left = sample.geometry.offset
    assert sample.labels.tolist() == [2]
    assert len(sample.outlines) == 1
    wanted = np.clip([40 - left, 40 - top, 120 - left, 80 - top], 0, [64, 48, 64, 48])
    np.testing.assert_array_equal(sample.boxes, [wanted])


def test_the_box_of_a_cropped_object_is_that_of_its_visible_part(write_split: WriteSplit) -> None:
    # an L: a wide foot at the bottom, a thin leg at the left
    leg = [[4, 4, 8, 4, 8, 40, 60, 40, 60, 44, 4, 44]]
    y, x = np.mgrid[:48, :64]
    bitmap = ((x >= 4) & (x < 8) & (y >= 4) & (y < 44)) | ((x >= 4) & (x < 60) & (y >= 40) & (y < 44))
    changes = {"bbox": [4, 4, 56, 40], "area": 352}
    tree = coco_tree(annotation(1, segmentation=leg, **changes), annotation(2, segmentation=packed(bitmap), **changes))
    sample = sample_with_offset(
        lambda geometry: geometry.offset[0] < 8 and geometry.offset[1] < 8, write_split(tree), (48, 64)
    )
    top, left = sample.geometry.offset
    wanted = [8 - left, 8 - top, 16 - left, 48]  # only the leg shows: 8 .. 16 of the doubled image
    np.testing.assert_array_equal(sample.boxes, [wanted, wanted])


def test_an_object_whose_box_is_in_the_window_but_not_itself_is_dropped(write_split: WriteSplit) -> None:
    foot = [[60, 4, 63, 4, 63, 47, 4, 47, 4, 44, 60, 44]]  # right and bottom border only
    tree = coco_tree(annotation(1, segmentation=foot, bbox=[4, 4, 59, 43], area=300))
    sample = sample_with_offset(
        lambda geometry: geometry.offset[0] < 30 and geometry.offset[1] < 40, write_split(tree), (48, 64)
    )
    assert len(sample.boxes) == len(sample.outlines) == len(sample.labels) == 0


def test_ground_truth_is_padded_to_few_sizes(write_split: WriteSplit, tmp_path: Path) -> None:
    one = sample_of(write_split(coco_tree(annotation(1), annotation(2, iscrowd=1))))
    many = sample_of(write_split(coco_tree(*(annotation(number) for number in range(1, 18)))))
    batch = batch_of([one, many])
    assert batch.targets.boxes.shape == (2, 32, 4)
    assert batch.targets.valid.sum(dim=1).tolist() == [1, 17]
    assert batch.targets.labels[0].tolist() == [2] + [0] * 31
    assert batch.targets.crowd_boxes.shape == (2, 4, 4)
    assert batch.targets.crowd_valid.sum(dim=1).tolist() == [1, 0]
    outlines = batch.targets.outlines
    assert outlines is not None
    assert outlines.count.sum(dim=1).tolist() == [4, 68]
    assert (outlines.edges.shape[1], outlines.max_count, outlines.max_parts) == (256, 32, 2)
    assert batch_of([one], crowds=False).targets.crowd_boxes.shape == (1, 0, 4)


def test_an_image_without_objects_makes_a_batch(write_split: WriteSplit) -> None:
    batch = batch_of([sample_of(write_split(coco_tree()))])
    assert batch.targets.boxes.shape == (1, 16, 4)
    assert not batch.targets.valid.any()


def test_images_of_other_sizes_lie_in_the_corner_of_a_black_canvas(write_split: WriteSplit) -> None:
    sample = sample_of(write_split(coco_tree(annotation(1))))
    images = collate.images_on_canvas([sample], (128, 160))
    assert images.pixels.shape == (1, 3, 128, 160)
    assert images.pixels.is_contiguous(memory_format=torch.channels_last)
    assert images.sizes.tolist() == [[96, 128]]
    wanted = cv2.resize(sample.image, (128, 96)).transpose(2, 0, 1)
    np.testing.assert_array_equal(images.pixels[0, :, :96, :128].numpy(), wanted)
    assert images.pixels[0, :, 96:].sum() == images.pixels[0, :, :, 128:].sum() == 0


def test_counts_are_padded_to_doublings() -> None:
    assert [collate.padded_count(count, 16) for count in (0, 16, 17, 93)] == [16, 16, 32, 128]


GEOMETRIES = [
    Geometry((48, 64), (96, 128), (0, 0), (96, 128), flip=False),
    Geometry((48, 64), (96, 128), (0, 0), (96, 128), flip=True),
    Geometry((48, 64), (77, 103), (0, 0), (77, 103), flip=True),
    Geometry((48, 64), (24, 32), (0, 0), (24, 32), flip=False),
    Geometry((48, 64), (31, 17), (0, 0), (31, 17), flip=True),
    Geometry((48, 64), (150, 200), (20, 31), (96, 128), flip=True),
    Geometry((1, 64), (5, 128), (0, 0), (5, 128), flip=False),
]


def test_the_device_resizes_as_opencv_does_to_one_grey_level() -> None:
    rng = np.random.default_rng(2)
    samples = []
    for geometry in GEOMETRIES:
        image = rng.integers(0, 256, (*geometry.source, 3), np.uint8)
        no_boxes = np.zeros((0, 4), np.float32)
        samples.append(Sample(1, image, geometry, no_boxes, np.zeros(0, np.int64), [], no_boxes, 0))
    wanted = collate.images_on_canvas(samples, (96, 128))
    images, moves = collate.images_as_decoded(samples, (96, 128))
    assert images.pixels.shape == (7, 3, 64, 64)
    found = resize_on_device(images.pixels, images.sizes, moves)
    assert found.dtype == torch.uint8
    torch.testing.assert_close(images.sizes, wanted.sizes)
    difference = (found.int() - wanted.pixels.int()).abs()
    assert difference.max() <= 1
    assert (difference > 0).float().mean() < 0.1  # white noise: the worst case
