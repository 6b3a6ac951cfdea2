"""Normalisation of features: stored or shared batch statistics, and groups; and the convolution that feeds it.

Shapes: B images, n feature maps of all images together, C channels, h x w pixels, G groups.
"""

from __future__ import annotations

import math
from typing import Any, Literal, TypeGuard

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from maskfleet.model.canvas import Area
from maskfleet.ops.conv import conv_relu, fuses

EPSILON = 1e-5
MEMORY = 0.9  # share of the old value in the moving average of statistics
MAX_GROUPS = 32

NormKind = Literal["FreezeBN", "SyncBN", "GN", "None"]


class BatchNorm(nn.Module):
    """Batch normalisation by stored statistics, or by those of the batch on all GPUs.

    With `learns_statistics=False` it is TensorPack's FreezeBN: an affine map per channel whose scale and offset may
    still be trained. Otherwise it is its SyncBN: the mean over images and ranks of each image's E[x] and E[x^2], with
    the biased variance, which also feeds the moving average.
    """

    running_mean: Tensor
    running_var: Tensor

    def __init__(self, channels: int, *, learns_statistics: bool) -> None:
        super().__init__()
        self.learns_statistics = learns_statistics
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))
        self.register_buffer("running_mean", torch.zeros(channels))
        self.register_buffer("running_var", torch.ones(channels))

    def stored_affine(self) -> tuple[Tensor, Tensor]:
        """Scale and offset [C] that the stored statistics amount to."""
        return self._affine(self.running_mean, self.running_var)

    def forward(self, features: Tensor, area: Area) -> Tensor:
        """Normalise `features` [n, C, h, w] by the statistics of this batch inside `area`, and remember them."""
        mean, variance = _batch_statistics(features.to(self.weight.dtype), area)
        with torch.no_grad():
            self.running_mean.lerp_(mean, 1 - MEMORY)
            self.running_var.lerp_(variance, 1 - MEMORY)
        scale, offset = self._affine(mean, variance)
        return (features * scale[:, None, None] + offset[:, None, None]).to(features.dtype)

    def _affine(self, mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
        scale = self.weight * (variance + EPSILON).rsqrt()
        return scale, self.bias - mean * scale


class GroupNorm(nn.Module):
    """Group normalisation of each feature map over its own pixels."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        # Networks narrower than 32 channels (tests, demos) have as many groups as still divide them.
        self.num_groups = math.gcd(MAX_GROUPS, channels)
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))

    def forward(self, features: Tensor, area: Area | None = None) -> Tensor:
        """Normalise `features` [n, C, h, w]; pixels outside `area` have no say and get no meaning."""
        if area is None or area.mask is None:
            normal = F.group_norm(features.to(self.weight.dtype), self.num_groups, self.weight, self.bias, EPSILON)
            return normal.to(features.dtype)
        maps, channels, height, width = features.shape
        grouped = features.to(self.weight.dtype).reshape(maps, self.num_groups, -1, height, width)  # [n, G, C/G, h, w]
        mask = area.mask[:, :, None]  # [n, 1, 1, h, w]
        count = mask.sum(dim=(2, 3, 4), keepdim=True) * grouped.shape[2]
        centred = grouped - (grouped * mask).sum(dim=(2, 3, 4), keepdim=True) / count
        variance = (centred * centred * mask).sum(dim=(2, 3, 4), keepdim=True) / count
        normal = (centred * (variance + EPSILON).rsqrt()).reshape(maps, channels, height, width)
        return (normal * self.weight[:, None, None] + self.bias[:, None, None]).to(features.dtype)


def make_norm(kind: NormKind, channels: int, *, frozen: bool = False) -> BatchNorm | GroupNorm | None:
    """The normalisation called `kind`; in a frozen stage SyncBN uses its stored statistics."""
    match kind:
        case "FreezeBN":
            return BatchNorm(channels, learns_statistics=False)
        case "SyncBN":
            return BatchNorm(channels, learns_statistics=not frozen)
        case "GN":
            return GroupNorm(channels)
        case "None":
            return None


class Conv(nn.Conv2d):
    """A k x k convolution without bias whose stride 2 halves a side downwards, as TensorPack's padding does.

    Stride 2 pads k//2 pixels at the top left and one less at the bottom right; `tf_pad` swaps the two.
    """

    def __init__(self, inputs: int, outputs: int, kernel: int, *, stride: int = 1, tf_pad: bool = False) -> None:
        super().__init__(inputs, outputs, kernel, stride=stride, padding=kernel // 2, bias=False)
        self.pads_late = tf_pad and stride == 2 and kernel > 1

    @property
    def reads_outside(self) -> bool:
        """Whether a pixel of an image can depend on what lies right of or below the image."""
        return self.kernel_size[0] > 1 and (self.stride[0] == 1 or self.pads_late or self.kernel_size[0] > 3)

    def with_kernel_relu(
        self,
        features: Tensor,
        kernel: Tensor,
        bias: Tensor,
        *,
        residual: Tensor | None = None,
        mask: Tensor | None = None,
    ) -> Tensor:
        """relu of `with_kernel`, plus `residual`, zero where `mask` [n, 1, h', w'] is; not where padding comes late."""
        stride, padding = self.stride[0], self.kernel_size[0] // 2
        is_odd = stride == 2 and (features.shape[2] % 2 == 1 or features.shape[3] % 2 == 1)
        if not is_odd:
            return conv_relu(features, kernel, bias, stride=stride, padding=padding, residual=residual, mask=mask)
        outputs = F.relu_(self.with_kernel(features, kernel.to(features.dtype), bias.to(features.dtype)))
        assert residual is None
        return outputs if mask is None else outputs * mask.to(outputs.dtype)

    def with_kernel(self, features: Tensor, kernel: Tensor, bias: Tensor | None) -> Tensor:
        """This convolution of `features` [n, C, h, w] with another `kernel` and `bias`."""
        if self.stride[0] == 1:
            return F.conv2d(features, kernel, bias, padding=self.padding)
        if self.pads_late:
            late = self.kernel_size[0] // 2
            return F.conv2d(F.pad(features, (late - 1, late, late - 1, late)), kernel, bias, stride=2)
        height, width = features.shape[2] // 2, features.shape[3] // 2
        # Symmetric padding gives one row too many for odd sides, and the same rows otherwise.
        return F.conv2d(features, kernel, bias, stride=2, padding=self.padding)[:, :, :height, :width]


def conv_norm_add_relu(
    features: Tensor, conv: Conv, norm: BatchNorm, residual: Tensor, residual_offset: Tensor | None
) -> Tensor:
    """relu of a folded normal convolution of `features` plus `residual`, which still lacks its own offset [C]."""
    scale, offset = norm.stored_affine()
    kernel = conv.weight * scale[:, None, None, None]
    bias = offset if residual_offset is None else offset + residual_offset
    return conv.with_kernel_relu(features, kernel, bias, residual=residual)


def folds(norm: BatchNorm | GroupNorm | None, area: Area) -> TypeGuard[BatchNorm]:
    """Whether `norm` is an affine map per channel, which a convolution's kernel and bias can take over."""
    return isinstance(norm, BatchNorm) and not (norm.learns_statistics and area.learning)


def conv_norm(features: Tensor, conv: Conv, norm: BatchNorm | GroupNorm | None, area: Area) -> Tensor:
    """Convolve `features` [n, C, h, w] and normalise the result, whose own pixels are in `area`."""
    if folds(norm, area):
        # An affine map per channel is a convolution with another kernel: no pass over the features is needed.
        scale, offset = norm.stored_affine()
        return conv.with_kernel(features, conv.weight * scale[:, None, None, None], offset)
    convolved = conv.with_kernel(features, conv.weight, None)
    return convolved if norm is None else norm(convolved, area)


def conv_norm_relu(
    features: Tensor, conv: Conv, norm: BatchNorm | GroupNorm | None, area: Area, *, is_cut: bool = False
) -> Tensor:
    """relu(conv_norm(...)); with `is_cut`, zero outside `area`."""
    if folds(norm, area) and fuses(features) and not conv.pads_late:
        scale, offset = norm.stored_affine()
        return conv.with_kernel_relu(
            features, conv.weight * scale[:, None, None, None], offset, mask=area.mask if is_cut else None
        )
    outputs = F.relu_(conv_norm(features, conv, norm, area))
    return area.cut(outputs) if is_cut else outputs


def _batch_statistics(values: Tensor, area: Area) -> tuple[Tensor, Tensor]:
    """Mean and biased variance [C] of `values` [n, C, h, w] inside `area`, each image of each rank counted alike."""
    maps, channels, height, width = values.shape
    runs = (area.num_images, maps // area.num_images, channels)
    if area.weight is None:
        moments = torch.stack([values.mean(dim=(2, 3)), (values * values).mean(dim=(2, 3))])  # [2, n, C]
        moments = moments.view(2, *runs).mean(dim=(1, 2))  # [2, C]
    else:
        weighted = values * area.weight
        sums = torch.stack([weighted.sum(dim=(2, 3)), (weighted * values).sum(dim=(2, 3))]).view(2, *runs).sum(dim=2)
        count = area.weight.expand(maps, 1, height, width).reshape(area.num_images, -1).sum(dim=1).clamp(min=1)
        moments = (sums / count[:, None]).mean(dim=1)  # [2, C]
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        moments = _MeanOverRanks.apply(moments)  # type: ignore[no-untyped-call]
    mean, mean_square = moments.unbind()
    return mean, (mean_square - mean * mean).clamp(min=0)


class _MeanOverRanks(torch.autograd.Function):
    """Mean of a tensor over all ranks; so is its gradient, since every rank's loss depends on every rank's tensor."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return _mean_over_ranks(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return _mean_over_ranks(gradient)


def _mean_over_ranks(value: Tensor) -> Tensor:
    total = value.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total)
    return total / dist.get_world_size()
