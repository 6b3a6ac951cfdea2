"""The fork server of the loader processes, which a program can start before it imports torch itself."""

from __future__ import annotations

from multiprocessing.context import ForkServerContext

from maskfleet.system.workers.fork_server import fork_server_context

_PRELOAD = "maskfleet.data.pipeline.loader"


def loader_context() -> ForkServerContext:
    """The context to start loader processes with; starts the fork server, which imports in the background."""
    return fork_server_context([_PRELOAD])


def start_fork_server(num_workers: int | None) -> None:
    """Start the fork server of a run with `data.num_workers`: its imports take seconds, this call does not."""
    if num_workers != 0:
        loader_context()
