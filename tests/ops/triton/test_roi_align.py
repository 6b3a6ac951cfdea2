"""The pooling kernels against plain torch, forward and gradient."""

import pytest
import torch
from torch import Tensor

from maskfleet.ops.roi_align import multilevel_roi_align

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
    pooled = kernels.roi_align(features, boxes, extents, levels, strides=STRIDES, **options)
    assert pooled.dtype == dtype
    torch.testing.assert_close(pooled.permute(0, 1, 4, 2, 3).float().cpu(), expected, rtol=tolerance, atol=tolerance)
    maps = kernels.roi_align_backward(
        gradient.permute(0, 1, 3, 4, 2).contiguous().to(kernel_device),
        boxes,
        extents,
        levels,
        heights=HEIGHTS,
        widths=WIDTHS,
        strides=STRIDES,
        samples=int(options["samples"]),
        half_pixel=bool(options["half_pixel"]),
    )
    for actual, wanted in zip(maps, expected_maps, strict=True):
        scale = wanted.abs().max().item()
        torch.testing.assert_close(actual.float().cpu(), wanted, rtol=tolerance, atol=tolerance * scale)


def test_no_boxes_give_no_bins_and_zero_gradients(kernel_device: str) -> None:
    from maskfleet.ops.triton import roi_align as kernels

    scene = Scene(4, num_boxes=0)
    extents, levels = torch.stack(scene.extents).to(kernel_device), scene.levels.to(kernel_device)
    boxes = scene.boxes.to(kernel_device)
    features = [feature.to(kernel_device) for feature in scene.features]
    pooled = kernels.roi_align(features, boxes, extents, levels, strides=STRIDES, **CASES[0])
    assert pooled.shape == (2, 0, 7, 7, 4)
    maps = kernels.roi_align_backward(
        pooled, boxes, extents, levels, heights=HEIGHTS, widths=WIDTHS, strides=STRIDES, samples=2, half_pixel=True
    )
    assert [tuple(part.shape) for part in maps] == [(2, 4, *size) for size in SIZES]
    assert not any(part.any() for part in maps)


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
