"""Whether this host still reaches any other one: a host whose network is gone may well keep its disks."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable

from maskfleet.launch.supervise.commands import bare_address
from maskfleet.launch.supervise.job_files import Job, JobFolder

PROBE_S = 3.0
CUT_S = 12.0
SSH_PORT = 22


class Reach:
    """Tries the SSH port of the others now and then; only an answer that was there before can be missed."""

    def __init__(self, folder: JobFolder, job: Job, index: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._folder, self._job, self._index, self._clock = folder, job, index, clock
        self._answered_at: float | None = None

    def watch(self) -> None:
        """Probe in the background for as long as the process lives."""
        if len(self._job.hosts) > 1:
            threading.Thread(target=self._probe_forever, daemon=True).start()

    def note(self, answered: bool) -> None:
        """Whether any host answered just now."""
        if answered:
            self._answered_at = self._clock()

    def is_cut_off(self, *, leads: bool) -> bool:
        """Whether no host has answered for long; of two hosts the leading one goes on, as either may be cut off."""
        if self._answered_at is None or (leads and len(self._job.hosts) == 2):
            return False
        return self._clock() - self._answered_at > CUT_S

    def _probe_forever(self) -> None:
        while True:
            self.note(any(self._answers(host) for host in range(len(self._job.hosts)) if host != self._index))
            time.sleep(PROBE_S)

    def _answers(self, host: int) -> bool:
        beat = self._folder.beat(host)
        port = self._job.hosts[host].address.rpartition(":")[2]
        address = beat.address if beat is not None else bare_address(self._job.hosts[host].address)
        try:
            with socket.create_connection((address, int(port) if port.isdigit() else SSH_PORT), timeout=1):
                return True
        except ConnectionRefusedError:
            return True  # somebody was there to refuse
        except OSError:
            return False
