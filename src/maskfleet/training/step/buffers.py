"""Static buffers for batches: a CUDA graph reads every batch from the same addresses.

Shapes: B images, G objects, C crowd regions, E edges (all padded).
"""

from __future__ import annotations

from dataclasses import dataclass

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
    return Batch(images, targets, torch.empty_like(example.seed), torch.empty_like(example.image_ids))


def copy_into(static: Batch, batch: Batch) -> None:
    """Copy `batch` into the buffers `static`; what remains of them is zero, which is padding."""
    pairs = [
        (static.images.pixels, batch.images.pixels),
        (static.images.sizes, batch.images.sizes),
        (static.seed, batch.seed),
        (static.image_ids, batch.image_ids),
    ]
    buffers, targets = static.targets, batch.targets
    padded = [
        (buffers.boxes, targets.boxes),
        (buffers.labels, targets.labels),
        (buffers.valid, targets.valid),
        (buffers.crowd_boxes, targets.crowd_boxes),
        (buffers.crowd_valid, targets.crowd_valid),
    ]
    if buffers.outlines is not None and targets.outlines is not None:
        # Edges beyond an instance's count are never read, so nothing needs to be cleared there.
        num_edges = targets.outlines.edges.shape[1]
        pairs += [
            (buffers.outlines.edges[:, :num_edges], targets.outlines.edges),
            (buffers.outlines.part[:, :num_edges], targets.outlines.part),
        ]
        padded += [(buffers.outlines.start, targets.outlines.start), (buffers.outlines.count, targets.outlines.count)]
    for buffer, value in padded:
        buffer[:, value.shape[1] :].zero_()
        pairs.append((buffer[:, : value.shape[1]], value))
    for buffer, value in pairs:
        buffer.copy_(value, non_blocking=True)


def _grown(capacity: int, needed: int) -> int:
    """`capacity` if it is enough, else the next power of two that is."""
    return capacity if needed <= capacity else 1 << (needed - 1).bit_length()
