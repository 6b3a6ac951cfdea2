"""The kernel that resizes on the GPU gives the pixels of plain torch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from maskfleet.data.pipeline import device_resize
from maskfleet.data.pipeline.device_resize import BatchGeometry, resize_on_device

CANVAS = (96, 300)  # wider than the columns of one program


def geometry_of_three_images() -> tuple[Tensor, BatchGeometry]:
    """An enlarged and flipped image, a smaller one, and a crop out of an enlarged one, flipped; (height, width)."""
    sizes = torch.tensor([[77, 290], [24, 32], [96, 300]])
    source = torch.tensor([[48, 64], [48, 64], [31, 50]])
    resized = torch.tensor([[77, 290], [24, 32], [150, 400]])
    offset = torch.tensor([[0, 0], [0, 0], [20, 31]])
    return sizes, BatchGeometry(source, resized, offset, torch.tensor([True, False, True]), CANVAS)


def by_kernel(pixels: Tensor, sizes: Tensor, geometry: BatchGeometry, device: str) -> Tensor:
    from maskfleet.ops.triton.resize import resize

    tensors = (pixels, sizes, geometry.source, geometry.resized, geometry.offset, geometry.flip)
    return resize(*(tensor.to(device) for tensor in tensors), canvas=geometry.canvas).cpu()


@pytest.mark.slow
def test_kernel_gives_the_pixels_of_plain_torch(kernel_device: str) -> None:
    sizes, geometry = geometry_of_three_images()
    generator = torch.Generator().manual_seed(0)
    noise = torch.randint(0, 256, (3, 48, 64, 3), dtype=torch.uint8, generator=generator).permute(0, 3, 1, 2)
    expected = resize_on_device(noise, sizes, geometry)
    found = by_kernel(noise, sizes, geometry, kernel_device)
    assert found.shape == (3, 3, *CANVAS)
    assert found.is_contiguous(memory_format=torch.channels_last)
    difference = (found.int() - expected.int()).abs()
    # Sums that end in one half may be rounded either way, where one of the two fuses multiplication and addition.
    assert difference.max() <= 1
    assert (difference > 0).float().mean() < 1e-3
    for image, (height, width) in enumerate(sizes.tolist()):
        assert found[image, :, height:].sum() == found[image, :, :, width:].sum() == 0
    assert found[0, :, :77, :290].float().std() > 30  # it is not empty


def test_the_kernel_is_launched_on_the_gpu_of_the_images(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program may have models on two GPUs; the one that was made last is current."""
    pytest.importorskip("triton")
    current, launched_on = list[torch.device](), list[torch.device]()

    @contextmanager
    def device(chosen: torch.device) -> Iterator[None]:
        current.append(chosen)
        yield
        current.pop()

    def resize(pixels: Tensor, *geometry: Tensor, canvas: tuple[int, int]) -> Tensor:
        launched_on.extend(current)
        return pixels

    monkeypatch.setattr(device_resize, "kernels_for", lambda tensor: True)
    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr("maskfleet.ops.triton.resize.resize", resize)
    sizes, geometry = geometry_of_three_images()
    pixels = torch.zeros(3, 3, 48, 64, dtype=torch.uint8)
    resize_on_device(pixels, sizes, geometry)
    assert launched_on == [pixels.device]


@pytest.mark.slow
def test_an_image_on_a_canvas_of_its_own_size_is_copied(kernel_device: str) -> None:
    pixels = torch.arange(2 * 3 * 5 * 4, dtype=torch.uint8).reshape(2, 5, 4, 3).permute(0, 3, 1, 2)
    size = torch.tensor([[5, 4], [5, 4]])
    geometry = BatchGeometry(size, size, torch.zeros_like(size), torch.tensor([False, True]), (6, 8))
    found = by_kernel(pixels, size, geometry, kernel_device)
    assert torch.equal(found[0, :, :5, :4], pixels[0])
    assert torch.equal(found[1, :, :5, :4], pixels[1].flip(2))
    assert found[:, :, 5:].sum() == found[:, :, :, 4:].sum() == 0
