"""The detection of `model/mask_rcnn.py` for one image, as a graph.

Shapes: one image of height x width pixels, n regions, the last of them padding, D detections, C categories,
M x M mask pixels.
"""

from __future__ import annotations

from typing import cast

from torch import nn

from maskfleet.inference.export.onnx.graph import FLOAT, Graph, Value
from maskfleet.inference.export.onnx.layers import Layers
from maskfleet.inference.export.onnx.regions import FeatureMaps, chosen_detections, clipped, crops, decoded, proposals
from maskfleet.model.backbones.resnet import Group, ResNet
from maskfleet.model.canvas import MIN_SIDE_PX
from maskfleet.model.fpn import LEVELS, Fpn
from maskfleet.model.heads.c4 import CROP_RESOLUTION, C4BoxHead
from maskfleet.model.heads.fpn import BOX_RESOLUTION, MASK_RESOLUTION, NUM_CONVS, FpnBoxHead, FpnMaskHead
from maskfleet.model.mask_rcnn import BoxHead, MaskRCNN
from maskfleet.model.norm import GroupNorm

INPUT = "image"  # [height, width, 3] uint8, RGB


class NetworkGraph:
    """Writes the graph of one network, which is on the CPU."""

    def __init__(self, network: MaskRCNN) -> None:
        self.network = network
        self.graph = Graph()
        self.layers = Layers(self.graph, {module: name for name, module in network.named_modules()})

    def detections(self) -> list[Value]:
        """Boxes [D, 4], scores [D], labels [D] and, with a mask head, masks [D, M, M]."""
        network, config = self.network, self.network.config
        features = self._features()
        regions = proposals(self.layers, network.rpn, features, config, network.max_log_scale)
        boxes, scores = self._refined(features, self._with_padding(regions))
        found = chosen_detections(self.graph, boxes, scores, config.inference, per_class=not config.cascade)
        if network.mask_head is None:
            return list(found)
        return [*found, self._masks(features, found[0], found[2])]

    def _features(self) -> FeatureMaps:
        network, graph = self.network, self.graph
        assert isinstance(network.backbone, ResNet)
        height, width = (graph.side(INPUT, axis) for axis in (0, 1))
        limits = graph.cast(graph.concat([width, height, width, height]), FLOAT)
        maps = self.layers.resnet(network.backbone, self._pixels(height, width))
        if network.fpn is None:
            return FeatureMaps(maps[-1:], (network.config.rpn.anchor_stride,), limits)
        return FeatureMaps(self._pyramid(network.fpn, maps), network.config.fpn.anchor_strides, limits)

    def _pixels(self, height: Value, width: Value) -> Value:
        """The image, normalised and padded with 0 at the bottom and the right -> [1, 3, H, W] in BGR order."""
        graph, network = self.graph, self.network
        pixels = graph.op("Transpose", graph.cast(INPUT, FLOAT), perm=[2, 0, 1])
        pixels = graph.unsqueeze(graph.rows(pixels, graph.constant([2, 1, 0])), 0)
        mean = graph.tensor("pixel_mean", network.pixel_mean[:, None, None])
        scale = graph.tensor("pixel_scale", network.pixel_scale[:, None, None])
        pixels = graph.mul(graph.sub(pixels, mean), scale)
        missing = [graph.sub(self._canvas_side(side), side) for side in (height, width)]
        return graph.op("Pad", pixels, graph.concat([graph.constant([0] * 6), *missing]))

    def _canvas_side(self, side: Value) -> Value:
        """`side` padded to what the network can halve."""
        graph, divisor = self.graph, self.network.config.size_divisor
        rounded = graph.op("Div", graph.add(side, graph.constant([divisor - 1])), graph.constant([divisor]))
        return graph.op("Max", graph.mul(rounded, graph.constant([divisor])), graph.constant([MIN_SIDE_PX]))

    def _pyramid(self, fpn: Fpn, maps: list[Value]) -> list[Value]:
        """Maps of the backbone -> p2..p6."""
        graph = self.graph
        merged: Value | None = None
        outputs: list[Value] = []
        for level, feature in reversed(list(zip(LEVELS, maps, strict=True))):
            lateral = self._fpn_layer(fpn, f"lateral_c{level}", f"lateral_norm_c{level}", feature)
            merged = lateral if merged is None else graph.add(lateral, self._doubled(merged))
            outputs.append(self._fpn_layer(fpn, f"output_p{level}", f"output_norm_p{level}", merged))
        axes, steps = graph.constant([2, 3]), graph.constant([2, 2])
        ends = graph.op("Shape", outputs[0], start=2, end=4)
        coarsest = graph.op("Slice", outputs[0], graph.constant([0, 0]), ends, axes, steps)
        return [*outputs[::-1], coarsest]

    def _fpn_layer(self, fpn: Fpn, conv: str, norm: str, feature: Value) -> Value:
        outputs = self.layers.conv(cast(nn.Conv2d, getattr(fpn, conv)), feature)
        return self.layers.group_norm(cast(GroupNorm, getattr(fpn, norm)), outputs) if fpn.has_norm else outputs

    def _doubled(self, feature: Value) -> Value:
        """Every pixel twice both ways."""
        scales = self.graph.real([1.0, 1.0, 2.0, 2.0])
        options = {"mode": "nearest", "coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
        return self.graph.op("Resize", feature, "", scales, **options)

    def _with_padding(self, boxes: Value) -> Value:
        """`boxes` [n, 4] and an empty one, because not every runtime runs layers on no region at all."""
        return self.graph.concat([boxes, self.graph.real([[0.0] * 4])])

    def _refined(self, features: FeatureMaps, boxes: Value) -> tuple[Value, Value]:
        """Boxes [n, C or 1, 4] and scores [n, C] that the box heads give to regions [n, 4]."""
        graph, stages = self.graph, len(self.network.box_heads)
        total: Value | None = None
        found = boxes
        for stage in range(stages):
            logits, deltas = self._box_outputs(self.network.box_head(stage), features, boxes)
            weights = graph.tensor(f"box_weights.{stage}", self.network.box_weights[stage])
            deltas = graph.op("Div", deltas, weights)
            found = decoded(graph, deltas, graph.unsqueeze(boxes, 1), self.network.max_log_scale)
            found = clipped(graph, found, features.limits)
            scores = graph.op("Softmax", logits, axis=-1)
            total = scores if total is None else graph.add(total, scores)
            boxes = graph.reshape(graph.cut(found, 0, 1, axis=1), [-1, 4])
        assert total is not None
        mean = graph.op("Div", total, graph.real(float(stages)))
        classes = self.network.box_head(0).class_logits.out_features
        if not self.network.config.cascade:
            found = graph.cut(found, 1, classes, axis=1)
        return found, graph.cut(mean, 1, classes, axis=1)

    def _box_outputs(self, head: BoxHead, features: FeatureMaps, boxes: Value) -> tuple[Value, Value]:
        """Logits [n, C + 1] and deltas [n, C + 1 or 1, 4] of a box head."""
        hidden = (
            self._c4_hidden(head, features, boxes)
            if isinstance(head, C4BoxHead)
            else self._fpn_hidden(head, features, boxes)
        )
        logits, deltas = self.layers.linear(head.class_logits, hidden), self.layers.linear(head.box_deltas, hidden)
        return logits, self.graph.reshape(deltas, [-1, head.box_deltas.out_features // 4, 4])

    def _c4_hidden(self, head: C4BoxHead, features: FeatureMaps, boxes: Value) -> Value:
        return self.graph.op("ReduceMean", self._c4_regions(head, features, boxes), axes=[2, 3], keepdims=0)

    def _c4_regions(self, head: C4BoxHead, features: FeatureMaps, boxes: Value) -> Value:
        """The backbone's last stage on each region."""
        regions = crops(self.graph, features, boxes, resolution=CROP_RESOLUTION)
        return self.layers.group(cast(Group, head.group3), regions)

    def _fpn_hidden(self, head: FpnBoxHead, features: FeatureMaps, boxes: Value) -> Value:
        aws = head.roi_align == "aws"
        regions = crops(self.graph, features, boxes, resolution=BOX_RESOLUTION, aws=aws)
        if head.kind == "2fc":
            hidden = self.layers.linear(head.fc6, self.graph.op("Flatten", regions, axis=1), relu=True)
            return self.layers.linear(head.fc7, hidden, relu=True)
        regions = self._convs(head, regions, has_norm=head.kind == "4conv1fc_gn")
        return self.layers.linear(head.fc, self.graph.op("Flatten", regions, axis=1), relu=True)

    def _convs(self, head: nn.Module, regions: Value, *, has_norm: bool) -> Value:
        """The convolutions of a head; GN comes after ReLU."""
        for number in range(NUM_CONVS):
            regions = self.layers.conv(cast(nn.Conv2d, getattr(head, f"conv{number}")), regions, relu=True)
            if has_norm:
                regions = self.layers.group_norm(cast(GroupNorm, getattr(head, f"norm{number}")), regions)
        return regions

    def _masks(self, features: FeatureMaps, boxes: Value, labels: Value) -> Value:
        """Mask probabilities [D, M, M] inside `boxes` [D, 4] for their `labels` [D]."""
        graph, head = self.graph, self.network.mask_head
        assert head is not None
        boxes = self._with_padding(boxes)
        if isinstance(head, FpnMaskHead):
            aws = head.roi_align == "aws"
            regions = crops(graph, features, boxes, resolution=MASK_RESOLUTION, aws=aws)
            regions = self._convs(head, regions, has_norm=head.has_norm)
        else:
            regions = self._c4_regions(cast(C4BoxHead, self.network.box_head(0)), features, boxes)
        hidden = self.layers.deconv(head.deconv, regions)
        # Only the label's channel is computed. The padding takes the first one.
        channel = graph.concat([graph.sub(labels, graph.constant([1])), graph.constant([0])])
        kernels = graph.rows(
            graph.tensor("mask_logits.weight", head.logits.weight.flatten(1)), channel
        )  # [n, channels]
        assert head.logits.bias is not None
        bias = graph.rows(graph.tensor("mask_logits.bias", head.logits.bias), channel)
        pixels = graph.reshape(hidden, [0, 0, -1])
        scores = graph.op("MatMul", graph.unsqueeze(kernels, 1), pixels)  # [n, 1, M * M]
        scores = graph.add(scores, graph.unsqueeze(bias, 1, 2))
        masks = graph.op("Sigmoid", graph.reshape(scores, [-1, head.resolution, head.resolution]))
        return graph.without_last(masks)
