"""The exchange of gradients between ranks: fixed buckets, summed while the backward pass still computes.

A bucket has the gradients of one region of the network. The regions, their order and the layout of a bucket depend on
the model alone, so every process of a run, also one that resumes it, adds the same numbers in the same order.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

ALIGNMENT = 32  # elements: gradients start at multiples of 128 bytes, where vector loads are fastest


@dataclass(frozen=True, slots=True, eq=False)
class Bucket:
    """The gradients of one region of the network, in one flat buffer."""

    parameters: tuple[nn.Parameter, ...]
    buffer: Tensor  # float32
    views: tuple[Tensor, ...]  # of the buffer, one per parameter, in the parameter's shape and memory layout

    def attach(self) -> None:
        """Make backward passes add to the buffer."""
        for parameter, view in zip(self.parameters, self.views, strict=True):
            parameter.grad = view

    def collect(self) -> None:
        """Copy gradients that are not in the buffer into it; a parameter without gradient contributes zeros."""
        targets, sources = [], []
        for parameter, view in zip(self.parameters, self.views, strict=True):
            gradient = parameter.grad
            if gradient is None:
                view.zero_()
            elif gradient.data_ptr() == view.data_ptr():
                continue
            elif _same_layout(gradient, view):
                # One kernel copies all of them if all strides are equal, also those of dimensions of size 1.
                targets.append(_flat(view))
                sources.append(_flat(gradient))
            else:
                view.copy_(gradient)
        if targets:
            torch._foreach_copy_(targets, sources)


def gradient_buckets(regions: Iterable[Sequence[nn.Parameter]]) -> tuple[Bucket, ...]:
    """A bucket for each of `regions`, lists of parameters in the order in which backward completes their gradients.

    Frozen parameters are left out, and regions that have no others. The buffers are zero.
    """
    trained = [[parameter for parameter in region if parameter.requires_grad] for region in regions]
    return tuple(_bucket(parameters) for parameters in trained if parameters)


def _bucket(parameters: Sequence[nn.Parameter]) -> Bucket:
    starts, end = [], 0
    for parameter in parameters:
        starts.append(end)
        end += -(-parameter.numel() // ALIGNMENT) * ALIGNMENT
    # One element more than the gradients need: `Exchange.blocked`.
    buffer = torch.zeros(end + 1, device=parameters[0].device)
    views = [
        buffer.as_strided(parameter.shape, parameter.stride(), start)
        for parameter, start in zip(parameters, starts, strict=True)
    ]
    return Bucket(tuple(parameters), buffer, tuple(views))


def _same_layout(one: Tensor, other: Tensor) -> bool:
    """Whether the elements of two tensors of one shape have the same order in memory; both without gaps."""
    strides = zip(one.shape, one.stride(), other.stride(), strict=True)
    return all(size == 1 or left == right for size, left, right in strides)


def _flat(tensor: Tensor) -> Tensor:
    """The elements of `tensor`, which has no gaps in memory, in the order in which they are there."""
    return tensor.as_strided((tensor.numel(),), (1,))


class Exchange:
    """Replaces each rank's gradients by their mean over all ranks.

    Between `start` and `finish` a bucket is sent as soon as the backward pass has completed its gradients, and always
    in the same order. Without `start` a backward pass exchanges nothing, so gradients can be accumulated first.
    """

    def __init__(self, buckets: Sequence[Bucket], *, world_size: int, dtype: torch.dtype = torch.float32) -> None:
        self.buckets = tuple(buckets)
        self.factor = 1 / world_size
        is_exact = dtype == torch.float32
        self._sent = [b.buffer if is_exact else torch.empty_like(b.buffer, dtype=dtype) for b in self.buckets]
        self._missing: list[int] | None = None  # gradients of each bucket; None outside of start .. finish
        self._works: list[dist.Work] = []  # of the buckets that were sent
        for number, bucket in enumerate(self.buckets):
            for parameter in bucket.parameters:
                ready = partial(self._gradient_ready, number)
                parameter.register_post_accumulate_grad_hook(ready)  # type: ignore[no-untyped-call]

    @property
    def blocked(self) -> Tensor:
        """A flag [1] that travels with the last bucket: after `finish`, above 0 if any rank passed 1 to `start`."""
        return self.buckets[-1].buffer[-1:]

    def start(self, blocked: Tensor) -> None:
        """Send each bucket when its gradients are complete; `blocked` [1] is 1 if this rank must not update, else 0."""
        self.blocked.copy_(blocked)
        self._missing = [len(bucket.parameters) for bucket in self.buckets]
        self._works = []

    def finish(self) -> None:
        """Wait for all buckets; the gradients are then their means, on every rank the same."""
        while len(self._works) < len(self.buckets):  # a parameter that a batch does not use has no gradient
            self._send(len(self._works))
        for bucket, sent, work in zip(self.buckets, self._sent, self._works, strict=True):
            work.wait()
            torch.mul(sent, self.factor, out=bucket.buffer)
            bucket.attach()
        self.cancel()

    def cancel(self) -> None:
        """Send nothing more until the next `start`."""
        self._missing = None
        self._works = []

    def broadcast(self, tensors: Sequence[Tensor]) -> None:
        """Give `tensors` the values that they have on rank 0."""
        for tensor in tensors:
            value = tensor.detach().contiguous()
            dist.broadcast(value, src=0)
            tensor.detach().copy_(value)

    def _gradient_ready(self, number: int, parameter: Tensor) -> None:
        """Called by autograd once `parameter`, which is in bucket `number`, has its gradient."""
        if self._missing is None:
            return
        self._missing[number] -= 1
        while len(self._works) < len(self.buckets) and self._missing[len(self._works)] == 0:
            self._send(len(self._works))

    def _send(self, number: int) -> None:
        bucket, sent = self.buckets[number], self._sent[number]
        bucket.collect()
        if sent is not bucket.buffer:
            sent.copy_(bucket.buffer)
        work = dist.all_reduce(sent, op=dist.ReduceOp.SUM, async_op=True)
        assert work is not None
        self._works.append(work)
