"""Detections as COCO results, with TensorPack's rounding.

Shapes: D detections of one image, h x w the window of a mask. Boxes are xyxy pixels of the original image.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from maskfleet.rle import encode_window

Result = dict[str, Any]  # image_id, category_id, bbox (xywh), score and, with masks, segmentation (an Rle)


def unscale_boxes(
    boxes: NDArray[np.float32], *, resized_hw: tuple[int, int], original_hw: tuple[int, int]
) -> NDArray[np.float32]:
    """Boxes [D, 4] of the resized image in pixels of the original one, clipped to it.

    Both axes use the same scale, as in TensorPack, although rounding makes theirs differ slightly.
    """
    scale = float(np.sqrt(resized_hw[0] / original_hw[0] * resized_hw[1] / original_hw[1]))
    height, width = original_hw
    limit = np.array([width, height, width, height], dtype=np.float32)
    unscaled: NDArray[np.float32] = np.asarray(boxes, dtype=np.float32) / scale
    return np.minimum(np.maximum(unscaled, np.float32(0)), limit)


def coco_results(
    image_id: int,
    boxes: NDArray[np.float32],
    scores: NDArray[np.float32],
    labels: NDArray[np.int64],
    *,
    category_ids: Sequence[int],
    original_hw: tuple[int, int],
    masks: Sequence[tuple[int, int, NDArray[np.bool_]] | Mapping[str, Any]] | None = None,
) -> list[Result]:
    """The results of one image: boxes [D, 4], scores [D], labels [D] and D masks, as windows or as RLEs.

    Label k is category `category_ids[k - 1]`. Boxes are rounded to 4 decimals and, as xywh, to 3; scores to 4.
    """
    results = []
    for index, (box, score, label) in enumerate(zip(boxes.tolist(), scores.tolist(), labels.tolist(), strict=True)):
        assert 1 <= label <= len(category_ids), f"label {label} is padding or beyond the {len(category_ids)} categories"
        result: Result = {
            "image_id": int(image_id),
            "category_id": int(category_ids[label - 1]),
            "bbox": _rounded_xywh(box),
            "score": round(score, 4),
        }
        if masks is not None:
            result["segmentation"] = _rle(masks[index], original_hw)
        results.append(result)
    return results


def _rounded_xywh(box: Sequence[float]) -> list[float]:
    """The xyxy `box` as TensorPack writes it: rounded, made xywh, rounded again."""
    x1, y1, x2, y2 = (round(value, 4) for value in box)
    return [round(value, 3) for value in (x1, y1, x2 - x1, y2 - y1)]


def _rle(
    mask: tuple[int, int, NDArray[np.bool_]] | Mapping[str, Any], original_hw: tuple[int, int]
) -> Mapping[str, Any]:
    if not isinstance(mask, Mapping):
        return encode_window(*mask, *original_hw)
    counts = mask["counts"]
    return {"size": list(mask["size"]), "counts": counts.decode("ascii") if isinstance(counts, bytes) else counts}
