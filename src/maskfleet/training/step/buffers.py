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
from maskfleet.data.pipeline.collate import MIN_CROWDS, MIN_EDGES, MIN_OBJECTS, MIN_PARTS, padded_count
from maskfleet.data.store.largest import GroundTruthSize
from maskfleet.errors import DataError
from maskfleet.ops.outlines import pack_outlines


@dataclass(frozen=True, slots=True)
class Capacity:
    """Size of the buffers for ground truth; padding costs little, and equal sizes share compiled code."""

    objects: int = 128  # per image; COCO has images with 93
    crowds: int = 0  # per image
    edges: int = 16384  # per image
    parts: int = 32  # per instance: as many as the mask kernel distinguishes in one pass

    def grown_for(self, largest: GroundTruthSize, *, crowds: bool) -> Capacity:
        """This capacity, increased to what batches are padded to where `largest` does not fit; 0 for unused crowds."""
        return Capacity(
            objects=max(self.objects, padded_count(largest.objects, MIN_OBJECTS)),
            crowds=max(self.crowds, padded_count(largest.crowds, MIN_CROWDS)) if crowds else 0,
            edges=max(self.edges, padded_count(largest.edges, MIN_EDGES)),
            parts=max(self.parts, padded_count(largest.parts, MIN_PARTS)),
        )

    def check(self, batch: Batch) -> None:
        """Raise DataError if the ground truth of `batch` does not fit."""
        outlines = batch.targets.outlines
        needed = {
            "objects": batch.targets.boxes.shape[1],
            "crowds": batch.targets.crowd_boxes.shape[1],
            "edges": 0 if outlines is None else outlines.edges.shape[1],
            "parts": 0 if outlines is None else outlines.max_parts,
        }
        too_many = {name: count for name, count in needed.items() if count > getattr(self, name)}
        if too_many:
            counts = ", ".join(f"{count} {name} instead of {getattr(self, name)}" for name, count in too_many.items())
            images = ", ".join(map(str, batch.image_ids.tolist()))
            raise DataError(
                f"images {images} have more ground truth than the data had when the run began: {counts}",
                remedy="do not change annotations while a run trains; start the same command again to continue",
            )


@dataclass(frozen=True, slots=True)
class BatchShapes:
    """The shapes of all batches of a run, known before its first step."""

    num_images: int  # per batch
    canvases: tuple[tuple[int, int], ...]  # (height, width); empty if each batch has a canvas of its own size
    capacity: Capacity
    masks: bool

    def examples(self, device: torch.device) -> list[Batch]:
        """A batch without objects for each canvas, in the memory layout of the loader's."""
        return [_blank_batch(self, canvas).to(device) for canvas in self.canvases]


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
    return Batch(images, targets, torch.empty_like(example.seed), torch.empty_like(example.image_ids))


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


def _blank_batch(shapes: BatchShapes, canvas: tuple[int, int]) -> Batch:
    count = shapes.num_images
    return Batch(
        images=Images(
            torch.zeros(count, *canvas, 3, dtype=torch.uint8).permute(0, 3, 1, 2), torch.tensor([canvas] * count)
        ),
        targets=Targets(
            boxes=torch.zeros(count, 0, 4),
            labels=torch.zeros(count, 0, dtype=torch.int64),
            valid=torch.zeros(count, 0, dtype=torch.bool),
            crowd_boxes=torch.zeros(count, 0, 4),
            crowd_valid=torch.zeros(count, 0, dtype=torch.bool),
            outlines=pack_outlines([[]] * count, num_instances=0) if shapes.masks else None,
        ),
        seed=torch.arange(count),
        image_ids=torch.zeros(count, dtype=torch.int64),
    )
