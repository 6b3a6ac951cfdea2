"""The mean of a tensor over all ranks, in the middle of the network: what SyncBN's statistics need.

An operator of its own, around which the compiler works: the collective is launched when the operator runs, on the
stream of that moment, so a CUDA graph records it with everything else.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_order: list[int] | None = None  # inside `without_communication`; not thread-local, for autograd has its own threads


def mean_over_ranks(value: Tensor, layer: int) -> Tensor:
    """Mean of `value` over all ranks, and of its gradient: every rank's loss depends on every rank's value.

    `layer`, from 0, is the number of the caller, the same on all ranks.
    """
    mean: Tensor = _mean_over_ranks(value, layer + 1)
    return mean


@contextmanager
def without_communication() -> Iterator[list[int]]:
    """Inside the block no rank waits for another, and means are of this rank only.

    Yields a list which gets the calls in their order: 1 + the layer's number, negative for a gradient. The compiler
    chooses that order; ranks with different orders would wait for each other forever, or add up different layers.
    """
    global _order
    before, _order = _order, []
    try:
        yield _order
    finally:
        _order = before


@torch.library.custom_op("maskfleet::mean_over_ranks", mutates_args=())
def _mean_over_ranks(value: Tensor, call: int) -> Tensor:
    total = value.clone(memory_format=torch.contiguous_format)
    if _order is not None:
        _order.append(call)
        return total
    dist.all_reduce(total, op=dist.ReduceOp.SUM)
    return total / dist.get_world_size()


@_mean_over_ranks.register_fake
def _(value: Tensor, call: int) -> Tensor:
    return torch.empty_like(value, memory_format=torch.contiguous_format)


def _save_call(ctx: Any, inputs: tuple[Tensor, int], output: Tensor) -> None:
    _, ctx.call = inputs


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
    return _mean_over_ranks(gradient, -ctx.call), None


_mean_over_ranks.register_autograd(_backward, setup_context=_save_call)
