"""Samples collated into batches: images on one canvas, ground truth padded to a few sizes to limit recompilation.

Shapes: B images, G objects, C crowd regions, E edges (all padded), H x W the canvas. Pixels stay in OpenCV's memory
layout, [B, H, W, 3], seen as [B, 3, H, W]: torch's channels_last, with no transpose on the host.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import get_worker_info

from maskfleet.batch import Batch, Images, Outlines, Targets
from maskfleet.data.pipeline.device_resize import BatchGeometry
from maskfleet.data.pipeline.geometry import place_image
from maskfleet.data.pipeline.samples import Sample
from maskfleet.ops.outlines import pack_outlines

MIN_OBJECTS, MIN_CROWDS = 16, 4
MIN_EDGES, MIN_EDGES_OF_ONE, MIN_PARTS = 256, 32, 2
SOURCE_STEP_PX = 64  # sources are padded to multiples of it, so that the GPU allocator can reuse its blocks


@dataclass(frozen=True, slots=True)
class EvalBatch:
    """Images to detect objects in, and what is needed to undo their resize."""

    images: Images
    image_ids: Tensor  # [B] int64
    original_sizes: Tensor  # [B, 2] int64, (height, width)

    def to(self, device: torch.device | str) -> EvalBatch:
        return EvalBatch(self.images.to(device), self.image_ids, self.original_sizes)

    def pin_memory(self) -> EvalBatch:
        images = Images(self.images.pixels.pin_memory(), self.images.sizes.pin_memory())
        return EvalBatch(images, self.image_ids, self.original_sizes)


def training_batch(samples: Sequence[Sample], images: Images, *, masks: bool, crowds: bool) -> Batch:
    """The batch of `samples`, whose pixels are already in `images`."""
    num_objects = padded_count(max(len(sample.boxes) for sample in samples), MIN_OBJECTS)
    num_crowds = padded_count(max(len(sample.crowd_boxes) for sample in samples), MIN_CROWDS) if crowds else 0
    boxes, valid = _padded([sample.boxes for sample in samples], num_objects)
    crowd_boxes, crowd_valid = _padded([sample.crowd_boxes for sample in samples], num_crowds)
    labels = torch.zeros(len(samples), num_objects, dtype=torch.int64)
    for row, sample in zip(labels, samples, strict=True):
        row[: len(sample.labels)] = torch.from_numpy(sample.labels)
    outlines = (
        _with_minimum_sizes(pack_outlines([s.outlines for s in samples], num_instances=num_objects)) if masks else None
    )
    return Batch(
        images=images,
        targets=Targets(boxes, labels, valid, crowd_boxes, crowd_valid, outlines),
        seed=torch.tensor([sample.seed for sample in samples], dtype=torch.int64),
        image_ids=torch.tensor([sample.image_id for sample in samples], dtype=torch.int64),
    )


def evaluation_batch(samples: Sequence[Sample], images: Images) -> EvalBatch:
    """The evaluation batch of `samples`, whose pixels are already in `images`."""
    return EvalBatch(
        images=images,
        image_ids=torch.tensor([sample.image_id for sample in samples], dtype=torch.int64),
        original_sizes=torch.tensor([sample.geometry.source for sample in samples], dtype=torch.int64),
    )


def images_on_canvas(samples: Sequence[Sample], canvas: tuple[int, int]) -> Images:
    """The resized images in the top left corners of canvases of (height, width)."""
    pixels = _zeros(len(samples), *canvas, 3)
    for image_canvas, sample in zip(pixels.numpy(), samples, strict=True):
        place_image(sample.image, sample.geometry, image_canvas)
    return Images(pixels.permute(0, 3, 1, 2), _sizes(samples))


def images_as_decoded(samples: Sequence[Sample], canvas: tuple[int, int]) -> tuple[Images, BatchGeometry]:
    """The source images, padded to one size, and how `resize_on_device` maps them to the canvas."""
    height, width = np.max([sample.image.shape[:2] for sample in samples], axis=0)
    padded_size = [-(-int(side) // SOURCE_STEP_PX) * SOURCE_STEP_PX for side in (height, width)]
    pixels = _zeros(len(samples), *padded_size, 3)
    for padded, sample in zip(pixels.numpy(), samples, strict=True):
        padded[: sample.image.shape[0], : sample.image.shape[1]] = sample.image
    geometries = [sample.geometry for sample in samples]
    geometry = BatchGeometry(
        source=torch.tensor([geometry.source for geometry in geometries]),
        resized=torch.tensor([geometry.resized for geometry in geometries]),
        offset=torch.tensor([geometry.offset for geometry in geometries]),
        flip=torch.tensor([geometry.flip for geometry in geometries]),
        canvas=canvas,
    )
    return Images(pixels.permute(0, 3, 1, 2), _sizes(samples)), geometry


def padded_count(count: int, smallest: int) -> int:
    """The first of `smallest`, 2 * `smallest`, 4 * `smallest`, ... that is at least `count`."""
    while smallest < count:
        smallest *= 2
    return smallest


def _zeros(*shape: int) -> Tensor:
    """Zeros of uint8; in a worker in shared memory from the start, which saves the queue a copy of every image."""
    if get_worker_info() is None:
        return torch.zeros(shape, dtype=torch.uint8)
    # As torch's own default_collate does; fresh pages are zero.
    storage = torch.UntypedStorage._new_shared(math.prod(shape))  # type: ignore[no-untyped-call]
    return torch.empty(0, dtype=torch.uint8).set_(storage).view(shape)


def _sizes(samples: Sequence[Sample]) -> Tensor:
    return torch.tensor([sample.geometry.size for sample in samples], dtype=torch.int64)


def _padded(
    boxes_of_images: Sequence[np.ndarray[tuple[int, ...], np.dtype[np.float32]]], count: int
) -> tuple[Tensor, Tensor]:
    """Boxes of each image padded to `count` -> (boxes [B, count, 4], valid [B, count])."""
    boxes = torch.zeros(len(boxes_of_images), count, 4)
    valid = torch.zeros(len(boxes_of_images), count, dtype=torch.bool)
    for number, image_boxes in enumerate(boxes_of_images):
        boxes[number, : len(image_boxes)] = torch.from_numpy(image_boxes)
        valid[number, : len(image_boxes)] = True
    return boxes, valid


def _with_minimum_sizes(outlines: Outlines) -> Outlines:
    """`outlines` padded to at least the MIN_* sizes, which most batches then share."""
    missing = max(0, MIN_EDGES - outlines.edges.shape[1])
    return dataclasses.replace(
        outlines,
        edges=F.pad(outlines.edges, (0, 0, 0, missing)),
        part=F.pad(outlines.part, (0, missing)),
        max_count=max(outlines.max_count, MIN_EDGES_OF_ONE),
        max_parts=max(outlines.max_parts, MIN_PARTS),
    )
