"""How fast the ranks of a job exchange data: an all-reduce of 8 bytes to 1 GiB, timed as nccl-tests times it.

Every rank runs `python -m maskfleet.bench.fabric`, started as a training is: by mpirun, or with RANK and WORLD_SIZE.
Rank 0 prints one line per size, which launch/fabric.py reads. Bus bandwidth is the data that each rank sends per second
when the ring is full, so it does not depend on the number of ranks.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from maskfleet.errors import MaskfleetError, TrainingError
from maskfleet.inference.device import local_device
from maskfleet.log import FABRIC_MARK
from maskfleet.training.distributed import Ranks, joined, worker_from_env
from maskfleet.training.ranks.transport import own_log, parsed, recorded_nccl_log, report_transport

SIZES = tuple(8 << (3 * power) for power in range(10))  # 8 bytes to 1 GiB
WARMUP = 5


@dataclass(frozen=True, slots=True)
class Row:
    """The all-reduce of one size."""

    bytes: int
    time_us: float  # of the slowest rank
    bus_gb_per_s: float
    ranks: int
    hosts: int


def measure(ranks: Ranks, device: torch.device, sizes: Sequence[int] = SIZES) -> Iterator[Row]:
    """The time of an all-reduce of each size, on every rank; raises if a sum is wrong."""
    count = ranks.worker.world_size
    for size in sizes:
        values = torch.full((size // 4,), float(ranks.worker.rank + 1), device=device)
        with ranks.reporting_lost_ranks(f"exchanging {size} bytes"):
            dist.all_reduce(values)
            _expect_sum(values, count * (count + 1) / 2)
            values.zero_()  # what is added next stays zero and finite, however often
            seconds = _mean_time(values, repeats=20 if size <= 2**27 else 5)
            slowest = torch.tensor([seconds], device=device)
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
        seconds = float(slowest)
        yield Row(size, seconds * 1e6, size / seconds * 2 * (count - 1) / count / 1e9, count, len(set(ranks.hosts)))


def _expect_sum(values: torch.Tensor, expected: float) -> None:
    if not bool((values == expected).all()):
        raise TrainingError(
            f"an all-reduce of {values.numel()} values gave {float(values.min())} to {float(values.max())}, "
            f"not {expected}",
            remedy="a GPU or a network card is broken: run it on fewer nodes to find which one, and replace that node",
        )


def _mean_time(values: torch.Tensor, *, repeats: int) -> float:
    for _ in range(WARMUP):
        dist.all_reduce(values)
    _finish(values)
    started = time.perf_counter()
    for _ in range(repeats):
        dist.all_reduce(values)
    _finish(values)
    return (time.perf_counter() - started) / repeats


def _finish(values: torch.Tensor) -> None:
    if values.is_cuda:
        torch.cuda.synchronize(values.device)


def run_rank(env: Mapping[str, str], folder: Path, sizes: Sequence[int] = SIZES) -> None:
    """Measure as one rank; rank 0 prints the rows. Ranks of one host meet in `folder`."""
    worker = worker_from_env(env)
    if worker.world_size == 1:
        raise TrainingError("one rank exchanges nothing", remedy="start at least two, on one host or several")
    device = local_device(worker.local_rank)
    with recorded_nccl_log(os.environ, device), joined(worker, device, env, folder) as ranks:
        report_transport(ranks, device, os.environ)
        if worker.is_chief:
            transport = str(parsed(own_log(os.environ) or "")) if device.type == "cuda" else "gloo over TCP"
            print(FABRIC_MARK + json.dumps({"transport": transport}), flush=True)
        for row in measure(ranks, device, sizes):
            if worker.is_chief:
                print(FABRIC_MARK + json.dumps(dataclasses.asdict(row)), flush=True)


def main() -> int:
    """Run as one rank."""
    try:
        # Only ranks that share a host use the folder, and only if they were given no port.
        run_rank(os.environ, Path(tempfile.gettempdir(), f"maskfleet-fabric-{os.getuid()}"))
    except MaskfleetError as error:
        print(f"error: {error.what}\n  → {error.remedy}", file=sys.stderr, flush=True)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
