"""Worker processes of multiprocessing's fork server that survive stop requests and never outlive their parent.

Slurm, systemd, `timeout`, a terminal's Ctrl-C and launchers send SIGTERM or SIGINT to a whole process group. The
process that owns the workers reacts to it and needs them until it has; so the workers and their fork server ignore both
signals. When the owner dies, however it dies, the kernel closes its end of a pipe to each worker, which then exits; the
fork server and multiprocessing's resource tracker exit after the last worker. (PR_SET_PDEATHSIG is no alternative: it
signals the death of the thread that started a process.)
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing import connection, forkserver, resource_tracker
from multiprocessing.context import ForkServerContext

_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_main_lock = threading.Lock()
# One thread in each worker: the workers together use all cores, and numpy reads this when it is imported.
SINGLE_THREAD = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


def fork_server_context(preload: Sequence[str]) -> ForkServerContext:
    """The context to start workers with; starts the fork server, which imports the modules `preload`."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(preload))
    resource_tracker.ensure_running()  # first, because it unblocks the signals
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, _STOP_SIGNALS)
    try:
        with _environment(SINGLE_THREAD):
            forkserver.ensure_running()  # inherits the blocked signals, and so do the workers that it forks
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    return context


def protect_worker() -> None:
    """Called first in a worker: ignore stop requests, and exit as soon as the process that started it is dead."""
    for number in _STOP_SIGNALS:  # also where the program had a fork server of its own, which blocks nothing
        signal.signal(number, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None, "called in a worker"
    threading.Thread(target=_exit_after, args=(parent.sentinel,), name="parent-watch", daemon=True).start()


def _exit_after(sentinel: int) -> None:
    connection.wait([sentinel])
    os._exit(1)


@contextlib.contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """Inside the block the environment has these values."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextlib.contextmanager
def main_hidden() -> Iterator[None]:
    """Start processes that do not run the user's script again, as multiprocessing would to recreate `__main__`.

    Scripts that call `maskfleet.train` then need no `if __name__ == "__main__"`; workers need nothing of theirs. Only
    where the module comes from is hidden: other threads can still pickle what it defines.
    """
    main = sys.modules["__main__"]
    with _main_lock:
        spec, file = main.__spec__, main.__dict__.pop("__file__", None)
        main.__spec__ = None
        try:
            yield
        finally:
            main.__spec__ = spec
            if file is not None:
                main.__file__ = file
