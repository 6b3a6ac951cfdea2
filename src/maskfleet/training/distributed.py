"""The rank of this process, small messages between ranks, and errors that name lost ranks."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from maskfleet.errors import TrainingError

# Collectives on the control group fail at once when a peer closes its connection; the timeout is for hosts that hang.
CONTROL_TIMEOUT = timedelta(minutes=30)
_LOST_CONNECTION = re.compile(r"gloo|NCCL|connection|peer|socket", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Worker:
    """The rank of this process among all ranks of the run."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1

    @property
    def is_chief(self) -> bool:
        return self.rank == 0


def worker_from_env(env: Mapping[str, str]) -> Worker:
    """The rank that torchrun or mpirun gave this process; a single rank if neither started it."""
    for names in (
        ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
        ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ):
        if names[0] in env and names[1] in env:
            rank, world_size = int(env[names[0]]), int(env[names[1]])
            return Worker(rank, world_size, int(env.get(names[2], rank)), int(env.get(names[3], world_size)))
    return Worker()


def rendezvous_address(env: Mapping[str, str], worker: Worker) -> tuple[str, int]:
    """Address and port of rank 0 from the launcher or, on one machine under mpirun, derived from the job id."""
    if "MASTER_ADDR" in env and "MASTER_PORT" in env:
        return env["MASTER_ADDR"], int(env["MASTER_PORT"])
    if worker.local_world_size < worker.world_size:
        raise TrainingError(
            f"{worker.world_size} ranks on several machines have no rendezvous address",
            remedy="pass the address of the first host: mpirun -x MASTER_ADDR=… -x MASTER_PORT=29500 …",
        )
    job = env.get("PMIX_NAMESPACE") or env.get("OMPI_MCA_ess_base_jobid") or str(os.getppid())
    # Below 32768, where Linux's ephemeral ports begin: any outgoing connection may occupy one of those.
    port = 20000 + int.from_bytes(hashlib.sha256(job.encode()).digest()[:2], "big") % 12000
    return env.get("MASTER_ADDR", "127.0.0.1"), int(env.get("MASTER_PORT", port))


@contextlib.contextmanager
def joined(worker: Worker, device: torch.device, env: Mapping[str, str]) -> Iterator[Ranks]:
    """The ranks, connected while the block runs."""
    if worker.world_size == 1:
        yield Ranks(worker, None)
        return
    address, port = rendezvous_address(env, worker)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        init_method=f"tcp://{address}:{port}",
        rank=worker.rank,
        world_size=worker.world_size,
        device_id=device if device.type == "cuda" else None,
    )
    try:
        yield Ranks(worker, dist.new_group(backend="gloo", timeout=CONTROL_TIMEOUT))
    finally:
        # Does not wait for the other ranks: after the loss of one, the launcher terminates the rest.
        if dist.is_initialized():
            dist.destroy_process_group()


class Ranks:
    """All ranks, for small messages between them; with a single rank no method blocks."""

    def __init__(self, worker: Worker, control: dist.ProcessGroup | None) -> None:
        self.worker = worker
        self._control = control
        self._pending: tuple[dist.Work, torch.Tensor] | None = None

    def gather(self, value: Any) -> list[Any] | None:
        """On rank 0 the `value` of every rank, by rank; None on the others."""
        if self._control is None:
            return [value]
        gathered: list[Any] | None = [None] * self.worker.world_size if self.worker.is_chief else None
        with self.reporting_lost_ranks("gathering results"):
            dist.gather_object(value, gathered, dst=0, group=self._control)
        return gathered

    def broadcast(self, value: Any) -> Any:
        """The `value` of rank 0, on every rank."""
        if self._control is None:
            return value
        box = [value]
        with self.reporting_lost_ranks("waiting for rank 0"):
            dist.broadcast_object_list(box, src=0, group=self._control)
        return box[0]

    def barrier(self) -> None:
        """Block until all ranks have called this."""
        if self._control is not None:
            with self.reporting_lost_ranks("waiting for each other"):
                dist.barrier(group=self._control)

    def agree(self, flags: Sequence[int]) -> list[int]:
        """The maximum of each flag over all ranks, one call late: every rank gets the same answer at the same step.

        The exchange overlaps with the step, so it costs no time, and a lost rank is noticed here even while the GPUs
        still wait for it.
        """
        if self._control is None:
            return list(flags)
        with self.reporting_lost_ranks("in a step"):
            answer = [0] * len(flags)
            if self._pending is not None:
                work, tensor = self._pending
                work.wait()
                answer = tensor.tolist()
            tensor = torch.tensor(flags, dtype=torch.int64)
            work = dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self._control, async_op=True)
            assert work is not None
            self._pending = (work, tensor)
        return answer

    def mean(self, values: torch.Tensor) -> torch.Tensor:
        """Mean of `values`, on the host, over all ranks."""
        if self._control is None:
            return values
        with self.reporting_lost_ranks("averaging metrics"):
            dist.all_reduce(values, group=self._control)
        return values / self.worker.world_size

    @contextlib.contextmanager
    def reporting_lost_ranks(self, doing: str) -> Iterator[None]:
        """Turn broken connections inside the block into an error that names the lost ranks."""
        try:
            yield
        except RuntimeError as error:  # gloo raises no specific type for a lost peer
            if not isinstance(error, dist.DistError) and not _LOST_CONNECTION.search(str(error)):
                raise
            cause = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise TrainingError(
                f"rank {self.worker.rank} lost another rank while {doing}: {cause}{self._missing()}",
                remedy="see the end of that rank's log; start the same command again to continue from the checkpoint",
            ) from error

    def _missing(self) -> str:
        """Ranks that do not report through the key-value store, which works despite broken connections."""
        try:
            store = dist.distributed_c10d._get_default_store()
            store.set(f"maskfleet/alive/{self.worker.rank}", "1")
            silent = []
            for rank in range(self.worker.world_size):
                try:
                    store.wait([f"maskfleet/alive/{rank}"], timedelta(seconds=5))
                except (RuntimeError, dist.DistError):
                    silent.append(rank)
        except (RuntimeError, ValueError):
            return "; rank 0, which hosts the store, does not answer"
        if not silent:
            return ""
        return f"; no answer from rank {', '.join(map(str, silent))}"
