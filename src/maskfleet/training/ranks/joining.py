"""Which rank is on which host, and an error that names the ranks that did not join."""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping, Sequence
from datetime import timedelta
from itertools import groupby
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import Store  # torch.distributed has it, but not for type checkers

from maskfleet.errors import TrainingError
from maskfleet.system.rank_variables import HOSTS

_ANSWER = "maskfleet/joined"
_LEAVE_S = 5.0  # how long rank 0 keeps its store open for ranks that have not read its answer yet
_REMEDY = (
    "see the logs of these ranks and check that their hosts reach rank 0 (maskfleet doctor); "
    "train.join_timeout_s sets how long the ranks wait for each other"
)


def check_in(store: Store, rank: int, world_size: int, *, env: Mapping[str, str], timeout_s: float) -> list[str]:
    """The host of every rank, by rank, once all have called this; an error on all that did if others do not.

    Goes through the store: without all ranks there is no process group yet.
    """
    planned = hosts_from_env(env, world_size)
    store.set(f"{_ANSWER}/{rank}", planned[rank] if planned is not None else socket.gethostname())
    if rank == 0:
        answer = _roll_call(store, world_size, planned, timeout_s)
        store.set(_ANSWER, json.dumps(answer))
    else:
        answer = _answer_of_rank_0(store, planned, timeout_s)
    if "error" not in answer:
        return list(answer["hosts"])
    if rank == 0:
        _wait_for_readers(store, answer["joined"])
    else:
        store.set(f"{_ANSWER}/{rank}/read", "")
    raise TrainingError(answer["error"], remedy=_REMEDY)


def hosts_from_env(env: Mapping[str, str], world_size: int) -> list[str] | None:
    """The host of every rank as the launcher planned it; None if it did not say."""
    if not env.get(HOSTS):
        return None
    hosts: list[str] = [name for name, count in json.loads(env[HOSTS]) for _ in range(count)]
    if len(hosts) != world_size:
        raise TrainingError(
            f"{HOSTS} has {len(hosts)} ranks, but there are {world_size}",
            remedy="give each host its number of ranks, or unset it",
        )
    return hosts


def ranks_text(ranks: Sequence[int]) -> str:
    """Ranks for people: `rank 3`, `ranks 0-3, 6`."""
    ranges = []
    for _, numbered in groupby(enumerate(sorted(ranks)), key=lambda pair: pair[1] - pair[0]):
        run = [rank for _, rank in numbered]
        ranges.append(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}")
    return f"rank{'s'[: len(ranks) != 1]} {', '.join(ranges)}"


def ranks_by_host(ranks: Sequence[int], hosts: Mapping[int, str] | Sequence[str]) -> str:
    """Ranks with their hosts: `ranks 0-3 on a and ranks 4-7 on b`."""
    by_host: dict[str, list[int]] = {}
    for rank in ranks:
        by_host.setdefault(hosts[rank], []).append(rank)
    return " and ".join(f"{ranks_text(members)} on {host}" for host, members in by_host.items())


def _roll_call(store: Store, world_size: int, planned: list[str] | None, timeout_s: float) -> dict[str, Any]:
    """Rank 0's answer to all: the hosts, or an error with the ranks that can read it."""
    keys = [f"{_ANSWER}/{rank}" for rank in range(world_size)]
    try:
        store.wait(keys, timedelta(seconds=timeout_s))
        return {"hosts": [store.get(key).decode() for key in keys]}
    except (RuntimeError, dist.DistError):  # a TCPStore raises DistStoreError, a FileStore RuntimeError
        joined = [rank for rank in range(world_size) if store.check([keys[rank]])]
    missing = [rank for rank in range(world_size) if rank not in joined]
    hosts = {rank: store.get(keys[rank]).decode() for rank in joined}
    missing_text = ranks_by_host(missing, planned) if planned is not None else ranks_text(missing)
    error = f"{missing_text} did not join within {timeout_s:.0f} s; {ranks_by_host(joined, hosts)} did"
    return {"error": error, "joined": joined}


def _answer_of_rank_0(store: Store, planned: list[str] | None, timeout_s: float) -> dict[str, Any]:
    try:
        store.wait([_ANSWER], timedelta(seconds=2 * timeout_s))  # rank 0 may have come last
        answer: dict[str, Any] = json.loads(store.get(_ANSWER))
    except (RuntimeError, dist.DistError) as error:
        host = f" on {planned[0]}" if planned is not None else ""
        raise TrainingError(f"rank 0{host} did not join within {timeout_s:.0f} s", remedy=_REMEDY) from error
    return answer


def _wait_for_readers(store: Store, joined: Sequence[int]) -> None:
    """Until the other ranks that joined have read the answer."""
    readers = [f"{_ANSWER}/{rank}/read" for rank in joined if rank != 0]
    try:
        store.wait(readers, timedelta(seconds=_LEAVE_S))
    except (RuntimeError, dist.DistError):
        return  # a rank that joined has exited since
