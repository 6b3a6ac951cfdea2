"""The rank of this process, how the ranks meet, small messages between them, and errors that name lost ranks.

Ranks meet through a key-value store: a private file if they share a host, else a TCP server of rank 0 on one address.
torch neither encrypts nor authenticates what they send, so nothing that arrives is ever unpickled.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

# Its functions keep the group that is there when they are imported, which torch._dynamo does in the middle of a run. A
# thread of a group that was kept may free a tensor while Python exits, and that aborts the process.
import torch.distributed.nn.functional
from torch._C._distributed_c10d import FileStore, PrefixStore, Store, TCPStore  # torch.distributed has them untyped

from maskfleet.errors import TrainingError
from maskfleet.system.network import LOOPBACK, address_for_others, interface_with, listening_socket
from maskfleet.system.rank_variables import ATTEMPT, STORE_FILE, STORE_SOCKET, named_rank
from maskfleet.training.ranks.joining import check_in
from maskfleet.training.ranks.watchdog import Watchdog
from maskfleet.training.step.memory import is_full_memory

STORE_FOLDER = ".store"
_LENGTH_BYTES = 8
_LAUNCHERS = "launchers such as torchrun set these variables; to train as a single rank, unset RANK and WORLD_SIZE"
# Gloo ends the other exchanges of a group with "pair closure" after one of them took too long.
_LOST_CONNECTION = re.compile(r"gloo|NCCL|connection|peer|socket|pair closure", re.IGNORECASE)


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
    """The rank that a launcher gave this process in its environment; a single rank if there was none."""
    for names in (
        ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
        ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ):
        if names[0] in env and names[1] in env:
            rank, world_size = _number(env, names[0]), _number(env, names[1])
            if rank >= world_size:
                raise TrainingError(f"{names[0]} is {rank}, but {names[1]} is {world_size}", remedy=_LAUNCHERS)
            local_rank = _number(env, names[2]) if names[2] in env else rank
            local_world_size = _number(env, names[3]) if names[3] in env else world_size
            return Worker(rank, world_size, local_rank, local_world_size)
    return Worker()


def _number(env: Mapping[str, str], name: str) -> int:
    if not re.fullmatch("[0-9]{1,9}", env[name]):
        raise TrainingError(f"{name} is {env[name]!r} in the environment, not a number", remedy=_LAUNCHERS)
    return int(env[name])


@dataclass(frozen=True, slots=True)
class Timeouts:
    """How long ranks wait for each other, in seconds. Broken connections are noticed at once."""

    join_s: float = 600.0  # until all have started
    start_s: float = 1800.0  # before the first step: reading data and checkpoints, compiling
    peer_s: float = 300.0  # from the first step on


DEFAULT_TIMEOUTS = Timeouts()


@contextlib.contextmanager
def joined(
    worker: Worker,
    device: torch.device,
    env: Mapping[str, str],
    run_dir: Path,
    timeouts: Timeouts = DEFAULT_TIMEOUTS,
) -> Iterator[Ranks]:
    """The ranks, connected while the block runs."""
    if worker.world_size == 1:
        yield Ranks(worker, None)
        return
    _choose_interfaces(worker)
    store = open_store(worker, env, run_dir, timeouts)
    hosts = check_in(store, worker.rank, worker.world_size, env=env, timeout_s=timeouts.join_s)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=store,
        rank=worker.rank,
        world_size=worker.world_size,
        device_id=device if device.type == "cuda" else None,
        timeout=timedelta(seconds=timeouts.start_s),
    )
    control = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeouts.start_s))
    ranks = Ranks(worker, control, hosts, Watchdog(store, worker.rank, hosts, timeout_s=timeouts.start_s), timeouts)
    try:
        yield ranks
    except BaseException:
        ranks.forget()
        # Destroying would wait for collectives that a lost rank never finishes.
        dist.distributed_c10d._abort_process_group()
        raise
    else:
        ranks.forget()
        dist.destroy_process_group()
    finally:
        del store, control  # the last rank removes the store's file
        with contextlib.suppress(OSError):  # there is none, or another rank still has a file in it
            (run_dir / STORE_FOLDER).rmdir()


def _choose_interfaces(worker: Worker) -> None:
    """Set what gloo and NCCL read from the environment, unless it is set already."""
    # Without it every rank connects to every other one; so only to those that it exchanges messages with.
    os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
    loopback = interface_with(LOOPBACK)
    if worker.local_world_size == worker.world_size and loopback is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", loopback)


def open_store(worker: Worker, env: Mapping[str, str], run_dir: Path, timeouts: Timeouts = DEFAULT_TIMEOUTS) -> Store:
    """The key-value store through which the ranks find each other."""
    if STORE_FILE in env:
        return _file_store(Path(env[STORE_FILE]), worker)
    if "MASTER_ADDR" in env and "MASTER_PORT" in env:
        return _tcp_store(worker, env, timeouts)
    if worker.local_world_size < worker.world_size:
        raise TrainingError(
            f"{worker.world_size} ranks on several machines have no rendezvous address",
            remedy="pass the address of the first host: mpirun -x MASTER_ADDR=… -x MASTER_PORT=29500 …",
        )
    return _file_store(run_dir / STORE_FOLDER / _job_digest(env), worker)


def _file_store(path: Path, worker: Worker) -> Store:
    """A store in a file that only its owner can read; the last rank that closes it removes it."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.parent.chmod(0o700)  # it may be older
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600))
        store = FileStore(str(path), worker.world_size)
        store.set(f"maskfleet/open/{worker.rank}", "1")
    except (OSError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or str(error).strip().splitlines()[0]
        raise TrainingError(
            f"the ranks cannot meet in the file {path}: {reason}",
            remedy=f"check disk and permissions; on a file system without locks set MASTER_ADDR={LOOPBACK} and a free "
            "MASTER_PORT for all ranks",
        ) from error
    return store


def _tcp_store(worker: Worker, env: Mapping[str, str], timeouts: Timeouts) -> Store:
    """A store on the port of rank 0, which listens on the one address that the other ranks use."""
    name, port = env["MASTER_ADDR"], _number(env, "MASTER_PORT")
    serves = worker.is_chief and env.get("TORCHELASTIC_USE_AGENT_STORE") != "True"  # torchrun serves the store itself
    descriptor = None
    if serves:
        descriptor = int(env[STORE_SOCKET]) if STORE_SOCKET in env else _listening(name, port, worker)
        with socket.socket(fileno=os.dup(descriptor)) as listening:
            name = str(listening.getsockname()[0])
    try:
        store = TCPStore(
            name,
            port,
            is_master=serves,
            timeout=timedelta(seconds=timeouts.join_s),
            wait_for_workers=False,  # `check_in` waits for them, and knows which are missing
            master_listen_fd=descriptor,
        )
    except RuntimeError as error:
        raise TrainingError(
            f"{named_rank(0, env)} at {name}, port {port}, did not join within {timeouts.join_s:.0f} s: "
            f"{str(error).strip().splitlines()[0]}",
            remedy="open all TCP ports between the hosts, and see the end of the log of rank 0",
        ) from error
    # The keys of an earlier attempt lead to ranks that are dead.
    return PrefixStore(f"attempt-{env.get(ATTEMPT) or env.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def _listening(name: str, port: int, worker: Worker) -> int:
    try:
        is_alone = worker.local_world_size == worker.world_size
        return listening_socket(name if is_alone else address_for_others(name), port).detach()
    except OSError as error:
        raise TrainingError(
            f"rank 0 cannot listen on {name}, port {port}: {error.strerror or error}",
            remedy="MASTER_ADDR must be an address of the host of rank 0, and MASTER_PORT a free port there; "
            "`ss -ltnp` shows who has it",
        ) from error


def _job_digest(env: Mapping[str, str]) -> str:
    """A name that the ranks of one mpirun share, and no earlier one had: process ids repeat in containers."""
    session = os.getsid(0)
    try:
        started = (Path("/proc") / str(session) / "stat").read_text().rsplit(")", 1)[1].split()[19]
    except OSError:
        started = ""  # the session outlived the process that began it
    job = env.get("PMIX_NAMESPACE") or env.get("OMPI_MCA_ess_base_jobid") or ""
    return hashlib.sha256(f"{job} {session} {started}".encode()).hexdigest()[:20]


class Ranks:
    """All ranks, for small messages between them; with a single rank no method blocks."""

    def __init__(
        self,
        worker: Worker,
        control: dist.ProcessGroup | None,
        hosts: Sequence[str] = ("localhost",),
        watchdog: Watchdog | None = None,
        timeouts: Timeouts = DEFAULT_TIMEOUTS,
    ) -> None:
        self.worker = worker
        self.hosts = tuple(hosts)  # by rank
        self._watchdog = watchdog
        self._timeouts = timeouts
        self._control = control
        self._pending: tuple[dist.Work, torch.Tensor] | None = None
        self._of_host: Ranks | None = None

    def of_host(self) -> Ranks:
        """The ranks of this rank's host, numbered from 0; its ranks must make their first call at the same point."""
        if self._of_host is None:
            own = self.hosts[self.worker.rank]
            members = [rank for rank, host in enumerate(self.hosts) if host == own]
            group = None
            if self._control is not None and len(members) > 1:
                timeout = timedelta(seconds=self._timeouts.start_s)
                group = dist.new_group(members, timeout, "gloo", use_local_synchronization=True)
            index = members.index(self.worker.rank)
            worker = Worker(index, len(members), index, len(members))
            self._of_host = Ranks(worker, group, [own] * len(members), self._watchdog, self._timeouts)
        return self._of_host

    def forget(self) -> None:
        """Give up the connections to the other ranks, after which no message can be sent."""
        if self._watchdog is not None:
            self._watchdog.stop()
        self._control, self._pending, self._watchdog, self._of_host = None, None, None, None

    def expect_steps(self) -> None:
        """Shorten the timeouts: from now on a rank that does not respond within minutes has failed."""
        self._set_timeouts(self._timeouts.peer_s)

    @contextlib.contextmanager
    def compiling(self) -> Iterator[None]:
        """Inside the block, between two steps, ranks may wait for each other as long as before the first step."""
        self._set_timeouts(self._timeouts.start_s)
        try:
            yield
        finally:
            self.expect_steps()

    def _set_timeouts(self, timeout_s: float) -> None:
        if self._control is None or self._watchdog is None:
            return
        self._watchdog.timeout_s = timeout_s
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=timeout_s), self._control)
        # NCCL kills the process without a word about the rank to blame: the watchdog comes first.
        uses_nccl = dist.get_backend() == dist.Backend.NCCL
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=3 * timeout_s if uses_nccl else timeout_s))

    def gather(self, value: Any) -> list[Any] | None:
        """On rank 0 the `value` of every rank, by rank; None on the others. A value is what JSON can hold."""
        if self._control is None:
            return [value]
        own = _encoded(value)
        with self.reporting_lost_ranks("gathering results"):
            longest = torch.tensor([len(own)])
            dist.all_reduce(longest, dist.ReduceOp.MAX, group=self._control)
            own = torch.nn.functional.pad(own, (0, int(longest) - len(own)))
            parts = [torch.empty_like(own) for _ in range(self.worker.world_size)] if self.worker.is_chief else None
            dist.gather(own, parts, group=self._control, group_dst=0)
        return None if parts is None else [_decoded(part) for part in parts]

    def broadcast(self, value: Any) -> Any:
        """The `value` of rank 0, on every rank. A value is what JSON can hold."""
        if self._control is None:
            return value
        message = _encoded(value if self.worker.is_chief else None)
        length = torch.tensor([len(message)])
        self.broadcast_tensor(length)
        if not self.worker.is_chief:
            message = torch.empty(int(length), dtype=torch.uint8)
        self.broadcast_tensor(message)
        return _decoded(message)

    def broadcast_tensor(self, values: torch.Tensor) -> None:
        """Copy `values`, on the host, from rank 0 to every rank."""
        if self._control is not None:
            with self.reporting_lost_ranks("waiting for rank 0"):
                dist.broadcast(values, group=self._control, group_src=0)

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
        """Turn broken connections and timeouts inside the block into an error that names the lost ranks."""
        watchdog = self._watchdog
        if watchdog is None:
            yield
            return
        started_at = time.monotonic()
        try:
            with watchdog.waiting(doing):
                yield
                if watchdog.aborted:
                    raise RuntimeError("NCCL was aborted")
        except RuntimeError as error:  # gloo raises no specific type for a lost peer
            is_lost = isinstance(error, dist.DistError) or _LOST_CONNECTION.search(str(error))
            if not is_lost or is_full_memory(error):  # NCCL needs memory too
                raise
            cause = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise TrainingError(
                f"rank {watchdog.rank} lost another rank while {doing}, after {time.monotonic() - started_at:.0f} s"
                f"{watchdog.lost()}: {cause}",
                remedy="see the end of that rank's log; start the same command again to continue from the checkpoint. "
                "If the rank was only slow, set train.peer_timeout_s higher",
            ) from error


def _encoded(value: Any) -> torch.Tensor:
    """`value` as bytes, after their number: JSON keeps floats to the last bit, and reading it runs no code."""
    text = json.dumps(value).encode()
    return torch.frombuffer(bytearray(len(text).to_bytes(_LENGTH_BYTES, "little") + text), dtype=torch.uint8)


def _decoded(message: torch.Tensor) -> Any:
    data = message.numpy().tobytes()
    length = int.from_bytes(data[:_LENGTH_BYTES], "little")
    return json.loads(data[_LENGTH_BYTES : _LENGTH_BYTES + length])
