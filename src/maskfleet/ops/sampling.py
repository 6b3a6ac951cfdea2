"""Random samples determined by a seed and a key: reproducible, whatever the padding or the rest of the batch.

Shapes: B images, N anchors, P regions of interest (padded), K sampled regions.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_GOLDEN = 0x9E3779B97F4A7C15
_MIX = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)  # splitmix64 (Steele, Lea, Flood 2014)
_WORD = 1 << 64
_LAST = torch.iinfo(torch.int64).max


@dataclass(frozen=True, slots=True)
class Sampled:
    """The regions that train the box head: foreground, then background, then padding."""

    index: Tensor  # [B, K] int64, into the P regions; 0 for padding
    foreground: Tensor  # [B, K] bool
    valid: Tensor  # [B, K] bool, False for padding
    matched: Tensor  # [B, K] int64, ground truth that fits best; 0 for padding


def hash_uniform(seed: Tensor, keys: Tensor, *, stream: int) -> Tensor:
    """Noise in [0, 1) -> [B, N] float32, a pure function of the image's seed [B], the key ([N] or [B, N]) and `stream`.

    Integer arithmetic modulo 2**64 and one exact conversion: the same bits on every device, compiled or not.
    """
    state = _mixed(seed ^ _signed(_mixed_int(stream + 1)))[:, None]  # [B, 1]
    keys = keys if keys.dim() == 2 else keys[None, :]
    word = _mixed(_mixed((keys * _signed(_GOLDEN)) ^ state) + state)  # [B, N]
    return _shifted_right(word, 40).to(torch.float32) * 2.0**-24


def subsample_labels(labels: Tensor, noise: Tensor, *, num_samples: int, positive_fraction: float) -> Tensor:
    """RPN labels [B, N] int8 with all but `num_samples` per image set to -1: those with the least `noise` [B, N] stay.

    At most int(num_samples * positive_fraction) positives; negatives fill the rest.
    """
    num_anchors = labels.shape[-1]
    max_positives = min(int(num_samples * positive_fraction), num_anchors)
    order = _unique_order(noise)
    positive, negative = labels == 1, labels == 0
    # Both in one call: a GPU takes many passes over rows this long, and as long for one row as for two.
    eligible = torch.where(torch.cat([positive, negative]), order.repeat(2, 1), _LAST)
    smallest = eligible.topk(min(num_samples, num_anchors), largest=False).values
    smallest = torch.nn.functional.pad(smallest, (1, 0), value=-1)  # so that entry k bounds k of them
    of_positive, smallest = smallest.chunk(2)
    kept_positive = positive & (order <= of_positive[:, max_positives, None])
    free = num_samples - kept_positive.sum(dim=-1, keepdim=True)  # [B, 1]
    kept_negative = negative & (order <= smallest.gather(1, free.clamp(max=smallest.shape[-1] - 1)))
    return torch.where(kept_positive | kept_negative, labels, -1)


def sample_rois(
    best_iou: Tensor,
    matched: Tensor,
    valid: Tensor,
    noise: Tensor,
    *,
    num_samples: int,
    positive_fraction: float,
    foreground_iou: float,
    fill_with_foreground: bool = False,
) -> Sampled:
    """Random foreground and background among P regions, all inputs [B, P] -> K = min(num_samples, P) slots.

    Foreground overlaps its ground truth by `foreground_iou` or more and gets int(num_samples * positive_fraction)
    slots at most; background is every other valid region. `fill_with_foreground` gives the slots that background
    leaves free to further foreground.
    """
    num_slots = min(num_samples, best_iou.shape[-1])
    foreground = valid & (best_iou >= foreground_iou)
    background = valid & ~foreground
    total_foreground = foreground.sum(dim=-1, keepdim=True)  # [B, 1]
    total_background = background.sum(dim=-1, keepdim=True)
    num_foreground = total_foreground.clamp(max=int(num_samples * positive_fraction))
    num_background = torch.minimum(total_background, num_samples - num_foreground)
    if fill_with_foreground:
        num_foreground = torch.minimum(total_foreground, num_samples - num_background)

    kind = torch.where(foreground, 0, torch.where(background, 1, 2))
    ranked = (_unique_order(noise) + (kind << 61)).argsort(dim=-1)  # [B, P] foreground, background, padding
    slot = torch.arange(num_slots, device=best_iou.device)[None, :]
    is_foreground = slot < num_foreground
    rank = torch.where(is_foreground, slot, slot - num_foreground + total_foreground)
    is_taken = slot < num_foreground + num_background
    index = torch.where(is_taken, ranked.gather(1, rank.clamp(max=best_iou.shape[-1] - 1)), 0)
    return Sampled(
        index=index,
        foreground=is_foreground,
        valid=is_taken,
        matched=torch.where(is_taken, matched.gather(1, index), 0),
    )


def _unique_order(noise: Tensor) -> Tensor:
    """Integers [B, N] below 2**61 in the order of `noise` >= 0, ties by position: sorting them is deterministic."""
    # The bits of non-negative floats sort as the floats do; they need 31 bits, the position gets the 30 below.
    bits = noise.to(torch.float32).contiguous().view(torch.int32).to(torch.int64)
    return (bits << 30) + torch.arange(noise.shape[-1], device=noise.device)


def _mixed(word: Tensor) -> Tensor:
    """The splitmix64 finaliser of int64 words, taken as unsigned."""
    word = (word ^ _shifted_right(word, 30)) * _signed(_MIX[0])
    word = (word ^ _shifted_right(word, 27)) * _signed(_MIX[1])
    return word ^ _shifted_right(word, 31)


def _mixed_int(word: int) -> int:
    """The splitmix64 step of a plain integer."""
    word = word * _GOLDEN % _WORD
    word = (word ^ word >> 30) * _MIX[0] % _WORD
    word = (word ^ word >> 27) * _MIX[1] % _WORD
    return word ^ word >> 31


def _shifted_right(word: Tensor, bits: int) -> Tensor:
    """`word` shifted right as if it were unsigned; torch's own shift copies the sign bit."""
    return (word >> bits) & ((1 << (64 - bits)) - 1)


def _signed(word: int) -> int:
    """The int64 with the bits of an unsigned 64-bit integer."""
    return word - _WORD if word >= _WORD >> 1 else word
