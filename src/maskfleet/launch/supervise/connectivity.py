"""The way to the other hosts: whether this one is cut off from all of them, and starting their supervisors over SSH.

Where the hosts know a program that lists those there are, as on our EC2 clusters, a new one takes the place of a lost
one: its supervisor is started there with the number of the lost host, and job.json gets its address.

A host can lose its network and still see the shared folder.
"""

from __future__ import annotations

import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace

from maskfleet.errors import LaunchError, MaskfleetError
from maskfleet.launch.address import address_parts, bare_address
from maskfleet.launch.supervise.job_files import Host, Job, JobFolder, event_line
from maskfleet.launch.supervise.state.kept_lines import KeptLines
from maskfleet.system.lock import locked
from maskfleet.system.process import Running, capture, remote_line, start

PROBE_S = 3.0
CUT_S = 12.0
SSH_PORT = 22
RETRY_S = 10.0  # between attempts to reach a lost host
LISTING_S = 30.0  # for the program that lists the hosts, which reads a shared folder


class Connectivity:
    """Probes the SSH port of the other hosts; a host that never answered says nothing about the network."""

    def __init__(
        self,
        folder: JobFolder,
        job: Job,
        index: int,
        *,
        hears_others: Callable[[], bool] = lambda: True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._folder, self._job, self._index, self._clock = folder, job, index, clock
        self._hears_others = hears_others
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
            others = [host for host in range(len(self._job.hosts)) if host != self._index and not self._has_left(host)]
            # A host that all others have left is not cut off from them.
            known = not others or any(self._answers(host) for host in others)
            self.record(known or self._new_host_answers() or self._is_the_last())
            time.sleep(PROBE_S)

    def _has_left(self, host: int) -> bool:
        heartbeat = self._folder.heartbeat(host)
        return heartbeat is not None and heartbeat.is_last

    def _answers(self, host: int) -> bool:
        heartbeat = self._folder.heartbeat(host)
        _, name, port = address_parts(self._job.hosts[host].address)
        return _is_up(heartbeat.address if heartbeat else name, port or SSH_PORT)

    def _new_host_answers(self) -> bool:
        """Whether a host answers that may take the place of a lost one; of two hosts it is the only other one left."""
        if not self._job.hosts_command:
            return False
        try:
            listed = _listed_hosts(self._job.hosts_command)
        except MaskfleetError:  # the program is missing, or its folder does not answer
            return False
        own = {bare_address(host.address) for host in self._job.hosts}
        return any(_is_up(one.address, SSH_PORT) for one in listed if one.address not in own)

    def _is_the_last(self) -> bool:
        """Whether the others are dead, not this host cut off: they write no heartbeats, and a third party answers."""
        if self._job.scheduler is None or self._hears_others():
            return False
        address, port = (os.environ.get(f"KUBERNETES_SERVICE_{name}", "") for name in ("HOST", "PORT"))
        return bool(address and port.isdigit()) and _is_up(address, int(port))


def _is_up(address: str, port: int) -> bool:
    try:
        with socket.create_connection((address, port), timeout=1):
            return True
    except ConnectionRefusedError:
        return True  # a host that refuses the connection is up
    except OSError:
        return False


class HostStarter:
    """Starts the supervisors of lost hosts over SSH, as soon as the hosts are reachable."""

    def __init__(self, folder: JobFolder, job: Job) -> None:
        self._folder, self._job = folder, job
        self._attempts: dict[int, tuple[Running, float]] = {}

    def start_all(self, hosts: Iterable[int]) -> None:
        """Try to start the supervisor of each of `hosts`."""
        for host in hosts:
            self.start(host)

    def start(self, host: int) -> None:
        """Try to start the supervisor of `host`, unless the last attempt is recent; does not wait for the answer."""
        if self._job.scheduler is not None:
            return  # which starts it
        attempt = self._attempts.get(host)
        if attempt is not None and time.monotonic() - attempt[1] < RETRY_S:
            return
        if attempt is not None:
            attempt[0].kill()
        if self._job.hosts_command:  # it may take a while to answer
            argv = ["sh", str(self._folder.path / "remote"), "restart", str(host)]
        else:
            argv = start_command(self._folder, self._job, host)
        try:
            self._attempts[host] = (start(argv), time.monotonic())
        except MaskfleetError:
            return  # without an ssh client only the launching machine can restart hosts

    def close(self) -> None:
        """Give up attempts that are under way."""
        for attempt, _ in self._attempts.values():
            attempt.kill()


def start_command(folder: JobFolder, job: Job, host: int) -> list[str]:
    """The command that starts the supervisor of `host` over SSH."""
    argv = ["ssh", "-oBatchMode=yes", "-oConnectTimeout=5", "-oServerAliveInterval=3"]
    line = remote_line(["sh", str(folder.path / "remote"), "start", str(host)])
    return [*argv, *ssh_target(job.hosts[host].address), line]


def restart_lost_host(folder: JobFolder, host: int) -> int:
    """Start the supervisor of a lost host, or of a new host in its place; returns the exit code of ssh."""
    with locked(folder.path / "hosts.lock", "replacing a lost host", wait_s=LISTING_S):
        job = folder.job()
        new = replacement_for(job, host, _listed_hosts(job.hosts_command))
        if new is not None:
            old, job = job.hosts[host], replace(job, hosts=(*job.hosts[:host], new, *job.hosts[host + 1 :]))
            folder.write_job(job)
            what = f"host {host} ({old.address}) is replaced by {new.address}"
            KeptLines(folder.host(host) / "events.jsonl", durable=True).add(event_line(what))
    return capture(start_command(folder, job, host), timeout_s=60).code


def replacement_for(job: Job, host: int, listed: Sequence[Host]) -> Host | None:
    """The new host that takes the place of a lost one: as many slots, and in no other place; None for none.

    A host that is still listed may come back, as after a reboot, and keeps its place.
    """
    taken = {bare_address(one.address) for one in job.hosts}
    user, own, port = address_parts(job.hosts[host].address)
    if own in {one.address for one in listed}:
        return None
    free = [one for one in listed if one.address not in taken and one.slots == job.hosts[host].slots]
    if not free:
        return None
    return Host(f"{user}@{free[0].address}" if user else free[0].address, free[0].slots) if not port else None


def _listed_hosts(command: str) -> list[Host]:
    """What the program `command` prints: one `ADDRESS slots=N` a line; other lines are ignored."""
    done = capture([command], timeout_s=LISTING_S)
    rows = [re.fullmatch(r"(\S+) slots=([0-9]{1,4})", line.strip()) for line in done.out.splitlines()]
    found = []
    for row in rows if done.code == 0 else ():
        with suppress(LaunchError):  # it is not an address
            if row is not None and address_parts(row[1])[1] == row[1]:
                found.append(Host(row[1], int(row[2])))
    return found


def ssh_target(address: str) -> list[str]:
    """`user@host:port` as arguments of ssh; a host name cannot be read as an option."""
    user, host, port = address_parts(address)
    return [*(["-p", str(port)] if port else []), "--", f"{user}@{host}" if user else host]
