"""The data that data, model, training and evaluation exchange: padded tensors with masks of what is valid.

Shapes: B images on one H x W canvas, G ground truths, C crowd boxes, E outline edges, D detections; G, C, E, D padded.
Boxes are xyxy float32 pixels of the resized image, whose pixel (i, j) covers [j, j+1) x [i, i+1).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Images:
    """Images of different sizes in the top left corners of one canvas."""

    pixels: Tensor  # [B, 3, H, W] uint8 or float32, BGR, 0..255, not normalised, 0 outside each image
    sizes: Tensor  # [B, 2] int64, (height, width) of each image inside the canvas

    def to(self, device: torch.device | str) -> Images:
        return map_tensors(self, lambda tensor: tensor.to(device, non_blocking=True))


@dataclass(frozen=True, slots=True)
class Outlines:
    """Instance masks as edges, so that no bitmap is sent to the device.

    The edges of one instance are contiguous. A pixel is inside a part if a ray crosses an odd number of the part's
    edges (so a part may have holes); an instance is the union of its parts. Polygons give their sides; a bitmap gives
    the horizontal borders between unlike pixels.
    """

    edges: Tensor  # [B, E, 4] float32, (x1, y1, x2, y2) in pixels of the resized image
    part: Tensor  # [B, E] int32, number of the part inside its instance: 0, 1, ...
    start: Tensor  # [B, G] int32, first edge of each instance
    count: Tensor  # [B, G] int32, number of edges of each instance; 0 for padding
    max_count: int  # at least count.max(); a power of two, so that few shapes occur
    max_parts: int  # at least the largest number of parts of an instance; a power of two


@dataclass(frozen=True, slots=True)
class Targets:
    """Ground truth of a batch, padded to G instances and C crowd regions per image."""

    boxes: Tensor  # [B, G, 4] float32
    labels: Tensor  # [B, G] int64, 1..num_categories; 0 for padding
    valid: Tensor  # [B, G] bool, False for padding
    crowd_boxes: Tensor  # [B, C, 4] float32; C may be 0
    crowd_valid: Tensor  # [B, C] bool
    outlines: Outlines | None  # None when no masks are trained


@dataclass(frozen=True, slots=True)
class Batch:
    """One step's images and ground truth."""

    images: Images
    targets: Targets
    seed: Tensor  # [B] int64, determines each image's random samples, whatever the rest of the batch
    image_ids: Tensor  # [B] int64, the ids of the annotation file

    @property
    def num_images(self) -> int:
        return self.images.pixels.shape[0]

    def to(self, device: torch.device | str) -> Batch:
        return map_tensors(self, lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> Batch:
        return map_tensors(self, lambda tensor: tensor.pin_memory())


@dataclass(frozen=True, slots=True)
class Detections:
    """Detected objects by descending score, padded to D per image."""

    boxes: Tensor  # [B, D, 4] float32, clipped to the image
    scores: Tensor  # [B, D] float32
    labels: Tensor  # [B, D] int64, 1..num_categories; 0 for padding
    valid: Tensor  # [B, D] bool
    masks: Tensor | None  # [B, D, M, M] float32 probabilities inside the box; None without a mask head


def map_tensors(record: T, change: Callable[[Tensor], Tensor]) -> T:
    """`record`, a dataclass of tensors, dataclasses and plain values, with `change` applied to each tensor."""
    fields = {}
    for field in dataclasses.fields(record):  # type: ignore[arg-type]
        value = getattr(record, field.name)
        if isinstance(value, Tensor):
            value = change(value)
        elif dataclasses.is_dataclass(value):
            value = map_tensors(value, change)
        fields[field.name] = value
    return type(record)(**fields)
