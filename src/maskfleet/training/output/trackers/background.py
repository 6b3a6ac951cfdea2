"""Sends measurements to a service from a thread, so that neither its speed nor its faults matter to training."""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

from maskfleet.config.load import METRICS_FILE
from maskfleet.log import logger
from maskfleet.system.files import write_atomically
from maskfleet.training.output.measurement import AP, Measurement, parsed_line

QUEUE_SIZE = 1000  # measurements; an hour or more of them
RETRY_AFTER_S = (5.0, 30.0, 120.0, 600.0)  # the last one again and again
MAX_REASON = 200  # characters of a library's message
CLOSE_S = 20.0  # how long the end of a run waits for the service


class Tracker(Protocol):
    """A service that collects metrics. All methods run in one thread and may raise anything."""

    name: str  # for people
    file_name: str  # in the run directory, for what must survive a restart

    def open(self, run_id: str | None) -> str:
        """Start a run or continue the run `run_id`; returns its id."""

    def send(self, measurement: Measurement) -> None:
        """Store the values of a measurement."""

    def close(self) -> None:
        """Finish the run, and pending transfers."""


@dataclass(slots=True)
class Sent:
    """What the service has: kept in the run directory, so that a resumed run continues there."""

    run_id: str
    step: int = 0  # last one whose metrics were sent
    evaluation: int = 0  # last step whose evaluation was sent

    def has(self, measurement: Measurement) -> bool:
        return measurement.step <= (self.evaluation if measurement.is_evaluation else self.step)

    def add(self, measurement: Measurement) -> None:
        if measurement.is_evaluation:
            self.evaluation = measurement.step
        else:
            self.step = measurement.step


class TrackerSink:
    """A sink that never blocks and never fails: it warns once instead."""

    def __init__(self, tracker: Tracker, run_dir: Path, *, retry_after_s: Sequence[float] = RETRY_AFTER_S) -> None:
        self._tracker = tracker
        self._run_dir = run_dir
        self._retry_after_s = retry_after_s
        self._queue: queue.SimpleQueue[Measurement | None] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._is_off = False
        self._has_warned = False
        self._earlier = list(_earlier(run_dir / METRICS_FILE))  # read now: the file grows later
        self._thread = threading.Thread(target=self._run, name=tracker.name, daemon=True)
        self._thread.start()

    def write(self, measurement: Measurement) -> None:
        if not measurement.values or self._is_off:
            return
        if self._queue.qsize() < QUEUE_SIZE:
            self._queue.put(measurement)
        else:
            self._warn("it is too slow, and some are left out")

    def close(self) -> None:
        """Send what is pending, for at most `CLOSE_S` seconds."""
        self._closing.set()
        self._queue.put(None)
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            self._warn(f"it did not take them within {CLOSE_S:.0f} s after the last step")

    def _run(self) -> None:
        try:
            sent = self._opened()
            for earlier in self._earlier:
                self._deliver(earlier, sent)
            while (measurement := self._queue.get()) is not None:
                self._deliver(measurement, sent)
            self._tracker.close()
        except Exception as error:  # a service and its library fail in too many ways to list
            self._is_off = True
            self._warn(_first_line(error))

    def _opened(self) -> Sent:
        path = self._run_dir / self._tracker.file_name
        known = Sent(**json.loads(path.read_text("utf-8"))) if path.is_file() else None
        run_id = self._tracker.open(None if known is None else known.run_id)
        sent = known if known is not None and known.run_id == run_id else Sent(run_id)
        self._save(sent)
        return sent

    def _deliver(self, measurement: Measurement, sent: Sent) -> None:
        """Send a measurement that the service does not have; after a failure, again and again."""
        if sent.has(measurement):
            return None
        # Saved before it is sent: after a kill between the two, one point is missing instead of there twice.
        sent.add(measurement)
        self._save(sent)
        attempt = 0
        while True:
            try:
                return self._tracker.send(measurement)
            except Exception as error:  # as above
                self._warn(_first_line(error))
            pause_s = self._retry_after_s[min(attempt, len(self._retry_after_s) - 1)]
            attempt += 1
            if self._closing.wait(pause_s):
                raise ConnectionError("the run has ended before the service answered again")

    def _save(self, sent: Sent) -> None:
        write_atomically(self._run_dir / self._tracker.file_name, json.dumps(asdict(sent)).encode())

    def _warn(self, reason: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            logger.warning("%s does not get all metrics: %s; the run continues without it", self._tracker.name, reason)


def _earlier(path: Path) -> Iterator[Measurement]:
    """The measurements of an earlier process of this run, some of which the service may lack."""
    if not path.is_file():
        return
    for line in path.read_bytes().splitlines():
        values = parsed_line(line)
        if values is not None:
            step, time = int(values.pop("step")), values.pop("time", 0.0)
            yield Measurement(step, time, values, is_evaluation=any(AP in name for name in values))


def _first_line(error: BaseException) -> str:
    line = f"{type(error).__name__}: {error}".split("\n", maxsplit=1)[0]
    return line if len(line) <= MAX_REASON else f"{line[:MAX_REASON]}…"
