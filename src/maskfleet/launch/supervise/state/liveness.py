"""Which hosts of a job are alive, for commands that ask: by heartbeats that change, never by the wall clock.

The clocks of hosts differ and are sometimes set, so the time in a heartbeat proves nothing. What does, best first:

1. A supervisor on the machine that asks: its process, and the boot clock that both share.
2. What a supervisor that is alive says about the others: how long ago it heard them, by its own clock.
3. Watching the heartbeats for a few seconds: one that changes is alive.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from maskfleet.launch.supervise.job_files import Heartbeat, JobFolder
from maskfleet.launch.supervise.lost_hosts import HEARTBEAT_S, LOST_S
from maskfleet.system.machine import boot_clock, machine_id, process_start

WATCH_S = 2.5 * HEARTBEAT_S  # how long to watch a heartbeat for a change while another host is alive
POLL_S = 0.2


@dataclass(frozen=True, slots=True)
class HostView:
    """What is known of one host."""

    heartbeat: Heartbeat | None
    silent_s: float = math.inf  # since its last heartbeat, at least
    is_alive: bool = False
    has_process: bool = False  # whether its supervisor was seen running on the machine that asks


@dataclass(slots=True)
class Liveness:
    """Watches the heartbeats of a job; asked again, it remembers when it saw which of them change."""

    folder: JobFolder
    machine: Callable[[], str] = machine_id
    uptime: Callable[[], float] = boot_clock
    started: Callable[[int], int | None] = process_start
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep

    _first_seen: dict[int, tuple[Heartbeat, float]] = field(default_factory=dict, init=False)
    _changed_at: dict[int, float] = field(default_factory=dict, init=False)

    def views(self, count: int, *, is_over: bool = False) -> list[HostView]:
        """What is known of hosts 0 to `count` - 1; takes a few seconds if only watching can tell.

        If the run `is_over`, a host that is silent for a moment matters little, and is not watched for long.
        """
        while True:
            views = self._known_now(count)
            short = is_over or any(view is not None and view.is_alive for view in views.values())
            unknown = [index for index, view in views.items() if view is None]
            if all(self.clock() - self._first_seen[index][1] > (WATCH_S if short else LOST_S) for index in unknown):
                break
            self.sleep(POLL_S)
        return [view if view is not None else self._silent(index) for index, view in views.items()]

    def _known_now(self, count: int) -> dict[int, HostView | None]:
        heartbeats = {index: self.folder.heartbeat(index) for index in range(count)}
        views = {index: self._seen(index, heartbeat) for index, heartbeat in heartbeats.items()}
        known = [view for view in views.values() if view is not None]
        for index, view in views.items():
            if view is None:
                views[index] = _reported(index, heartbeats[index], known)
        return views

    def _seen(self, index: int, heartbeat: Heartbeat | None) -> HostView | None:
        """What this machine sees of a host by itself; None if it must be watched."""
        if heartbeat is None:
            return HostView(None)
        if heartbeat.is_last:
            return HostView(heartbeat, 0.0)
        if heartbeat.machine == self.machine():
            silent_s = max(0.0, self.uptime() - heartbeat.uptime_s)
            runs = heartbeat.started != 0 and self.started(heartbeat.pid) == heartbeat.started
            return HostView(heartbeat, silent_s, is_alive=runs and silent_s < LOST_S, has_process=runs)
        first, now = self._first_seen.setdefault(index, (heartbeat, self.clock()))[0], self.clock()
        if first != heartbeat:
            self._first_seen[index] = (heartbeat, now)
            self._changed_at[index] = now
        if index in self._changed_at:
            silent_s = now - self._changed_at[index]
            return HostView(heartbeat, silent_s, is_alive=silent_s < LOST_S)
        return None

    def _silent(self, index: int) -> HostView:
        heartbeat, since = self._first_seen[index]
        return HostView(heartbeat, self.clock() - since)


def _reported(index: int, heartbeat: Heartbeat | None, others: list[HostView]) -> HostView | None:
    """What other supervisors say about a host; None if they have not heard it yet, or said so too long ago."""
    alive = [(view.heartbeat, view.silent_s) for view in others if view.heartbeat is not None and view.is_alive]
    heard = [said.silent_s[index] + age_s for said, age_s in alive if index in said.silent_s]
    is_lost = any(index in said.lost for said, _ in alive) or any(
        view.heartbeat is not None and view.heartbeat.is_outcome and index in view.heartbeat.lost for view in others
    )
    silent_s = min(heard, default=math.inf)
    was_silent = bool(heard) and all(said.silent_s.get(index, math.inf) >= LOST_S for said, _ in alive)
    if is_lost or was_silent or silent_s < LOST_S:
        return HostView(heartbeat, silent_s, is_alive=not is_lost and silent_s < LOST_S)
    return None  # who cannot write, as to a read-only mount, has not said what it heard since
