"""Selection by score: stable top-k, greedy non-maximum suppression (NMS), and the final detections.

Shapes: M independent rows of N boxes (padded), B images, R regions, C categories, D detections, k picked entries.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from maskfleet.ops.boxes import pairwise_iou
from maskfleet.ops.layers.exporting import is_exporting
from maskfleet.ops.triton import kernels_for

_BLOCK = 64  # boxes processed together; the width of a machine word
_FIRST = torch.iinfo(torch.int64).min
MAX_CANDIDATES = 4000  # of an image, by score; NMS considers no others
MAX_SCAN, SCAN_BLOCK = 4096, 256  # longer rows are summed up block by block

Columns = Sequence[NDArray[np.float32]]  # x1, y1, x2, y2, area of the boxes of one row


def topk_sorted(scores: Tensor, valid: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """The `k` (at most N) best valid of `scores` [M, N], descending -> scores, index and valid, each [M, k].

    Of equal scores the lower index comes first. Slots without a valid score have score 0 and index 0.
    """
    scores = scores.to(torch.float32)
    top, index = _order(scores, valid).topk(min(k, scores.shape[-1]), dim=-1)
    is_valid = top != _FIRST
    index = torch.where(is_valid, index, 0)
    return torch.where(is_valid, scores.gather(-1, index), 0.0), index, is_valid


def topk_sorted_each(scores: Sequence[Tensor], valid: Sequence[Tensor], k: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    """`topk_sorted` of each of several `scores` [M, N], which share M and have each an N; always `k` slots.

    Sorted together: sorting a few thousand numbers takes a GPU as long as sorting them for many rows.
    """
    scores = [part.to(torch.float32) for part in scores]
    orders = [_order(part, of_part) for part, of_part in zip(scores, valid, strict=True)]
    sort = _best_of_each if is_exporting() else _sorted_best
    results = []
    for part, top in zip(scores, sort(orders, k).chunk(len(orders)), strict=True):
        is_valid = top != _FIRST
        index = torch.where(is_valid, part.shape[-1] - 1 - (top & 0xFFFFFFFF), 0)
        results.append((torch.where(is_valid, part.gather(-1, index), 0.0), index, is_valid))
    return results


def _order(scores: Tensor, valid: Tensor) -> Tensor:
    """Integers [M, N] in the order of `scores` [M, N] float32, of equal scores the lower index highest.

    Score and position in one integer: no two are equal, so every device picks and orders the same ones.
    """
    bits = torch.where(scores == 0, 0.0, scores).view(torch.int32).to(torch.int64)  # -0.0 equals 0.0
    ascending = torch.where(bits >= 0, bits, bits ^ 0x7FFFFFFF)  # negative floats have descending bits
    backward = torch.arange(scores.shape[-1] - 1, -1, -1, device=scores.device)
    return torch.where(valid, (ascending << 32) + backward, _FIRST)


def _best_of_each(orders: Sequence[Tensor], k: int) -> Tensor:
    """The `k` largest of each row of each of `orders` [M, N], descending -> [len(orders) M, k]."""
    tops = [order.topk(min(k, order.shape[-1]), dim=-1, sorted=False).values for order in orders]
    tops = [F.pad(top, (0, k - top.shape[-1]), value=_FIRST) for top in tops]
    return torch.cat(tops).sort(dim=-1, descending=True).values


# An operator of its own: torch's compiler makes a kernel of a sort this long that Triton 3.6 cannot compile.
@torch.library.custom_op("maskfleet::sorted_best", mutates_args=(), schema="(Tensor[] orders, int k) -> Tensor")
def _sorted_best(orders: Sequence[Tensor], k: int) -> Tensor:
    return _best_of_each(orders, k)


@_sorted_best.register_fake
def _(orders: Sequence[Tensor], k: int) -> Tensor:
    return orders[0].new_empty(sum(len(order) for order in orders), k)


def nms_keep(boxes: Tensor, valid: Tensor, *, threshold: float) -> Tensor:
    """Which boxes [M, N, 4], each row by descending score, greedy NMS keeps -> [M, N] bool.

    A kept box removes the later ones that overlap it by an IoU above `threshold`. A box without area removes nothing
    and is not removed. What is not `valid` [M, N] is not kept.
    """
    if is_exporting():
        return _nms_keep_in_program(boxes.detach(), valid, threshold)
    keep: Tensor = _nms_keep(boxes.detach(), valid, threshold)
    return keep


def first_kept(keep: Tensor, count: int) -> Tensor:
    """`keep` [M, N] with no more than its first `count` in each row."""
    num_slots = keep.shape[1]
    if num_slots <= MAX_SCAN:
        return keep & (keep.cumsum(dim=1) <= count)
    # Torch's compiler cannot fuse a running sum over rows so long that it splits them, so the splitting is done here.
    blocks = F.pad(keep, (0, -num_slots % SCAN_BLOCK)).reshape(len(keep), -1, SCAN_BLOCK)  # [M, blocks, SCAN_BLOCK]
    inside = blocks.cumsum(dim=2)
    ends = inside[:, :, -1].cumsum(dim=1)
    ranks = (inside + (ends - inside[:, :, -1])[:, :, None]).flatten(1)[:, :num_slots]
    return keep & (ranks <= count)


def detections_nms(
    boxes: Tensor,
    scores: Tensor,
    valid: Tensor,
    *,
    score_threshold: float,
    iou_threshold: float,
    max_detections: int,
    max_candidates: int = MAX_CANDIDATES,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Boxes [B, D, 4], scores, labels 1..C, valid and index into R * C, each [B, D]: the final detections, best first.

    `boxes` [B, R, C, 4], `scores` [B, R, C], `valid` [B, R]; D = min(max_detections, candidates); padding is 0.
    Candidates score above `score_threshold`; each category is suppressed by itself. Only the `max_candidates` best of
    an image are considered. A box is never removed by one that scores less, so the cap changes the result only if more
    than that many pass the threshold and fewer than `max_detections` of the best survive.
    """
    num_images, num_regions, num_categories = scores.shape
    num_slots = min(max_detections, num_regions * num_categories)
    # Category-major, because ties between scores go to the lower category first.
    by_category = torch.where(valid[:, :, None], scores, 0.0).transpose(1, 2).reshape(num_images, -1)  # [B, C * R]
    eligible = (scores > score_threshold) & valid[:, :, None]
    eligible = eligible.transpose(1, 2).reshape(num_images, -1)
    top_scores, position, is_candidate = topk_sorted(by_category, eligible, max_candidates)  # [B, k]
    category, region = position // num_regions, position % num_regions
    index = region * num_categories + category
    picked = _rows(boxes.reshape(num_images, -1, 4), index)  # [B, k, 4]

    keep = nms_keep(_apart_by_category(picked, category, boxes, valid), is_candidate, threshold=iou_threshold)
    final_scores, slot, final_valid = topk_sorted(top_scores, keep, num_slots)
    final_boxes = torch.where(final_valid[:, :, None], _rows(picked, slot), 0.0)
    labels = torch.where(final_valid, category.gather(1, slot) + 1, 0)
    return final_boxes, final_scores, labels, final_valid, torch.where(final_valid, index.gather(1, slot), 0)


def _apart_by_category(picked: Tensor, category: Tensor, boxes: Tensor, valid: Tensor) -> Tensor:
    """`picked` [B, k, 4] moved so that boxes of different categories never touch -> [B, k, 4].

    The step is TensorPack's: one more than the largest coordinate of any category of any valid region.
    """
    largest = torch.where(valid[:, :, None, None], boxes, 0.0).flatten(1).amax(dim=1)  # [B]
    return picked + (category.to(torch.float32) * (largest + 1)[:, None])[:, :, None]


def _rows(table: Tensor, index: Tensor) -> Tensor:
    """Rows `index` [B, k] of `table` [B, N, 4] -> [B, k, 4]."""
    return table.gather(1, index[:, :, None].expand(-1, -1, table.shape[-1]))


@torch.library.custom_op(
    "maskfleet::nms_keep",
    mutates_args=(),
    device_types="cpu",
    schema="(Tensor boxes, Tensor valid, float threshold) -> Tensor",
)
def _nms_keep(boxes: Tensor, valid: Tensor, threshold: float) -> Tensor:
    boxes_array = boxes.to(torch.float32).numpy()
    valid_array = valid.numpy()
    keep = np.zeros(valid_array.shape, dtype=np.bool_)
    for row in range(len(keep)):
        chosen = np.flatnonzero(valid_array[row])
        keep[row, chosen] = _keep_in_row(boxes_array[row, chosen], threshold)
    return torch.from_numpy(keep)


@_nms_keep.register_fake
def _(boxes: Tensor, valid: Tensor, threshold: float) -> Tensor:
    return torch.empty_like(valid, dtype=torch.bool)


@_nms_keep.register_kernel("cuda")
def _nms_keep_on_device(boxes: Tensor, valid: Tensor, threshold: float) -> Tensor:
    """Greedy NMS without host synchronisation: block by block, each box suppresses the later ones of its block, then
    the block those after it.
    """
    if kernels_for(boxes):
        from maskfleet.ops.triton import nms as kernels

        return kernels.nms_keep(boxes, valid, threshold)
    boxes = boxes.to(torch.float32)
    alive = valid.clone()
    num_boxes = valid.shape[1]
    for start in range(0, num_boxes, _BLOCK):
        stop = min(start + _BLOCK, num_boxes)
        suppresses = pairwise_iou(boxes[:, start:stop], boxes[:, start:]) > threshold  # [M, block, rest]
        inner = suppresses[:, :, : stop - start].triu(diagonal=1)
        block = alive[:, start:stop]
        for box in range(stop - start):
            block = block & ~(inner[:, box] & block[:, box : box + 1])
        alive[:, start:stop] = block
        alive[:, stop:] &= ~(suppresses[:, :, stop - start :] & block[:, :, None]).any(dim=1)
    return alive


def _nms_keep_in_program(boxes: Tensor, valid: Tensor, threshold: float) -> Tensor:
    """The same with torch's own operators alone, so that an exported program runs without maskfleet.

    Repeats "a box stays unless one that stays suppresses it" until nothing changes. Round k decides at least the first
    k boxes of a row, and a result that does not change is that of greedy NMS.
    """
    boxes = boxes.to(torch.float32)
    suppresses = (pairwise_iou(boxes, boxes) > threshold).triu(diagonal=1)  # [M, N, N], the first suppresses the second

    def is_unfinished(keep: Tensor, changed: Tensor) -> Tensor:
        return changed.clone()  # an input must not be returned as it is

    def next_round(keep: Tensor, changed: Tensor) -> tuple[Tensor, Tensor]:
        after = valid & ~(suppresses & keep[:, :, None]).any(dim=1)
        return after, (after != keep).any()

    started = torch.ones((), dtype=torch.bool, device=boxes.device)
    keep: Tensor = torch.while_loop(is_unfinished, next_round, (valid.clone(), started))[0]  # type: ignore[no-untyped-call]
    return keep


def _keep_in_row(boxes: NDArray[np.float32], threshold: float) -> NDArray[np.bool_]:
    """Which of boxes [N, 4], by descending score, greedy NMS keeps -> [N]."""
    size = np.maximum(boxes[:, 2:] - boxes[:, :2], 0)
    columns = (*np.ascontiguousarray(boxes.T), size[:, 0] * size[:, 1])
    remaining = np.arange(len(boxes))
    keep = np.zeros(len(boxes), dtype=np.bool_)
    while len(remaining):
        block, rest = [c[:_BLOCK] for c in columns], [c[_BLOCK:] for c in columns]
        kept = _kept_in_order(_suppresses(block, block, threshold))
        keep[remaining[:_BLOCK][kept]] = True
        suppressed = _suppresses([c[kept] for c in block], rest, threshold).any(axis=0)
        columns = tuple(c[~suppressed] for c in rest)
        remaining = remaining[_BLOCK:][~suppressed]
    return keep


def _suppresses(a: Columns, b: Columns, threshold: float) -> NDArray[np.bool_]:
    """Whether the IoU of each box in `a` [n] with each in `b` [m] is above `threshold` -> [n, m]."""
    x1, y1, x2, y2, area_a = (column[:, None] for column in a)
    overlap = np.minimum(x2, b[2]) - np.maximum(x1, b[0])
    np.maximum(overlap, 0, out=overlap)
    height = np.minimum(y2, b[3]) - np.maximum(y1, b[1])
    np.maximum(height, 0, out=height)
    overlap *= height
    union = area_a + b[4]
    union -= overlap
    np.maximum(union, np.float32(1e-9), out=union)
    overlap /= union
    return overlap > np.float32(threshold)


def _kept_in_order(suppresses: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Boxes of one block that NMS keeps, given which box would suppress which [n, n] -> [n]."""
    size = len(suppresses)
    words = [int.from_bytes(row.tobytes(), "little") for row in np.packbits(suppresses, axis=1, bitorder="little")]
    alive = (1 << size) - 1
    for box in range(size):
        if alive >> box & 1:
            alive &= ~(words[box] >> (box + 1) << (box + 1))
    return np.array([alive >> box & 1 for box in range(size)], dtype=np.bool_)
