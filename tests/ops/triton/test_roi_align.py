"""The pooling kernels against plain torch, forward and gradient, and the operator around them."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from maskfleet.ops import roi_align
from maskfleet.ops.roi_align import joint_roi_align, multilevel_roi_align

SIZES = [(12, 17), (6, 9), (3, 5)]
HEIGHTS, WIDTHS = [height for height, _ in SIZES], [width for _, width in SIZES]
STRIDES = [4, 8, 16]


class Scene:
    """Random maps and boxes: ragged extents, padding, boxes that leave the map and boxes far outside it."""

    def __init__(self, channels: int, num_boxes: int, *, dtype: torch.dtype = torch.float32, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.features = [torch.randn(2, channels, *size, generator=generator).to(dtype) for size in SIZES]
        self.extents = [torch.tensor([[height, width], [height - 1, width - 2]]) for height, width in SIZES]
        corner = torch.rand(2, num_boxes, 2, generator=generator) * 50 - 5
        size = torch.rand(2, num_boxes, 2, generator=generator) * 40
        self.boxes = torch.cat([corner, corner + size], dim=-1)
        self.boxes[:, :1] = 0
        self.boxes[:, 1:2] = torch.tensor([1000.0, 1000.0, 1100.0, 1200.0])
        self.boxes[:, 2:3] = torch.tensor([0.0, 0.0, 68.0, 48.0])
        self.levels = torch.randint(0, len(SIZES), (2, num_boxes), generator=generator)

    def expected(self, **options: int | bool) -> tuple[Tensor, list[Tensor], Tensor]:
        """Bins, gradients of the maps, and the gradient of the bins that makes them."""
        maps = [feature.float().requires_grad_() for feature in self.features]
        pooled = multilevel_roi_align(maps, self.boxes, self.extents, strides=STRIDES, levels=self.levels, **options)
        gradient = torch.randn(pooled.shape, generator=torch.Generator().manual_seed(9))
        gradient = gradient.to(self.features[0].dtype)
        return pooled.detach(), list(torch.autograd.grad(pooled, maps, gradient.float())), gradient


CASES = [
    {"resolution": 7, "samples": 2, "half_pixel": True},
    {"resolution": 2, "samples": 2, "half_pixel": True},
    {"resolution": 3, "samples": 1, "half_pixel": False},
]


@pytest.mark.slow
@pytest.mark.parametrize("options", CASES)
@pytest.mark.parametrize(("channels", "dtype", "tolerance"), [(3, torch.float32, 1e-5), (20, torch.bfloat16, 1e-2)])
def test_kernels_pool_as_plain_torch_does(
    options: dict[str, int | bool], channels: int, dtype: torch.dtype, tolerance: float, kernel_device: str
) -> None:
    from maskfleet.ops.triton import roi_align as kernels

    scene = Scene(channels, num_boxes=5, dtype=dtype)
    expected, expected_maps, gradient = scene.expected(**options)
    boxes, levels = scene.boxes.to(kernel_device), scene.levels.to(kernel_device)
    extents = torch.stack(scene.extents).to(kernel_device)
    features = [feature.to(kernel_device) for feature in scene.features]
    samples, half_pixel = int(options["samples"]), bool(options["half_pixel"])
    (pooled,) = kernels.roi_align(
        features, [boxes], extents, [levels], STRIDES, [int(options["resolution"])], samples, half_pixel
    )
    assert pooled.dtype == dtype
    torch.testing.assert_close(pooled.permute(0, 1, 4, 2, 3).float().cpu(), expected, rtol=tolerance, atol=tolerance)
    gradient = gradient.permute(0, 1, 3, 4, 2).contiguous().to(kernel_device)
    sums = kernels.roi_align_backward(
        [gradient], [boxes], extents, [levels], HEIGHTS, WIDTHS, STRIDES, samples, half_pixel
    )
    assert sums.dtype == torch.float32
    wanted = torch.cat([one.permute(0, 2, 3, 1).reshape(-1, channels) for one in expected_maps])
    scale = wanted.abs().max().item()
    torch.testing.assert_close(sums.cpu(), wanted, rtol=tolerance, atol=tolerance * scale)


@pytest.fixture
def op_device(kernel_device: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Where the operator is tested: without a GPU it runs on the CPU for once, in Triton's interpreter."""
    if kernel_device == "cuda":
        yield kernel_device
        return
    from maskfleet.ops.triton import roi_align as kernels

    monkeypatch.setattr(roi_align, "kernels_for", lambda tensor: True)
    with torch.library._scoped_library("maskfleet", "IMPL") as library:
        library.impl("roi_align", kernels.roi_align, "CPU")
        library.impl("roi_align_backward", kernels.roi_align_backward, "CPU")
        yield kernel_device


class Pair:
    """Two lists of boxes on the same maps, of which the second is the beginning of the first, as in training."""

    RESOLUTIONS = (2, 3)

    def __init__(self, counts: tuple[int, int], device: str, *, dtype: torch.dtype = torch.float32) -> None:
        self.scene = Scene(4, num_boxes=max(counts), dtype=dtype, seed=5)
        self.device = device
        self.boxes = [self.scene.boxes[:, :count].to(device) for count in counts]
        self.levels = [self.scene.levels[:, :count].to(device) for count in counts]
        self.extents = [extent.to(device) for extent in self.scene.extents]
        generator = torch.Generator().manual_seed(6)
        shapes = [(2, count, 4, side, side) for count, side in zip(counts, self.RESOLUTIONS, strict=True)]
        self.gradients = [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes]

    def maps(self) -> list[Tensor]:
        channels_last = {"memory_format": torch.channels_last}
        return [one.to(self.device, **channels_last).requires_grad_() for one in self.scene.features]

    def pooled(self, maps: list[Tensor], *lists: int) -> list[Tensor]:
        """Bins of the `lists` 0 and 1, by one operator."""
        return joint_roi_align(
            maps,
            [self.boxes[number] for number in lists],
            self.extents,
            strides=STRIDES,
            levels=[self.levels[number] for number in lists],
            resolutions=[self.RESOLUTIONS[number] for number in lists],
        )

    def apart(self) -> tuple[list[Tensor], list[Tensor]]:
        """Bins of both lists and gradients of the maps, by one operator for each list."""
        maps = self.maps()
        bins = [self.pooled(maps, number)[0] for number in (0, 1)]
        return bins, list(torch.autograd.grad(bins, maps, self.gradients))

    def plain(self) -> tuple[list[Tensor], list[Tensor]]:
        """The same in plain torch and float32."""
        maps = [one.float().requires_grad_() for one in self.scene.features]
        options = {"strides": STRIDES, "extents": self.scene.extents}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(roi_align, "kernels_for", lambda tensor: False)
            bins = [
                multilevel_roi_align(maps, boxes.cpu(), levels=levels.cpu(), resolution=side, **options)
                for boxes, levels, side in zip(self.boxes, self.levels, self.RESOLUTIONS, strict=True)
            ]
        return bins, list(torch.autograd.grad(bins, maps, [one.float().cpu() for one in self.gradients]))


def expect_close(actual: list[Tensor], wanted: list[Tensor], tolerance: float) -> None:
    for one, other in zip(actual, wanted, strict=True):
        scale = other.abs().max().item() if other.numel() else 1.0
        torch.testing.assert_close(one.float().cpu(), other.float().cpu(), rtol=tolerance, atol=tolerance * scale)


@pytest.mark.parametrize(
    "counts", [pytest.param((5, 3), marks=pytest.mark.slow), pytest.param((4, 0), marks=pytest.mark.slow), (0, 0)]
)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
def test_two_lists_in_one_operator_are_as_two_operators_and_as_plain_torch(
    counts: tuple[int, int], dtype: torch.dtype, tolerance: float, op_device: str
) -> None:
    pair = Pair(counts, op_device, dtype=dtype)
    maps = pair.maps()
    bins = pair.pooled(maps, 0, 1)
    gradients = list(torch.autograd.grad(bins, maps, pair.gradients))
    assert [tuple(one.shape) for one in bins] == [(2, counts[0], 4, 2, 2), (2, counts[1], 4, 3, 3)]
    assert all(one.dtype == dtype for one in [*bins, *gradients])
    assert all(one.is_contiguous(memory_format=torch.channels_last) for one in gradients)

    bins_apart, gradients_apart = pair.apart()
    assert all(torch.equal(one, other) for one, other in zip(bins, bins_apart, strict=True))
    expect_close(gradients, gradients_apart, tolerance)
    plain_bins, plain_gradients = pair.plain()
    expect_close(bins, plain_bins, tolerance)
    expect_close(gradients, plain_gradients, tolerance)
    assert any(bool(one.any()) for one in gradients) == (counts[0] > 0)


@pytest.mark.slow
def test_a_list_whose_bins_nobody_reads_adds_nothing(op_device: str) -> None:
    pair = Pair((1, 1), op_device)
    for number in (0, 1):
        maps, alone = pair.maps(), pair.maps()
        gradient = pair.gradients[number]
        together = torch.autograd.grad(pair.pooled(maps, 0, 1)[number], maps, gradient)
        wanted = torch.autograd.grad(pair.pooled(alone, number), alone, gradient)
        expect_close(list(together), list(wanted), 1e-6)


def test_the_operators_keep_the_rules_of_custom_ops(op_device: str) -> None:
    pair = Pair((1, 1), op_device)
    extents = torch.stack(pair.extents)
    checks = ("test_schema", "test_faketensor", "test_autograd_registration")
    pool: tuple[Any, ...] = (pair.maps(), pair.boxes, extents, pair.levels, STRIDES, [2, 3], 2, True)
    torch.library.opcheck(roi_align._pool_by_kernel, pool, test_utils=checks)
    bins = [one.permute(0, 1, 3, 4, 2).contiguous() for one in pair.gradients]
    unpool: tuple[Any, ...] = (bins, pair.boxes, extents, pair.levels, HEIGHTS, WIDTHS, STRIDES, 2, True)
    torch.library.opcheck(roi_align._unpool_by_kernel, unpool, test_utils=checks)


def test_the_compiler_can_round_the_sums_where_it_adds_other_gradients(op_device: str) -> None:
    """Between the float32 sums and the addition there is no copy, only the conversion that the addition can include."""
    pair = Pair((2, 1), op_device, dtype=torch.bfloat16)
    gradients = [one.permute(0, 1, 3, 4, 2).contiguous().permute(0, 1, 4, 2, 3) for one in pair.gradients]

    def both(maps: list[Tensor]) -> tuple[Tensor, ...]:
        bins = pair.pooled(maps, 0, 1)
        others = [one * 3 for one in maps]
        return torch.autograd.grad([*bins, *others], maps, [*gradients, *(torch.ones_like(one) for one in maps)])

    graph = make_fx(both, tracing_mode="fake", _allow_non_fake_inputs=True)(pair.maps()).graph
    (sums,) = [node for node in graph.nodes if "roi_align_backward" in str(node.target)]
    assert sums.meta["val"].dtype == torch.float32
    seen = set()
    for part in sums.users:
        names = [str(part.target)]
        while "add" not in names[-1]:
            (part,) = part.users
            names.append(str(part.target))
        assert part.meta["val"].is_contiguous(memory_format=torch.channels_last)
        seen.add(tuple(name.split(".")[1] for name in names))
    assert len(sums.users) == len(STRIDES)
    assert seen == {("slice", "view", "permute", "_to_copy", "add")}
    assert not any("clone" in str(node.target) for node in graph.nodes)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("options", CASES)
@pytest.mark.parametrize(("channels", "dtype", "tolerance"), [(256, torch.float32, 1e-4), (264, torch.bfloat16, 1e-2)])
def test_public_function_on_the_gpu_agrees_with_the_cpu_forward_and_back(
    options: dict[str, int | bool], channels: int, dtype: torch.dtype, tolerance: float
) -> None:
    scene = Scene(channels, num_boxes=300, dtype=dtype, seed=3)
    expected, expected_maps, gradient = scene.expected(**options)
    maps = [feature.cuda().requires_grad_() for feature in scene.features]
    pooled = multilevel_roi_align(
        maps,
        scene.boxes.cuda(),
        [extent.cuda() for extent in scene.extents],
        strides=STRIDES,
        levels=scene.levels.cuda(),
        **options,
    )
    torch.testing.assert_close(pooled.float().cpu(), expected, rtol=tolerance, atol=tolerance)
    for actual, wanted in zip(torch.autograd.grad(pooled, maps, gradient.cuda()), expected_maps, strict=True):
        scale = wanted.abs().max().item()
        torch.testing.assert_close(actual.float().cpu(), wanted, rtol=tolerance, atol=tolerance * scale)
