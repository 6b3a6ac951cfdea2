"""Worker processes that call functions for this process and exit with it."""

from __future__ import annotations

import queue
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

from maskfleet.errors import MaskfleetError
from maskfleet.system.workers.fork_server import fork_server_context, main_hidden, protect_worker

T = TypeVar("T")

JOIN_S = 5.0
_IF_KILLED = "usually memory ran out (see dmesg): set data.num_workers lower, or give the job more memory"


class WorkerProcesses:
    """Processes that call module-level functions; with 0 of them, this process calls them."""

    def __init__(self, num_workers: int, *, preload: Sequence[str], if_killed: str = _IF_KILLED) -> None:
        """`preload` are modules that the functions need; they are imported once for all workers.

        `if_killed` is what to do if a worker is killed.
        """
        self._if_killed = if_killed
        self._processes: list[BaseProcess] = []
        self._idle: queue.SimpleQueue[Connection] = queue.SimpleQueue()
        self._threads = ThreadPoolExecutor(num_workers, "workers") if num_workers else None
        for _ in range(num_workers):
            self._start(preload)

    def __len__(self) -> int:
        return len(self._processes)

    def submit(self, function: Callable[..., T], *arguments: Any) -> Future[T]:
        """What `function` returns in a worker; its errors are raised here."""
        if self._threads is not None:
            return self._threads.submit(self._call, function, arguments)
        done: Future[T] = Future()
        done.set_result(function(*arguments))
        return done

    def close(self) -> None:
        """Stop the workers; calls that have not started are dropped."""
        if self._threads is not None:
            self._threads.shutdown(cancel_futures=True)
        while not self._idle.empty():
            self._idle.get().close()  # the worker then reads the end of its input
        while self._processes:
            process = self._processes.pop()
            process.join(JOIN_S)
            if process.is_alive():
                process.kill()

    def kill(self) -> None:
        """Stop the workers at once; calls that have started raise an error."""
        for process in self._processes:
            process.kill()
        self.close()

    def _start(self, preload: Sequence[str]) -> None:
        context = fork_server_context(preload)
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(theirs,), daemon=True)
        with main_hidden():
            process.start()
        theirs.close()
        self._processes.append(process)
        self._idle.put(ours)

    def _call(self, function: Callable[..., T], arguments: tuple[Any, ...]) -> T:
        """Runs in a thread; there are as many threads as workers, so one is idle."""
        connection = self._idle.get()
        try:
            connection.send((function, arguments))
            outcome, value = connection.recv()
        except (EOFError, ConnectionError) as error:
            raise MaskfleetError("a worker process died", remedy=self._if_killed) from error
        finally:
            self._idle.put(connection)
        if outcome == "returned":
            returned: T = value
            return returned
        if outcome == "failed":
            raise MaskfleetError(value[0], remedy=value[1])
        raise RuntimeError(f"a worker process failed:\n{value}")


def _serve(connection: Connection) -> None:
    """Answer calls until the other end is closed."""
    protect_worker()
    while True:
        try:
            function, arguments = connection.recv()
        except (EOFError, ConnectionError):
            return
        answer: tuple[str, Any]
        try:
            answer = ("returned", function(*arguments))
        except MaskfleetError as error:
            answer = ("failed", (error.what, error.remedy))
        except Exception:
            answer = ("crashed", traceback.format_exc())
        try:
            connection.send(answer)
        except ConnectionError:
            return
