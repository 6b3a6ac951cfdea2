"""SIGTERM and SIGINT as a request to stop at the next safe moment."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

from maskfleet.errors import MaskfleetError


class StoppedError(MaskfleetError):
    """The run stopped on request and saved a checkpoint to resume from; the exit code is that of the signal."""

    def __init__(self, number: int, step: int) -> None:
        name = signal.Signals(number).name
        super().__init__(
            f"stopped by {name} after step {step}; everything is saved",
            remedy="start the same command again to continue",
        )
        self.exit_code = 128 + number


class StopRequest:
    """The signal that requested this rank to stop; 0 while there was none."""

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
    """Inside the block signals only set the request; outside the main thread no signal is handled."""
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    before = {number: signal.signal(number, request.receive) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
