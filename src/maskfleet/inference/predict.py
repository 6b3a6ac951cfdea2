"""From a model and images to COCO results.

Shapes: D detections of one image.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from maskfleet.batch import Detections
from maskfleet.data.pipeline.collate import EvalBatch
from maskfleet.data.store.annotations import AnnotationStore
from maskfleet.evaluation.coco_eval import CocoScores, Kind, evaluate_detections
from maskfleet.evaluation.results import coco_results, unscale_boxes
from maskfleet.model.mask_rcnn import MaskRCNN
from maskfleet.ops.paste import Window, paste_mask_window, paste_mask_window_fast

Result = dict[str, Any]


def predict_batches(
    model: MaskRCNN,
    batches: Iterable[EvalBatch],
    *,
    device: torch.device,
    category_ids: Sequence[int],
    accurate_paste: bool,
    on_image: Callable[[int], None] | None = None,
) -> dict[int, list[Result]]:
    """Results by image id; the model is left in the mode it was in."""
    was_training = model.training
    model.eval()
    results: dict[int, list[Result]] = {}
    try:
        for batch in batches:
            found = model.detect(batch.images.to(device)).to("cpu")
            for index, image_id in enumerate(batch.image_ids.tolist()):
                results[image_id] = image_results(
                    found,
                    index,
                    image_id=image_id,
                    resized_hw=_pair(batch.images.sizes[index]),
                    original_hw=_pair(batch.original_sizes[index]),
                    category_ids=category_ids,
                    accurate_paste=accurate_paste,
                )
                if on_image is not None:
                    on_image(image_id)
    finally:
        model.train(was_training)
    return results


def image_results(
    found: Detections,
    index: int,
    *,
    image_id: int,
    resized_hw: tuple[int, int],
    original_hw: tuple[int, int],
    category_ids: Sequence[int],
    accurate_paste: bool,
) -> list[Result]:
    """Results of image `index` of a batch, in pixels of the original image."""
    valid = found.valid[index].numpy()
    boxes = unscale_boxes(found.boxes[index].numpy()[valid], resized_hw=resized_hw, original_hw=original_hw)
    masks = None
    if found.masks is not None:
        masks = mask_windows(found.masks[index].numpy()[valid], boxes, original_hw, accurate=accurate_paste)
    return coco_results(
        image_id,
        boxes,
        found.scores[index].numpy()[valid],
        found.labels[index].numpy()[valid],
        category_ids=category_ids,
        original_hw=original_hw,
        masks=masks,
    )


def mask_windows(
    masks: NDArray[np.float32], boxes: NDArray[np.float32], hw: tuple[int, int], *, accurate: bool
) -> list[Window]:
    """Masks [D, M, M] put into an image of `hw`, each as the window of its box [D, 4]."""
    paste = paste_mask_window if accurate else paste_mask_window_fast
    return [paste(mask, box, *hw) for mask, box in zip(masks, boxes, strict=True)]


def score_results(
    store: AnnotationStore, results: dict[int, list[Result]], *, masks: bool, max_detections: int
) -> dict[str, CocoScores]:
    """AP of `results` against the annotations of just those images."""
    document = json.loads(store.split.annotations.read_text(encoding="utf-8"))
    document["images"] = [image for image in document["images"] if image["id"] in results]
    document["annotations"] = [item for item in document["annotations"] if item["image_id"] in results]
    flat = [result for image_id in sorted(results) for result in results[image_id]]
    kinds: tuple[Kind, ...] = ("bbox", "segm") if masks else ("bbox",)
    return evaluate_detections(document, flat, kinds=kinds, max_detections=max_detections)


def _pair(size: torch.Tensor) -> tuple[int, int]:
    height, width = size.tolist()
    return int(height), int(width)
