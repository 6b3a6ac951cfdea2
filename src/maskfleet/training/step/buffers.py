"""Batches copied to fixed places, so that a recorded CUDA graph finds the next one where it found the last.

Shapes: B images, G objects, C crowd regions, E edges (all padded).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from maskfleet.batch import Batch, Images, Outlines, Targets


@dataclass(frozen=True, slots=True)
class Capacity:
    """Room for ground truth; padding costs little, growing costs a new recording."""

    objects: int = 128  # COCO has images with 93
    crowds: int = 0
    edges: int = 16384  # an image
    parts: int = 32  # an instance: as many as the mask kernel tells apart in one pass

    def with_room_for(self, targets: Targets) -> Capacity:
        """This capacity, doubled where `targets` do not fit."""
        outlines = targets.outlines
        return Capacity(
            objects=_doubled(self.objects, targets.boxes.shape[1]),
            crowds=_doubled(self.crowds, targets.crowd_boxes.shape[1]),
            edges=_doubled(self.edges, 0 if outlines is None else outlines.edges.shape[1]),
            parts=_doubled(self.parts, 0 if outlines is None else outlines.max_parts),
        )


def empty_batch(example: Batch, capacity: Capacity) -> Batch:
    """A batch of images like those of `example`, with room for ground truth, in new memory."""
    device, count = example.images.pixels.device, example.num_images

    def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(count, *shape, dtype=dtype, device=device)

    outlines = None
    if example.targets.outlines is not None:
        outlines = Outlines(
            edges=zeros(capacity.edges, 4, dtype=torch.float32),
            part=zeros(capacity.edges, dtype=torch.int32),
            start=zeros(capacity.objects, dtype=torch.int32),
            count=zeros(capacity.objects, dtype=torch.int32),
            max_count=capacity.edges,
            max_parts=capacity.parts,
        )
    targets = Targets(
        boxes=zeros(capacity.objects, 4, dtype=torch.float32),
        labels=zeros(capacity.objects, dtype=torch.int64),
        valid=zeros(capacity.objects, dtype=torch.bool),
        crowd_boxes=zeros(capacity.crowds, 4, dtype=torch.float32),
        crowd_valid=zeros(capacity.crowds, dtype=torch.bool),
        outlines=outlines,
    )
    images = Images(torch.empty_like(example.images.pixels), torch.empty_like(example.images.sizes))
    return Batch(images, targets, torch.empty_like(example.seeds), torch.empty_like(example.image_ids))


def fill(places: Batch, batch: Batch) -> None:
    """Copy `batch` into `places`; room it leaves is zero, which is padding."""
    pairs = [
        (places.images.pixels, batch.images.pixels),
        (places.images.sizes, batch.images.sizes),
        (places.seeds, batch.seeds),
        (places.image_ids, batch.image_ids),
    ]
    truth, given = places.targets, batch.targets
    padded = [
        (truth.boxes, given.boxes),
        (truth.labels, given.labels),
        (truth.valid, given.valid),
        (truth.crowd_boxes, given.crowd_boxes),
        (truth.crowd_valid, given.crowd_valid),
    ]
    if truth.outlines is not None and given.outlines is not None:
        # Edges beyond an instance's count are never read, so nothing needs to be cleared there.
        num_edges = given.outlines.edges.shape[1]
        pairs += [
            (truth.outlines.edges[:, :num_edges], given.outlines.edges),
            (truth.outlines.part[:, :num_edges], given.outlines.part),
        ]
        padded += [(truth.outlines.start, given.outlines.start), (truth.outlines.count, given.outlines.count)]
    for place, value in padded:
        place[:, value.shape[1] :].zero_()
        pairs.append((place[:, : value.shape[1]], value))
    for place, value in pairs:
        place.copy_(value, non_blocking=True)


def _doubled(room: int, wanted: int) -> int:
    """`room`, or the first power of two above it that holds `wanted`."""
    return room if wanted <= room else 1 << (wanted - 1).bit_length()
