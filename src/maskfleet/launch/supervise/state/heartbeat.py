"""Writes the heartbeats of one host: beat.json, every few seconds, from a thread of its own.

A write that fails (a full disk, a read-only mount, a file server that restarts) is tried again with the next heartbeat
for as long as the supervisor lives. Events and log lines wait in memory meanwhile (kept_lines.py).
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from maskfleet.launch.job import LostTime
from maskfleet.launch.supervise.job_files import Heartbeat, JobFolder, event_line, stamp
from maskfleet.launch.supervise.lost_hosts import HEARTBEAT_S, LOST_S, HostMonitor
from maskfleet.launch.supervise.state.kept_lines import KeptLines
from maskfleet.launch.supervise.state.progress import Observation, StepWatch
from maskfleet.system.machine import boot_clock, machine_id, process_start

Say = Callable[[str, LostTime | None], None]

RECENTLY_S = 60.0
LAST_S = 600.0  # how long the last heartbeat, which says how the host ended, is tried


@dataclass(frozen=True, slots=True)
class HostReport:
    """What a supervisor says about its host."""

    state: str  # as in Heartbeat
    generation: int
    restarts: int
    address: str
    leads: bool  # whether it is the leader, which alone reports what failures cost


class Heartbeats:
    """The heartbeats of host `index`; `report` is asked before each, and none is sent while `withheld()`."""

    def __init__(
        self,
        folder: JobFolder,
        index: int,
        monitor: HostMonitor,
        *,
        report: Callable[[], HostReport],
        withheld: Callable[[], bool],
        say: Say,
        kept: Sequence[KeptLines] = (),
    ) -> None:
        self._folder, self._index, self._monitor = folder, index, monitor
        self._report, self._withheld, self._say, self._kept = report, withheld, say, kept
        self._lock = threading.Lock()
        self._before = folder.heartbeat(index)  # of an earlier supervisor of this host
        self._count = self._before.count if self._before is not None else 0
        self._progress = StepWatch()
        self._wrote_at = time.monotonic()
        self._failing_since: float | None = None
        self._failed_at: float | None = None

    def start(self) -> None:
        """Send heartbeats in the background until the process exits."""
        before = self._before
        if before is not None and not before.is_last:
            self._say(
                f"this supervisor of host {self._index} (process {os.getpid()}) replaces process {before.pid}, "
                "which ended without notice",
                None,
            )
            away_s = boot_clock() - before.uptime_s if before.machine == machine_id() else 0.0
            seen = self._observation(time.monotonic() - away_s - (before.step_age_s or 0.0), self._report())
            self._progress.continue_after(seen, f"supervisor of host {self._index} replaced")
        threading.Thread(target=self._send_forever, daemon=True).start()

    def send(self) -> OSError | None:
        """Send one now, and write the lines that wait; returns why that failed, or None."""
        with self._lock:  # two threads write heartbeats, and the last one must hold the last state
            error = self._write()
            for lines in self._kept:
                error = lines.flush() or error
            self._tell(error)
            return error

    def send_last(self, *, timeout_s: float = LAST_S) -> None:
        """Send the last one, with the final state; tries again while the shared folder cannot be written."""
        deadline = time.monotonic() + timeout_s
        while self.send() is not None and time.monotonic() < deadline:
            time.sleep(HEARTBEAT_S)

    def are_missed(self) -> bool:
        """Whether this host cannot write while others can: they count it as lost and continue without it."""
        overdue = time.monotonic() - self._wrote_at > LOST_S
        return overdue and self._monitor.hears_others()

    def await_recovery(self, is_over: Callable[[], bool]) -> bool:
        """After ranks failed: whether writing failed lately, and so most likely for them too; waits until it works."""
        while self._failing_since is not None and not is_over():
            time.sleep(HEARTBEAT_S)
        return self._failed_at is not None and time.monotonic() - self._failed_at < RECENTLY_S

    def _write(self) -> OSError | None:
        report = self._report()
        seen = self._observation(time.monotonic(), report)
        self._report_failure(self._progress.observe(seen), report)
        step_age_s = self._progress.step_age_s(seen.at)
        heartbeat = Heartbeat(
            count=self._count + 1,
            pid=os.getpid(),
            state=report.state,
            generation=report.generation,
            restarts=report.restarts,
            time=time.time(),
            address=report.address,
            lost=self._monitor.lost(),
            silent_s=self._monitor.heard(),
            step=seen.step,
            step_age_s=None if step_age_s is None else round(step_age_s, 1),
            machine=machine_id(),
            uptime_s=boot_clock(),
            started=process_start(os.getpid()) or 0,
        )
        try:
            self._folder.write_heartbeat(self._index, heartbeat)
        except OSError as error:
            return error
        self._count += 1
        self._wrote_at = time.monotonic()
        return None

    def _observation(self, at: float, report: HostReport) -> Observation:
        return Observation(
            at,
            self._folder.last_step(),
            self._folder.newest_checkpoint(),
            (report.generation, report.restarts),
            self._monitor.lost_addresses(),
        )

    def _report_failure(self, failure: LostTime | None, report: HostReport) -> None:
        if failure is not None and report.leads:
            self._say(str(failure), failure)

    def _tell(self, error: OSError | None) -> None:
        """Log the first failure and the recovery, once each."""
        self._monitor.can_write = error is None
        now = time.monotonic()
        if error is not None:
            self._failed_at = now
        if error is not None and self._failing_since is None:
            self._failing_since = now
            self._say(
                f"host {self._index} cannot write to {self._folder.run_dir}: {error.strerror}; "
                "it keeps what it has to write, and tries again until it can",
                None,
            )
        elif error is None and self._failing_since is not None:
            self._say(f"host {self._index} can write again, after {now - self._failing_since:.0f} s", None)
            self._failing_since = None

    def _send_forever(self) -> None:
        while True:
            if not self._withheld():
                self.send()
            time.sleep(HEARTBEAT_S)


def report_second_supervisor(folder: JobFolder, index: int, why: str) -> None:
    """Log, once, that another supervisor of the host was started and exits because the first one is there."""
    since = datetime.fromtimestamp((folder.host(index) / "lock").stat().st_mtime, UTC).isoformat(timespec="seconds")
    print(f"{stamp()} host {index} has a supervisor since {since}: {why}", file=sys.stderr, flush=True)
    what = f"another supervisor of host {index} was started, and exits: {why}"
    path = folder.host(index) / "events.jsonl"
    if not any(event.what == what for event in folder.events()):
        KeptLines(path, durable=True).add(event_line(what))
