"""What one rank per host does for the others of its host: reading a checkpoint, compiling first."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from maskfleet.errors import TrainingError
from maskfleet.model.weights.checkpoint import CheckpointFolder, Snapshot
from maskfleet.training.distributed import Ranks
from maskfleet.training.ranks.agreement import expect_same


@contextmanager
def first_on_host(ranks: Ranks) -> Iterator[None]:
    """Run the block on the first rank of each host, then on the other ranks there, which find what it left in caches.

    The others continue even if the first one fails: what it could not do, they try themselves.
    """
    of_host = ranks.of_host()
    if not of_host.worker.is_chief:
        of_host.barrier()
    try:
        yield
    finally:
        if of_host.worker.is_chief:
            of_host.barrier()


def newest_snapshot(saved: CheckpointFolder, ranks: Ranks) -> Snapshot | None:
    """The newest intact checkpoint, read and verified by one rank per host.

    Hosts that share no folder may have none or an older one: they get that of rank 0 over the network. A newer one than
    rank 0 has is an error, since that of rank 0 would undo its steps.
    """
    snapshot, failure, of_host = None, None, ranks.of_host()
    if of_host.worker.is_chief:
        try:
            snapshot = saved.newest()
        except TrainingError as error:
            failure = [error.what, error.remedy]
    header = of_host.broadcast({"failure": failure, "snapshot": _header(snapshot)})
    if header["failure"] is not None:
        raise TrainingError(header["failure"][0], remedy=header["failure"][1])
    described, source = header["snapshot"], of_host
    steps: list[int] = ranks.broadcast(ranks.gather(-1 if described is None else described["step"]))
    if max(steps) > steps[0]:
        expect_same(
            ranks,
            {"the newest checkpoint": "none" if described is None else f"step {described['step']}"},
            remedy="use a run directory on a file system that all machines share",
        )
    if min(steps) < steps[0]:
        described, source = ranks.broadcast(described), ranks
    if described is None:
        return None
    tensors = snapshot.tensors if snapshot is not None and source.worker.is_chief else _empty(described["tensors"])
    for name, _, _ in described["tensors"]:
        source.broadcast_tensor(tensors[name].reshape(-1).view(torch.uint8))  # gloo does not know every type
    return Snapshot(described["step"], tensors, described["numbers"])


def _header(snapshot: Snapshot | None) -> dict[str, Any] | None:
    """All of `snapshot` but the values of its tensors, as JSON."""
    if snapshot is None:
        return None
    tensors = [
        (name, list(tensor.shape), str(tensor.dtype).removeprefix("torch."))
        for name, tensor in snapshot.tensors.items()
    ]
    return {"step": snapshot.step, "numbers": snapshot.numbers, "tensors": tensors}


def _empty(described: list[tuple[str, list[int], str]]) -> dict[str, torch.Tensor]:
    return {name: torch.empty(shape, dtype=getattr(torch, dtype)) for name, shape, dtype in described}
