"""Signals that stop a command, for commands that must clean up or save before they exit."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import Any, Literal

from maskfleet.log import logger

Handler = Callable[[int, FrameType | None], Any]
DUPLICATE_S = 1.0  # a signal that repeats the first one within this time is the same request
STDERR = 2
SHOW_CURSOR = b"\x1b[?25h\r\n"


@contextlib.contextmanager
def handled(handlers: Mapping[int, Handler]) -> Iterator[None]:
    """Handle signals inside the block, in the main thread: Python delivers them to no other."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class StopRequest:
    """The signal that asked this process to stop; 0 while there was none."""

    def __init__(self) -> None:
        self.number = 0
        self._received_at = 0.0

    def receive(self, number: int, at: float) -> Literal["stop", "ignore", "quit"]:
        """What to do about a signal at the time `at`, in seconds: the first one is the request, Ctrl-C again quits.

        A second SIGTERM changes nothing: whoever sends it sends SIGKILL next. Neither does a second SIGINT that comes
        at once: a terminal sends it to the whole process group, and a launcher in that group forwards it to its ranks.
        """
        if not self.number:
            self.number, self._received_at = number, at
            return "stop"
        return "quit" if number == signal.SIGINT and at - self._received_at >= DUPLICATE_S else "ignore"


@contextlib.contextmanager
def stop_request(reply: str = "stopping after this step, saving") -> Iterator[StopRequest]:
    """Inside the block SIGTERM and SIGINT only set the request, so that the caller stops at the next safe moment.

    `reply` is what the log says about the request.

    A thread reads them, so that they are acknowledged, and the second Ctrl-C quits, also while the main thread is busy
    in native code, where Python would not call a handler.
    """
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():  # Python delivers signals to no other
        yield request
        return
    reader, writer = socket.socketpair()
    writer.setblocking(False)  # as set_wakeup_fd requires
    thread = threading.Thread(target=_acknowledge, args=(reader, request, reply), name="stop-requests", daemon=True)
    with reader, writer, handled(dict.fromkeys((signal.SIGTERM, signal.SIGINT), _woken_instead)):
        before = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        thread.start()
        try:
            yield request
        finally:
            signal.set_wakeup_fd(before)
            writer.shutdown(socket.SHUT_WR)
            thread.join()


def _woken_instead(number: int, frame: FrameType | None) -> None:
    """Does nothing: Python writes the signal's number to the wakeup descriptor, which `_acknowledge` reads."""


def _acknowledge(reader: socket.socket, request: StopRequest, reply: str) -> None:
    while received := reader.recv(1):
        number = received[0]
        if number not in (signal.SIGTERM, signal.SIGINT):
            continue
        reaction = request.receive(number, time.monotonic())
        if reaction == "quit":
            _quit(number)
        elif reaction == "stop":
            hint = "; Ctrl-C again to quit now" if number == signal.SIGINT else ""
            logger.warning("%s%s", reply, hint)


def _quit(number: int) -> None:
    """Exit without any cleanup but that of the terminal, whose cursor a live display has hidden."""
    if os.isatty(STDERR):
        os.write(STDERR, SHOW_CURSOR)
    os._exit(128 + number)


@contextlib.contextmanager
def interrupt_on_signals() -> Iterator[None]:
    """Inside the block SIGTERM and a closed terminal raise KeyboardInterrupt, as Ctrl-C does, so that cleanup runs."""
    received: list[int] = []

    def on_signal(number: int, frame: FrameType | None) -> None:
        if not received:
            received.append(number)
            signal.raise_signal(signal.SIGINT)  # which asyncio, where it runs, turns into a cancelled task

    stops = (signal.SIGTERM, signal.SIGHUP)
    handlers: dict[int, Handler] = {
        number: on_signal
        for number in stops
        if signal.getsignal(number) == signal.SIG_DFL  # nohup stays nohup
    }
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        # Shells set that for background jobs of scripts; then nothing would clean up.
        handlers[signal.SIGINT] = signal.default_int_handler
    try:
        with handled(handlers):
            yield
    except KeyboardInterrupt:
        if received:
            raise SystemExit(128 + received[0]) from None
        raise
