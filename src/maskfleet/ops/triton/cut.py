"""Zeros outside each image, written only there: nothing is read or written where the image is.

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


def clear_outside(features: Tensor, mask: Tensor) -> None:
    """Set `features` [n, C, h, w], channels last, to 0 where `mask` [n, 1, h, w] is."""
    assert features.is_contiguous(memory_format=torch.channels_last)
    num_pixels = mask.numel()
    if features.numel() > 0:
        _clear[(triton.cdiv(num_pixels, _PIXELS),)](
            features, mask.contiguous(), num_pixels, features.shape[1], PIXELS=_PIXELS, CHANNELS=_CHANNELS
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
