"""Signals that stop a command, for commands that must clean up or save before they exit."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import Any

Handler = Callable[[int, FrameType | None], Any]


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

    def receive(self, number: int, frame: FrameType | None) -> None:
        """Remember the first signal; a second one terminates the process immediately."""
        if self.number:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        self.number = number


@contextlib.contextmanager
def stop_request() -> Iterator[StopRequest]:
    """Inside the block SIGTERM and SIGINT only set the request, so that the caller stops at the next safe moment."""
    request = StopRequest()
    with handled({signal.SIGTERM: request.receive, signal.SIGINT: request.receive}):
        yield request


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
