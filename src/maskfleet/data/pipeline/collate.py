"""Samples collated into batches: images on one canvas, ground truth padded to a few sizes to limit recompilation.

Shapes: B images, G objects, C crowd regions, E edges (all padded), H x W the canvas. Pixels stay in OpenCV's memory
layout, [B, H, W, 3], seen as [B, 3, H, W]: torch's channels_last, with no transpose on the host.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import get_worker_info

from maskfleet.batch import Batch, Images, Outlines, Targets, map_tensors
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
    resized_sizes: Tensor  # [B, 2] int64, those of `images`; on the host, where reading them stalls no GPU

    def to(self, device: torch.device | str) -> EvalBatch:
        return dataclasses.replace(self, images=self.images.to(device))

    def pin_memory(self) -> EvalBatch:
        return dataclasses.replace(self, images=map_tensors(self.images, lambda tensor: tensor.pin_memory()))


def training_batch(samples: Sequence[Sample], images: Images, *, masks: bool, crowds: bool) -> Batch:
    """The batch of `samples`, whose pixels are already in `images`."""
    num_objects = padded_count(max(len(sample.boxes) for sample in samples), MIN_OBJECTS)
    num_crowds = padded_count(max(len(sample.crowd_boxes) for sample in samples), MIN_CROWDS) if crowds else 0
    boxes, valid = _padded([sample.boxes for sample in samples], num_objects)
    crowd_boxes, crowd_valid = _padded([sample.crowd_boxes for sample in samples], num_crowds)
    labels, _ = _padded([sample.labels for sample in samples], num_objects)
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
        resized_sizes=_sizes(samples),
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
    fields = {
        name: torch.tensor([getattr(sample.geometry, name) for sample in samples])
        for name in ("resized", "offset", "flip")
    }
    source = torch.tensor([sample.image.shape[:2] for sample in samples])  # of the pixels, which may be reduced
    geometry = BatchGeometry(source=source, **fields, canvas=canvas)
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


def _padded(of_images: Sequence[npt.NDArray[Any]], count: int) -> tuple[Tensor, Tensor]:
    """Boxes or labels of each image padded to `count` -> (values [B, count, ...], valid [B, count])."""
    values = torch.from_numpy(np.zeros((len(of_images), count, *of_images[0].shape[1:]), of_images[0].dtype))
    valid = torch.zeros(len(of_images), count, dtype=torch.bool)
    for number, of_image in enumerate(of_images):
        values[number, : len(of_image)] = torch.from_numpy(of_image)
        valid[number, : len(of_image)] = True
    return values, valid


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
