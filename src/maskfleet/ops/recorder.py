"""Recording the work of a step once, to repeat it with other numbers in the same buffers."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Recording(Protocol[T_co]):
    """Recorded work."""

    def replay(self) -> T_co:
        """Do the work once more; returns its outputs, which the next replay overwrites."""


class Recorder(Protocol):
    """Records work that reads from and writes to the same tensors each time."""

    @property
    def records_collectives(self) -> bool:
        """Whether the work may contain collectives of the default process group."""

    def warm_up(self, work: Callable[[], object]) -> None:
        """Do `work` once, before it is recorded: this compiles it and loads its kernels."""

    def record(self, work: Callable[[], T]) -> Recording[T]:
        """Record `work`; on the device it happens only when the recording is replayed."""


class CudaGraphRecorder:
    """Records CUDA graphs, which share one pool of memory: only one of them is replayed at a time."""

    def __init__(self) -> None:
        self._pool: Any = None
        self._stream: Any = None  # of all warm-ups: torch keeps the memory of each stream apart

    @property
    def records_collectives(self) -> bool:
        return dist.is_initialized() and dist.get_backend() == "nccl"

    def warm_up(self, work: Callable[[], object]) -> None:
        if self._stream is None:
            self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            work()
        torch.cuda.current_stream().wait_stream(self._stream)

    def record(self, work: Callable[[], T]) -> Recording[T]:
        graph = torch.cuda.CUDAGraph()
        # Cycles of references keep what a warm-up left in memory, and torch collects them here no longer by itself.
        gc.collect()
        # thread_local: the loader's thread may pin memory during the capture, which the default mode forbids.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            outputs = work()
        self._pool = graph.pool()
        return _GraphRecording(graph, outputs)


class _GraphRecording(Generic[T]):
    def __init__(self, graph: torch.cuda.CUDAGraph, outputs: T) -> None:
        self._graph = graph
        self._outputs = outputs

    def replay(self) -> T:
        self._graph.replay()
        return self._outputs


class RerunRecorder:
    """A stand-in for machines without a GPU, used by tests: a replay calls the work again."""

    def __init__(self, *, records_collectives: bool = True) -> None:
        self.records_collectives = records_collectives

    def warm_up(self, work: Callable[[], object]) -> None:
        work()

    def record(self, work: Callable[[], T]) -> Recording[T]:
        return _Rerun(work)


class _Rerun(Generic[T]):
    def __init__(self, work: Callable[[], T]) -> None:
        self._work = work

    def replay(self) -> T:
        return self._work()
