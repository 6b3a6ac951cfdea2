"""Zeros outside each image, alone or together with all else that follows a convolution: bias, coarser map, ReLU.

Shapes: n maps, C channels, h x w pixels.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_PIXELS = 64  # of one program
_CHANNELS = 64
_SUM_TILE = 4096  # numbers that one program of `add` has at a time: four vectors of 16 bytes per thread in bfloat16
_MAX_SUM_CHANNELS = 256
# Sizes that differ between canvases and align no address, as `channels` does: one compilation serves them all.
_SIZES = ["num_pixels", "width"]


def clear_outside(features: Tensor, mask: Tensor) -> None:
    """Set `features` [n, C, h, w], channels last, to 0 where `mask` [n, 1, h, w] is. Others are not read."""
    assert features.is_contiguous(memory_format=torch.channels_last)
    num_pixels = mask.numel()
    if features.numel() > 0:
        _clear[(triton.cdiv(num_pixels, _PIXELS),)](
            features, mask.contiguous(), num_pixels, features.shape[1], PIXELS=_PIXELS, CHANNELS=_CHANNELS
        )


def add(outputs: Tensor, bias: Tensor | None, coarser: Tensor | None, mask: Tensor | None, *, relu: bool) -> None:
    """Replace `outputs` [n, C, h, w] by their sum with `bias` [C] and the pixels of `coarser`, doubled both ways.

    Then ReLU if `relu`, and 0 where `mask` [n, 1, h, w] is. `coarser` is [n, C, h / 2, w / 2]; maps are channels last.
    The sum is rounded once.
    """
    assert outputs.is_contiguous(memory_format=torch.channels_last)
    maps, channels, height, width = outputs.shape
    if outputs.numel() == 0:
        return
    if coarser is not None:
        assert coarser.is_contiguous(memory_format=torch.channels_last)
        assert coarser.shape == (maps, channels, height // 2, width // 2)
        assert height % 2 == width % 2 == 0
    num_pixels = maps * height * width
    block = min(_MAX_SUM_CHANNELS, triton.next_power_of_2(channels))
    # Absent inputs are never read; the kernel needs a pointer all the same.
    _add[(triton.cdiv(num_pixels * block, _SUM_TILE),)](
        outputs,
        outputs if bias is None else bias.contiguous(),
        outputs if coarser is None else coarser,
        outputs if mask is None else mask.contiguous(),
        num_pixels,
        channels,
        width,
        HAS_BIAS=bias is not None,
        HAS_COARSER=coarser is not None,
        HAS_MASK=mask is not None,
        RELU=relu,
        PIXELS=_SUM_TILE // block,
        CHANNELS=block,
    )


@triton.jit
def _clear(features, mask, num_pixels, channels, PIXELS: tl.constexpr, CHANNELS: tl.constexpr):  # noqa: N803
    pixel = tl.program_id(0) * PIXELS + tl.arange(0, PIXELS)
    outside = tl.load(mask + pixel, mask=pixel < num_pixels, other=1.0) == 0
    if tl.max(outside.to(tl.int32), axis=0) != 0:
        for first in range(0, channels, CHANNELS):
            channel = first + tl.arange(0, CHANNELS)
            place = features + pixel.to(tl.int64)[:, None] * channels + channel[None, :]
            zeros = tl.zeros([PIXELS, CHANNELS], features.dtype.element_ty)
            tl.store(place, zeros, mask=outside[:, None] & (channel < channels)[None, :])


@triton.jit(do_not_specialize=_SIZES)
def _add(
    outputs,
    bias,
    coarser,
    mask,
    num_pixels,
    channels,
    width,
    HAS_BIAS: tl.constexpr,  # noqa: N803
    HAS_COARSER: tl.constexpr,  # noqa: N803
    HAS_MASK: tl.constexpr,  # noqa: N803
    RELU: tl.constexpr,  # noqa: N803
    PIXELS: tl.constexpr,  # noqa: N803
    CHANNELS: tl.constexpr,  # noqa: N803
):
    pixel = tl.program_id(0) * PIXELS + tl.arange(0, PIXELS)
    here = pixel < num_pixels
    inside = here
    if HAS_MASK:
        inside = here & (tl.load(mask + pixel, mask=here, other=0.0) != 0)
    row = pixel // width  # of all maps; each has an even number of rows, so that half of it is the coarser row
    below = (row // 2).to(tl.int64) * (width // 2) + (pixel - row * width) // 2
    for first in range(0, channels, CHANNELS):
        channel = first + tl.arange(0, CHANNELS)
        exists = (channel < channels)[None, :]
        place = pixel.to(tl.int64)[:, None] * channels + channel[None, :]
        # Nothing is read outside of the image.
        total = tl.load(outputs + place, mask=inside[:, None] & exists, other=0.0).to(tl.float32)
        if HAS_BIAS:
            total += tl.load(bias + channel, mask=channel < channels, other=0.0).to(tl.float32)[None, :]
        if HAS_COARSER:
            source = below[:, None] * channels + channel[None, :]
            total += tl.load(coarser + source, mask=inside[:, None] & exists, other=0.0).to(tl.float32)
        if RELU:
            total = tl.where(total < 0, 0.0, total)  # unlike a maximum, keeps NaN, as torch does
        if HAS_MASK:
            total = tl.where(inside[:, None], total, 0.0)
        tl.store(outputs + place, total.to(outputs.dtype.element_ty), mask=here[:, None] & exists)
