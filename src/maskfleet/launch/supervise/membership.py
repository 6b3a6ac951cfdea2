"""Which host leads a job, which hosts take part in a generation, and how their ranks ended.

RUN_DIR/launch/host-0/ranks-3/exit.json    how the ranks of the first host ended in generation 3
RUN_DIR/launch/host-0/ranks-3/store/       where the ranks of generation 3 meet if they share a host; private
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from maskfleet.launch.supervise.job_files import Endpoint, Job, JobFolder, stamp
from maskfleet.launch.supervise.lost_hosts import HostMonitor
from maskfleet.system.files import write_atomically

EXIT_FILE = "exit.json"
RETRY_WRITE_S = 1.0
LEFT = "left"  # state of a supervisor that has stopped, as when its machine shuts down


@dataclass(frozen=True, slots=True)
class Exit:
    """How the ranks of one host ended."""

    code: int
    rank: int | None  # the first that failed; None if none did, or mpirun ran them
    time: float


@dataclass(frozen=True, slots=True)
class Interruption:
    """Why the ranks of this host must stop: their grace period, and what follows."""

    grace_s: float
    regroup: Literal["before", "after"] | None = None  # begin the next generation before or after they stop
    code: int | None = None  # with which the ranks of another host failed


@dataclass(frozen=True, slots=True)
class Hosts:
    """The hosts of a job as the supervisor of host `index` sees them."""

    folder: JobFolder
    job: Job
    monitor: HostMonitor
    index: int
    address: str

    def named(self, host: int) -> str:
        """`host 1 (node2)`, for events."""
        job = self.folder.known_job() or self.job  # a new host may have taken its place
        return f"host {host} ({job.hosts[host].address})"

    def reachable(self) -> dict[int, str]:
        """Addresses of this host, first, and of all others that have started, are not lost and have not left."""
        found = {self.index: self.address}
        for host in self.monitor.others():
            heartbeat = self.folder.heartbeat(host)
            if heartbeat is not None and not self.monitor.is_lost(host) and heartbeat.state != LEFT:
                found[host] = heartbeat.address
        return found

    def are_complete(self) -> bool:
        """Whether there are enough hosts, and none that is not lost has still to start."""
        reachable = self.reachable()
        absent = [host for host in self.present() if host not in reachable]
        return not absent and len(reachable) >= self.job.min_nodes

    def have_ended(self, members: Iterable[int], generation: int) -> bool:
        """Whether the ranks of all `members` have ended, or their hosts are lost."""
        ended = exits(self.folder, members, generation)
        return all(host in ended or self.monitor.is_lost(host) for host in members)

    def present(self) -> list[int]:
        """This host and all others that are neither lost nor have left, in order."""
        return [host for host in self.monitor.alive() if host == self.index or not self._has_left(host)]

    def is_gone(self, host: int) -> bool:
        """Whether another host is lost or has left."""
        return host not in self.present()

    def _has_left(self, host: int) -> bool:
        heartbeat = self.folder.heartbeat(host)
        return heartbeat is not None and heartbeat.state == LEFT


class Leadership:
    """Which host leads the job, and in which generation, as the supervisor of one host sees it."""

    def __init__(self, hosts: Hosts, *, log: Callable[[str], None], give_up: Callable[[], bool]) -> None:
        self._hosts, self._log, self._give_up = hosts, log, give_up
        self.generation = 0

    def is_settled(self) -> bool:
        """Whether there is a leader: the previous one or, if that one is lost or has left, the first host present."""
        known, index = self._hosts.folder.endpoint(), self._hosts.index
        if known is not None and not self._hosts.is_gone(known.host):
            self.generation = known.generation
            return True
        if self._hosts.present()[0] != index:
            return False
        if known is not None:
            self._log(f"host {index} is the new leader, instead of host {known.host}")
        self.generation = known.generation + 1 if known is not None else 0
        self.begin(self.generation)
        return True

    def begin(self, generation: int, port: int = 0, members: Sequence[int] = ()) -> None:
        """As the leader, begin a generation; its members follow as soon as they are known."""
        endpoint = Endpoint(generation, self._hosts.index, self._hosts.address, port, list(members))

        def write() -> None:
            known = self._hosts.folder.endpoint()
            if known is None or known.host == endpoint.host or known.generation < generation:
                self._hosts.folder.write_endpoint(endpoint)
            # else another host took over while this one could not write

        persistently(write, give_up=self._give_up)

    def is_own(self) -> bool:
        """Whether this host leads."""
        known = self._hosts.folder.endpoint()
        return (known.host if known is not None else 0) == self._hosts.index

    def is_superseded(self) -> bool:
        """Whether the leader is lost, has left, or has begun another generation."""
        known = self._hosts.folder.endpoint()
        if known is None:
            return self._hosts.is_gone(0)
        return self._hosts.is_gone(known.host) or known.generation != self.generation


def ranks_folder(folder: JobFolder, host: int, generation: int) -> Path:
    """The folder of a host's ranks in a generation."""
    return folder.host(host) / f"ranks-{generation}"


def store_folder(folder: JobFolder, host: int, generation: int) -> Path:
    """The private folder where the ranks of a generation meet if they share `host`."""
    return ranks_folder(folder, host, generation) / "store"


def write_exit(folder: JobFolder, host: int, generation: int, end: Exit) -> None:
    """Record how the ranks of a host ended; the leader reads it."""
    own = ranks_folder(folder, host, generation)
    own.mkdir(exist_ok=True)  # not its parents: the run may have been deleted
    write_atomically(own / EXIT_FILE, json.dumps(asdict(end)))


def exits(folder: JobFolder, hosts: Iterable[int], generation: int) -> dict[int, Exit]:
    """How the ranks of each of `hosts` ended, without hosts where they still run."""
    found = {}
    for host in hosts:
        end = folder.read(ranks_folder(folder, host, generation) / EXIT_FILE, Exit)
        if end is not None:
            found[host] = end
    return found


def first_failure(ends: dict[int, Exit]) -> tuple[int, Exit] | None:
    """The host whose ranks failed first, and how; a kill counts before errors that may only report it."""
    failed = [(host, end) for host, end in ends.items() if end.code != 0]
    return min(failed, key=lambda one: (one[1].code <= 128, one[1].time), default=None)


def remove_exits(folder: JobFolder) -> None:
    """Forget how ranks ended before the job was launched again: generations count from 0 each time."""
    for stale in folder.path.glob(f"host-*/ranks-*/{EXIT_FILE}"):
        stale.unlink(missing_ok=True)


def persistently(write: Callable[[], object], *, give_up: Callable[[], bool]) -> None:
    """Write to the shared folder, again and again while it is full or read-only: without it there is no run."""
    said = ""
    while True:
        try:
            write()
            return
        except FileNotFoundError:
            raise  # the run directory was deleted
        except OSError as error:
            if give_up():
                return
            if str(error) != said:
                said = str(error)
                with suppress(OSError):  # supervisor.log may be on the same disk
                    print(f"{stamp()} will try again: {said}", file=sys.stderr, flush=True)
            time.sleep(RETRY_WRITE_S)
