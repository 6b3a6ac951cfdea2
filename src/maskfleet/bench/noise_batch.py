"""Batches for benchmarks: images of noise with 8 objects each, every object an outline of 40 points.

Shapes: B images, G objects per image.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from maskfleet.batch import Batch, Images, Targets
from maskfleet.ops.outlines import pack_outlines, polygon_edges

OBJECTS = 8
CORNERS = 40


def noise_batch(
    count: int,
    *,
    canvas: tuple[int, int] = (800, 1344),
    size: tuple[int, int] = (800, 1333),
    num_categories: int = 80,
    seed: int = 0,
) -> Batch:
    """A batch of `count` images of noise with random ellipses as objects."""
    random = np.random.default_rng(seed)
    height, width = size
    sides = (math.log(0.03 * height), math.log(0.6 * height))
    extent = np.exp(random.uniform(*sides, (count, OBJECTS, 2)))
    centre = random.uniform(extent / 2, np.array([width, height]) - extent / 2)
    boxes = np.concatenate([centre - extent / 2, centre + extent / 2], axis=-1)
    angle = np.linspace(0, 2 * math.pi, CORNERS, endpoint=False)
    circle = np.stack([np.cos(angle), np.sin(angle)], axis=-1) / 2  # [corners, 2]
    outlines = [
        [polygon_edges([centre[image, number] + circle * extent[image, number]]) for number in range(OBJECTS)]
        for image in range(count)
    ]
    pixels = torch.zeros(count, *canvas, 3, dtype=torch.uint8)
    pixels[:, :height, :width] = torch.from_numpy(random.integers(0, 256, (count, height, width, 3), dtype=np.uint8))
    labels = torch.from_numpy(random.integers(1, num_categories + 1, (count, OBJECTS)))
    return Batch(
        images=Images(pixels.permute(0, 3, 1, 2), torch.tensor([size] * count)),
        targets=Targets(
            boxes=torch.from_numpy(boxes.astype(np.float32)),
            labels=labels,
            valid=torch.ones(count, OBJECTS, dtype=torch.bool),
            crowd_boxes=torch.zeros(count, 0, 4),
            crowd_valid=torch.zeros(count, 0, dtype=torch.bool),
            outlines=pack_outlines(outlines, num_instances=OBJECTS),
        ),
        seed=torch.arange(count) + 1000 * seed,
        image_ids=torch.arange(count),
    )
