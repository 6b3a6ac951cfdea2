"""Which other hosts of a job are alive, judged by their beats as they change before this host's own clock."""

from __future__ import annotations

import time
from collections.abc import Callable

from maskfleet.launch.supervise.job_files import Beat, Job, JobFolder

BEAT_S = 2.0
LOST_S = 16.0  # eight beats missed: a host that is only busy does not miss so many
GRACE_S = 90.0  # for hosts that have still to begin


class Peers:
    """What this host saw of the others."""

    def __init__(self, folder: JobFolder, job: Job, index: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._folder, self._job, self._index, self._clock = folder, job, index, clock
        now = clock()
        self._began = now
        self._beats: dict[int, Beat | None] = {}
        self._changed: dict[int, float] = {}
        self._lost: set[int] = set()
        for other in self.others():
            self._beats[other] = folder.beat(other)  # may be of an earlier life: only a change is a sign of life

    def others(self) -> list[int]:
        return [index for index in range(len(self._job.hosts)) if index != self._index]

    def look(self) -> tuple[list[int], list[int]]:
        """Read all beats; the answer is who was lost and who came back since the last look."""
        now = self._clock()
        lost, back = [], []
        for other in self.others():
            beat = self._folder.beat(other)
            if beat != self._beats[other]:
                self._beats[other] = beat
                self._changed[other] = now
                if other in self._lost:
                    self._lost.discard(other)
                    back.append(other)
            limit = LOST_S if other in self._changed else GRACE_S
            if other not in self._lost and now - self._changed.get(other, self._began) > limit:
                self._lost.add(other)
                lost.append(other)
        return lost, back

    def is_lost(self, index: int) -> bool:
        return index in self._lost

    def lost(self) -> list[int]:
        return sorted(self._lost)

    def silent_s(self, index: int) -> float:
        """Seconds since the last sign of life."""
        return self._clock() - self._changed.get(index, self._began)

    def alive(self) -> list[int]:
        """This host and all that are not lost, in order."""
        return [index for index in range(len(self._job.hosts)) if index == self._index or index not in self._lost]
