"""The largest ground truth of a data set: what static buffers for its batches must hold.

Shapes: A annotations, P polygon parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from maskfleet.data.store.annotations import (
    MIN_POLYGON_NUMBERS,
    AnnotationStore,
    InstanceArrays,
    clean_instances,
)
from maskfleet.data.store.coco import KIND_POLYGONS, KIND_RLE
from maskfleet.rle import RleError, runs_from_text

Ints = npt.NDArray[np.int64]

BOX_EDGES = 4  # of an object without an outline, which is trained as its box


@dataclass(frozen=True, slots=True)
class GroundTruthSize:
    """Counts of ground truth; those of bitmaps are upper limits."""

    objects: int = 0  # per image
    crowds: int = 0  # per image
    edges: int = 0  # of all outlines, per image
    parts: int = 1  # per object

    def union(self, other: GroundTruthSize) -> GroundTruthSize:
        """The larger of each count."""
        return GroundTruthSize(
            objects=max(self.objects, other.objects),
            crowds=max(self.crowds, other.crowds),
            edges=max(self.edges, other.edges),
            parts=max(self.parts, other.parts),
        )


def largest_ground_truth(stores: Sequence[AnnotationStore], *, masks: bool) -> GroundTruthSize:
    """The largest count of each kind in any image of `stores`; without `masks`, edges and parts are not counted."""
    largest = GroundTruthSize()
    for store in stores:
        largest = largest.union(_largest_of(store, masks=masks))
    return largest


def _largest_of(store: AnnotationStore, *, masks: bool, rows_per_block: int = 1 << 16) -> GroundTruthSize:
    objects, crowds, edges = (np.zeros(len(store), np.int64) for _ in range(3))
    parts = 1
    num_rows = int(store.num_instances.sum())
    polygon_edges, polygon_parts = _polygon_totals(store)
    for start in range(0, num_rows, rows_per_block):
        usable = clean_instances(store.annotations(start, min(start + rows_per_block, num_rows)))
        crowds += np.bincount(usable.crowds.owner, minlength=len(store))
        block = usable.objects
        objects += np.bincount(block.owner, minlength=len(store))
        if masks:
            first = store.columns["ann_first_part"][block.rows]
            stop = first + store.columns["ann_parts"][block.rows]
            is_polygon = block.kind == KIND_POLYGONS
            of_row = np.where(is_polygon, polygon_edges[stop * is_polygon] - polygon_edges[first * is_polygon], 0)
            of_row[of_row == 0] = BOX_EDGES
            for number in np.flatnonzero(block.kind == KIND_RLE).tolist():
                of_row[number] = _bitmap_edges(block, number)
            edges += np.bincount(block.owner, weights=of_row, minlength=len(store)).astype(np.int64)
            in_row = np.where(is_polygon, polygon_parts[stop * is_polygon] - polygon_parts[first * is_polygon], 1)
            parts = max(parts, int(in_row.max(initial=1)))
    return GroundTruthSize(
        int(objects.max(initial=0)), int(crowds.max(initial=0)), int(edges.max(initial=0)), int(parts)
    )


def _polygon_totals(store: AnnotationStore) -> tuple[Ints, Ints]:
    """Edges and parts of all polygons before each part -> two [P + 1]; the parts that `polygons` skips have none."""
    numbers = np.diff(store.columns["part_start"])
    is_used = (numbers >= MIN_POLYGON_NUMBERS) & (numbers % 2 == 0)
    edges = np.concatenate([[0], np.cumsum(np.where(is_used, numbers // 2, 0))])
    return edges.astype(np.int64), np.concatenate([[0], np.cumsum(is_used)]).astype(np.int64)


def _bitmap_edges(instances: InstanceArrays, number: int) -> int:
    """At most so many horizontal borders has the run-length mask of an object: two per column that a run covers."""
    rle = instances.rle(number)
    assert rle is not None
    try:
        runs = runs_from_text(rle["counts"])
    except RleError:
        return 0  # reported when the image is used
    height = max(1, int(rle["size"][0]))
    ends = np.cumsum(runs)
    start, stop = ends[:-1:2], ends[1::2]  # of the foreground runs
    covered = np.maximum((stop - 1) // height - start[: len(stop)] // height + 1, 0)
    return 2 * int(covered[stop > start[: len(stop)]].sum())
