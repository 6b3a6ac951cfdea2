"""Threads of each rank: one ends the rank if a collective never returns, one says to the others that it is alive.

Timeouts of NCCL do not cover collectives inside a CUDA graph, and none of them says which rank is to blame.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, Store  # torch.distributed has them untyped

from maskfleet.errors import MaskfleetError
from maskfleet.log import logger
from maskfleet.training.ranks.joining import ranks_by_host

POLL_S = 0.5  # between looks into the store
ANSWER_S = 4.0  # how long a rank may take to answer; launchers kill the others 10 s after a rank died
STORE_S = 8.0  # how long asking them may take; if rank 0 hangs, so does everything that asks its store
EXIT_S = 30.0  # how long a collective may take to return after it was aborted
_CALL, _ANSWER, _RESULT = "maskfleet/roll-call", "maskfleet/alive", "maskfleet/lost"


@dataclass(frozen=True, slots=True)
class Waiting:
    """What this rank waits for other ranks with."""

    doing: str
    since: float  # time.monotonic()


class Watchdog:
    """Watches one rank; `timeout_s` is how long it may wait for the others, and may be changed at any time."""

    def __init__(
        self,
        store: Store,
        rank: int,
        hosts: Sequence[str],
        *,
        timeout_s: float,
        abort: Callable[[], None] | None = None,
    ) -> None:
        self.timeout_s = timeout_s
        # A connection of its own: the main thread may be blocked in the other one. A file counts those who use it.
        self._store: Store = store if isinstance(store, FileStore) else store.clone()  # type: ignore[attr-defined]
        self._abort = abort or abort_nccl
        self._lock = threading.Lock()  # of the store
        self.rank, self._hosts = rank, hosts
        self._waiting: Waiting | None = None
        self._lost: str | None = None
        self._aborted_at: float | None = None
        self._stopped = threading.Event()
        self._threads = [_started(self._watch, "rank-watchdog"), _started(self._answer_calls, "rank-answers")]

    @property
    def aborted(self) -> bool:
        """Whether collectives were aborted, so that their results are invalid."""
        return self._aborted_at is not None

    @contextmanager
    def waiting(self, doing: str) -> Iterator[None]:
        """Watch the block, in which the main thread waits for other ranks."""
        outer = self._waiting
        self._waiting = Waiting(doing, time.monotonic())
        try:
            yield
        finally:
            self._waiting = outer

    def lost(self) -> str:
        """Ask all ranks whether they are alive -> which ones are to blame, as the end of an error message."""
        if self._lost is None:
            _started(self._ask, "rank-roll-call").join(STORE_S)
        if self._lost is None:
            return f"; no answer from {ranks_by_host([0], self._hosts)}, which serves the store"
        return self._lost

    def stop(self) -> None:
        """End the threads; one that waits for a store which never answers is left behind."""
        self._stopped.set()
        for thread in self._threads:
            thread.join(2 * POLL_S)

    def _watch(self) -> None:
        while not self._stopped.wait(POLL_S):
            waiting = self._waiting
            if waiting is not None:
                self._check(waiting)

    def _answer_calls(self) -> None:
        while not self._stopped.wait(POLL_S):
            try:
                with self._lock:
                    self._answer()
            except (RuntimeError, dist.DistError):
                return  # rank 0 has exited, or its host is lost

    def _ask(self) -> None:
        with self._lock:
            if self._lost is None:
                try:
                    self._lost = self._roll_call()
                except (RuntimeError, dist.DistError):
                    return  # as above

    def _answer(self) -> None:
        """Answer a roll call of another rank, and read its result."""
        if self._lost is None and self._store.check([_CALL]):
            self._say_alive()
            if self._store.check([_RESULT]):
                self._lost = self._store.get(_RESULT).decode()

    def _say_alive(self) -> None:
        waiting = self._waiting
        self._store.set(f"{_ANSWER}/{self.rank}", json.dumps(waiting.doing if waiting is not None else None))

    def _roll_call(self) -> str:
        self._store.set(_CALL, "")
        self._say_alive()
        keys = [f"{_ANSWER}/{rank}" for rank in range(len(self._hosts))]
        try:
            self._store.wait(keys, timedelta(seconds=ANSWER_S))
        except (RuntimeError, dist.DistError):
            silent = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
            text = f"; no answer from {ranks_by_host(silent, self._hosts)}" if silent else ""
        else:
            busy = [rank for rank, key in enumerate(keys) if json.loads(self._store.get(key)) is None]
            text = f"; {ranks_by_host(busy, self._hosts)} did not get there" if busy else ""
        if self._store.check([_RESULT]):
            text = self._store.get(_RESULT).decode()
        self._store.set(_RESULT, text)
        time.sleep(2 * POLL_S)  # for the other ranks to read it: the store ends with rank 0
        return text

    def _check(self, waiting: Waiting) -> None:
        """Abort what the main thread waits for once it takes too long or a rank is lost; exit if that does not help."""
        now = time.monotonic()
        if self._aborted_at is not None:
            if now - self._aborted_at > EXIT_S:
                logger.error("rank %d is stuck while %s%s: exiting", self.rank, waiting.doing, self._lost or "")
                os._exit(MaskfleetError.exit_code)  # the main thread cannot be interrupted
        elif self._lost is not None or now - waiting.since > self.timeout_s + ANSWER_S:
            self.lost()
            self._aborted_at = now
            self._abort()


def _started(work: Callable[[], None], name: str) -> threading.Thread:
    thread = threading.Thread(target=work, name=name, daemon=True)
    thread.start()
    return thread


def abort_nccl() -> None:
    """Make the kernels of NCCL return, so that whoever waits for them does too; gloo has timeouts of its own."""
    if dist.is_initialized() and dist.get_backend() == dist.Backend.NCCL:
        dist.distributed_c10d._get_default_group().abort()
