"""Whether this host is cut off from all others: a host can lose its network and still see the shared folder."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable

from maskfleet.launch.supervise.commands import address_parts
from maskfleet.launch.supervise.job_files import Job, JobFolder

PROBE_S = 3.0
CUT_S = 12.0
SSH_PORT = 22


class Connectivity:
    """Probes the SSH port of the other hosts; a host that never answered says nothing about the network."""

    def __init__(self, folder: JobFolder, job: Job, index: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._folder, self._job, self._index, self._clock = folder, job, index, clock
        self._answered_at: float | None = None

    def start(self) -> None:
        """Probe in the background until the process exits."""
        if len(self._job.hosts) > 1:
            threading.Thread(target=self._probe_forever, daemon=True).start()

    def record(self, answered: bool) -> None:
        """Record whether any host answered the latest probe."""
        if answered:
            self._answered_at = self._clock()

    def is_cut_off(self, *, leads: bool) -> bool:
        """Whether no host has answered for CUT_S; with two hosts, either may be cut off, so the leader continues."""
        if self._answered_at is None or (leads and len(self._job.hosts) == 2):
            return False
        return self._clock() - self._answered_at > CUT_S

    def _probe_forever(self) -> None:
        while True:
            self.record(any(self._answers(host) for host in range(len(self._job.hosts)) if host != self._index))
            time.sleep(PROBE_S)

    def _answers(self, host: int) -> bool:
        heartbeat = self._folder.heartbeat(host)
        _, name, port = address_parts(self._job.hosts[host].address)
        try:
            with socket.create_connection((heartbeat.address if heartbeat else name, port or SSH_PORT), timeout=1):
                return True
        except ConnectionRefusedError:
            return True  # a host that refuses the connection is up
        except OSError:
            return False
