"""How a command that started something here ends when it is told to."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

_TOLD = (signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def leaving_in_order() -> Iterator[None]:
    """SIGTERM and a terminal that closes unwind as Ctrl-C does, so that what was started here ends, too."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {one: signal.getsignal(one) for one in _TOLD}
    taken = [one for one, handler in before.items() if handler == signal.SIG_DFL]  # nohup stays nohup
    told: list[int] = []

    def leave(number: int, frame: FrameType | None) -> None:
        if not told:
            told.append(number)
            signal.raise_signal(signal.SIGINT)  # which asyncio, where it runs, turns into a cancelled task

    for one in taken:
        signal.signal(one, leave)
    interrupt = signal.getsignal(signal.SIGINT)
    if interrupt == signal.SIG_IGN:  # as in the background of a script: then nothing could be unwound
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    except KeyboardInterrupt:
        if told:
            raise SystemExit(128 + told[0]) from None
        raise
    finally:
        for one in taken:
            signal.signal(one, signal.SIG_DFL)
        signal.signal(signal.SIGINT, interrupt)
