"""Signals that stop a command, for commands that must clean up what they started."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

_STOP_SIGNALS = (signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def interrupt_on_signals() -> Iterator[None]:
    """Inside the block SIGTERM and a closed terminal raise KeyboardInterrupt, as Ctrl-C does, so that cleanup runs."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in _STOP_SIGNALS}
    handled = [number for number, handler in before.items() if handler == signal.SIG_DFL]  # nohup stays nohup
    received: list[int] = []

    def on_signal(number: int, frame: FrameType | None) -> None:
        if not received:
            received.append(number)
            signal.raise_signal(signal.SIGINT)  # which asyncio, where it runs, turns into a cancelled task

    for number in handled:
        signal.signal(number, on_signal)
    interrupt = signal.getsignal(signal.SIGINT)
    if interrupt == signal.SIG_IGN:  # shells set that for background jobs of scripts; then nothing would clean up
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    except KeyboardInterrupt:
        if received:
            raise SystemExit(128 + received[0]) from None
        raise
    finally:
        for number in handled:
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, interrupt)
