"""From a model and batches of images to COCO results."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from maskfleet.data.pipeline.collate import EvalBatch
from maskfleet.inference.detections import Categories, Result, image_detections
from maskfleet.model.mask_rcnn import MaskRCNN


def predict_batches(
    model: MaskRCNN,
    batches: Iterable[EvalBatch],
    *,
    device: torch.device,
    categories: Categories,
    accurate_paste: bool,
    on_image: Callable[[int], None] | None = None,
) -> dict[int, list[Result]]:
    """Results by image id, calling `on_image` with each id; the model stays in the mode it was in."""
    was_training = model.training
    model.eval()
    results: dict[int, list[Result]] = {}
    try:
        for batch in batches:
            detections = model.detect(batch.images.to(device)).to("cpu")
            for index, image_id in enumerate(batch.image_ids.tolist()):
                found = image_detections(
                    detections,
                    index,
                    resized_hw=_pair(batch.images.sizes[index]),
                    original_hw=_pair(batch.original_sizes[index]),
                    categories=categories,
                    accurate_paste=accurate_paste,
                )
                results[image_id] = found.to_coco(image_id)
                if on_image is not None:
                    on_image(image_id)
    finally:
        model.train(was_training)
    return results


def _pair(size: torch.Tensor) -> tuple[int, int]:
    height, width = size.tolist()
    return int(height), int(width)
