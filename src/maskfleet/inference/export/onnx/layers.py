"""Convolutions, normalisation and blocks of the network, as in `model/norm.py` and `model/backbones/resnet.py`.

Shapes: n feature maps, C channels, h x w pixels. One image fills its own canvas, so nothing has to be masked.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from maskfleet.inference.export.onnx.graph import Graph, Value
from maskfleet.model.backbones.resnet import Bottleneck, Group, ResNet
from maskfleet.model.norm import BatchNorm, Conv, ConvNorm, GroupNorm, Norm
from maskfleet.ops.layers.group_norm import EPSILON


@dataclass(frozen=True, slots=True)
class Layers:
    """Writes the layers of a network to a graph, with their names in the network."""

    graph: Graph
    names: dict[nn.Module, str]

    def conv(self, layer: nn.Conv2d, features: Value, *, relu: bool = False) -> Value:
        """A convolution of torch with equal padding on all sides."""
        assert isinstance(layer.padding, tuple)
        padding = [*layer.padding, *layer.padding]
        outputs = self._conv(self.names[layer], features, layer.weight, layer.bias, padding, layer.stride[0])
        return self.graph.op("Relu", outputs) if relu else outputs

    def linear(self, layer: nn.Linear, hidden: Value, *, relu: bool = False) -> Value:
        """`hidden` [n, C] through a fully connected layer."""
        name = self.names[layer]
        weight, bias = self.graph.tensor(f"{name}.weight", layer.weight), self.graph.tensor(f"{name}.bias", layer.bias)
        outputs = self.graph.op("Gemm", hidden, weight, bias, transB=1)
        return self.graph.op("Relu", outputs) if relu else outputs

    def deconv(self, layer: nn.ConvTranspose2d, features: Value) -> Value:
        """The upsampling of the mask heads, with ReLU."""
        assert layer.bias is not None
        name = self.names[layer]
        weight, bias = self.graph.tensor(f"{name}.weight", layer.weight), self.graph.tensor(f"{name}.bias", layer.bias)
        strides, kernel = list(layer.stride), list(layer.kernel_size)
        outputs = self.graph.op("ConvTranspose", features, weight, bias, strides=strides, kernel_shape=kernel)
        return self.graph.op("Relu", outputs)

    def group_norm(self, layer: GroupNorm, features: Value) -> Value:
        """Group normalisation as instance normalisation of groups, which every runtime has."""
        graph, name = self.graph, self.names[layer]
        channels = len(layer.weight)
        # 0 keeps the number of maps, -1 takes all values of a group.
        grouped = graph.reshape(features, [0, layer.num_groups, -1])
        ones, zeros = graph.real([1.0] * layer.num_groups), graph.real([0.0] * layer.num_groups)
        normal = graph.op("InstanceNormalization", grouped, ones, zeros, epsilon=EPSILON)
        normal = graph.op("Reshape", normal, graph.op("Shape", features))
        weight = graph.tensor(f"{name}.weight", layer.weight.reshape(channels, 1, 1))
        bias = graph.tensor(f"{name}.bias", layer.bias.reshape(channels, 1, 1))
        return graph.add(graph.mul(normal, weight), bias)

    def conv_norm(
        self, conv: Conv, norm: Norm, features: Value, *, residual: Value | None = None, relu: bool = False
    ) -> Value:
        """A convolution, its normalisation, plus `residual`, then ReLU."""
        if isinstance(norm, BatchNorm):
            kernel, bias = ConvNorm(conv, norm).folded()
            outputs = self._backbone_conv(conv, features, kernel, bias)
        else:
            outputs = self._backbone_conv(conv, features, conv.weight, None)
            outputs = outputs if norm is None else self.group_norm(norm, outputs)
        if residual is not None:
            outputs = self.graph.add(outputs, residual)
        return self.graph.op("Relu", outputs) if relu else outputs

    def resnet(self, network: ResNet, pixels: Value) -> list[Value]:
        """The map of each group."""
        stem = network.stem
        features = self.conv_norm(stem.conv, stem.norm, pixels, relu=True)
        # No value is negative, so any padding below or at 0 gives the same maximum.
        pads = [0, 0, 1, 1] if stem.conv.tf_pad else [1, 1, 0, 0]
        features = self.graph.op("MaxPool", features, kernel_shape=[3, 3], strides=[2, 2], pads=pads)
        maps = []
        for number in range(len(network.channels)):
            features = self.group(network.group(number), features)
            maps.append(features)
        return maps

    def group(self, group: Group, features: Value) -> Value:
        for block in group:
            assert isinstance(block, Bottleneck)
            features = self._block(block, features)
        return features

    def _block(self, block: Bottleneck, features: Value) -> Value:
        inner = self.conv_norm(block.conv1, block.norm1, features, relu=True)
        inner = self.conv_norm(block.conv2, block.norm2, inner, relu=True)
        residual = features
        if block.shortcut is not None:
            residual = self.conv_norm(block.shortcut.conv, block.shortcut.norm, features)
        return self.conv_norm(block.conv3, block.norm3, inner, residual=residual, relu=True)

    def _backbone_conv(self, conv: Conv, features: Value, kernel: Tensor, bias: Tensor | None) -> Value:
        """The convolution of `model/norm.py`, whose stride 2 rounds odd sides down."""
        half, stride = conv.kernel_size[0] // 2, conv.stride[0]
        padding = [half] * 4
        if stride == 2 and half == 0:
            features = self._even(features)
        elif stride == 2:
            padding = [half - 1, half - 1, half, half] if conv.tf_pad else [half, half, half - 1, half - 1]
        return self._conv(self.names[conv], features, kernel, bias, padding, stride)

    def _conv(
        self, name: str, features: Value, kernel: Tensor, bias: Tensor | None, padding: list[int], stride: int
    ) -> Value:
        inputs = [features, self.graph.tensor(f"{name}.weight", kernel)]
        if bias is not None:
            inputs.append(self.graph.tensor(f"{name}.bias", bias))
        sides = list(kernel.shape[2:])
        return self.graph.op("Conv", *inputs, kernel_shape=sides, pads=padding, strides=[stride, stride])

    def _even(self, features: Value) -> Value:
        """`features` without the last row and column of an odd side."""
        graph = self.graph
        sides = graph.op("Shape", features, start=2, end=4)
        ends = graph.mul(graph.op("Div", sides, graph.constant([2])), graph.constant([2]))
        return graph.op("Slice", features, graph.constant([0, 0]), ends, graph.constant([2, 3]))
