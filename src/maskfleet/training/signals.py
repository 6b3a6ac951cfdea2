"""SIGTERM and SIGINT as a wish to stop at the next safe moment."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

from maskfleet.errors import MaskfleetError


class StoppedError(MaskfleetError):
    """The run was asked to stop, saved, and can go on; the exit code is the signal's own."""

    def __init__(self, number: int, step: int) -> None:
        name = signal.Signals(number).name
        super().__init__(
            f"stopped by {name} after step {step}; everything is saved",
            remedy="start the same command again to continue",
        )
        self.exit_code = 128 + number


class StopWish:
    """The signal that asked this rank to stop; 0 while none did."""

    def __init__(self) -> None:
        self.number = 0

    def take(self, number: int, frame: FrameType | None) -> None:
        """Remember the first signal; a second one acts at once."""
        if self.number:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        self.number = number


@contextlib.contextmanager
def stop_wish() -> Iterator[StopWish]:
    """Signals inside the block become a wish; outside the main thread nothing is caught."""
    wish = StopWish()
    if threading.current_thread() is not threading.main_thread():
        yield wish
        return
    before = {number: signal.signal(number, wish.take) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield wish
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
