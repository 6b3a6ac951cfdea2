"""A small model that runs in a blink, with weights that make every branch matter, and batches for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import golden
import numpy as np
import torch

from maskfleet.batch import Batch, Images, Targets
from maskfleet.config.model import ModelConfig
from maskfleet.model.build import build_mask_rcnn
from maskfleet.model.mask_rcnn import MaskRCNN
from maskfleet.ops.outlines import pack_outlines, polygon_edges

SMALL: dict[str, Any] = {
    "num_categories": 5,
    "backbone": {"blocks": (1, 2, 1, 1), "stem_channels": 16},
    "fpn": {"channels": 32},
    "rpn": {
        "head_channels": 32,
        "samples_per_image": 64,
        "train_pre_nms": 300,
        "train_post_nms": 100,
        "test_pre_nms": 200,
        "test_post_nms": 60,
        "train_per_level_pre_nms": 100,
        "train_per_level_post_nms": 100,
        "train_per_image": 100,
        "test_per_level_pre_nms": 60,
        "test_per_level_post_nms": 60,
        "test_per_image": 60,
    },
    "box_head": {"fc_channels": 64, "conv_channels": 32, "samples_per_image": 48},
    "mask_head": {"channels": 32},
    "inference": {"max_detections": 30},
}
VARIANTS: dict[str, dict[str, Any]] = {
    "fpn": {},
    "faster": {"mask": False},
    "c4": {"architecture": "c4"},
    "cascade": {"cascade": True},
    "gn": {
        "backbone": {"norm": "GN"},
        "fpn": {"norm": "GN"},
        "box_head": {"kind": "4conv1fc_gn"},
        "mask_head": {"kind": "up4conv_gn"},
    },
    "no_norm": {"backbone": {"norm": "None"}, "box_head": {"kind": "4conv1fc"}},
    "sync": {"backbone": {"norm": "SyncBN", "freeze_at": 0}},
    "c4_sync": {"architecture": "c4", "backbone": {"norm": "SyncBN", "freeze_at": 1}},
    "joint": {"fpn": {"proposal_mode": "Joint"}},
    "tf_pad": {"backbone": {"tf_pad_mode": True}},
    "c4_tf_pad": {"architecture": "c4", "backbone": {"tf_pad_mode": True}},
    "stride_1x1": {"backbone": {"stride_1x1": True}},
    "c4_stride_1x1": {"architecture": "c4", "backbone": {"stride_1x1": True}},
    "legacy_anchors": {"rpn": {"legacy_anchors": True}},
    "aws": {
        "roi_align": "aws",
        "loss_mean_over": "batch",
        "rpn": {"min_size": 0.1},
        "box_head": {"box_loss": "huber", "fill_with_foreground": True},
    },
}


def small_config(variant: str = "fpn", **changes: Any) -> ModelConfig:
    return ModelConfig.model_validate(_merged(_merged(SMALL, VARIANTS[variant]), changes))


def small_model(variant: str = "fpn", **changes: Any) -> MaskRCNN:
    """A small model with the weights of the golden rule, under which no layer is idle."""
    config = small_config(variant, **changes)
    model = build_mask_rcnn(config)
    golden.load_tensorpack(model, config)
    return model


def small_batch(
    sizes: Sequence[tuple[int, int]],
    *,
    canvas: tuple[int, int] | None = None,
    numbers: Sequence[int] | None = None,
    num_slots: int = 6,
    num_truths: Sequence[int] | None = None,
) -> Batch:
    """Images of `sizes`; the same `number` always gives the same image, ground truth and seed."""
    numbers = range(len(sizes)) if numbers is None else numbers
    height, width = canvas or (max(h for h, _ in sizes), max(w for _, w in sizes))
    pixels = torch.zeros(len(sizes), 3, height, width)
    boxes, labels = torch.zeros(len(sizes), num_slots, 4), torch.zeros(len(sizes), num_slots, dtype=torch.int64)
    outlines = []
    for place, (number, (h, w)) in enumerate(zip(numbers, sizes, strict=True)):
        pixels[place, :, :h, :w] = torch.from_numpy(golden.image(h, w, number + 1.0)).permute(2, 0, 1)
        count = 2 + number % 3 if num_truths is None else num_truths[place]
        truths = [_truth(number, instance, h, w) for instance in range(count)]
        for instance, (box, label, _) in enumerate(truths):
            boxes[place, instance], labels[place, instance] = torch.tensor(box), label
        outlines.append([polygon_edges([polygon]) for _, _, polygon in truths])
    targets = Targets(
        boxes=boxes,
        labels=labels,
        valid=labels > 0,
        crowd_boxes=torch.zeros(len(sizes), 0, 4),
        crowd_valid=torch.zeros(len(sizes), 0, dtype=torch.bool),
        outlines=pack_outlines(outlines, num_instances=num_slots),
    )
    seed = torch.tensor([1000 + number for number in numbers])
    return Batch(Images(pixels, torch.tensor(list(sizes))), targets, seed=seed, image_ids=seed)


def _truth(number: int, instance: int, height: int, width: int) -> tuple[list[float], int, np.ndarray]:
    """Box, label and polygon (a diamond in the box) of one object."""
    rng = np.random.default_rng([number, instance])
    w, h = rng.uniform(0.2, 0.7) * width, rng.uniform(0.2, 0.7) * height
    x, y = rng.uniform(0, width - w), rng.uniform(0, height - h)
    diamond = np.array([[x + w / 2, y], [x + w, y + h / 2], [x + w / 2, y + h], [x, y + h / 2]])
    return [x, y, x + w, y + h], int(rng.integers(1, 6)), diamond


def _merged(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in changes.items():
        merged[key] = _merged(merged.get(key, {}), value) if isinstance(value, dict) else value
    return merged
