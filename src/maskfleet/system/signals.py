"""Signals that stop a command, for commands that must clean up what they started."""

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
