"""What a model detected in one image, in pixels of that image.

Shapes: N detections, M x M the mask probabilities of one, H x W the image. Boxes are xyxy pixels.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from maskfleet.batch import Detections
from maskfleet.ops.paste import Window, paste_mask_window_fast, paste_mask_windows
from maskfleet.rle import Rle, encode_window

Categories = Sequence[tuple[int, str]]  # (id, name) by label, which counts from 1
Result = dict[str, Any]  # image_id, category_id, bbox (xywh), score and, with masks, segmentation (an Rle)
Index = int | slice | Sequence[int] | NDArray[np.bool_] | NDArray[np.integer]


@dataclass(frozen=True, eq=False)
class ImageDetections:
    """The objects detected in one image, by descending score.

    Index them like a numpy array; the answer is an `ImageDetections` again:

        best = found[0]
        sure = found[found.scores > 0.9]
    """

    boxes: NDArray[np.float32]  # [N, 4] xyxy, clipped to the image
    scores: NDArray[np.float32]  # [N] 0..1
    labels: NDArray[np.int64]  # [N] 1..number of classes
    image_size: tuple[int, int]  # (height, width)
    categories: Categories
    mask_probabilities: NDArray[np.float32] | None  # [N, M, M] inside the boxes; None without a mask head
    accurate_paste: bool = True

    def __len__(self) -> int:
        return len(self.scores)

    def __iter__(self) -> Iterator[ImageDetections]:
        return (self[index] for index in range(len(self)))

    def __getitem__(self, index: Index) -> ImageDetections:
        """The detections that `index` selects; an integer selects one."""
        rows = np.arange(len(self))[index].reshape(-1)
        masks = None if self.mask_probabilities is None else self.mask_probabilities[rows]
        return replace(
            self, boxes=self.boxes[rows], scores=self.scores[rows], labels=self.labels[rows], mask_probabilities=masks
        )

    def __repr__(self) -> str:
        height, width = self.image_size
        listed = ", ".join(f"{name} {score:.2f}" for name, score in zip(self.class_names, self.scores, strict=True))
        return f"<{len(self)} detections in {height} x {width} pixels: {listed or 'none'}>"

    @property
    def category_ids(self) -> NDArray[np.int64]:
        """Ids of the annotation file the model was trained on -> [N]."""
        return np.array([self.categories[label - 1][0] for label in self.labels], np.int64)

    @property
    def class_names(self) -> list[str]:
        """Name of each detection's class; its number if the weights have no names."""
        return [self.categories[label - 1][1] for label in self.labels]

    @cached_property
    def masks(self) -> NDArray[np.bool_] | None:
        """Pixels of each object -> [N, H, W]; None if the model has no mask head. Made at the first access."""
        if self.mask_probabilities is None:
            return None
        masks = np.zeros((len(self), *self.image_size), dtype=bool)
        for mask, (top, left, pixels) in zip(masks, self._windows(), strict=True):
            mask[top : top + pixels.shape[0], left : left + pixels.shape[1]] = pixels
        return masks

    @cached_property
    def rle(self) -> list[Rle] | None:
        """The masks as COCO's compressed run lengths, which JSON can hold; None if the model has no mask head."""
        if self.mask_probabilities is None:
            return None
        return [encode_window(*window, *self.image_size) for window in self._windows()]

    def _windows(self) -> Iterator[Window]:
        assert self.mask_probabilities is not None
        if self.accurate_paste:
            return paste_mask_windows(self.mask_probabilities, self.boxes, *self.image_size)
        pairs = zip(self.mask_probabilities, self.boxes, strict=True)
        return (paste_mask_window_fast(*pair, *self.image_size) for pair in pairs)

    def to_coco(self, image_id: int) -> list[Result]:
        """COCO results, rounded as TensorPack rounds them: boxes to 4 decimals and, as xywh, to 3; scores to 4."""
        return self.columns(image_id).results()

    def columns(self, image_id: int) -> ResultColumns:
        """What `to_coco` returns, in a form that is quick to send to another process."""
        labels = self.labels.tolist()
        wrong = [label for label in labels if not 1 <= label <= len(self.categories)]
        assert not wrong, f"label {wrong[0]} is padding or beyond the categories"
        return ResultColumns(
            image_id=int(image_id),
            image_size=(int(self.image_size[0]), int(self.image_size[1])),
            category_ids=tuple(int(self.categories[label - 1][0]) for label in labels),
            boxes_xywh=tuple(value for box in self.boxes.tolist() for value in _rounded_xywh(box)),
            scores=tuple(round(score, 4) for score in self.scores.tolist()),
            counts=None if self.rle is None else tuple(rle["counts"] for rle in self.rle),
        )


@dataclass(frozen=True, slots=True)
class ResultColumns:
    """The COCO results of one image, field by field."""

    image_id: int
    image_size: tuple[int, int]  # (height, width)
    category_ids: tuple[int, ...]  # [N]
    boxes_xywh: tuple[float, ...]  # [4 N]
    scores: tuple[float, ...]  # [N]
    counts: tuple[str, ...] | None  # [N] compressed run lengths of the masks; None if the model has no mask head

    def results(self) -> list[Result]:
        """COCO results, in the order of the detections."""
        boxes = zip(*[iter(self.boxes_xywh)] * 4, strict=True)
        results: list[Result] = [
            {"image_id": self.image_id, "category_id": category_id, "bbox": list(box), "score": score}
            for category_id, box, score in zip(self.category_ids, boxes, self.scores, strict=True)
        ]
        if self.counts is not None:
            for result, counts in zip(results, self.counts, strict=True):
                result["segmentation"] = {"size": list(self.image_size), "counts": counts}
        return results


def image_detections(
    detections: Detections,
    index: int,
    *,
    resized_hw: tuple[int, int],
    original_hw: tuple[int, int],
    categories: Categories,
    accurate_paste: bool,
) -> ImageDetections:
    """Image `index` of a batch on the CPU, without padding and in pixels of the original image."""
    valid = detections.valid[index].numpy()
    return ImageDetections(
        boxes=unscale_boxes(detections.boxes[index].numpy()[valid], resized_hw=resized_hw, original_hw=original_hw),
        scores=detections.scores[index].numpy()[valid],
        labels=detections.labels[index].numpy()[valid],
        image_size=original_hw,
        categories=categories,
        mask_probabilities=None if detections.masks is None else detections.masks[index].numpy()[valid],
        accurate_paste=accurate_paste,
    )


def unscale_boxes(
    boxes: NDArray[np.float32], *, resized_hw: tuple[int, int], original_hw: tuple[int, int]
) -> NDArray[np.float32]:
    """Boxes [N, 4] of the resized image in pixels of the original one, clipped to it.

    Both axes use one scale, as in TensorPack, although rounding makes the two differ slightly.
    """
    scale = float(np.sqrt(resized_hw[0] / original_hw[0] * resized_hw[1] / original_hw[1]))
    height, width = original_hw
    limit = np.array([width, height, width, height], dtype=np.float32)
    unscaled: NDArray[np.float32] = np.asarray(boxes, dtype=np.float32) / scale
    return np.minimum(np.maximum(unscaled, np.float32(0)), limit)


def _rounded_xywh(box: Sequence[float]) -> list[float]:
    """The xyxy `box` as TensorPack writes it: rounded, made xywh, rounded again."""
    x1, y1, x2, y2 = (round(value, 4) for value in box)
    return [round(value, 3) for value in (x1, y1, x2 - x1, y2 - y1)]
