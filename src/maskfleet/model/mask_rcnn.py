"""Faster R-CNN and Mask R-CNN, numerically TensorPack's: `losses(batch)` to train, `detect(images)` to use.

Shapes: B images, H x W canvas, N anchors, P proposals, K sampled regions, F foreground regions, D detections (all
padded), M x M mask pixels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from maskfleet.batch import Batch, Detections, Images, Targets
from maskfleet.config.model import ModelConfig
from maskfleet.errors import DataError
from maskfleet.model.backbones import Backbone
from maskfleet.model.canvas import MIN_SIDE_PX, Canvas, canvas_of, canvas_side, inside, slots_in_use
from maskfleet.model.features import Features
from maskfleet.model.fpn import Fpn
from maskfleet.model.heads.c4 import C4BoxHead, C4MaskHead
from maskfleet.model.heads.fpn import FpnBoxHead, FpnMaskHead, joint_region_features
from maskfleet.model.heads.layers import BoxOutputs
from maskfleet.model.losses import BoxStage, MaskStage, TrainingOutputs, training_losses
from maskfleet.model.metrics import StepResults, step_results, training_metrics
from maskfleet.model.regions import Regions, at_least_one, matched_boxes, relabelled, sample_regions
from maskfleet.model.rpn import Proposals, Rpn, RpnOutputs, propose, rpn_targets
from maskfleet.ops.boxes import clip_boxes, decode_boxes, encode_boxes
from maskfleet.ops.masks import mask_targets
from maskfleet.ops.nms import detections_nms

SMALLEST_ANCHOR_PX = 16  # a box may outgrow its anchor by the longest image side divided by this

BoxHead = FpnBoxHead | C4BoxHead


class MaskRCNN(nn.Module):
    """Backbone, feature pyramid, region proposals, box heads and mask head; `model/build.py` makes the parts."""

    pixel_mean: Tensor
    pixel_scale: Tensor
    box_weights: Tensor  # [stages, 4]

    def __init__(
        self,
        config: ModelConfig,
        *,
        backbone: Backbone,
        fpn: Fpn | None,
        rpn: Rpn,
        box_heads: Sequence[BoxHead],
        mask_head: FpnMaskHead | C4MaskHead | None,
    ) -> None:
        super().__init__()
        self.config = config
        self.backbone = backbone
        self.fpn = fpn
        self.rpn = rpn
        self.box_heads = nn.ModuleList(box_heads)
        self.mask_head = mask_head
        # Images are BGR, the config lists RGB.
        self.register_buffer("pixel_mean", torch.tensor(config.pixel_mean_rgb[::-1]), persistent=False)
        # On the CPU: arithmetic on the meta device makes torch import a second of code.
        scale = 1 / torch.tensor(config.pixel_std_rgb[::-1], device="cpu")
        self.register_buffer("pixel_scale", scale, persistent=False)
        weights = config.cascade_head.box_weights if config.cascade else (config.box_head.box_weights,)
        self.register_buffer("box_weights", torch.tensor(weights), persistent=False)
        self.max_log_scale = math.log(config.canvas_max_px / SMALLEST_ANCHOR_PX)

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        """`losses`, as callers of an `nn.Module` expect it."""
        return self.losses(batch)

    def losses(self, batch: Batch) -> dict[str, Tensor]:
        """The terms of the training loss, each a scalar under TensorPack's name; training minimises their sum."""
        return training_losses(self.training_outputs(batch), self.config)

    def losses_and_metrics(self, batch: Batch) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """`losses`, and every other scalar TensorPack logs about the model."""
        losses, results = self.losses_and_results(batch)
        return losses, training_metrics(results, self.config)

    def losses_and_results(self, batch: Batch) -> tuple[dict[str, Tensor], StepResults]:
        """`losses`, and what `training_metrics` computes the metrics from."""
        outputs = self.training_outputs(batch)
        return training_losses(outputs, self.config), step_results(outputs)

    def training_outputs(self, batch: Batch) -> TrainingOutputs:
        """Outputs and targets of every head for `batch`."""
        features = self.features(batch.images, learning=self.training)
        return self.head_outputs(batch, features, self.rpn(features))

    def head_outputs(self, batch: Batch, features: Features, anchors: RpnOutputs) -> TrainingOutputs:
        """Outputs and targets of every head for `batch`, whose `features` and `anchors` are known."""
        targets = at_least_one(batch.targets)
        proposals = self.proposals(anchors, features.sizes, training=True)
        regions = sample_regions(proposals, targets, batch.seed, self.config.box_head)
        regions = regions.first(slots_in_use(regions.valid))
        box_stages, mask_stage = self._stages(features, regions, targets)
        return TrainingOutputs(
            targets=targets,
            rpn=anchors,
            rpn_targets=rpn_targets(anchors, targets, features.sizes, seed=batch.seed, config=self.config.rpn),
            proposals=proposals,
            box_stages=box_stages,
            mask=mask_stage,
        )

    @torch.no_grad()
    def detect(self, images: Images) -> Detections:
        """Objects in `images`, at most `inference.max_detections` per image, in pixels of the images as given."""
        features = self.features(images)
        proposals = self.proposals(self.rpn(features), features.sizes, training=False)
        used = slots_in_use(proposals.valid)
        valid = proposals.valid[:, :used]
        boxes, scores = self._refined(features, proposals.boxes[:, :used], valid)
        inference = self.config.inference
        boxes, scores, labels, valid, _ = detections_nms(
            boxes,
            scores,
            valid,
            score_threshold=inference.score_threshold,
            iou_threshold=inference.nms_iou,
            max_detections=inference.max_detections,
        )
        missing = inference.max_detections - valid.shape[1]
        boxes, scores = F.pad(boxes, (0, 0, 0, missing)), F.pad(scores, (0, missing))
        labels, valid = F.pad(labels, (0, missing)), F.pad(valid, (0, missing))
        return Detections(boxes, scores, labels, valid, masks=self._masks(features, boxes, labels, valid))

    def features(self, images: Images, *, learning: bool = False) -> Features:
        """Feature maps of `images`; with `learning`, SyncBN takes its statistics from them."""
        pixels, canvas = self.prepared(images, learning=learning)
        return self.as_features(self.maps(self.backbone(pixels, canvas), canvas), canvas, images, learning=learning)

    def maps(self, stages: Sequence[Tensor], canvas: Canvas) -> tuple[Tensor, ...]:
        """The maps that the heads read, from those of the backbone's `stages`."""
        if self.fpn is not None:
            return tuple(self.fpn(stages, canvas))
        return (canvas.areas[self.backbone.strides[-1]].cut(stages[-1]),)

    def as_features(self, maps: tuple[Tensor, ...], canvas: Canvas, images: Images, *, learning: bool) -> Features:
        """`maps` with what the heads need to know about them."""
        is_fpn, strides = self.fpn is not None, self.backbone.strides
        map_strides = (*strides, 2 * strides[-1]) if is_fpn else strides[-1:]
        return Features(
            maps=maps,
            extents=tuple(canvas.extents[stride] for stride in map_strides),
            strides=self.config.fpn.anchor_strides if is_fpn else (self.config.rpn.anchor_stride,),
            sizes=images.sizes,
            learning=learning,
        )

    def prepared(self, images: Images, *, learning: bool = False) -> tuple[Tensor, Canvas]:
        """Normalised pixels [B, 3, H, W], 0 outside each image, on a canvas that the network can halve."""
        _check_images(images)
        height, width = images.pixels.shape[2:]
        divisor = self.config.size_divisor
        pixels = (images.pixels.float() - self.pixel_mean[:, None, None]) * self.pixel_scale[:, None, None]
        pixels = pixels * inside(images.sizes, height=height, width=width)[:, None].to(pixels.dtype)
        pixels = F.pad(pixels, (0, canvas_side(width, divisor) - width, 0, canvas_side(height, divisor) - height))
        return pixels, self.canvas(images, learning=learning)

    def canvas(self, images: Images, *, learning: bool = False) -> Canvas:
        """The valid areas of `images` at every stride of the network."""
        divisor = self.config.size_divisor
        height, width = (canvas_side(side, divisor) for side in images.pixels.shape[2:])
        sizes = images.sizes.clamp(min=MIN_SIDE_PX) if divisor < MIN_SIDE_PX else images.sizes
        return canvas_of(sizes, height=height, width=width, divisor=divisor, learning=learning)

    def proposals(self, outputs: RpnOutputs, sizes: Tensor, *, training: bool) -> Proposals:
        """The best boxes of the RPN in images of `sizes` [B, 2]; training and inference keep different numbers."""
        return propose(outputs, sizes, self.config, training=training, max_log_scale=self.max_log_scale)

    def box_head(self, stage: int) -> BoxHead:
        return cast(BoxHead, self.box_heads[stage])

    def box_outputs(
        self, features: Features, boxes: Tensor, valid: Tensor, *, stage: int = 0, crops: Tensor | None = None
    ) -> tuple[BoxOutputs, Tensor]:
        """Outputs [B, K, ...] of box head `stage` for `boxes` [B, K, 4], valid [B, K]; and the features it read.

        `crops` are those features, where they are known.
        """
        head = self.box_head(stage)
        region_features = head.region_features(features, boxes, valid) if crops is None else crops
        outputs = head(region_features)
        return BoxOutputs(_by_image(outputs.logits, valid), _by_image(outputs.deltas, valid)), region_features

    def decoded(self, outputs: BoxOutputs, boxes: Tensor, sizes: Tensor, *, stage: int = 0) -> Tensor:
        """Boxes [B, K, num_class or 1, 4] that a head refines `boxes` [B, K, 4] to, clipped to images of `sizes`."""
        deltas = outputs.deltas / self.box_weights[stage]
        decoded = decode_boxes(deltas, boxes[:, :, None, :], max_log_scale=self.max_log_scale)
        return clip_boxes(decoded.flatten(1, 2), sizes).view(decoded.shape)

    def mask_logits(self, features: Features, boxes: Tensor, valid: Tensor, labels: Tensor) -> Tensor:
        """Mask logits [B, K, M, M] inside `boxes` [B, K, 4], valid [B, K], for their `labels` [B, K]."""
        assert self.mask_head is not None
        if isinstance(self.mask_head, FpnMaskHead):
            region_features = self.mask_head.region_features(features, boxes)
        else:
            region_features = self.box_head(0).region_features(features, boxes, valid)
        return _by_image(self.mask_head(region_features, labels.flatten()), valid)

    def _stages(
        self, features: Features, regions: Regions, targets: Targets
    ) -> tuple[tuple[BoxStage, ...], MaskStage | None]:
        """The box heads on the sampled `regions`, and the mask head, if there is one, on the foreground of them."""
        if self.mask_head is None:
            return self._box_stages(features, regions, targets), None
        box = self.config.box_head
        fraction = 1.0 if box.fill_with_foreground else box.positive_fraction
        foreground = regions.first(int(box.samples_per_image * fraction))
        foreground = foreground.first(slots_in_use(foreground.foreground))
        box_head, box_crops, mask_crops = self.box_head(0), None, None
        if isinstance(box_head, FpnBoxHead) and isinstance(self.mask_head, FpnMaskHead) and not self.config.cascade:
            box_crops, mask_crops = joint_region_features(
                box_head, self.mask_head, features, boxes=regions.boxes, mask_boxes=foreground.boxes
            )
        box_stages = self._box_stages(features, regions, targets, crops=box_crops)
        return box_stages, self._mask_stage(features, box_stages[0], foreground, targets, crops=mask_crops)

    def _box_stages(
        self, features: Features, regions: Regions, targets: Targets, *, crops: Tensor | None = None
    ) -> tuple[BoxStage, ...]:
        """Each box head on its regions; in a cascade, the boxes of the head before, labelled more strictly.

        `crops` is what the first head reads, where it is known.
        """
        stages: list[BoxStage] = []
        for number in range(len(self.box_heads)):
            if stages:
                outputs = stages[-1].outputs
                boxes = self.decoded(outputs, regions.boxes, features.sizes, stage=number - 1)[:, :, 0].detach()
                foreground_iou = self.config.cascade_head.foreground_ious[number]
                regions = relabelled(boxes, regions.valid, targets, foreground_iou=foreground_iou)
            outputs, region_features = self.box_outputs(
                features, regions.boxes, regions.valid, stage=number, crops=None if stages else crops
            )
            deltas = encode_boxes(matched_boxes(regions, targets), regions.boxes) * self.box_weights[number]
            stages.append(BoxStage(regions, region_features, outputs, deltas))
        return tuple(stages)

    def _mask_stage(
        self, features: Features, box_stage: BoxStage, regions: Regions, targets: Targets, *, crops: Tensor | None
    ) -> MaskStage:
        """The mask head on `regions`, the first of `box_stage`; that of C4 reads the features of the box head.

        `crops` is what the head reads, where it is known.
        """
        assert self.mask_head is not None
        if targets.outlines is None:
            raise DataError(
                "the model trains masks but the batch has no outlines",
                remedy="use annotations with segmentations, or set model.mask=false",
            )
        if crops is not None:
            region_features = crops
        elif isinstance(self.mask_head, FpnMaskHead):
            region_features = self.mask_head.region_features(features, regions.boxes)
        else:
            of_boxes = _by_image(box_stage.region_features, box_stage.regions.valid)
            region_features = of_boxes[:, : regions.valid.shape[1]].flatten(0, 1)
        logits = _by_image(self.mask_head(region_features, regions.labels.flatten()), regions.valid)
        masks = mask_targets(
            targets.outlines,
            features.sizes,
            regions.boxes,
            regions.matched,
            regions.foreground,
            resolution=self.mask_head.resolution,
        )
        return MaskStage(regions, logits, masks)

    def _refined(self, features: Features, boxes: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
        """Boxes [B, P, num_categories, 4] and scores [B, P, num_categories] that the box heads give to proposals."""
        stages = len(self.box_heads)
        total = torch.zeros(())
        for stage in range(stages):
            outputs, _ = self.box_outputs(features, boxes, valid, stage=stage)
            decoded = self.decoded(outputs, boxes, features.sizes, stage=stage)
            # Each stage scores its input boxes, not the final ones.
            probability = outputs.logits.softmax(dim=-1)
            total = probability if stage == 0 else total + probability
            boxes = decoded[:, :, 0]
        scores = (total / stages)[:, :, 1:]
        if self.config.cascade:
            return decoded.expand(-1, -1, scores.shape[2], -1), scores
        return decoded[:, :, 1:], scores

    def _masks(self, features: Features, boxes: Tensor, labels: Tensor, valid: Tensor) -> Tensor | None:
        """Mask probabilities [B, D, M, M] inside detections; 0 for padding."""
        if self.mask_head is None:
            return None
        used = slots_in_use(valid)
        logits = self.mask_logits(features, boxes[:, :used], valid[:, :used], labels[:, :used])
        masks = torch.where(valid[:, :used, None, None], logits.sigmoid(), 0.0)
        return F.pad(masks, (0, 0, 0, 0, 0, valid.shape[1] - used))


def _by_image(values: Tensor, valid: Tensor) -> Tensor:
    """`values` [B * K, ...] of all regions as [B, K, ...], like `valid` [B, K]."""
    return values.reshape(*valid.shape, *values.shape[1:])


def _check_images(images: Images) -> None:
    """Reject what the network cannot read, by shape alone: values stay on the device."""
    shape = tuple(images.pixels.shape)
    if len(shape) != 4 or shape[1] != 3:
        raise DataError(
            f"images must be [count, 3, height, width] in BGR order, but these are {list(shape)}",
            remedy="convert grey or RGBA images to three channels (cv2.IMREAD_COLOR does)",
        )
    if 0 in shape:
        raise DataError(
            f"images of {shape[2]} x {shape[3]} pixels (batch of {shape[0]}) have no pixels",
            remedy="remove empty image files from the dataset; `maskfleet data inspect` finds them",
        )
    if tuple(images.sizes.shape) != (shape[0], 2):
        raise DataError(
            f"{shape[0]} images need sizes [{shape[0]}, 2], but these are {list(images.sizes.shape)}",
            remedy="give (height, width) of every image of the batch",
        )
