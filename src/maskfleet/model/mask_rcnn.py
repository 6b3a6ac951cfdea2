"""Faster R-CNN and Mask R-CNN, numerically TensorPack's: `losses(batch)` to train, `detect(images)` to use.

Shapes: B images, H x W canvas, N anchors, P proposals, K sampled regions, F foreground regions, D detections (all
padded), M x M mask pixels.
"""

from __future__ import annotations

import math
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from maskfleet.batch import Batch, Detections, Images, Targets
from maskfleet.config.model import ModelConfig
from maskfleet.errors import ConfigError, DataError
from maskfleet.model.backbones.resnet import EXPANSION, ResNet
from maskfleet.model.box_head import BoxHead, BoxOutputs, conv5_channels, make_box_head, scaled_gradient
from maskfleet.model.canvas import Canvas, canvas_of, inside, slots_in_use
from maskfleet.model.features import Features, crop
from maskfleet.model.fpn import Fpn
from maskfleet.model.mask_head import FPN_CROP, MaskHead
from maskfleet.model.metrics import Scores
from maskfleet.model.regions import Regions, at_least_one, matched_boxes, relabelled, sample_regions
from maskfleet.model.rpn import Proposals, Rpn, RpnOutputs, proposal_limits, propose, rpn_targets
from maskfleet.ops.boxes import clip_boxes, decode_boxes, encode_boxes
from maskfleet.ops.losses import box_head_losses, mask_head_loss, rpn_losses
from maskfleet.ops.masks import mask_targets
from maskfleet.ops.nms import detections_nms

NUM_STAGES = 3  # box heads of a cascade
NUM_LEVELS = 5  # maps of the pyramid
SMALLEST_ANCHOR_PX = 16  # a box may outgrow its anchor by the longest image side over this


def build_mask_rcnn(config: ModelConfig) -> MaskRCNN:
    """The model that `config` describes, with random weights drawn from torch's global generator.

    The starting values follow TensorPack's rules, but for one accident of it: every gamma starts at 1 (0 at the end of
    a block), where TensorPack's backbone without weights starts at Glorot-uniform noise around 0.
    """
    if config.num_categories is None:
        raise ConfigError(
            "the model does not know how many categories to tell apart",
            remedy="set model.num_categories, or build it from data whose annotation file lists them",
        )
    if config.architecture == "fpn" and len(config.fpn.anchor_strides) != NUM_LEVELS:
        raise ConfigError(
            f"model.fpn.anchor_strides has {len(config.fpn.anchor_strides)} levels, but the pyramid has {NUM_LEVELS}",
            remedy=f"give {NUM_LEVELS} strides and {NUM_LEVELS} model.rpn.anchor_sizes",
        )
    return MaskRCNN(config)


class MaskRCNN(nn.Module):
    """Backbone, pyramid, region proposals, box heads and mask head."""

    pixel_mean: Tensor
    pixel_scale: Tensor
    box_weights: Tensor  # [stages, 4]

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        stem = config.backbone.stem_channels
        groups = [stem * EXPANSION << number for number in range(4)]
        is_fpn = config.architecture == "fpn"
        channels = config.fpn.channels if is_fpn else groups[2]
        self.backbone = ResNet(config.backbone, num_groups=4 if is_fpn else 3)
        self.fpn = Fpn(config.fpn, groups) if is_fpn else None
        self.rpn = Rpn(config, channels)
        self.box_heads = nn.ModuleList(
            make_box_head(config, channels) for _ in range(NUM_STAGES if config.cascade else 1)
        )
        self.mask_head = MaskHead(config, channels if is_fpn else conv5_channels(config)) if config.mask else None
        # Images come as BGR, the config lists RGB.
        self.register_buffer("pixel_mean", torch.tensor(config.pixel_mean_rgb[::-1]), persistent=False)
        self.register_buffer("pixel_scale", 1 / torch.tensor(config.pixel_std_rgb[::-1]), persistent=False)
        weights = config.cascade_head.box_weights if config.cascade else (config.box_head.box_weights,)
        self.register_buffer("box_weights", torch.tensor(weights), persistent=False)
        self.max_log_scale = math.log(config.canvas_max_px / SMALLEST_ANCHOR_PX)

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        """`losses`, so that wrappers such as DistributedDataParallel see it."""
        return self.losses(batch)

    def losses(self, batch: Batch) -> dict[str, Tensor]:
        """The terms of the training loss, each a scalar under TensorPack's name; their sum is to be minimised."""
        return self._losses(batch, None)

    def losses_and_metrics(self, batch: Batch) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """`losses`, and every other scalar TensorPack logs about the model."""
        scores = Scores()
        losses = self._losses(batch, scores)
        return losses, scores.values

    @torch.no_grad()
    def detect(self, images: Images) -> Detections:
        """Objects in `images`, at most `inference.max_detections` each, in pixels of the images as given."""
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
        stages = self.backbone(pixels, canvas)
        if self.fpn is not None:
            maps, strides = self.fpn(stages, canvas), self.config.fpn.anchor_strides
            extents = [canvas.extents[stride] for stride in (4, 8, 16, 32, 64)]
        else:
            maps, strides = [canvas.areas[16].cut(stages[-1])], (self.config.rpn.anchor_stride,)
            extents = [canvas.extents[16]]
        return Features(
            maps=tuple(maps),
            extents=tuple(extents),
            strides=strides,
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
        pixels = F.pad(pixels, (0, -width % divisor, 0, -height % divisor))
        canvas = canvas_of(
            images.sizes, height=pixels.shape[2], width=pixels.shape[3], divisor=divisor, learning=learning
        )
        return pixels, canvas

    def proposals(self, outputs: RpnOutputs, sizes: Tensor, *, training: bool) -> Proposals:
        """Boxes worth a closer look in images of `sizes` [B, 2]; training and inference keep different numbers."""
        return propose(
            outputs,
            sizes,
            proposal_limits(self.config, training=training),
            nms_iou=self.config.rpn.nms_iou,
            min_size=self.config.rpn.min_size,
            max_log_scale=self.max_log_scale,
        )

    def box_head(self, stage: int) -> BoxHead:
        return cast(BoxHead, self.box_heads[stage])

    def crops(self, features: Features, boxes: Tensor, *, resolution: int) -> Tensor:
        """Features inside `boxes` [B, K, 4] -> [B * K, C, resolution, resolution]."""
        return crop(features, boxes, resolution=resolution, aws=self.config.roi_align == "aws")

    def box_outputs(
        self, features: Features, boxes: Tensor, valid: Tensor, *, stage: int = 0
    ) -> tuple[BoxOutputs, Tensor]:
        """What box head `stage` says about `boxes` [B, K, 4], valid [B, K]; and its hidden features [B * K, ...]."""
        head = self.box_head(stage)
        crops = self.crops(features, boxes, resolution=head.resolution)
        if self.config.cascade and torch.is_grad_enabled():
            crops = scaled_gradient(crops, 1 / NUM_STAGES)
        hidden = head.trunk(crops, features.region_area(valid))
        outputs = head.outputs(hidden)
        by_image = BoxOutputs(_by_image(outputs.logits, valid), _by_image(outputs.deltas, valid))
        return by_image, hidden

    def decoded(self, outputs: BoxOutputs, boxes: Tensor, sizes: Tensor, *, stage: int = 0) -> Tensor:
        """Boxes [B, K, num_class or 1, 4] that a head makes of `boxes` [B, K, 4], clipped to images of `sizes`."""
        deltas = outputs.deltas / self.box_weights[stage]
        decoded = decode_boxes(deltas, boxes[:, :, None, :], max_log_scale=self.max_log_scale)
        return clip_boxes(decoded.flatten(1, 2), sizes).view(decoded.shape)

    def mask_logits(self, features: Features, boxes: Tensor, valid: Tensor, labels: Tensor) -> Tensor:
        """Mask logits [B, K, M, M] inside `boxes` [B, K, 4], valid [B, K], for their `labels` [B, K]."""
        assert self.mask_head is not None
        if self.fpn is not None:
            crops = self.crops(features, boxes, resolution=FPN_CROP)
        else:
            head = self.box_head(0)
            crops = head.trunk(self.crops(features, boxes, resolution=head.resolution), features.region_area(valid))
        return _by_image(self.mask_head(crops, labels.flatten()), valid)

    def _losses(self, batch: Batch, scores: Scores | None) -> dict[str, Tensor]:
        targets = at_least_one(batch.targets)
        features = self.features(batch.images, learning=self.training)
        anchors = self.rpn(features)
        losses = self._rpn_losses(anchors, targets, batch, scores)
        proposals = self.proposals(anchors, features.sizes, training=True)
        regions = sample_regions(proposals, targets, batch.seeds, self.config.box_head)
        regions = regions.first(slots_in_use(regions.valid))
        if scores is not None:
            scores.add_sampling(proposals, targets, regions)
        if self.config.cascade:
            losses |= self._cascade_losses(features, regions, targets, scores)
            hidden = None
        else:
            outputs, hidden = self.box_outputs(features, regions.boxes, regions.valid)
            losses |= self._box_losses(outputs, regions, targets, scores, scope="fastrcnn_losses")
            self._count_levels(scores, regions.boxes, regions.valid, scope="multilevel_roi_align")
        if self.mask_head is not None:
            losses |= self._mask_losses(features, hidden, regions, targets, scores)
        return losses

    def _rpn_losses(
        self, anchors: RpnOutputs, targets: Targets, batch: Batch, scores: Scores | None
    ) -> dict[str, Tensor]:
        wanted = rpn_targets(anchors, targets, batch.images.sizes, seeds=batch.seeds, config=self.config.rpn)
        normalizer = self.config.rpn.samples_per_image
        label_loss, box_loss = rpn_losses(
            anchors.logits, anchors.deltas, wanted.labels, wanted.deltas, normalizer=normalizer
        )
        if scores is not None:
            scores.add_rpn(anchors, wanted, normalizer=normalizer, by_level=self.fpn is not None)
        return {"rpn_losses/label_loss": label_loss.mean(), "rpn_losses/box_loss": box_loss.mean()}

    def _cascade_losses(
        self, features: Features, regions: Regions, targets: Targets, scores: Scores | None
    ) -> dict[str, Tensor]:
        """Losses of the three stages; each takes the boxes of the one before and labels them more strictly."""
        losses: dict[str, Tensor] = {}
        boxes = regions.boxes
        for stage, foreground_iou in enumerate(self.config.cascade_head.foreground_ious):
            if stage > 0:
                regions = relabelled(boxes, regions.valid, targets, foreground_iou=foreground_iou)
            outputs, _ = self.box_outputs(features, regions.boxes, regions.valid, stage=stage)
            scope = f"cascade_loss_stage{stage + 1}/fastrcnn_losses"
            losses |= self._box_losses(outputs, regions, targets, scores, scope=scope, stage=stage)
            scope = f"cascade_rcnn_stage{stage + 1}/multilevel_roi_align"
            self._count_levels(scores, regions.boxes, regions.valid, scope=scope)
            boxes = self.decoded(outputs, regions.boxes, features.sizes, stage=stage)[:, :, 0].detach()
        return losses

    def _box_losses(
        self,
        outputs: BoxOutputs,
        regions: Regions,
        targets: Targets,
        scores: Scores | None,
        *,
        scope: str,
        stage: int = 0,
    ) -> dict[str, Tensor]:
        wanted = encode_boxes(matched_boxes(regions, targets), regions.boxes)
        wanted = wanted * self.box_weights[stage]
        huber = self.config.box_head.box_loss == "huber"
        label_loss, box_loss = box_head_losses(
            outputs.logits, outputs.deltas, regions.labels, regions.valid, wanted, huber=huber
        )
        if scores is not None:
            scores.add_box_head(outputs, regions, scope=scope)
        counts = regions.valid.sum(dim=1)
        return {
            f"{scope}/label_loss": self._mean(label_loss, counts),
            f"{scope}/box_loss": self._mean(box_loss, counts),
        }

    def _mask_losses(
        self, features: Features, hidden: Tensor | None, regions: Regions, targets: Targets, scores: Scores | None
    ) -> dict[str, Tensor]:
        """Loss of the masks of the sampled foreground; C4 reads them from the box head's `hidden` [B * K, C, r, r]."""
        assert self.mask_head is not None
        if targets.outlines is None:
            raise DataError(
                "the model trains masks but the batch has no outlines",
                remedy="use annotations with segmentations, or set model.mask=false",
            )
        box = self.config.box_head
        share = 1.0 if box.fill_with_foreground else box.positive_fraction
        few = regions.first(int(box.samples_per_image * share))
        few = few.first(slots_in_use(few.foreground))
        if self.fpn is None:
            assert hidden is not None
            shared = _by_image(hidden, regions.valid)[:, : few.valid.shape[1]].flatten(0, 1)
            logits = _by_image(self.mask_head(shared, few.labels.flatten()), few.valid)
        else:
            logits = self.mask_logits(features, few.boxes, few.foreground, few.labels)
            self._count_levels(scores, few.boxes, few.foreground, scope="multilevel_roi_align_mask")
        wanted = mask_targets(
            targets.outlines,
            features.sizes,
            few.boxes,
            few.matched,
            few.foreground,
            resolution=self.mask_head.resolution,
        )
        loss = mask_head_loss(logits, wanted, few.foreground)
        if scores is not None:
            scores.add_mask_head(logits, wanted, few.foreground)
        return {"maskrcnn_loss/maskrcnn_loss": self._mean(loss, few.foreground.sum(dim=1))}

    def _refined(self, features: Features, boxes: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
        """Boxes [B, P, num_categories, 4] and scores [B, P, num_categories] that the heads make of proposals."""
        stages = len(self.box_heads)
        total = torch.zeros(())
        for stage in range(stages):
            outputs, _ = self.box_outputs(features, boxes, valid, stage=stage)
            decoded = self.decoded(outputs, boxes, features.sizes, stage=stage)
            # Each stage scores the boxes it was given, not the final ones.
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

    def _mean(self, loss: Tensor, counts: Tensor) -> Tensor:
        """Mean of `loss` [B], itself a mean over `counts` [B] things: over images, or over all things of the batch."""
        if self.config.loss_mean_over == "image":
            return loss.mean()
        return (loss * counts).sum() / counts.sum().clamp(min=1)

    def _count_levels(self, scores: Scores | None, boxes: Tensor, valid: Tensor, *, scope: str) -> None:
        if scores is not None and self.fpn is not None:
            scores.add_levels(boxes, valid, scope=scope, aws=self.config.roi_align == "aws")


def _by_image(values: Tensor, valid: Tensor) -> Tensor:
    """`values` [B * K, ...] of all regions as [B, K, ...], like `valid` [B, K]."""
    return values.reshape(*valid.shape, *values.shape[1:])


def _check_images(images: Images) -> None:
    """Refuse what the network cannot read, by shape alone: values stay on the device."""
    shape = tuple(images.pixels.shape)
    if len(shape) != 4 or shape[1] != 3:
        raise DataError(
            f"images must be [count, 3, height, width] in BGR order, but these are {list(shape)}",
            remedy="convert grey or RGBA images to three channels (cv2.IMREAD_COLOR does)",
        )
    if 0 in shape:
        raise DataError(
            f"images of {shape[2]} x {shape[3]} pixels (batch of {shape[0]}) hold nothing to look at",
            remedy="remove empty image files from the dataset; `maskfleet data inspect` finds them",
        )
    if tuple(images.sizes.shape) != (shape[0], 2):
        raise DataError(
            f"{shape[0]} images need sizes [{shape[0]}, 2], but these are {list(images.sizes.shape)}",
            remedy="give (height, width) of every image of the batch",
        )
