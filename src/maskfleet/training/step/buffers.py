"""Static buffers for batches: a CUDA graph reads every batch from the same addresses.

Shapes: B images, G objects, C crowd regions, E edges (all padded).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from maskfleet.batch import Batch, Images, Outlines, Targets


@dataclass(frozen=True, slots=True)
class Capacity:
    """Size of the buffers for ground truth; padding costs little, growing costs a new graph capture."""

    objects: int = 128  # per image; COCO has images with 93
    crowds: int = 0  # per image
    edges: int = 16384  # per image
    parts: int = 32  # per instance: as many as the mask kernel distinguishes in one pass

    def grown_for(self, targets: Targets) -> Capacity:
        """This capacity, increased to a power of two where `targets` do not fit."""
        outlines = targets.outlines
        return Capacity(
            objects=_grown(self.objects, targets.boxes.shape[1]),
            crowds=_grown(self.crowds, targets.crowd_boxes.shape[1]),
            edges=_grown(self.edges, 0 if outlines is None else outlines.edges.shape[1]),
            parts=_grown(self.parts, 0 if outlines is None else outlines.max_parts),
        )


def static_batch(example: Batch, capacity: Capacity) -> Batch:
    """New buffers for batches with images of the shape of `example` and ground truth up to `capacity`."""

    def zeros(like: Tensor, length: int) -> Tensor:
        return like.new_zeros(len(like), length, *like.shape[2:])

    targets, outlines = example.targets, example.targets.outlines
    if outlines is not None:
        outlines = Outlines(
            edges=zeros(outlines.edges, capacity.edges),
            part=zeros(outlines.part, capacity.edges),
            start=zeros(outlines.start, capacity.objects),
            count=zeros(outlines.count, capacity.objects),
            max_count=capacity.edges,
            max_parts=capacity.parts,
        )
    targets = Targets(
        boxes=zeros(targets.boxes, capacity.objects),
        labels=zeros(targets.labels, capacity.objects),
        valid=zeros(targets.valid, capacity.objects),
        crowd_boxes=zeros(targets.crowd_boxes, capacity.crowds),
        crowd_valid=zeros(targets.crowd_valid, capacity.crowds),
        outlines=outlines,
    )
    images = Images(torch.empty_like(example.images.pixels), torch.empty_like(example.images.sizes))
    return Batch(images, targets, torch.empty_like(example.seeds), torch.empty_like(example.image_ids))


def copy_into(static: Batch, batch: Batch) -> None:
    """Copy `batch` into the buffers `static`; what remains of them is zero, which is padding."""
    for buffer, value in zip(_tensors(static), _tensors(batch), strict=True):
        if buffer.shape != value.shape:
            buffer[:, value.shape[1] :].zero_()
            buffer = buffer[:, : value.shape[1]]
        buffer.copy_(value, non_blocking=True)


def _tensors(record: Any) -> Iterator[Tensor]:
    """The tensors of a dataclass and of the dataclasses in it, in the order of their fields."""
    for field in dataclasses.fields(record):
        value = getattr(record, field.name)
        if isinstance(value, Tensor):
            yield value
        elif dataclasses.is_dataclass(value):
            yield from _tensors(value)


def _grown(capacity: int, needed: int) -> int:
    """`capacity` if it is enough, else the next power of two that is."""
    return capacity if needed <= capacity else 1 << (needed - 1).bit_length()
