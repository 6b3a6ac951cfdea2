"""The least time one image's training step can take on a GPU: every convolution and product at full speed.

FLOP = 2 x multiply-add. Each layer takes the longer of its arithmetic and of its bytes in half precision, each tensor
read or written once, everything elementwise fused. Frozen layers run forward only. Not counted: pooling, suppression,
sampling, targets, losses and the optimizer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from maskfleet.config.model import ModelConfig

HALF = 2  # bytes


@dataclass(frozen=True, slots=True)
class Gpu:
    """What a GPU was seen to sustain: a large bf16 product, a large copy (bytes read plus bytes written)."""

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
    """A convolution or product: `pixels` outputs of `outputs` numbers, each from `taps` times `inputs`."""

    pixels: int
    inputs: int
    outputs: int
    taps: int = 1
    input_pixels: int | None = None
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


def layers(config: ModelConfig, canvas: tuple[int, int]) -> Iterator[Layer]:
    """Every convolution and product of one image's step."""
    pixels = canvas[0] * canvas[1]
    is_fpn = config.architecture == "fpn"
    yield from _backbone(config, pixels, groups=4 if is_fpn else 3)
    stem = config.backbone.stem_channels
    if is_fpn:
        yield from _pyramid(config, pixels)
    else:
        yield from _rpn(pixels // 256, stem * 16, config.rpn.head_channels, len(config.rpn.anchor_sizes) * 3)
    yield from _heads(config, is_fpn=is_fpn)


def _backbone(config: ModelConfig, pixels: int, *, groups: int) -> Iterator[Layer]:
    backbone = config.backbone
    stem = backbone.stem_channels
    yield Layer(pixels // 4, 3, stem, 49, input_pixels=pixels, passes=1 if backbone.freeze_at >= 1 else 2)
    inputs = stem
    for group in range(groups):
        here = pixels // (16 << 2 * group)
        frozen = group == 0 and backbone.freeze_at >= 2
        for block in range(backbone.blocks[group]):
            before = here * 4 if block == 0 and group > 0 else here
            # Nothing below the first trained block wants a gradient.
            first = 2 if block == 0 and group == 1 and backbone.freeze_at >= 2 else 3
            passes = 1 if frozen else 3
            yield from _block(inputs, stem << group, here, before, passes, 1 if frozen else first, backbone.stride_1x1)
            inputs = 4 * (stem << group)


def _block(
    inputs: int, inner: int, here: int, before: int, passes: int, first_passes: int, stride_1x1: bool
) -> Iterator[Layer]:
    middle = here if stride_1x1 else before
    yield Layer(middle, inputs, inner, passes=first_passes)
    yield Layer(here, inner, inner, 9, input_pixels=middle, passes=passes)
    yield Layer(here, inner, 4 * inner, passes=passes)
    if inputs != 4 * inner:
        yield Layer(here, inputs, 4 * inner, input_pixels=here, passes=first_passes)


def _pyramid(config: ModelConfig, pixels: int) -> Iterator[Layer]:
    channels = config.fpn.channels
    for level in range(4):
        here = pixels // (16 << 2 * level)
        passes = 2 if level == 0 and config.backbone.freeze_at >= 2 else 3
        yield Layer(here, config.backbone.stem_channels * 4 << level, channels, passes=passes)
        yield Layer(here, channels, channels, 9)
        yield from _rpn(here, channels, channels, 3)
    yield from _rpn(pixels // 4096, channels, channels, 3)


def _rpn(pixels: int, inputs: int, channels: int, anchors: int) -> Iterator[Layer]:
    yield Layer(pixels, inputs, channels, 9)
    yield Layer(pixels, channels, 5 * anchors)


def _heads(config: ModelConfig, *, is_fpn: bool) -> Iterator[Layer]:
    regions = config.box_head.samples_per_image
    foreground = int(regions * config.box_head.positive_fraction)
    classes = 5 * ((config.num_categories or 80) + 1)
    stem = config.backbone.stem_channels
    if is_fpn:
        width = config.box_head.fc_channels
        for _ in range(3 if config.cascade else 1):
            yield Layer(regions, config.fpn.channels * 49, width)
            yield Layer(regions, width, width)
            yield Layer(regions, width, classes)
    else:
        inputs = stem * 16
        for block in range(config.backbone.blocks[3]):
            before = regions * (196 if block == 0 else 49)
            yield from _block(inputs, stem * 8, regions * 49, before, 3, 3, config.backbone.stride_1x1)
            inputs = stem * 32
        yield Layer(regions, inputs, classes)
    if config.mask:
        channels = config.mask_head.channels
        side = 14 if is_fpn else 7
        for _ in range(4 if is_fpn else 0):
            yield Layer(foreground * side * side, channels, channels, 9)
        yield Layer(foreground * side * side, channels if is_fpn else stem * 32, 4 * channels)
        yield Layer(foreground * 4 * side * side, channels, 1)
