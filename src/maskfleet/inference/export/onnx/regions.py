"""Proposals, crops and the final choice of detections, as in `model/rpn.py`, `ops/roi_align.py` and `ops/nms.py`.

Shapes: N anchors of one map, P proposals, n boxes, k candidates, D detections, C categories, h x w one feature map.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from maskfleet.config.model import InferenceConfig, ModelConfig
from maskfleet.inference.export.onnx.graph import DOUBLE, FLOAT, INT64, ZERO_INT64, Graph, Value
from maskfleet.inference.export.onnx.layers import Layers
from maskfleet.model.features import MAX_LEVEL, MIN_LEVEL
from maskfleet.model.rpn import Rpn, proposal_limits
from maskfleet.ops.nms import MAX_CANDIDATES
from maskfleet.ops.roi_align import CANONICAL_LEVEL, CANONICAL_SIDE_PX, LEVEL_EPSILON

SCORE_THRESHOLD = "score_threshold"  # the constant under this name; detections score above it


@dataclass(frozen=True, slots=True)
class FeatureMaps:
    """What the heads read of one image."""

    maps: list[Value]  # [1, channels, h, w] each, finest first
    strides: tuple[int, ...]
    limits: Value  # [4] float32: width, height, width, height of the image


@dataclass(frozen=True, slots=True)
class Anchors:
    """Outputs of the region proposal network."""

    logits: Value  # [N]
    deltas: Value  # [N, 4]
    boxes: Value  # [N, 4]


def proposals(layers: Layers, rpn: Rpn, features: FeatureMaps, config: ModelConfig, max_log_scale: float) -> Value:
    """The best boxes [P, 4] of the region proposal network, map by map or jointly."""
    graph = layers.graph
    joint = config.architecture == "c4" or config.fpn.proposal_mode == "Joint"
    before_nms, after_nms, per_image = proposal_limits(config.rpn, joint=joint, training=False)
    anchors = _anchors(layers, rpn, features)
    scores, boxes = [], []
    for part in [_joined(graph, anchors)] if joint else anchors:
        top, index = graph.best(part.logits, before_nms)
        found = decoded(graph, graph.rows(part.deltas, index), graph.rows(part.boxes, index), max_log_scale)
        found = clipped(graph, found, features.limits)
        if config.rpn.min_size > 0:
            large = _larger_than(graph, found, config.rpn.min_size)
            top, found = graph.rows(top, large), graph.rows(found, large)
        kept = nms(graph, found, threshold=config.rpn.nms_iou, most=after_nms)
        scores.append(graph.rows(top, kept))
        boxes.append(graph.rows(found, kept))
    _, index = graph.best(graph.concat(scores), per_image)
    return graph.rows(graph.concat(boxes), index)


def decoded(graph: Graph, deltas: Value, boxes: Value, max_log_scale: float) -> Value:
    """Boxes [..., 4] that `deltas` [..., 4] make of `boxes` [..., 4]."""
    shift, scale = _halves(graph, deltas)
    corner, opposite = _halves(graph, boxes)
    half = graph.real(0.5)
    size, center = graph.sub(opposite, corner), graph.mul(graph.add(opposite, corner), half)
    growth = graph.op("Exp", graph.op("Min", scale, graph.real(max_log_scale)))
    half_size = graph.mul(graph.mul(growth, size), half)
    center = graph.add(graph.mul(shift, size), center)
    return graph.concat([graph.sub(center, half_size), graph.add(center, half_size)], axis=-1)


def clipped(graph: Graph, boxes: Value, limits: Value) -> Value:
    """Boxes [..., 4] cut to the image."""
    return graph.op("Min", graph.op("Max", boxes, graph.real(0.0)), limits)


def nms(graph: Graph, boxes: Value, *, threshold: float, most: int) -> Value:
    """Positions of the first `most` boxes [n, 4], which are best first, that non-maximum suppression keeps."""
    count = graph.side(boxes, 0)
    # Scores that only say the order: they are positive and differ, so every runtime takes the boxes in this order.
    order = graph.cast(graph.sub(count, graph.count_up(count)), FLOAT)
    limits = (graph.constant([most]), graph.real([threshold]))
    chosen = graph.op("NonMaxSuppression", graph.unsqueeze(boxes, 0), graph.unsqueeze(order, 0, 1), *limits)
    position = graph.op("Squeeze", graph.cut(chosen, 2, 3, axis=1), graph.constant([1]))
    return graph.best(position, most, largest=False)[0]


def crops(graph: Graph, features: FeatureMaps, boxes: Value, *, resolution: int, aws: bool = False) -> Value:
    """FeatureMaps [n, channels, r, r] inside each of `boxes` [n, 4], each from the map of its level."""
    count = min(len(features.maps), MAX_LEVEL - MIN_LEVEL + 1)
    if count == 1:
        return _crops_of_map(graph, features, 0, boxes, resolution=resolution, aws=aws)
    levels = _levels(graph, boxes, aws=aws)
    parts, order = [], []
    for number in range(count):
        here = graph.where_true(graph.op("Equal", levels, graph.constant(number)))
        parts.append(_crops_of_map(graph, features, number, graph.rows(boxes, here), resolution=resolution, aws=aws))
        order.append(here)
    # The crops are sorted by level; the inverse of that order puts them back.
    positions = graph.concat(order)
    ranks = graph.count_up(graph.side(positions, 0))
    return graph.rows(graph.concat(parts), graph.op("ScatterElements", ranks, positions, ranks, axis=0))


def chosen_detections(
    graph: Graph, boxes: Value, scores: Value, config: InferenceConfig, *, per_class: bool
) -> tuple[Value, Value, Value]:
    """Boxes [D, 4], scores [D] and labels [D] of the final detections, best first.

    `boxes` are [n, C, 4] if `per_class`, else [n, 1, 4]; `scores` [n, C]. The last of the n is padding.
    """
    # Before the padding goes: the maximum of nothing is undefined. Its own box is at 0.
    largest = graph.op("ReduceMax", graph.reshape(boxes, [-1]), axes=[0], keepdims=1)
    boxes, scores = graph.without_last(boxes), graph.without_last(scores)
    regions = graph.op("Max", graph.side(scores, 0), graph.constant([1]))  # a divisor; without regions of nothing
    by_category = graph.reshape(graph.op("Transpose", scores, perm=[1, 0]), [-1])  # ties go to the lower category
    threshold = graph.tensor(SCORE_THRESHOLD, torch.tensor(config.score_threshold))
    eligible = graph.where_true(graph.op("Greater", by_category, threshold))
    top, index = graph.best(graph.rows(by_category, eligible), MAX_CANDIDATES)
    position = graph.rows(eligible, index)
    category, region = graph.op("Div", position, regions), graph.op("Mod", position, regions)
    row = region
    if per_class:
        row = graph.add(graph.mul(region, graph.side(scores, 1)), category)
    picked = graph.rows(graph.reshape(boxes, [-1, 4]), row)
    # Boxes of different categories are moved apart, so that one suppression treats each by itself.
    step = graph.mul(graph.cast(category, FLOAT), graph.add(largest, graph.real([1.0])))
    apart = graph.add(picked, graph.unsqueeze(step, 1))
    kept = nms(graph, apart, threshold=config.nms_iou, most=config.max_detections)
    labels = graph.add(graph.rows(category, kept), graph.constant([1]))
    return graph.rows(picked, kept), graph.rows(top, kept), labels


def _anchors(layers: Layers, rpn: Rpn, features: FeatureMaps) -> list[Anchors]:
    """Outputs for the anchors of each map, in (row, column, anchor) order."""
    graph = layers.graph
    found = []
    for number, (feature, stride) in enumerate(zip(features.maps, features.strides, strict=True)):
        hidden = layers.conv(rpn.conv, feature, relu=True)
        logits, deltas = (
            graph.op("Transpose", layers.conv(layer, hidden), perm=[0, 2, 3, 1]) for layer in (rpn.objectness, rpn.box)
        )
        cell: Tensor = getattr(rpn, f"cell{number}")
        boxes = _grid(graph, cell, feature, stride)
        found.append(Anchors(graph.reshape(logits, [-1]), graph.reshape(deltas, [-1, 4]), boxes))
    return found


def _grid(graph: Graph, cell: Tensor, feature: Value, stride: int) -> Value:
    """`cell` [A, 4] at every cell of `feature` [1, channels, h, w] -> [N, 4]."""
    height, width = graph.side(feature, 2), graph.side(feature, 3)
    index = graph.count_up(graph.mul(height, width))  # of the cell
    row, column = graph.op("Div", index, width), graph.op("Mod", index, width)
    corner = graph.concat([graph.unsqueeze(axis, 1) for axis in (column, row, column, row)], axis=1)
    corner = graph.cast(graph.mul(corner, graph.constant([stride])), DOUBLE)
    at_origin = graph.constant(cell.numpy()[None], np.float64)  # [1, A, 4]
    # Rounded to float32 once, after the shift, as the network's own grid is.
    boxes = graph.add(at_origin, graph.unsqueeze(corner, 1))
    return graph.reshape(graph.cast(boxes, FLOAT), [-1, 4])


def _joined(graph: Graph, anchors: list[Anchors]) -> Anchors:
    return Anchors(
        logits=graph.concat([part.logits for part in anchors]),
        deltas=graph.concat([part.deltas for part in anchors]),
        boxes=graph.concat([part.boxes for part in anchors]),
    )


def _larger_than(graph: Graph, boxes: Value, size: float) -> Value:
    """Positions of the boxes [n, 4] whose both sides are above `size`."""
    corner, opposite = _halves(graph, boxes)
    shorter = graph.op("ReduceMin", graph.sub(opposite, corner), axes=[1], keepdims=0)
    return graph.where_true(graph.op("Greater", shorter, graph.real(size)))


def _levels(graph: Graph, boxes: Value, *, aws: bool) -> Value:
    """Which map, 0 is the finest, each of `boxes` [n, 4] reads -> [n] int64.

    The floor of a logarithm to the base 2, as the number of powers of two that the side reaches.
    """
    corner, opposite = _halves(graph, boxes)
    sides = graph.op("Max", graph.sub(opposite, corner), graph.real(0.0))
    area = graph.op("ReduceProd", sides, axes=[1], keepdims=1)  # [n, 1]
    side = graph.op("Div", graph.op("Sqrt", area), graph.real(CANONICAL_SIDE_PX))
    side = side if aws else graph.add(side, graph.real(LEVEL_EPSILON))
    bounds = graph.real([2.0 ** (level - CANONICAL_LEVEL) for level in range(MIN_LEVEL + 1, MAX_LEVEL + 1)])
    reached = graph.op("Not", graph.op("Less", side, bounds))
    return graph.op("ReduceSum", graph.cast(reached, INT64), graph.constant([1]), keepdims=0)


def _crops_of_map(
    graph: Graph, features: FeatureMaps, number: int, boxes: Value, *, resolution: int, aws: bool
) -> Value:
    """FeatureMaps inside `boxes` [n, 4] of map `number`."""
    stride = features.strides[number]
    if aws:
        # ONNX's rule without half pixels also widens small boxes; this is the one with them, shifted by half a cell.
        boxes = graph.add(boxes, graph.real(stride / 2))
    zero = graph.op("ConstantOfShape", graph.side(boxes, 0), value=ZERO_INT64)
    return graph.op(
        "RoiAlign",
        features.maps[number],
        boxes,
        zero,
        coordinate_transformation_mode="half_pixel",
        output_height=resolution,
        output_width=resolution,
        sampling_ratio=1 if aws else 2,
        spatial_scale=1.0 / stride,
    )


def _halves(graph: Graph, values: Value) -> tuple[Value, Value]:
    """The first and the last two of four values [..., 4]."""
    first, last = graph.ops("Split", values, graph.constant([2, 2]), outputs=2, axis=-1)
    return first, last
