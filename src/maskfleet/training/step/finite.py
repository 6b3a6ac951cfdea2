"""Losses and gradients that are not finite: noticed on the device, agreed between the ranks, reported with images."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor

from maskfleet.errors import TrainingError

Scalars = dict[str, Tensor]

MAX_NAMED_IMAGES = 64  # in an error; 1,000 ranks have thousands


class FiniteCheck:
    """Records the first batch whose loss is not finite, and blocks updates from then on; reads nothing back itself."""

    def __init__(self, device: torch.device) -> None:
        self.blocked = torch.zeros(1, device=device)  # 1.0 or 0.0, as the fused kernel of SGD expects it
        self._names: tuple[str, ...] = ()
        self._terms = torch.zeros(0, device=device)  # [T] of the recorded loss: the newest, or the one that blocked
        self._image_ids = torch.zeros(0, dtype=torch.int64, device=device)  # [B] of its batch

    def record(self, losses: Scalars, image_ids: Tensor) -> None:
        """Record the `losses` of a batch and block updates if their sum is not finite; the first such one stays."""
        terms = torch.stack([loss.detach() for loss in losses.values()])
        if self._terms.shape != terms.shape or self._image_ids.shape != image_ids.shape:
            self._names = tuple(losses)
            self._terms, self._image_ids = torch.zeros_like(terms), torch.zeros_like(image_ids)
        is_free = self.blocked[0] == 0
        self._terms.copy_(torch.where(is_free, terms, self._terms))
        self._image_ids.copy_(torch.where(is_free, image_ids, self._image_ids))
        self.block_unless_finite(self._terms.sum())

    def block_unless_finite(self, value: Tensor) -> None:
        """Block updates if `value` [] is not finite."""
        self.blocked.copy_(torch.where(torch.isfinite(value), self.blocked, 1.0))

    def is_blocked(self) -> bool:
        """Whether updates are blocked; waits for the device."""
        return bool(self.blocked.item() != 0)

    def state(self) -> tuple[Tensor, ...]:
        """A copy of what is recorded."""
        return self.blocked.clone(), self._terms.clone(), self._image_ids.clone()

    def restore(self, state: tuple[Tensor, ...]) -> None:
        """Restore `state`, as it was before warm-up passes."""
        for tensor, saved in zip((self.blocked, self._terms, self._image_ids), state, strict=True):
            tensor.copy_(saved if saved.shape == tensor.shape else torch.zeros_like(tensor))

    def error(self, *, world_size: int) -> TrainingError:
        """Why updates are blocked, with the images of the ranks that had the bad loss; all ranks must call this."""
        terms = _of_all_ranks(self._terms.double(), world_size).tolist()
        images = _of_all_ranks(self._image_ids, world_size).tolist()
        bad_ranks = [rank for rank in range(world_size) if not math.isfinite(sum(terms[rank]))]
        if not bad_ranks:  # a gradient may overflow where the loss does not
            what = "the gradient is not a finite number"
            where = f"images {_listed([image for of_rank in images for image in of_rank])}"
            return _nonfinite(what, where)
        rank = bad_ranks[0]
        numbers = zip(self._names, terms[rank], strict=True)
        bad = ", ".join(f"{name} = {number:g}" for name, number in numbers if not math.isfinite(number))
        places = [f"rank {rank}, " if world_size > 1 else "" for rank in bad_ranks]
        where = "; ".join(
            f"{place}images {_listed(images[rank])}" for place, rank in zip(places, bad_ranks, strict=True)
        )
        return _nonfinite(f"the loss is not a finite number ({bad or 'the sum overflows'})", where)


def _nonfinite(what: str, where: str) -> TrainingError:
    return TrainingError(
        f"{what} on {where}; the weights are unchanged",
        remedy="check these images with `maskfleet data inspect`; if they are fine, lower train.base_lr, increase "
        "train.warmup_steps, or set train.gradient_clip",
    )


def _of_all_ranks(row: Tensor, world_size: int) -> Tensor:
    """`row` [N] of each rank -> [W, N]."""
    rows = row.new_zeros(world_size, *row.shape)
    if world_size == 1:
        rows[0] = row
        return rows
    rows[dist.get_rank()] = row
    dist.all_reduce(rows)  # the one collective that every backend has for every device
    return rows


def _listed(images: list[int]) -> str:
    named = ", ".join(map(str, images[:MAX_NAMED_IMAGES]))
    return named if len(images) <= MAX_NAMED_IMAGES else f"{named} and {len(images) - MAX_NAMED_IMAGES} more"
