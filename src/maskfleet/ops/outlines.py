"""Instance masks as edges, made on the host: from polygons, from bitmaps, and packed for a batch.

Shapes: V vertices of a polygon, E edges, B images, G instances per image (padded).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from maskfleet.batch import Outlines

Edges = tuple[NDArray[np.float32], NDArray[np.int32]]
"""Of one instance: (x1, y1, x2, y2) [E, 4] and the part [E] that each edge belongs to."""


def polygon_edges(polygons: Sequence[NDArray[np.floating]]) -> Edges:
    """Sides of an instance's `polygons`, each [V, 2] of (x, y) -> (edges [E, 4], part [E]); one part per polygon."""
    edges = [np.concatenate([polygon, np.roll(polygon, -1, axis=0)], axis=1) for polygon in polygons]
    part = [np.full(len(polygon), number, dtype=np.int32) for number, polygon in enumerate(polygons)]
    return (
        np.concatenate([np.zeros((0, 4)), *edges]).astype(np.float32),
        np.concatenate([np.zeros(0, dtype=np.int32), *part]),
    )


def bitmap_edges(mask: NDArray[np.bool_]) -> Edges:
    """Horizontal borders between unlike pixels of `mask` [h, w], runs merged -> (edges [E, 4], part [E]), one part.

    Vertical borders are left out: the parity rule looks along columns and never sees them.
    """
    padded = np.pad(mask.astype(bool), ((1, 1), (0, 0)))
    border = padded[1:] != padded[:-1]  # [h + 1, w]: between row y - 1 and row y
    ends = np.diff(np.pad(border, ((0, 0), (1, 1))).astype(np.int8), axis=1)  # [h + 1, w + 1]
    y, left = np.nonzero(ends == 1)
    right = np.nonzero(ends == -1)[1]
    edges = np.stack([left, y, right, y], axis=1).astype(np.float32)
    return edges, np.zeros(len(edges), dtype=np.int32)


def pack_outlines(images: Sequence[Sequence[Edges]], *, num_instances: int) -> Outlines:
    """Outlines of a batch from the edges of each instance of each image, padded to `num_instances` per image.

    E, `max_count` and `max_parts` are rounded up to powers of two, so that few shapes occur.
    """
    assert all(len(instances) <= num_instances for instances in images), "more instances than slots"
    num_images = len(images)
    counts = np.zeros((num_images, num_instances), dtype=np.int32)
    for number, instances in enumerate(images):
        counts[number, : len(instances)] = [len(part) for _, part in instances]
    starts = (np.cumsum(counts, axis=1) - counts).astype(np.int32)
    num_edges = _power_of_two(int(counts.sum(axis=1).max(initial=0)))
    edges = np.zeros((num_images, num_edges, 4), dtype=np.float32)
    parts = np.zeros((num_images, num_edges), dtype=np.int32)
    for number, instances in enumerate(images):
        total = int(counts[number].sum())
        edges[number, :total] = np.concatenate([np.zeros((0, 4), np.float32), *(edge for edge, _ in instances)])
        parts[number, :total] = np.concatenate([np.zeros(0, np.int32), *(part for _, part in instances)])
    return Outlines(
        edges=torch.from_numpy(edges),
        part=torch.from_numpy(parts),
        start=torch.from_numpy(starts),
        count=torch.from_numpy(counts),
        max_count=_power_of_two(int(counts.max(initial=0))),
        max_parts=_power_of_two(int(parts.max(initial=0)) + 1),
    )


def _power_of_two(number: int) -> int:
    """The smallest power of two that is at least `number` and at least 1."""
    return 1 << max(number - 1, 0).bit_length()
