"""The least time one image's training step can take on a GPU: every convolution and product at full speed.

FLOP = 2 x multiply-add. Each layer takes the longer of its arithmetic and its memory traffic in half precision, each
tensor read or written once, elementwise operations fused. Frozen layers run forward only. Not counted: pooling, NMS,
sampling, targets, losses and the optimizer.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from maskfleet.bench.noise_batch import noise_batch
from maskfleet.config.model import ModelConfig
from maskfleet.model.build import build_mask_rcnn

HALF = 2  # bytes


@dataclass(frozen=True, slots=True)
class Gpu:
    """Sustained speed of a GPU: of a large bf16 product, and of a large copy (bytes read plus bytes written)."""

    flops: float
    bytes_per_s: float


KNOWN = {
    "NVIDIA H200": Gpu(788e12, 4.3e12),  # measured
    "NVIDIA H100 80GB HBM3": Gpu(788e12, 3.0e12),  # H200's arithmetic, datasheet bandwidth at the same efficiency
    "NVIDIA A100-SXM4-80GB": Gpu(260e12, 1.8e12),  # datasheet times the H200's efficiencies
    "NVIDIA A100-SXM4-40GB": Gpu(260e12, 1.4e12),
    "Tesla V100-SXM2-32GB": Gpu(100e12, 0.8e12),
}


@dataclass(frozen=True, slots=True)
class Layer:
    """A convolution or product: `pixels` vectors of `outputs` numbers, each from `taps` vectors of `inputs` numbers."""

    pixels: int
    inputs: int
    outputs: int
    taps: int = 1
    input_pixels: int | None = None  # None: as many as `pixels`
    passes: int = 3  # forward, gradient of the input, gradient of the weights

    @property
    def flops(self) -> float:
        return 2.0 * self.pixels * self.inputs * self.outputs * self.taps * self.passes

    def num_bytes(self, batch: int) -> float:
        read = (self.pixels if self.input_pixels is None else self.input_pixels) * self.inputs
        weights = self.inputs * self.outputs * self.taps / batch
        return float(HALF * self.passes * (read + self.pixels * self.outputs + weights))


def images_per_s(config: ModelConfig, gpu: Gpu, *, batch: int, canvas: tuple[int, int] = (800, 1344)) -> float:
    """The bound on training speed."""
    return 1.0 / sum(
        max(layer.flops / gpu.flops, layer.num_bytes(batch) / gpu.bytes_per_s) for layer in layers(config, canvas)
    )


@functools.lru_cache(maxsize=16)
def layers(config: ModelConfig, canvas: tuple[int, int]) -> tuple[Layer, ...]:
    """Every convolution and product of one image's step, read off the model as it runs on the meta device."""
    with torch.device("meta"):
        model = build_mask_rcnn(config)
    assert config.num_categories is not None
    image = noise_batch(1, canvas=canvas, size=canvas, num_categories=config.num_categories)
    with _Recorder() as recorder:
        model.to("meta").train().losses(image.to("meta"))
    return tuple(recorder.layers)


class _Recorder(TorchFunctionMode):
    """Records the layers that run inside it; two in a row that read the same tensor are one on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.layers: list[Layer] = []
        self._last_inputs: Tensor | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if func in (F.conv2d, F.linear, F.conv_transpose2d, torch.bmm):
            inputs, kernel = args[:2]
            layer = _layer(func, inputs, kernel, output)
            if inputs is self._last_inputs:
                last = self.layers.pop()
                layer = replace(last, outputs=last.outputs + layer.outputs)
            self.layers.append(layer)
            self._last_inputs = inputs
        return output


def _layer(func: Any, inputs: Tensor, kernel: Tensor, output: Tensor) -> Layer:
    """The work of one call; frozen layers, and those without a trained layer before them, have fewer passes."""
    passes = 1 + inputs.requires_grad + kernel.requires_grad
    if func is F.conv2d:
        outputs, channels, height, width = kernel.shape
        pixels, input_pixels = output.numel() // outputs, inputs.numel() // channels
        taps = height * width
        # A 1 x 1 convolution reads no more pixels than it writes, whatever its stride.
        return Layer(pixels, channels, outputs, taps, pixels if taps == 1 else input_pixels, passes)
    if func is F.conv_transpose2d:
        channels = kernel.shape[0]
        return Layer(inputs.numel() // channels, channels, kernel[0].numel(), passes=passes)
    channels, outputs = inputs.shape[-1], output.shape[-1]
    return Layer(inputs.numel() // channels, channels, outputs, passes=passes)
