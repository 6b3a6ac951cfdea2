"""RoI align against TensorPack's numbers, against a loop, and against itself on other canvases."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from maskfleet.ops.roi_align import joint_roi_align, multilevel_roi_align, roi_levels, weighted_rows
from reference_masks import roi_align as slow_roi_align

GOLDENS = Path(__file__).parents[1] / "goldens"


@pytest.fixture(scope="module")
def golden() -> dict[str, np.ndarray]:
    with np.load(GOLDENS / "ops_roialign.npz", allow_pickle=False) as file:
        return dict(file)


def extents_of(features: list[Tensor]) -> list[Tensor]:
    return [torch.tensor([feature.shape[2:]] * feature.shape[0]) for feature in features]


def pyramid(batch: int, channels: int, side: int, *, dtype: torch.dtype = torch.float32, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(side >> level, (side >> level) + level) for level in range(3)]
    return [
        torch.randn(batch, channels, *shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes
    ]


def awkward_boxes(canvas: float, *, seed: int = 0) -> Tensor:
    """Boxes inside, across and outside a canvas, empty, tiny and far away -> [K, 4]."""
    generator = torch.Generator().manual_seed(seed)
    corner = torch.rand(12, 2, generator=generator) * canvas * 1.6 - canvas * 0.4
    size = torch.rand(12, 2, generator=generator) * canvas
    fixed = [
        [0.0, 0.0, 0.0, 0.0],
        [3.0, 5.0, 3.0, 9.0],
        [0.0, 0.0, canvas, canvas],
        [-1e4, -1e4, -9e3, -9e3],
        [1e9, 1e9, 2e9, 2e9],
        [2.1, 2.2, 2.3, 2.4],
        [-canvas, -canvas, 2 * canvas, 2 * canvas],
    ]
    return torch.cat([torch.cat([corner, corner + size], dim=1), torch.tensor(fixed)])


def slow(features: list[Tensor], boxes: Tensor, levels: Tensor, strides: list[int], **options: object) -> Tensor:
    out = [
        [
            slow_roi_align(features[level][image].numpy(), box.double().numpy() / strides[level], **options)
            for box, level in zip(boxes[image], levels[image].tolist(), strict=True)
        ]
        for image in range(boxes.shape[0])
    ]
    return torch.from_numpy(np.array(out))


@pytest.mark.parametrize("resolution", [7, 14])
def test_one_level_matches_tensorpack(golden, resolution):
    feature, boxes = torch.from_numpy(golden["feat"]), torch.from_numpy(golden["boxes_on_feat"])[None]
    found = multilevel_roi_align(
        [feature],
        boxes,
        extents_of([feature]),
        strides=[1],
        levels=torch.zeros(1, 40, dtype=torch.int64),
        resolution=resolution,
    )
    # TensorFlow normalises and un-normalises the coordinates, which costs it a few float32 roundings.
    torch.testing.assert_close(found[0], torch.from_numpy(golden[f"roi_align_{resolution}"]), atol=2e-5, rtol=0)


def test_levels_and_strides_match_tensorpack(golden):
    features = [torch.from_numpy(golden[f"ml_feat{level}"]) for level in (2, 3, 4, 5)]
    boxes = torch.from_numpy(golden["ml_boxes"])[None]
    levels = roi_levels(boxes) - 2
    assert set(levels.flatten().tolist()) == {0, 1, 2}  # a 256 x 320 image has no box for level 5
    found = multilevel_roi_align(
        features, boxes, extents_of(features), strides=[4, 8, 16, 32], levels=levels, resolution=7
    )
    torch.testing.assert_close(found[0], torch.from_numpy(golden["ml_roi_7"]), atol=2e-5, rtol=0)


def test_level_of_a_box_follows_the_square_root_of_its_area():
    sides = torch.tensor([0.0, 1.0, 55.0, 111.9, 112.0, 223.9, 224.0, 447.9, 448.0, 5000.0])
    boxes = torch.stack([torch.full_like(sides, 3), torch.full_like(sides, 4), 3 + sides, 4 + sides], dim=-1)
    assert roi_levels(boxes).tolist() == [2, 2, 2, 2, 3, 3, 4, 4, 5, 5]
    assert roi_levels(boxes, aws=True).tolist() == [2, 2, 2, 2, 3, 3, 4, 4, 5, 5]
    assert roi_levels(boxes, min_level=3, max_level=4).tolist() == [3, 3, 3, 3, 3, 3, 4, 4, 4, 4]
    assert roi_levels(boxes).dtype == torch.int64


def test_only_tensorpack_lifts_a_box_a_hair_under_the_boundary():
    box = torch.tensor([0.0, 0.0, 112.0, 112.0 - 1e-4])
    assert int(roi_levels(box)) == 3
    assert int(roi_levels(box, aws=True)) == 2


@pytest.mark.parametrize(("samples", "half_pixel"), [(2, True), (1, True), (3, True), (1, False)])
def test_awkward_boxes_match_the_loop(samples, half_pixel):
    features, strides = pyramid(2, 3, 16), [2, 4, 8]
    boxes = torch.stack([awkward_boxes(32, seed=1), awkward_boxes(32, seed=2)])
    levels = torch.randint(0, 3, boxes.shape[:2], generator=torch.Generator().manual_seed(3))
    options = {"resolution": 5, "samples": samples, "half_pixel": half_pixel}
    found = multilevel_roi_align(features, boxes, extents_of(features), strides=strides, levels=levels, **options)
    torch.testing.assert_close(found.double(), slow(features, boxes, levels, strides, **options), atol=1e-5, rtol=0)


def test_a_hand_worked_bin():
    feature = torch.tensor([[0.0, 1.0], [10.0, 11.0]])[None, None]
    box = torch.tensor([[[0.0, 0.0, 2.0, 2.0]]])
    arguments = {"strides": [1], "levels": torch.zeros(1, 1, dtype=torch.int64), "resolution": 1}
    # Samples at 0 and 1 along each axis: the mean of the four cells.
    assert multilevel_roi_align([feature], box, extents_of([feature]), **arguments).item() == pytest.approx(5.5)
    # AWS: one sample at (1, 1), the last cell itself.
    aws = multilevel_roi_align([feature], box, extents_of([feature]), samples=1, half_pixel=False, **arguments)
    assert aws.item() == pytest.approx(11.0)


def test_a_map_of_one_cell_gives_that_cell_within_a_cell_and_zero_beyond():
    feature = torch.full((1, 2, 1, 1), 3.0)
    boxes = torch.tensor([[[-0.4, -0.4, 1.4, 1.4], [5.0, 0.0, 6.0, 1.0], [0.5, 0.5, 0.5, 0.5]]])
    found = multilevel_roi_align(
        [feature],
        boxes,
        extents_of([feature]),
        strides=[1],
        levels=torch.zeros(1, 3, dtype=torch.int64),
        resolution=2,
    )
    assert found[0, 0].eq(3).all()
    assert found[0, 1].eq(0).all()
    assert found[0, 2].eq(3).all()


def test_no_boxes_give_an_empty_result_and_a_zero_gradient():
    features = [feature.requires_grad_() for feature in pyramid(2, 3, 8)]
    found = multilevel_roi_align(
        features,
        torch.zeros(2, 0, 4),
        extents_of(features),
        strides=[2, 4, 8],
        levels=torch.zeros(2, 0, dtype=torch.int64),
        resolution=7,
    )
    assert found.shape == (2, 0, 3, 7, 7)
    found.sum().backward()
    assert all(feature.grad is not None and feature.grad.eq(0).all() for feature in features)


def test_padding_and_neighbours_do_not_matter():
    small, strides = pyramid(1, 4, 16), [2, 4, 8]
    boxes, own = awkward_boxes(32)[None], extents_of(small)
    levels = torch.arange(boxes.shape[1])[None] % 3
    alone = multilevel_roi_align(small, boxes, own, strides=strides, levels=levels, resolution=7)

    big = [torch.full((2, 4, f.shape[2] + 3, f.shape[3] + 5), torch.inf) for f in small]
    for padded, feature in zip(big, small, strict=True):
        padded[1, :, : feature.shape[2], : feature.shape[3]] = feature[0]
        padded[0] = 7.0
    extents = [torch.cat([torch.tensor([f.shape[2:]]), extent]) for f, extent in zip(big, own, strict=True)]
    together = multilevel_roi_align(
        big, boxes.expand(2, -1, -1), extents, strides=strides, levels=levels.expand(2, -1), resolution=7
    )
    assert torch.equal(together[1], alone[0])


def test_gradient_reaches_features_as_finite_differences_say():
    features = [feature.requires_grad_() for feature in pyramid(2, 2, 4, dtype=torch.float64)]
    boxes = torch.stack([awkward_boxes(8, seed=4), awkward_boxes(8, seed=5)])[:, 8:]
    levels = torch.arange(boxes.shape[1]).expand(2, -1) % 3

    def pooled(*maps: Tensor) -> Tensor:
        return multilevel_roi_align(maps, boxes, extents_of(list(maps)), strides=[2, 4, 8], levels=levels, resolution=2)

    assert torch.autograd.gradcheck(pooled, tuple(features))


def test_several_lists_of_boxes_are_pooled_as_each_alone_and_have_the_sum_of_their_gradients():
    features = [feature.requires_grad_() for feature in pyramid(2, 2, 4, dtype=torch.float64)]
    boxes = torch.stack([awkward_boxes(8, seed=4), awkward_boxes(8, seed=5)])[:, 10:]
    lists, resolutions = [boxes, boxes[:, :3], boxes[:, :0]], [2, 3, 1]
    levels = [torch.arange(some.shape[1]).expand(2, -1) % 3 for some in lists]
    extents = extents_of(features)

    def joint(*maps: Tensor) -> tuple[Tensor, ...]:
        return tuple(joint_roi_align(maps, lists, extents, strides=[2, 4, 8], levels=levels, resolutions=resolutions))

    for pooled, some, level, resolution in zip(joint(*features), lists, levels, resolutions, strict=True):
        alone = multilevel_roi_align(features, some, extents, strides=[2, 4, 8], levels=level, resolution=resolution)
        assert torch.equal(pooled, alone)
    assert torch.autograd.gradcheck(joint, tuple(features))


def test_boxes_get_no_gradient():
    feature = torch.randn(1, 2, 8, 8, requires_grad=True)
    boxes = torch.tensor([[[1.0, 1.0, 6.0, 6.0]]], requires_grad=True)
    levels = torch.zeros(1, 1, dtype=torch.int64)
    found = multilevel_roi_align([feature], boxes, extents_of([feature]), strides=[1], levels=levels, resolution=2)
    found.sum().backward()
    assert boxes.grad is None
    assert feature.grad is not None
    assert feature.grad.sum().item() == pytest.approx(2 * 4, abs=1e-5)  # each bin's weights sum to 1


def test_half_precision_is_summed_in_float32():
    features = pyramid(1, 4, 16, dtype=torch.bfloat16)
    boxes = awkward_boxes(32)[None]
    levels = torch.arange(boxes.shape[1])[None] % 3
    options = {"strides": [2, 4, 8], "levels": levels, "resolution": 7}
    found = multilevel_roi_align(features, boxes, extents_of(features), **options)
    exact = multilevel_roi_align([f.float() for f in features], boxes, extents_of(features), **options)
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, exact.bfloat16())


def test_threads_do_not_change_a_bit():
    before = torch.get_num_threads()
    features, strides = pyramid(1, 32, 64), [1, 2, 4]
    boxes = torch.cat([awkward_boxes(64, seed=seed) for seed in range(8)])[None]
    levels = torch.arange(boxes.shape[1])[None] % 3
    seen = []
    try:
        for threads in (1, 2, 2):
            torch.set_num_threads(threads)
            leaves = [feature.clone().requires_grad_() for feature in features]
            out = multilevel_roi_align(leaves, boxes, extents_of(leaves), strides=strides, levels=levels, resolution=7)
            gradients = torch.autograd.grad((out * out.detach()).sum(), leaves)
            seen.append((out.detach(), *gradients))
    finally:
        torch.set_num_threads(before)
    for other in seen[1:]:
        assert all(torch.equal(one, two) for one, two in zip(seen[0], other, strict=True))


def test_compiles_as_one_graph_with_the_same_values_and_gradient():
    features, strides = pyramid(2, 3, 16), [2, 4, 8]
    boxes = torch.stack([awkward_boxes(32, seed=1), awkward_boxes(32, seed=2)])

    def loss(maps: list[Tensor], boxes: Tensor) -> Tensor:
        levels = roi_levels(boxes, min_level=0, max_level=2)
        pooled = multilevel_roi_align(maps, boxes, extents, strides=strides, levels=levels, resolution=3)
        return pooled.square().sum()

    extents = extents_of(features)
    values = []
    for function in (loss, torch.compile(loss, fullgraph=True, backend="aot_eager")):
        leaves = [feature.clone().requires_grad_() for feature in features]
        value = function(leaves, boxes)
        values.append((value.detach(), *torch.autograd.grad(value, leaves)))
    torch.testing.assert_close(values[0], values[1])


def test_the_gather_keeps_the_rules_of_a_custom_op():
    table = torch.randn(5, 3, requires_grad=True)
    index = torch.tensor([[0, 4], [4, 4], [2, 1]], dtype=torch.int32)
    torch.library.opcheck(weighted_rows, (table, index, torch.rand(3, 2)))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_gives_the_cpus_values_and_gradient_and_repeats_them_from_a_graph():
    features, strides = pyramid(2, 32, 64), [1, 2, 4]
    boxes = torch.stack([awkward_boxes(64, seed=1), awkward_boxes(64, seed=2)])

    def both(maps: list[Tensor], boxes: Tensor, extents: list[Tensor]) -> tuple[Tensor, ...]:
        levels = roi_levels(boxes, min_level=0, max_level=2)
        pooled = multilevel_roi_align(maps, boxes, extents, strides=strides, levels=levels, resolution=7)
        return (pooled.detach(), *torch.autograd.grad(pooled.square().sum(), maps))

    cpu = both([feature.clone().requires_grad_() for feature in features], boxes, extents_of(features))
    maps = [feature.cuda().requires_grad_() for feature in features]
    arguments = (maps, boxes.cuda(), [extent.cuda() for extent in extents_of(features)])
    eager = both(*arguments)
    torch.testing.assert_close([tensor.cpu() for tensor in eager], list(cpu), atol=2e-5, rtol=1e-5)
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        both(*arguments)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        captured = both(*arguments)
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(one, two) for one, two in zip(captured, eager, strict=True))
