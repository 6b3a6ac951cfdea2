"""Group normalisation of maps that fit into one program, each read once; and what all its kernels share.

Shapes: n maps, C channels in G groups, h x w pixels.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

MAX_NUMBERS = 16384  # of a program: 32 per thread of the largest
MAX_PIXELS = 256
_MIN_BLOCK = 32  # channels: 64 bytes in half precision, two sectors of the cache
_NUMBERS_PER_WARP = 1024
# Sizes that differ between layers and do not align addresses, as `channels` does: one compilation serves them all.
SIZES = ["num_maps", "num_pixels"]


def fits_small(features: Tensor, num_groups: int) -> bool:
    """Whether one program can keep a whole map of some groups of `features` [n, C, h, w]."""
    _, channels, height, width = features.shape
    per_group = channels // num_groups
    # Groups are summed by a reshape, which needs a power of two.
    is_power = per_group & (per_group - 1) == 0
    pixels = triton.next_power_of_2(height * width)
    return is_power and pixels <= MAX_PIXELS and pixels * max(_MIN_BLOCK, per_group) <= MAX_NUMBERS


def forward_small(
    features: Tensor,
    weight: Tensor,
    bias: Tensor,
    residual: Tensor | None,
    mask: Tensor | None,
    outputs: Tensor,
    statistics: Tensor,
    *,
    epsilon: float,
    relu: bool,
) -> None:
    """Write `outputs` [n, C, h, w] and `statistics` [3, n, G] of `features`; all channels last."""
    maps, channels, height, width = features.shape
    grid, tile = _launch(features, statistics)
    _forward[grid](
        features, weight, bias, residual, mask, outputs, statistics, epsilon,
        maps, statistics.shape[2], height * width, channels, RELU=relu, **tile,
    )  # fmt: skip


def backward_small(
    gradient: Tensor,
    features: Tensor,
    weight: Tensor,
    bias: Tensor,
    mask: Tensor | None,
    outputs: Tensor | None,
    statistics: Tensor,
    to_features: Tensor,
    to_sum: Tensor | None,
    sums: Tensor,
    *,
    relu: bool,
) -> None:
    """Write the gradients of the features and of the sum before ReLU, and those of bias and weight by map."""
    maps, channels, height, width = features.shape
    grid, tile = _launch(features, statistics)
    _backward[grid](
        gradient, features, weight, bias, mask, outputs, statistics, to_features, to_sum, sums,
        maps, statistics.shape[2], height * width, channels, RELU=relu, **tile,
    )  # fmt: skip


def _launch(features: Tensor, statistics: Tensor) -> tuple[tuple[int, int], dict[str, int]]:
    maps, channels, height, width = features.shape
    per_group = channels // statistics.shape[2]
    pixels, block = triton.next_power_of_2(height * width), max(_MIN_BLOCK, per_group)
    warps = max(1, pixels * block // _NUMBERS_PER_WARP)
    tile = {"PIXELS": pixels, "CHANNELS": block, "PER_GROUP": per_group, "num_warps": warps}
    return (maps, triton.cdiv(channels, block)), tile


@triton.jit
def inside(mask, image, row, num_pixels):
    """Whether pixels `row` of map `image` exist and, if there is a `mask` [n, 1, h, w], count."""
    counts = row < num_pixels
    if mask is not None:
        counts = counts & (tl.load(mask + image.to(tl.int64) * num_pixels + row, mask=counts, other=0.0) != 0.0)
    return counts


@triton.jit
def of_channels(statistics, weight, bias, image, channel, num_maps, num_groups, channels):
    """The first two statistics [.., n, G] of each channel's group, and the channel's weight and bias."""
    here = channel < channels
    place = image * num_groups + channel // (channels // num_groups)
    first = tl.load(statistics + place, mask=here, other=0.0)
    second = tl.load(statistics + num_maps * num_groups + place, mask=here, other=0.0)
    scale = tl.load(weight + channel, mask=here, other=0.0).to(tl.float32)
    offset = tl.load(bias + channel, mask=here, other=0.0).to(tl.float32)
    return first, second, scale, offset


@triton.jit
def before_relu(change, value, outputs, at, here, counts, scale, offset, RELU: tl.constexpr):  # noqa: N803
    """The gradient `change` of the outputs, 0 where ReLU or the mask cut them off.

    Without a residual the `outputs` are not stored: they are `value` * scale + offset before ReLU.
    """
    if RELU:
        if outputs is not None:
            change = tl.where(tl.load(outputs + at, mask=here, other=0.0) > 0.0, change, 0.0)
        else:
            change = tl.where(value * scale[None, :] + offset[None, :] > 0.0, change, 0.0)
    return tl.where(counts[:, None], change, 0.0)


@triton.jit
def _over_group(values, PER_GROUP: tl.constexpr):  # noqa: N803
    """Each channel's value replaced by the sum over its group."""
    GROUPS: tl.constexpr = values.shape[0] // PER_GROUP  # noqa: N806
    total = tl.sum(tl.reshape(values, [GROUPS, PER_GROUP]), axis=1)
    return tl.reshape(tl.broadcast_to(total[:, None], [GROUPS, PER_GROUP]), values.shape)


@triton.jit(do_not_specialize=SIZES)
def _forward(
    features, weight, bias, residual, mask, outputs, statistics, epsilon,
    num_maps, num_groups, num_pixels, channels, RELU: tl.constexpr,  # noqa: N803
    PIXELS: tl.constexpr, CHANNELS: tl.constexpr, PER_GROUP: tl.constexpr,  # noqa: N803
):  # fmt: skip
    """Some groups of one map."""
    image, row = tl.program_id(0), tl.arange(0, PIXELS)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    counts = inside(mask, image, row, num_pixels)
    here = (row < num_pixels)[:, None] & (channel < channels)[None, :]
    at = (image.to(tl.int64) * num_pixels + row)[:, None] * channels + channel[None, :]
    value = tl.load(features + at, mask=here, other=0.0).to(tl.float32)
    value = tl.where(counts[:, None], value, 0.0)
    inverse_count = 1.0 / (tl.maximum(tl.sum(counts.to(tl.float32), axis=0), 1.0) * PER_GROUP)
    mean = _over_group(tl.sum(value, axis=0), PER_GROUP) * inverse_count
    value = tl.where(counts[:, None], value - mean[None, :], 0.0)
    variance = _over_group(tl.sum(value * value, axis=0), PER_GROUP) * inverse_count
    inverse = tl.rsqrt(variance + epsilon)
    scale = tl.load(weight + channel, mask=channel < channels, other=0.0).to(tl.float32)
    offset = tl.load(bias + channel, mask=channel < channels, other=0.0).to(tl.float32)
    value = value * inverse[None, :] * scale[None, :] + offset[None, :]
    if residual is not None:
        value += tl.load(residual + at, mask=here, other=0.0).to(tl.float32)
    if RELU:
        value = tl.maximum(value, 0.0)
    tl.store(outputs + at, tl.where(counts[:, None], value, 0.0).to(outputs.dtype.element_ty), mask=here)

    is_first = (channel % PER_GROUP == 0) & (channel < channels)
    statistics += image * num_groups + channel // PER_GROUP
    tl.store(statistics, mean, mask=is_first)
    tl.store(statistics + num_maps * num_groups, inverse, mask=is_first)
    tl.store(statistics + 2 * num_maps * num_groups, inverse_count + tl.zeros_like(mean), mask=is_first)


@triton.jit(do_not_specialize=SIZES)
def _backward(
    gradient, features, weight, bias, mask, outputs, statistics, to_features, to_sum, sums,
    num_maps, num_groups, num_pixels, channels, RELU: tl.constexpr,  # noqa: N803
    PIXELS: tl.constexpr, CHANNELS: tl.constexpr, PER_GROUP: tl.constexpr,  # noqa: N803
):  # fmt: skip
    """Some groups of one map."""
    image, row = tl.program_id(0), tl.arange(0, PIXELS)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    counts = inside(mask, image, row, num_pixels)
    here = (row < num_pixels)[:, None] & (channel < channels)[None, :]
    at = (image.to(tl.int64) * num_pixels + row)[:, None] * channels + channel[None, :]
    mean, inverse, scale, offset = of_channels(statistics, weight, bias, image, channel, num_maps, num_groups, channels)
    inverse_count = tl.load(statistics + (2 * num_maps + image) * num_groups)
    value = tl.load(features + at, mask=here, other=0.0).to(tl.float32)
    change = tl.load(gradient + at, mask=here, other=0.0).to(tl.float32)
    normal = tl.where(counts[:, None], (value - mean[None, :]) * inverse[None, :], 0.0)
    change = before_relu(change, normal, outputs, at, here, counts, scale, offset, RELU)
    if to_sum is not None:
        tl.store(to_sum + at, change.to(to_sum.dtype.element_ty), mask=here)
    total = tl.sum(change, axis=0)
    product = tl.sum(change * normal, axis=0)
    sums += image * channels + channel
    tl.store(sums, total, mask=channel < channels)
    tl.store(sums + num_maps * channels, product, mask=channel < channels)
    mean_change = _over_group(total * scale, PER_GROUP) * inverse_count
    mean_product = _over_group(product * scale, PER_GROUP) * inverse_count
    change = change * scale[None, :] - mean_change[None, :] - normal * mean_product[None, :]
    change = tl.where(counts[:, None], change * inverse[None, :], 0.0)
    tl.store(to_features + at, change.to(to_features.dtype.element_ty), mask=here)
