"""The kernel that follows a convolution computes what plain torch computes, and writes nothing else."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

LAYOUT = torch.channels_last


def maps(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return values.to(dtype).contiguous(memory_format=LAYOUT)


@pytest.mark.parametrize(
    ("channels", "has_bias", "has_coarser", "has_mask", "relu"),
    [
        (16, True, True, True, False),
        (300, True, True, True, True),
        (1, False, True, False, False),
        (16, True, False, False, True),
        (16, False, False, True, False),
    ],
)
def test_kernel_adds_what_plain_torch_adds(
    channels: int, has_bias: bool, has_coarser: bool, has_mask: bool, relu: bool, kernel_device: str
) -> None:
    from maskfleet.ops.triton import cut as kernels

    # Not bfloat16: Triton's interpreter cuts its digits off instead of rounding.
    outputs = maps(2, channels, 6, 10, seed=0, dtype=torch.float16)
    bias = torch.randn(channels, generator=torch.Generator().manual_seed(1)) if has_bias else None
    coarser = maps(2, channels, 3, 5, seed=2, dtype=torch.float16) if has_coarser else None
    mask = (torch.rand(2, 1, 6, 10, generator=torch.Generator().manual_seed(3)) < 0.7).float() if has_mask else None
    expected = outputs.float() if bias is None else outputs.float() + bias[:, None, None]
    if coarser is not None:
        expected = expected + F.interpolate(coarser.float(), scale_factor=2.0)
    expected = (expected.relu() if relu else expected) * (1 if mask is None else mask)
    if mask is not None:
        outputs.masked_fill_(mask == 0, torch.nan)  # must not reach the result
    actual = outputs.to(kernel_device, copy=True)
    given = (None if value is None else value.to(kernel_device) for value in (bias, coarser, mask))
    kernels.add(actual, *given, relu=relu)
    torch.testing.assert_close(actual.cpu(), expected.to(torch.float16), rtol=0, atol=0)


def test_kernel_changes_nothing_beyond_the_last_pixel(kernel_device: str) -> None:
    from maskfleet.ops.triton import cut as kernels

    memory = torch.zeros(3, 5, 7, 20, device=kernel_device)  # [n, h, w, C]; 35 pixels are no multiple of a program's
    kernels.add(memory[1:2].permute(0, 3, 1, 2), torch.ones(20, device=kernel_device), None, None, relu=False)
    assert memory.sum(dim=(1, 2, 3)).tolist() == [0, 5 * 7 * 20, 0]


def test_kernel_keeps_nan_under_relu(kernel_device: str) -> None:
    from maskfleet.ops.triton import cut as kernels

    outputs = torch.full((1, 4, 2, 2), torch.nan, device=kernel_device).contiguous(memory_format=LAYOUT)
    kernels.add(outputs, None, None, None, relu=True)
    assert outputs.isnan().all()
