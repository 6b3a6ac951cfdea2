"""Mask targets against TensorPack's numbers, pycocotools' bitmaps and a loop over pixels."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from pycocotools import mask as coco_mask
from torch import Tensor

from maskfleet.batch import Outlines
from maskfleet.ops.masks import mask_targets
from maskfleet.ops.outlines import bitmap_edges, pack_outlines, polygon_edges
from reference_masks import crop_mask, rasterise

# pycocotools meets numpy 2 with a warning of its own.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

GOLDENS = Path(__file__).parents[1] / "goldens"


def golden(name: str) -> dict[str, np.ndarray]:
    with np.load(GOLDENS / name, allow_pickle=False) as file:
        return dict(file)


def targets_of_one_image(
    outlines: Outlines, size: tuple[int, int], boxes: Tensor, matched: list[int], resolution: int
) -> Tensor:
    return mask_targets(
        outlines,
        torch.tensor([size]),
        boxes[None],
        torch.tensor([matched]),
        torch.ones(1, len(matched), dtype=torch.bool),
        resolution=resolution,
    )[0]


def drawn(outlines: Outlines, height: int, width: int) -> np.ndarray:
    """The whole bitmap of every instance of image 0: a box as wide as its resolution samples the pixels themselves."""
    side = max(height, width)
    num = outlines.count.shape[1]
    boxes = torch.tensor([[0.0, 0.0, side, side]]).expand(num, 4)
    values = targets_of_one_image(outlines, (height, width), boxes, list(range(num)), side)[:, :height, :width]
    assert torch.allclose(values, values.round(), atol=1e-4)
    return values.round().bool().numpy()


def coco_bitmap(polygons: list[np.ndarray], height: int, width: int) -> np.ndarray:
    flat = [polygon.astype(np.float64).flatten().tolist() for polygon in polygons]
    return coco_mask.decode(coco_mask.merge(coco_mask.frPyObjects(flat, height, width))).astype(bool)


def random_polygon(rng: np.random.Generator, height: int, width: int) -> np.ndarray:
    """Crossing itself, leaving the canvas, on and off the grid, tiny, collinear, with repeated points -> [V, 2]."""
    count = int(rng.integers(3, 12))
    points = rng.uniform(-0.3, 1.3, (count, 2)) * [width, height]
    match int(rng.integers(0, 8)):
        case 0:
            points = np.round(points)
        case 1:
            points = np.round(points * 10) / 10  # fifths of pixels and their halves: the ties of the rule
        case 2:
            points = rng.uniform(0, 1, 2) * [width, height] + rng.normal(0, 0.6, (count, 2))
        case 3:
            points[1:] = points[0] + rng.uniform(0, 1, (count - 1, 1)) * (points[1] - points[0])
        case 4:
            points = np.repeat(points, 2, axis=0)
        case 5:
            points = np.round(points * 2) / 2
        case 6:
            points = np.clip(points, 0, [width, height])
    return points.astype(np.float32)


def random_instances(seed: int, num: int, height: int, width: int) -> list[list[np.ndarray]]:
    rng = np.random.default_rng(seed)
    return [[random_polygon(rng, height, width) for _ in range(rng.integers(1, 4))] for _ in range(num)]


def test_targets_of_a_training_step_are_tensorpacks_to_the_last_bit():
    step = golden("train_fpn_mask_A.npz")
    bitmaps = np.unpackbits(step["gt_masks_packed"], axis=-1).astype(bool)
    foreground = step["sampled_labels"] > 0
    matched = [step["gt_labels"].tolist().index(label) for label in step["sampled_labels"][foreground]]
    outlines = pack_outlines([[bitmap_edges(bitmap) for bitmap in bitmaps]], num_instances=len(bitmaps))
    boxes = torch.from_numpy(step["sampled_boxes"][foreground])
    found = targets_of_one_image(outlines, (256, 320), boxes, matched, 28)
    assert len(found) == 14
    assert np.array_equal(found.numpy(), step["mask_targets"])


@pytest.mark.parametrize("resolution", [14, 28])
def test_crops_match_tensorpacks_crop_function(resolution):
    file = golden("ops_roialign.npz")
    outlines = pack_outlines([[bitmap_edges(source[0] > 0) for source in file["mask_src"]]], num_instances=3)
    found = targets_of_one_image(
        outlines, (64, 80), torch.from_numpy(file["mask_boxes"]), file["mask_ind"].tolist(), resolution
    )
    # This golden is of the function outside a training graph, where TensorFlow rounds in another order.
    np.testing.assert_allclose(found, file[f"mask_target_{resolution}"][:, 0], atol=1e-5, rtol=0)


def test_two_polygons_make_tensorpacks_bitmap():
    file = golden("ops_image.npz")
    expected = np.unpackbits(file["poly_mask_80x104"], axis=-1).astype(bool)
    outlines = pack_outlines([[polygon_edges([file["poly0"], file["poly1"]])]], num_instances=1)
    assert np.array_equal(drawn(outlines, 80, 104)[0], expected)


@pytest.mark.parametrize("seed", range(40))
def test_any_polygons_make_the_bitmaps_of_pycocotools(seed):
    height, width = (8 * int(n) for n in np.random.default_rng(seed).integers(1, 9, 2))
    instances = random_instances(seed, 64, height, width)
    outlines = pack_outlines([[polygon_edges(polygons) for polygons in instances]], num_instances=64)
    found = drawn(outlines, height, width)
    for polygons, bitmap in zip(instances, found, strict=True):
        assert np.array_equal(bitmap, coco_bitmap(polygons, height, width))


def test_a_large_canvas_makes_the_bitmaps_of_pycocotools():
    instances = random_instances(7, 6, 1344, 808)
    outlines = pack_outlines([[polygon_edges(polygons) for polygons in instances]], num_instances=6)
    corners = torch.tensor([[0.0, 0], [512, 0], [300, 832], [0, 500], [296, 400], [100, 100]])
    boxes = torch.cat([corners, corners + 512], dim=1)  # whole pixels, so the crop is a window of the bitmap
    found = targets_of_one_image(outlines, (1344, 808), boxes, list(range(6)), 512)
    for polygons, box, crop in zip(instances, boxes.int().tolist(), found, strict=True):
        window = coco_bitmap(polygons, 1344, 808)[box[1] : box[3], box[0] : box[2]]
        seen = crop[: window.shape[0], : window.shape[1]]
        assert window.any()
        # A coordinate of a thousand has float32 steps of 1e-4, a sample that far off a pixel's centre blends as little.
        assert np.abs(seen.numpy() - window).max() < 1e-3


def test_crops_of_polygons_equal_the_loop_to_the_last_bit():
    height, width = 45, 61  # the canvas is 48 x 64
    instances = random_instances(3, 12, height, width)
    outlines = pack_outlines([[polygon_edges(polygons) for polygons in instances]], num_instances=12)
    rng = np.random.default_rng(3)
    corner = rng.uniform(-5, 40, (24, 2))
    boxes = np.concatenate([corner, corner + rng.uniform(0, 30, (24, 2))], axis=1).astype(np.float32)
    boxes[0] = [10, 10, 10, 10]
    boxes[1] = [0, 0, width, height]
    boxes[2] = [200, 200, 220, 220]
    matched = [number % 12 for number in range(24)]
    found = targets_of_one_image(outlines, (height, width), torch.from_numpy(boxes), matched, 14)
    bitmaps = [np.any([rasterise(polygon, 48, 64) for polygon in polygons], axis=0) for polygons in instances]
    expected = np.stack([crop_mask(bitmaps[m], box, 14) for m, box in zip(matched, boxes, strict=True)])
    assert 0.1 < expected.mean() < 0.9
    assert ((expected > 0) & (expected < 1)).any()
    assert np.array_equal(found.numpy(), expected)


def test_a_square_sampled_across_its_border_is_half():
    square = np.array([[4.0, 4], [12, 4], [12, 12], [4, 12]])
    outlines = pack_outlines([[polygon_edges([square])]], num_instances=1)
    # One-pixel cells centred on the square's left border blend an outer and an inner pixel half and half.
    found = targets_of_one_image(outlines, (16, 16), torch.tensor([[3.5, 6.0, 5.5, 8.0]]), [0], 2)
    np.testing.assert_allclose(found[0], [[0.5, 1.0], [0.5, 1.0]], atol=1e-5)


def test_a_part_inside_a_part_stays_filled_but_a_hole_in_one_part_is_empty():
    outer = np.array([[0.0, 0], [16, 0], [16, 16], [0, 16]])
    inner = np.array([[4.0, 4], [12, 4], [12, 12], [4, 12]])
    union = polygon_edges([outer, inner])
    ring = (union[0], np.zeros_like(union[1]))
    bitmaps = drawn(pack_outlines([[union, ring]], num_instances=2), 16, 16)
    assert bitmaps[0].all()
    assert bitmaps[1].sum() == 16 * 16 - 8 * 8
    assert not bitmaps[1][4:12, 4:12].any()


def test_a_bitmap_comes_back_from_its_edges():
    rng = np.random.default_rng(0)
    for density in (0.0, 0.05, 0.5, 1.0):
        mask = rng.random((24, 40)) < density
        assert np.array_equal(drawn(pack_outlines([[bitmap_edges(mask)]], num_instances=1), 24, 40)[0], mask)


def test_boxes_that_are_not_valid_have_no_mask():
    square = polygon_edges([np.array([[0.0, 0], [16, 0], [16, 16], [0, 16]])])
    outlines = pack_outlines([[square]], num_instances=3)
    boxes = torch.tensor([[[2.0, 2, 9, 9]] * 3])
    valid = torch.tensor([[True, False, True]])
    matched = torch.tensor([[0, 0, 2]])  # 2 is padding and has no edges
    found = mask_targets(outlines, torch.tensor([[16, 16]]), boxes, matched, valid, resolution=4)
    assert found.dtype == torch.float32
    assert found[0, 0].eq(1).all()
    assert found[0, 1:].eq(0).all()


def test_no_boxes_and_no_instances_give_empty_targets():
    outlines = pack_outlines([[], []], num_instances=1)
    nothing = torch.zeros(2, 0, dtype=torch.int64)
    sizes = torch.tensor([[16, 16], [8, 8]])
    found = mask_targets(outlines, sizes, torch.zeros(2, 0, 4), nothing, nothing.bool(), resolution=28)
    assert found.shape == (2, 0, 28, 28)
    one = torch.zeros(2, 1, dtype=torch.int64)
    found = mask_targets(outlines, sizes, torch.zeros(2, 1, 4), one, one.bool(), resolution=28)
    assert found.eq(0).all()


def two_images() -> tuple[list[list], Tensor, Tensor, Tensor]:
    sizes = [(40, 56), (64, 48)]
    edges = [
        [polygon_edges(polygons) for polygons in random_instances(seed, 3 + seed, *size)]
        for seed, size in enumerate(sizes)
    ]
    generator = torch.Generator().manual_seed(0)
    corner = torch.rand(2, 10, 2, generator=generator) * 30
    boxes = torch.cat([corner, corner + 5 + torch.rand(2, 10, 2, generator=generator) * 30], dim=-1)
    matched = torch.arange(10).expand(2, -1) % 3
    return edges, torch.tensor(sizes), boxes, matched


def test_neighbours_and_padding_do_not_matter():
    edges, sizes, boxes, matched = two_images()
    valid = torch.ones_like(matched, dtype=torch.bool)
    packed = pack_outlines(edges, num_instances=9)
    wider = dataclasses.replace(packed, max_count=packed.max_count * 4, max_parts=packed.max_parts * 2)
    together = mask_targets(wider, sizes, boxes, matched, valid, resolution=14)
    assert together.mean() > 0.05
    for image in range(2):
        here = slice(image, image + 1)
        own = pack_outlines(edges[here], num_instances=len(edges[image]))
        alone = mask_targets(own, sizes[here], boxes[here], matched[here], valid[here], resolution=14)
        assert torch.equal(together[here], alone)


def test_a_thousand_edges_in_sixteen_parts_equal_pycocotools():
    rng = np.random.default_rng(5)
    polygons = [rng.uniform(0, 128, 2) + rng.normal(0, 20, (64, 2)) for _ in range(16)]
    polygons = [polygon.astype(np.float32) for polygon in polygons]
    outlines = pack_outlines([[polygon_edges(polygons)]], num_instances=1)
    assert (outlines.max_count, outlines.max_parts) == (1024, 16)
    assert np.array_equal(drawn(outlines, 128, 128)[0], coco_bitmap(polygons, 128, 128))


def test_compiles_as_one_graph_with_the_same_bits():
    edges, sizes, boxes, matched = two_images()
    outlines = pack_outlines(edges, num_instances=8)
    valid = torch.rand(matched.shape, generator=torch.Generator().manual_seed(1)) < 0.8
    compiled = torch.compile(mask_targets, fullgraph=True, backend="aot_eager")
    plain = mask_targets(outlines, sizes, boxes, matched, valid, resolution=14)
    assert torch.equal(compiled(outlines, sizes, boxes, matched, valid, resolution=14), plain)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_gives_the_cpus_targets_and_repeats_them_from_a_graph():
    edges, sizes, boxes, matched = two_images()
    outlines = pack_outlines(edges, num_instances=8)
    valid = torch.rand(matched.shape, generator=torch.Generator().manual_seed(1)) < 0.8
    cpu = mask_targets(outlines, sizes, boxes, matched, valid, resolution=14)
    fields = {name: getattr(outlines, name).cuda() for name in ("edges", "part", "start", "count")}
    there = dataclasses.replace(outlines, **fields)
    arguments = (there, sizes.cuda(), boxes.cuda(), matched.cuda(), valid.cuda())
    eager = mask_targets(*arguments, resolution=14)
    torch.testing.assert_close(eager.cpu(), cpu, atol=1e-5, rtol=0)  # a division may round otherwise there
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        captured = mask_targets(*arguments, resolution=14)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(captured, eager)
