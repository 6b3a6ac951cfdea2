"""Worker processes for many short calls with arrays, such as encoding the masks of one image.

Arguments and answers pass through memory that this process shares with each worker; pipes carry only short messages.
So one thread can serve all workers: sending never blocks, and a worker that has finished never waits for a reader.
`WorkerProcesses` has a thread for each worker instead, which suits calls that take long.
"""

from __future__ import annotations

import ctypes
import pickle
import selectors
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from typing import Any, Generic, TypeVar

from maskfleet.errors import MaskfleetError
from maskfleet.system.workers.fork_server import fork_server_context, main_hidden, protect_worker

T = TypeVar("T")

JOIN_S = 5.0
CALLS_PER_WORKER = 4  # sent and not yet answered, so that a worker has work while this process does something else
SLOT_BYTES = 1 << 19  # shared memory of one call; what is larger passes through the pipe
ALIGNMENT = 64  # of arrays in shared memory
MAX_MESSAGE_BYTES = 1 << 14  # CALLS_PER_WORKER of them fit into the buffer of a pipe
LOST = (EOFError, ConnectionError)


class Call(Generic[T]):
    """A function that a worker calls; `result` waits until it has returned."""

    def __init__(self, read_answers: Callable[[], object]) -> None:
        self._read_answers = read_answers
        self._outcome: tuple[str, Any] | None = None

    @property
    def is_done(self) -> bool:
        """Whether `result` returns at once, as far as answers have been read."""
        return self._outcome is not None

    def result(self) -> T:
        """What the function returned; its errors are raised here."""
        while self._outcome is None:
            self._read_answers()
        outcome, value = self._outcome
        if outcome == "returned":
            returned: T = value
            return returned
        if outcome == "failed":
            raise MaskfleetError(value[0], remedy=value[1])
        raise RuntimeError(f"a worker process failed:\n{value}")

    def finish(self, outcome: tuple[str, Any]) -> None:
        self._outcome = outcome


class ArrayWorkers:
    """Processes that call module-level functions; with 0 of them, this process calls them. For use by one thread."""

    def __init__(self, num_workers: int, *, preload: Sequence[str]) -> None:
        """`preload` are modules that the functions need; they are imported once for all workers."""
        self._workers: list[_Worker] = []
        self._selector = selectors.DefaultSelector()
        for _ in range(num_workers):
            worker = _Worker(fork_server_context(preload))
            self._workers.append(worker)
            self._selector.register(worker.connection, selectors.EVENT_READ, worker)

    def __len__(self) -> int:
        return len(self._workers)

    def submit(self, function: Callable[..., T], *arguments: Any) -> Call[T]:
        """Let the worker with the fewest calls call `function`; waits while each has CALLS_PER_WORKER of them."""
        call: Call[T] = Call(self._read_answers)
        if not self._workers:
            call.finish(("returned", function(*arguments)))
            return call
        self._read_answers(timeout_s=0)
        worker = self._least_busy()
        while len(worker.calls) >= CALLS_PER_WORKER:
            self._read_answers()
            worker = self._least_busy()
        message = worker.message(function, arguments)
        while len(message) > MAX_MESSAGE_BYTES and worker.calls:
            self._read_answers()  # a worker that has calls may be sending a long answer, and both would block
        worker.send(call, message)
        return call

    def close(self) -> None:
        """Stop the workers; calls without an answer are dropped."""
        self._selector.close()
        for worker in self._workers:
            worker.connection.close()  # the worker then reads the end of its input
        while self._workers:
            process = self._workers.pop().process
            process.join(JOIN_S)
            if process.is_alive():
                process.kill()

    def _least_busy(self) -> _Worker:
        return min(self._workers, key=lambda worker: len(worker.calls))

    def _read_answers(self, timeout_s: float | None = None) -> None:
        """Read what has been answered; None waits for one answer."""
        for key, _ in self._selector.select(timeout_s):
            if not key.data.read_answer():
                self._selector.unregister(key.fileobj)


class _Worker:
    """A worker process, its end of the pipe, the shared memory, and the calls that it has not answered, in order."""

    def __init__(self, context: ForkServerContext) -> None:
        self.connection, theirs = context.Pipe()
        self.calls: deque[Call[Any]] = deque()
        self._num_sent = 0
        self._num_answered = 0
        memory = context.RawArray(ctypes.c_ubyte, CALLS_PER_WORKER * SLOT_BYTES)
        self._slots = _slots(memory)
        self.process = context.Process(target=_serve, args=(theirs, memory), daemon=True)
        with main_hidden():
            self.process.start()
        theirs.close()

    def message(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> bytes:
        """The call, pickled, without the arrays that fit into the slot of shared memory where they are now."""
        buffers: list[pickle.PickleBuffer] = []
        payload = pickle.dumps((function, arguments), protocol=5, buffer_callback=buffers.append)
        spans = _stored([buffer.raw() for buffer in buffers], self._slots[self._num_sent % CALLS_PER_WORKER])
        if spans is None:
            payload, spans = pickle.dumps((function, arguments), protocol=5), []
        return pickle.dumps((payload, spans), protocol=5)

    def send(self, call: Call[Any], message: bytes) -> None:
        try:
            self.connection.send_bytes(message)
        except ConnectionError:
            call.finish(_died())
            return
        self._num_sent += 1
        self.calls.append(call)

    def read_answer(self) -> bool:
        """Finish the oldest call; False if the worker is dead, which finishes all of them."""
        try:
            length, answer = self.connection.recv()
        except LOST:
            while self.calls:
                self.calls.popleft().finish(_died())
            return False
        if answer is None:
            answer = self._slots[self._num_answered % CALLS_PER_WORKER][:length]
        self._num_answered += 1
        self.calls.popleft().finish(pickle.loads(answer))  # noqa: S301 (from our own child process)
        return True


def _serve(connection: Connection, memory: Any) -> None:
    """Answer calls until the other end is closed."""
    protect_worker()
    slots, number = _slots(memory), 0
    while True:
        try:
            payload, spans = connection.recv()
        except LOST:
            return
        slot = slots[number % CALLS_PER_WORKER]
        number += 1
        answer = _answer(payload, [slot[start:stop] for start, stop in spans])
        fits = len(answer) <= SLOT_BYTES
        if fits:
            slot[: len(answer)] = answer
        try:
            connection.send((len(answer), None if fits else answer))
        except ConnectionError:
            return


def _answer(payload: bytes, buffers: Sequence[memoryview]) -> bytes:
    """How a call ended and its value, pickled, so that nothing in it refers to `buffers`."""
    try:
        function, arguments = pickle.loads(payload, buffers=buffers)  # noqa: S301 (from the process that started us)
        return pickle.dumps(("returned", function(*arguments)), protocol=5)
    except MaskfleetError as error:
        return pickle.dumps(("failed", (error.what, error.remedy)))
    except Exception:
        return pickle.dumps(("crashed", traceback.format_exc()))


def _stored(buffers: Sequence[memoryview], slot: memoryview) -> list[tuple[int, int]] | None:
    """Copy `buffers` into `slot` and return where each one is; None if they do not fit."""
    spans, start = [], 0
    for buffer in buffers:
        spans.append((start, start + len(buffer)))
        start += -(-len(buffer) // ALIGNMENT) * ALIGNMENT
    if start > len(slot):
        return None
    for buffer, (first, past) in zip(buffers, spans, strict=True):
        slot[first:past] = buffer
    return spans


def _slots(memory: Any) -> list[memoryview]:
    view = memoryview(memory).cast("B")
    return [view[number * SLOT_BYTES : (number + 1) * SLOT_BYTES] for number in range(CALLS_PER_WORKER)]


def _died() -> tuple[str, Any]:
    remedy = "usually memory ran out (see dmesg): set data.num_workers lower, or give the job more memory"
    return "failed", ("a worker process died", remedy)
