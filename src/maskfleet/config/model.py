"""What the network is. The defaults are TensorPack's R50-FPN Mask R-CNN."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from maskfleet.config.base import Config

Share = Annotated[float, Field(ge=0, le=1)]
BoxWeights = tuple[PositiveFloat, PositiveFloat, PositiveFloat, PositiveFloat]
# The limits are far above any network in use; a weights file decides how large a model is built.
BlockCount = Annotated[int, Field(ge=1, le=256)]
Blocks = tuple[BlockCount, BlockCount, BlockCount, BlockCount]
Channels = Annotated[int, Field(ge=8, le=16_384, multiple_of=8)]

R50_BLOCKS: Blocks = (3, 4, 6, 3)
R101_BLOCKS: Blocks = (3, 4, 23, 3)


class BackboneConfig(Config):
    """The network that turns pixels into features."""

    # Left out of run.yaml where it is the default: versions without this field read those files too.
    kind: Literal["resnet"] = Field(default="resnet", exclude_if=lambda kind: kind == "resnet")
    """Architecture of the backbone."""

    blocks: Blocks = R50_BLOCKS
    """Bottleneck blocks in each of the four groups: 3,4,6,3 is ResNet-50 and 3,4,23,3 is ResNet-101."""

    stem_channels: Channels = 64
    """Channels after the first convolution; the groups have 4, 8, 16 and 32 times as many. 64 is the usual ResNet."""

    norm: Literal["FreezeBN", "SyncBN", "GN", "None"] = "FreezeBN"
    """Normalisation: stored statistics (FreezeBN), those of all GPUs (SyncBN), groups (GN), or nothing (None)."""

    freeze_at: int = Field(default=2, ge=0, le=2)
    """Stages that stay as loaded: 0 trains everything, 1 freezes the stem, 2 freezes stem and first group."""

    freeze_affine: bool = False
    """Whether the scale and offset of FreezeBN stay as loaded in every stage."""

    tf_pad_mode: bool = False
    """Whether to pad strided layers at the bottom right, as weights trained in plain TensorFlow expect."""

    stride_1x1: bool = False
    """Whether a group's stride sits in its first 1x1 convolution (Caffe and MSRA weights) instead of the 3x3 one."""

    weights: str | None = None
    """ImageNet weights to start from: a file, also looked for under data.root, or a published name; None is random."""

    @model_validator(mode="after")
    def _affine_needs_frozen_statistics(self) -> BackboneConfig:
        if self.freeze_affine and self.norm != "FreezeBN":
            raise ValueError(f"freeze_affine needs norm FreezeBN, not {self.norm}; set freeze_affine=false")
        return self


class FpnConfig(Config):
    """The feature pyramid; read only when `model.architecture` is fpn."""

    channels: Channels = 256
    """Channels of every pyramid level."""

    norm: Literal["None", "GN"] = "None"
    """Normalisation after each pyramid convolution."""

    anchor_strides: tuple[PositiveInt, ...] = (4, 8, 16, 32, 64)
    """Stride in pixels of each pyramid level, finest first."""

    proposal_mode: Literal["Level", "Joint"] = "Level"
    """Whether non-maximum suppression of proposals works level by level or on all levels together."""


class RpnConfig(Config):
    """The region proposal network."""

    anchor_sizes: tuple[PositiveFloat, ...] = (32.0, 64.0, 128.0, 256.0, 512.0)
    """Side in pixels of a square of each anchor's area; with fpn, one per level."""

    anchor_ratios: tuple[PositiveFloat, ...] = (0.5, 1.0, 2.0)
    """Height over width of the anchors."""

    anchor_stride: PositiveInt = 16
    """Stride in pixels of the anchor grid without a pyramid (c4)."""

    legacy_anchors: bool = False
    """Whether anchors are rounded and centred as before May 2019; weights of that time need it."""

    head_channels: int = Field(default=1024, ge=1, le=16_384)
    """Channels of the proposal head without a pyramid (c4); with fpn it has as many as the pyramid."""

    positive_iou: Share = 0.7
    """An anchor with at least this overlap with an object is positive."""

    negative_iou: Share = 0.3
    """An anchor with less overlap than this with every object is negative."""

    crowd_overlap: float = Field(default=9.99, gt=0)
    """An anchor with more than this share inside a crowd region is ignored; above 1 turns the rule off."""

    samples_per_image: PositiveInt = 256
    """Anchors that enter the loss, an image; also the divisor of the loss."""

    positive_fraction: Share = 0.5
    """Largest share of positives among the sampled anchors."""

    min_size: float = Field(default=0.0, ge=0)
    """Proposals not wider and higher than this many pixels are dropped; 0 keeps all."""

    nms_iou: Share = 0.7
    """Overlap above which the lower-scored of two proposals is dropped."""

    train_pre_nms: PositiveInt = 12000
    """Proposals that enter suppression in training (c4, and fpn in Joint mode)."""

    train_post_nms: PositiveInt = 2000
    """Proposals that leave suppression in training (c4, and fpn in Joint mode)."""

    test_pre_nms: PositiveInt = 6000
    """Proposals that enter suppression in inference (c4, and fpn in Joint mode)."""

    test_post_nms: PositiveInt = 1000
    """Proposals that leave suppression in inference (c4, and fpn in Joint mode)."""

    train_per_level_pre_nms: PositiveInt = 2000
    """Proposals of each level that enter suppression in training (fpn in Level mode)."""

    train_per_level_post_nms: PositiveInt = 2000
    """Proposals of each level that leave suppression in training (fpn in Level mode)."""

    train_per_image: PositiveInt = 2000
    """Proposals of all levels together that the heads get in training (fpn in Level mode)."""

    test_per_level_pre_nms: PositiveInt = 1000
    """Proposals of each level that enter suppression in inference (fpn in Level mode)."""

    test_per_level_post_nms: PositiveInt = 1000
    """Proposals of each level that leave suppression in inference (fpn in Level mode)."""

    test_per_image: PositiveInt = 1000
    """Proposals of all levels together that the heads get in inference (fpn in Level mode)."""

    @model_validator(mode="after")
    def _thresholds_in_order(self) -> RpnConfig:
        if self.negative_iou > self.positive_iou:
            raise ValueError(f"negative_iou {self.negative_iou} is above positive_iou {self.positive_iou}")
        return self


class BoxHeadConfig(Config):
    """The head that classifies and refines regions."""

    kind: Literal["2fc", "4conv1fc", "4conv1fc_gn"] = "2fc"
    """Layers of the head with fpn: two fully connected, or four convolutions (with or without GN) and one."""

    conv_channels: Channels = 256
    """Channels of the head's convolutions (4conv1fc kinds)."""

    fc_channels: int = Field(default=1024, ge=1, le=65_536)
    """Width of the head's fully connected layers."""

    samples_per_image: PositiveInt = 512
    """Regions per image that enter the loss."""

    positive_fraction: Share = 0.25
    """Largest share of foreground among the sampled regions."""

    foreground_iou: Share = 0.5
    """A region with at least this overlap with an object is foreground."""

    fill_with_foreground: bool = False
    """Whether foreground may exceed its share when background runs short (AWS Samples)."""

    box_weights: BoxWeights = (10.0, 10.0, 5.0, 5.0)
    """Factors on the box regression targets: x, y, width, height."""

    box_loss: Literal["l1", "huber"] = "l1"
    """Regression loss: plain L1 (TensorPack since May 2019) or Huber (before, and AWS Samples)."""


class CascadeConfig(Config):
    """Three box heads with increasing IoU thresholds; read only when `model.cascade` is true."""

    foreground_ious: tuple[Share, Share, Share] = (0.5, 0.6, 0.7)
    """Overlap that makes a region foreground, stage by stage."""

    box_weights: tuple[BoxWeights, BoxWeights, BoxWeights] = (
        (10.0, 10.0, 5.0, 5.0),
        (20.0, 20.0, 10.0, 10.0),
        (30.0, 30.0, 15.0, 15.0),
    )
    """Factors on the box regression targets, stage by stage."""


class MaskHeadConfig(Config):
    """The head that predicts instance masks."""

    kind: Literal["up4conv", "up4conv_gn"] = "up4conv"
    """Layers of the head with fpn: four convolutions and an upsampling, with or without GN."""

    channels: Channels = 256
    """Channels of the head's convolutions."""


class InferenceConfig(Config):
    """How scores become detections."""

    score_threshold: Share = 0.05
    """Detections must score above this."""

    nms_iou: Share = 0.5
    """Overlap above which the lower-scored of two detections of one class is dropped."""

    max_detections: PositiveInt = 100
    """Most detections per image."""


class ModelConfig(Config):
    """Faster R-CNN or Mask R-CNN."""

    architecture: Literal["fpn", "c4"] = "fpn"
    """Feature pyramid (fpn), or one feature map at stride 16 (c4)."""

    mask: bool = True
    """True is Mask R-CNN, False is Faster R-CNN."""

    cascade: bool = False
    """Whether a cascade of three heads refines the boxes (needs fpn)."""

    num_categories: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    """Object classes without background; None takes them from the training data."""

    max_size_px: PositiveInt = 1333
    """Longest side of an image; fpn rounds it up to a multiple of 32."""

    pixel_mean_rgb: tuple[float, float, float] = (123.675, 116.28, 103.53)
    """Mean of red, green and blue, subtracted from the pixels."""

    pixel_std_rgb: tuple[PositiveFloat, PositiveFloat, PositiveFloat] = (58.395, 57.12, 57.375)
    """Standard deviation of red, green and blue, by which the pixels are divided."""

    roi_align: Literal["tensorpack", "aws"] = "tensorpack"
    """Region pooling: two samples per bin with half-pixel centres (tensorpack), or one sample without them (aws)."""

    loss_mean_over: Literal["image", "batch"] = "image"
    """Whether head losses are averaged per image (TensorPack) or over all regions of a batch (AWS Samples)."""

    backbone: BackboneConfig = BackboneConfig()
    """The ResNet."""

    fpn: FpnConfig = FpnConfig()
    """The feature pyramid."""

    rpn: RpnConfig = RpnConfig()
    """The region proposal network."""

    box_head: BoxHeadConfig = BoxHeadConfig()
    """The box head."""

    cascade_head: CascadeConfig = CascadeConfig()
    """The stages of the cascade."""

    mask_head: MaskHeadConfig = MaskHeadConfig()
    """The mask head."""

    inference: InferenceConfig = InferenceConfig()
    """How scores become detections."""

    @property
    def canvas_max_px(self) -> int:
        """`max_size_px` as the network uses it: it limits resizing, box regression and the anchor grid."""
        return math.ceil(self.max_size_px / 32) * 32 if self.architecture == "fpn" else self.max_size_px

    @property
    def size_divisor(self) -> int:
        """Images are padded to a multiple of this many pixels."""
        return 32 if self.architecture == "fpn" else 1

    @model_validator(mode="after")
    def _parts_fit_together(self) -> ModelConfig:
        if self.architecture == "c4":
            if self.cascade:
                raise ValueError("cascade needs a feature pyramid; set architecture=fpn, or cascade=false")
            if self.roi_align == "aws":
                raise ValueError(
                    "roi_align=aws belongs to the AWS Samples model, which has only fpn; set roi_align=tensorpack"
                )
        elif len(self.fpn.anchor_strides) != len(self.rpn.anchor_sizes):
            raise ValueError(
                f"fpn.anchor_strides has {len(self.fpn.anchor_strides)} levels but rpn.anchor_sizes has "
                f"{len(self.rpn.anchor_sizes)} sizes; give one size per level"
            )
        if self.cascade and self.cascade_head.foreground_ious[0] != self.box_head.foreground_iou:
            raise ValueError(
                f"cascade_head.foreground_ious starts at {self.cascade_head.foreground_ious[0]} but "
                f"box_head.foreground_iou is {self.box_head.foreground_iou}; the first stage uses both, make them equal"
            )
        return self
