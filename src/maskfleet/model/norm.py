"""Normalisation layers (stored, synchronised or group statistics) and the convolution in front of them.

Shapes: B images, n feature maps of all images together, C channels, h x w pixels, G groups.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from maskfleet.model.canvas import Area
from maskfleet.ops.layers.conv import fuses, shared_conv_relu
from maskfleet.ops.layers.group_norm import EPSILON, shared_group_norm
from maskfleet.ops.layers.mean_over_ranks import mean_over_ranks

MOMENTUM = 0.9  # weight of the old value in the moving average of statistics
MAX_GROUPS = 32

NormKind = Literal["FreezeBN", "SyncBN", "GN", "None"]


class BatchNorm(nn.Module):
    """Batch normalisation with stored statistics, or with those of the batch on all GPUs.

    With `learns_statistics=False` it is TensorPack's FreezeBN: an affine map per channel whose scale and offset may
    still be trained. Otherwise it is TensorPack's SyncBN: the mean over images and ranks of each image's E[x] and
    E[x^2], with the biased variance, which also updates the moving average. `share_statistics` includes other ranks.
    """

    running_mean: Tensor
    running_var: Tensor

    def __init__(self, channels: int, *, learns_statistics: bool) -> None:
        super().__init__()
        self.learns_statistics = learns_statistics
        self.shared_as: int | None = None  # its number among the layers whose statistics are those of all ranks
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))
        self.register_buffer("running_mean", torch.zeros(channels))
        self.register_buffer("running_var", torch.ones(channels))

    def forward(self, features: Tensor, area: Area) -> Tensor:
        """Normalise `features` [n, C, h, w] with the batch statistics inside `area`; update the moving average."""
        moments = _moments(features.to(self.weight.dtype), area)
        if self.shared_as is not None:
            moments = mean_over_ranks(moments, self.shared_as)
        mean, mean_square = moments.unbind()
        variance = (mean_square - mean * mean).clamp(min=0)
        with torch.no_grad():
            self.running_mean.lerp_(mean, 1 - MOMENTUM)
            self.running_var.lerp_(variance, 1 - MOMENTUM)
        scale, offset = self.affine(mean, variance)
        return (features * scale[:, None, None] + offset[:, None, None]).to(features.dtype)

    def affine(self, mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
        """Scale and offset [C] of the affine map that statistics [C] define."""
        scale = self.weight * (variance + EPSILON).rsqrt()
        return scale, self.bias - mean * scale


class GroupNorm(nn.Module):
    """Group normalisation of each feature map over its own pixels."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        # Layers narrower than 32 channels (tests, demos) use the largest number of groups that divides them.
        self.num_groups = math.gcd(MAX_GROUPS, channels)
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))

    def forward(
        self, features: Tensor, area: Area | None = None, *, residual: Tensor | None = None, relu: bool = False
    ) -> Tensor:
        """Normalise `features` [n, C, h, w], then add `residual` and apply ReLU.

        Pixels outside `area` do not count, and are 0 in the result.
        """
        return self.shared(features, area, residual=residual, relu=relu, readers=1)[0]

    def shared(
        self, features: Tensor, area: Area | None, *, residual: Tensor | None = None, relu: bool = False, readers: int
    ) -> tuple[Tensor, ...]:
        """The result once for each of its `readers`: see `shared_group_norm`."""
        mask = None if area is None else area.mask
        affine = (self.weight, self.bias, self.num_groups)
        return shared_group_norm(features, *affine, mask=mask, residual=residual, relu=relu, readers=readers)


Norm = BatchNorm | GroupNorm | None


def make_norm(kind: NormKind, channels: int, *, frozen: bool = False) -> Norm:
    """The normalisation layer of this `kind`; in a frozen stage SyncBN uses its stored statistics."""
    match kind:
        case "FreezeBN" | "SyncBN":
            return BatchNorm(channels, learns_statistics=kind == "SyncBN" and not frozen)
        case "GN":
            return GroupNorm(channels)
        case "None":
            return None


class Conv(nn.Conv2d):
    """A k x k convolution without bias whose stride 2 rounds odd sides down, as TensorPack's padding does.

    Stride 2 pads k//2 pixels at the top left and one less at the bottom right; `tf_pad` swaps the two.
    """

    def __init__(self, inputs: int, outputs: int, kernel: int, *, stride: int = 1, tf_pad: bool = False) -> None:
        super().__init__(inputs, outputs, kernel, stride=stride, padding=kernel // 2, bias=False)
        self.tf_pad = tf_pad and stride == 2 and kernel > 1

    @property
    def reads_outside(self) -> bool:
        """Whether a pixel of an image can depend on what lies to the right of or below the image."""
        return self.kernel_size[0] > 1 and (self.stride[0] == 1 or self.tf_pad or self.kernel_size[0] > 3)

    def pads_evenly(self, features: Tensor) -> bool:
        """Whether this is a convolution with equal padding on all sides for `features` [n, C, h, w]."""
        return self.stride[0] == 1 or not (self.tf_pad or features.shape[2] % 2 or features.shape[3] % 2)

    def with_kernel(self, features: Tensor, kernel: Tensor, bias: Tensor | None) -> Tensor:
        """This convolution of `features` [n, C, h, w] with another `kernel` and `bias`."""
        if self.stride[0] == 1:
            return F.conv2d(features, kernel, bias, padding=self.padding)
        if self.tf_pad:
            last = self.kernel_size[0] // 2
            return F.conv2d(F.pad(features, (last - 1, last, last - 1, last)), kernel, bias, stride=2)
        height, width = features.shape[2] // 2, features.shape[3] // 2
        # Symmetric padding gives one row too many for odd sides, and the same rows otherwise.
        return F.conv2d(features, kernel, bias, stride=2, padding=self.padding)[:, :, :height, :width]


class ConvNorm:
    """A convolution and the normalisation after it, computed as one convolution where possible.

    Not a module: blocks register both layers themselves, under the names that checkpoints have.
    """

    # A plain class: torch 2.11 cannot trace calls of a dataclass with slots that is made inside a compiled function.
    def __init__(self, conv: Conv, norm: Norm) -> None:
        self.conv = conv
        self.norm = norm

    def __call__(
        self,
        features: Tensor,
        area: Area,
        *,
        residual: Tensor | None = None,
        extra_bias: Tensor | None = None,
        relu: bool = False,
        mask: bool = False,
    ) -> Tensor:
        """Normalised convolution of `features` [n, C, h, w], whose result has its valid pixels in `area`.

        Then, in this order: plus `residual` [n, O, h', w'], ReLU, and zeros outside `area` (`mask`; group normalisation
        always writes them). `extra_bias` [O] is what `without_bias` left out of the residual.
        """
        return self.shared(features, area, residual=residual, extra_bias=extra_bias, relu=relu, mask=mask, readers=1)[0]

    def shared(
        self,
        features: Tensor,
        area: Area,
        *,
        residual: Tensor | None = None,
        extra_bias: Tensor | None = None,
        relu: bool = False,
        mask: bool = False,
        readers: int,
    ) -> tuple[Tensor, ...]:
        """The result once for each of its `readers`: see `shared_conv_relu`."""
        if self.folds(area):
            kernel, bias = self.folded()
            bias = bias if extra_bias is None else bias + extra_bias
            if relu and fuses(features) and self.conv.pads_evenly(features):
                stride, cut = self.conv.stride[0], area.mask if mask else None
                return shared_conv_relu(
                    features, kernel, bias, stride=stride, residual=residual, mask=cut, readers=readers
                )
            outputs = self.conv.with_kernel(features, kernel, bias)
        else:
            assert extra_bias is None
            outputs = self.conv.with_kernel(features, self.conv.weight, None)
            if isinstance(self.norm, GroupNorm):
                return self.norm.shared(outputs, area, residual=residual, relu=relu, readers=readers)
            outputs = outputs if self.norm is None else self.norm(outputs, area)
        if residual is not None:
            outputs = outputs + residual
        if relu:
            outputs = F.relu_(outputs)
        return (area.cut(outputs) if mask else outputs,) * readers

    def without_bias(self, features: Tensor, area: Area) -> tuple[Tensor, Tensor | None]:
        """The result without the bias [O] of the folded normalisation, and that bias; None if it has none.

        As a residual it costs no pass of its own over the features: the next convolution adds both biases at once.
        """
        if not self.folds(area):
            return self(features, area), None
        kernel, bias = self.folded()
        return self.conv.with_kernel(features, kernel, None), bias

    def folds(self, area: Area) -> bool:
        """Whether the normalisation is an affine map per channel, which the convolution's kernel and bias absorb."""
        return isinstance(self.norm, BatchNorm) and not (self.norm.learns_statistics and area.learning)

    def folded(self) -> tuple[Tensor, Tensor]:
        """Kernel and bias of the convolution that has absorbed its normalisation; only where it `folds`."""
        assert isinstance(self.norm, BatchNorm)
        scale, offset = self.norm.affine(self.norm.running_mean, self.norm.running_var)
        return self.conv.weight * scale[:, None, None, None], offset


def learning_layers(model: nn.Module) -> list[BatchNorm]:
    """The layers of `model` that take their statistics from the batch."""
    return [layer for layer in model.modules() if isinstance(layer, BatchNorm) and layer.learns_statistics]


def share_statistics(model: nn.Module, *, over_ranks: bool) -> None:
    """Take the statistics of the `learning_layers` from the images of all ranks, or of this one only.

    All ranks must have the same model and the same number of images.
    """
    for number, layer in enumerate(learning_layers(model)):
        layer.shared_as = number if over_ranks else None


def _moments(values: Tensor, area: Area) -> Tensor:
    """E[x] and E[x^2] -> [2, C] of `values` [n, C, h, w] inside `area`; all images weigh the same."""
    maps, channels, height, width = values.shape
    runs = (area.num_images, maps // area.num_images, channels)
    if area.weight is None:
        moments = torch.stack([values.mean(dim=(2, 3)), (values * values).mean(dim=(2, 3))])  # [2, n, C]
        return moments.view(2, *runs).mean(dim=(1, 2))
    weighted = values * area.weight
    sums = torch.stack([weighted.sum(dim=(2, 3)), (weighted * values).sum(dim=(2, 3))]).view(2, *runs).sum(dim=2)
    count = area.weight.expand(maps, 1, height, width).reshape(area.num_images, -1).sum(dim=1).clamp(min=1)
    return (sums / count[:, None]).mean(dim=1)
