"""Notices lost hosts: another host is lost when its heartbeat has not changed for too long, by our own clock.

While this host cannot write to the shared folder, nobody is declared lost: most likely nobody else can write either.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from maskfleet.launch.supervise.job_files import Job, JobFolder

HEARTBEAT_S = 2.0
LOST_S = 16.0  # eight missed heartbeats: a host that is only busy does not miss that many
GRACE_S = 90.0  # grace period for hosts that have not started yet


class HostMonitor:
    """Watches the heartbeats of the other hosts."""

    def __init__(self, folder: JobFolder, job: Job, index: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._folder, self._job, self._index, self._clock = folder, job, index, clock
        self._started_at = clock()
        # They may be old: only a change shows that a host is alive.
        self._heartbeats = {other: folder.heartbeat(other) for other in self.others()}
        self._changed_at: dict[int, float] = {}
        self._lost: set[int] = set()
        self.can_write = True  # whether this host can write to the shared folder
        self._blind_at = self._started_at

    def others(self) -> list[int]:
        return [index for index in range(len(self._job.hosts)) if index != self._index]

    def poll(self) -> tuple[list[int], list[int]]:
        """Read all heartbeats; returns the hosts that were lost and those that came back since the last poll."""
        now = self._clock()
        if not self.can_write:
            self._blind_at = now
        lost, back = [], []
        for other in self.others():
            heartbeat = self._folder.heartbeat(other)
            if heartbeat is not None and heartbeat != self._heartbeats[other]:  # None: damaged, or not started
                self._heartbeats[other] = heartbeat
                self._changed_at[other] = now
                if other in self._lost:
                    self._lost.discard(other)
                    back.append(other)
            limit = LOST_S if other in self._changed_at else GRACE_S
            silent_since = max(self._changed_at.get(other, self._started_at), self._blind_at)
            if other not in self._lost and now - silent_since > limit:
                self._lost.add(other)
                lost.append(other)
        return lost, back

    def is_lost(self, index: int) -> bool:
        return index in self._lost

    def lost(self) -> list[int]:
        return sorted(self._lost)

    def lost_addresses(self) -> frozenset[str]:
        return frozenset(self._job.hosts[index].address for index in self.lost())

    def hears_others(self) -> bool:
        """Whether any other host has sent a heartbeat lately."""
        return any(self.silent_s(other) < LOST_S for other in self._changed_at)

    def silent_s(self, index: int) -> float:
        """Seconds since the last heartbeat."""
        return self._clock() - self._changed_at.get(index, self._started_at)

    def heard(self) -> dict[int, float]:
        """Seconds since the last heartbeat of each host that has sent one since this monitor started."""
        return {other: round(self.silent_s(other), 1) for other in tuple(self._changed_at)}

    def alive(self) -> list[int]:
        """This host and all others that are not lost, in order."""
        return [index for index in range(len(self._job.hosts)) if index == self._index or index not in self._lost]
