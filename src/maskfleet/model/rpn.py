"""The region proposal network (Ren et al. 2015, Faster R-CNN, section 3.1).

Shapes: B images, A anchors per cell, N anchors of all maps in (map, row, column, a) order, P proposals (padded),
G ground truths (padded), k candidates of one map.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from maskfleet.batch import Targets
from maskfleet.config.model import ModelConfig, RpnConfig
from maskfleet.model.canvas import inside
from maskfleet.model.features import Features
from maskfleet.model.initial import fill_normal
from maskfleet.ops.anchors import anchor_grid, anchor_keys, cell_anchors, legacy_cell_anchors
from maskfleet.ops.boxes import clip_boxes, decode_boxes, encode_boxes
from maskfleet.ops.layers.conv import aligned_outputs, conv_relu, fuses
from maskfleet.ops.layers.conv_sum import conv_sum
from maskfleet.ops.layers.sparse_gradient import with_sparse_gradient
from maskfleet.ops.matching import rpn_labels
from maskfleet.ops.nms import first_kept, nms_keep, topk_sorted, topk_sorted_each
from maskfleet.ops.sampling import hash_uniform, subsample_labels

ANCHOR_STREAM = 0  # stream of random numbers


@dataclass(frozen=True, slots=True)
class RpnOutputs:
    """Scores and boxes of every anchor."""

    logits: Tensor  # [B, N] float32
    deltas: Tensor  # [B, N, 4] float32, deltas relative to the anchor
    anchors: Tensor  # [N, 4] float32
    keys: Tensor  # [N] int64, a key of each anchor, independent of the size of the canvas
    inside: Tensor  # [B, N] bool, whether the anchor's cell is in the image's own canvas
    counts: tuple[int, ...]  # anchors of each map; their sum is N


@dataclass(frozen=True, slots=True)
class Proposals:
    """Boxes that may hold an object, by descending score, valid ones first."""

    boxes: Tensor  # [B, P, 4]
    scores: Tensor  # [B, P] logits
    valid: Tensor  # [B, P] bool


@dataclass(frozen=True, slots=True)
class RpnTargets:
    """Ground truth of each anchor."""

    labels: Tensor  # [B, N] int8: 1 object, 0 background, -1 ignored
    deltas: Tensor  # [B, N, 4]


class Rpn(nn.Module):
    """A small convolutional head, shared by all maps, that scores and shifts anchors."""

    def __init__(self, config: ModelConfig, inputs: int) -> None:
        super().__init__()
        cells = _cells(config)
        for number, cell in enumerate(cells):
            self.register_buffer(f"cell{number}", cell, persistent=False)
        channels = config.fpn.channels if config.architecture == "fpn" else config.rpn.head_channels
        self.samples_per_image = config.rpn.samples_per_image
        self.conv = nn.Conv2d(inputs, channels, 3, padding=1)
        self.objectness = nn.Conv2d(channels, cells[0].shape[0], 1)
        self.box = nn.Conv2d(channels, cells[0].shape[0] * 4, 1)
        for layer in (self.conv, self.objectness, self.box):
            fill_normal(layer, std=0.01)

    def forward(self, features: Features) -> RpnOutputs:
        return self.at_anchors(features, *self.scores_and_deltas(features))

    def scores_and_deltas(self, features: Features) -> tuple[Tensor, Tensor]:
        """Objectness logits [B, N] and box deltas [B, N, 4] of all anchors.

        At most `rpn.samples_per_image` anchors of an image may carry a gradient: see `with_sparse_gradient`.
        """
        with torch.no_grad():
            raw = [self.raw_outputs(feature) for feature in features.maps]
            batch = features.sizes.shape[0]
            logits = [scores.permute(0, 2, 3, 1).reshape(batch, -1).float() for scores, _ in raw]
            deltas = [shifts.permute(0, 2, 3, 1).reshape(batch, -1, 4).float() for _, shifts in raw]
        if not torch.is_grad_enabled():
            return torch.cat(logits, dim=1), torch.cat(deltas, dim=1)
        assert self.conv.bias is not None
        assert self.objectness.bias is not None
        assert self.box.bias is not None
        kernel = torch.cat([self.objectness.weight, self.box.weight]).flatten(1)
        return with_sparse_gradient(
            torch.cat(logits, dim=1),
            torch.cat(deltas, dim=1),
            features.maps,
            (self.conv.weight, self.conv.bias),
            (kernel, torch.cat([self.objectness.bias, self.box.bias])),
            max_anchors=batch * self.samples_per_image,
        )

    def at_anchors(self, features: Features, logits: Tensor, deltas: Tensor) -> RpnOutputs:
        """What `scores_and_deltas` returned, with the anchors it belongs to."""
        anchors, keys, cells_inside = self._anchors(features)
        per_cell = self.objectness.out_channels
        return RpnOutputs(
            logits=logits,
            deltas=deltas,
            anchors=anchors,
            keys=keys,
            inside=cells_inside,
            counts=tuple(per_cell * feature.shape[2] * feature.shape[3] for feature in features.maps),
        )

    def raw_outputs(self, feature: Tensor) -> tuple[Tensor, Tensor]:
        """Objectness [B, A, h, w] and box deltas [B, 4 A, h, w] of one map [B, C, h, w]."""
        assert self.conv.bias is not None
        hidden = conv_relu(feature, self.conv.weight, self.conv.bias)
        if not fuses(feature):
            return self.objectness(hidden), self.box(hidden)
        # One convolution instead of two, of a width that fits tensor cores.
        kernel, bias = aligned_outputs((self.objectness.weight, self.box.weight), (self.objectness.bias, self.box.bias))
        both = conv_sum(hidden, kernel, bias)
        num_scores, num_shifts = self.objectness.out_channels, self.box.out_channels
        return both[:, :num_scores], both[:, num_scores : num_scores + num_shifts]

    def _anchors(self, features: Features) -> tuple[Tensor, Tensor, Tensor]:
        """Anchors [N, 4], their keys [N], and whether each image has them on its own canvas [B, N]."""
        anchors, keys, cells_inside = [], [], []
        for number, (feature, extent) in enumerate(zip(features.maps, features.extents, strict=True)):
            height, width = feature.shape[2:]
            cell: Tensor = getattr(self, f"cell{number}")
            num_anchors = cell.shape[0]
            stride = features.strides[number]
            anchors.append(anchor_grid(cell, stride=stride, height=height, width=width))
            keys.append(
                anchor_keys(level=number, height=height, width=width, num_anchors=num_anchors, device=feature.device)
            )
            here = inside(extent, height=height, width=width)[..., None]  # [B, h, w, 1]
            cells_inside.append(here.expand(-1, -1, -1, num_anchors).flatten(1))
        return torch.cat(anchors), torch.cat(keys), torch.cat(cells_inside, dim=1)


@torch.no_grad()
def propose(
    outputs: RpnOutputs, sizes: Tensor, config: ModelConfig, *, training: bool, max_log_scale: float
) -> Proposals:
    """The best boxes of each image of `sizes` [B, 2] after NMS, map by map or jointly."""
    joint = config.architecture == "c4" or config.fpn.proposal_mode == "Joint"
    before_nms, after_nms, per_image = proposal_limits(config.rpn, joint=joint, training=training)
    counts = (sum(outputs.counts),) if joint else outputs.counts
    candidates = min(before_nms, max(counts))
    scores, boxes, valid = [], [], []
    logits, are_inside = (torch.split(values, list(counts), dim=1) for values in (outputs.logits, outputs.inside))
    start = 0
    for count, (top, index, is_valid) in zip(counts, topk_sorted_each(logits, are_inside, candidates), strict=True):
        part = slice(start, start + count)
        start += count
        deltas = outputs.deltas[:, part].gather(1, index[..., None].expand(-1, -1, 4))
        decoded = decode_boxes(deltas, outputs.anchors[part][index], max_log_scale=max_log_scale)
        decoded = clip_boxes(decoded, sizes)
        if config.rpn.min_size > 0:
            is_valid = is_valid & ((decoded[..., 2:] - decoded[..., :2]) > config.rpn.min_size).all(dim=-1)
        scores.append(top)
        boxes.append(decoded)
        valid.append(is_valid)
    keep = nms_keep(torch.cat(boxes), torch.cat(valid), threshold=config.rpn.nms_iou)  # [maps * B, k]
    keep = first_kept(keep, after_nms)
    kept = torch.cat(keep.chunk(len(counts)), dim=1)  # [B, maps * k]
    all_boxes = torch.cat(boxes, dim=1)
    best, index, is_valid = topk_sorted(torch.cat(scores, dim=1), kept, per_image)
    picked = all_boxes.gather(1, index[..., None].expand(-1, -1, 4))
    return Proposals(boxes=torch.where(is_valid[..., None], picked, 0.0), scores=best, valid=is_valid)


@torch.no_grad()
def rpn_targets(
    outputs: RpnOutputs, targets: Targets, sizes: Tensor, *, seed: Tensor | None, config: RpnConfig
) -> RpnTargets:
    """Labels and box deltas of the anchors for `targets`; `seed` [B] chooses the sampled anchors, None takes all."""
    labels, matched = rpn_labels(
        outputs.anchors,
        targets.boxes,
        targets.valid,
        sizes,
        targets.crowd_boxes,
        targets.crowd_valid,
        positive_iou=config.positive_iou,
        negative_iou=config.negative_iou,
        crowd_overlap=config.crowd_overlap,
    )
    if seed is not None:
        noise = hash_uniform(seed, outputs.keys, stream=ANCHOR_STREAM)
        labels = subsample_labels(
            labels, noise, num_samples=config.samples_per_image, positive_fraction=config.positive_fraction
        )
    boxes = targets.boxes.gather(1, matched[..., None].expand(-1, -1, 4))  # [B, N, 4]
    return RpnTargets(labels=labels, deltas=encode_boxes(boxes, outputs.anchors))


def proposal_limits(config: RpnConfig, *, joint: bool, training: bool) -> tuple[int, int, int]:
    """How many boxes of a map (of all maps if `joint`) are kept before and after NMS, and how many of an image."""
    match joint, training:
        case True, True:
            return config.train_pre_nms, config.train_post_nms, config.train_post_nms
        case True, False:
            return config.test_pre_nms, config.test_post_nms, config.test_post_nms
        case False, True:
            return config.train_per_level_pre_nms, config.train_per_level_post_nms, config.train_per_image
        case _:
            return config.test_per_level_pre_nms, config.test_per_level_post_nms, config.test_per_image


def _cells(config: ModelConfig) -> list[Tensor]:
    """Anchors [A, 4] of one cell of each map."""
    rpn = config.rpn
    maps: list[tuple[int, Sequence[float]]] = [(rpn.anchor_stride, rpn.anchor_sizes)]
    if config.architecture == "fpn":
        maps = [(stride, [size]) for stride, size in zip(config.fpn.anchor_strides, rpn.anchor_sizes, strict=True)]
    if rpn.legacy_anchors:
        return [legacy_cell_anchors(stride, sizes, rpn.anchor_ratios) for stride, sizes in maps]
    return [cell_anchors(sizes, rpn.anchor_ratios) for _, sizes in maps]
