"""Faults for a run on three hosts: what each does, how it ends, and what `status` may say of the host meanwhile."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from cluster import Cluster
from maskfleet.launch.supervise.job_files import JobFolder

COMPILER = "/usr/bin/cc"
ALIVE = frozenset({"not started", "starting", "running", "waiting", "done"})
GONE = frozenset({"lost", "not started"})
SLOW_DISK = Path(__file__).with_name("slow_disk.py")


@dataclass
class Target:
    """A run, and the host of it that a fault concerns (1 is the first)."""

    cluster: Cluster
    folder: JobFolder
    host: int

    def inside(self, *argv: str) -> None:
        done = self.cluster.inside(self.host, *argv)
        assert done.returncode == 0, (argv, done.stderr)

    def signal(self, number: signal.Signals, *, ranks: bool = True, supervisor: bool = True) -> None:
        """Send a signal to the processes of the run on the host."""
        for pid in self.processes():
            arguments = _command(pid)
            is_supervisor = "maskfleet.launch.supervise.supervisor" in arguments
            is_rank = "train" in arguments and "maskfleet" in arguments
            if (is_supervisor and supervisor) or (is_rank and ranks):
                os.kill(pid, number)

    def processes(self) -> list[int]:
        """All processes of the host, by the numbers they have outside of it."""
        listed = subprocess.run(
            ["ip", "netns", "pids", self.cluster.namespace(self.host)], capture_output=True, text=True, check=True
        )
        return [int(pid) for pid in listed.stdout.split()]


def _command(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except FileNotFoundError:
        return []


def _nothing(target: Target) -> None:
    """For a fault that needs no preparation, or that the run itself repairs."""


@dataclass(frozen=True)
class Fault:
    """One kind of fault."""

    name: str
    what: str  # for the table in the documentation
    begin: Callable[[Target], None]
    hold_s: float = 0.0
    end: Callable[[Target], None] = _nothing
    prepare: Callable[[Target], None] = _nothing  # before the run is launched
    clean_up: Callable[[Target], None] = _nothing  # after the run
    on_leader: bool = False
    states: frozenset[str] = ALIVE | GONE  # of the host while the fault lasts, once it was noticed
    others: frozenset[str] = ALIVE  # states of the other hosts
    needs: str = ""  # a file without which it cannot be tried

    @property
    def is_none(self) -> bool:
        return self.begin is _nothing


def _stop_all(target: Target, number: signal.Signals) -> None:
    for pid in target.processes():
        os.kill(pid, number)


def _read_only(target: Target) -> None:
    shared = str(target.cluster.shared)
    target.inside("mount", "--bind", shared, shared)
    target.inside("mount", "-o", "remount,bind,ro", shared)


def _fill(target: Target) -> None:
    filler = target.cluster.folder / "filler"
    with filler.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(b"x" * 65536)
        except OSError:
            return


def _fake_clock(target: Target) -> None:
    home = target.cluster.home_of(target.host)
    source = str(Path(__file__).with_name("step_clock.c"))
    subprocess.run([COMPILER, "-shared", "-fPIC", "-o", str(home / "step_clock.so"), source, "-ldl"], check=True)
    (home / "clock").write_text("+0\n")
    (home / "before").write_text((home / ".ssh" / "environment").read_text())
    with (home / ".ssh" / "environment").open("a") as file:
        file.write(f"LD_PRELOAD={home}/step_clock.so\nCLOCK_STEP_FILE={home}/clock\n")


def _real_clock(target: Target) -> None:
    home = target.cluster.home_of(target.host)
    (home / ".ssh" / "environment").write_text((home / "before").read_text())


def _step_clock(seconds: int) -> Callable[[Target], None]:
    def step(target: Target) -> None:
        (target.cluster.home_of(target.host) / "clock").write_text(f"{seconds:+d}\n")

    return step


def _mount_slow_disk(target: Target) -> None:
    folder, shared = target.cluster.folder, str(target.cluster.shared)
    (folder / "under").mkdir(exist_ok=True)
    (folder / "delay").write_text("0\n")
    target.inside("mount", "--bind", shared, str(folder / "under"))
    script = '/usr/bin/python3 "$@" >/dev/null 2>&1 </dev/null & while ! mountpoint -q "$3"; do sleep 0.1; done'
    target.inside("sh", "-c", script, "sh", str(SLOW_DISK), str(folder / "under"), shared, str(folder / "delay"))


def _delay(seconds: float) -> Callable[[Target], None]:
    return lambda target: (target.cluster.folder / "delay").write_text(f"{seconds}\n") and None


def _unmount(target: Target) -> None:
    target.inside("umount", "--lazy", str(target.cluster.shared))


def _boot(target: Target) -> None:
    target.cluster.start_host(target.host)


FAULTS = (
    Fault("nothing", "nothing fails", _nothing, states=ALIVE),
    Fault(
        "rank killed",
        "one rank is killed (SIGKILL)",
        lambda target: target.signal(signal.SIGKILL, supervisor=False),
        states=ALIVE,
    ),
    Fault(
        "supervisor killed",
        "the supervisor of a host is killed",
        lambda target: target.signal(signal.SIGKILL, ranks=False),
    ),
    Fault(
        "leader killed",
        "the supervisor of the leading host is killed",
        lambda target: target.signal(signal.SIGKILL, ranks=False),
        on_leader=True,
    ),
    Fault(
        "power failure",
        "a host loses its power, and boots again after 40 s",
        lambda target: target.cluster.cut_host(target.host),
        40,
        _boot,
        states=GONE,
    ),
    Fault(
        "power failure of the leader",
        "the leading host loses its power, and boots again after 40 s",
        lambda target: target.cluster.cut_host(target.host),
        40,
        _boot,
        on_leader=True,
        states=GONE,
    ),
    Fault(
        "partition",
        "a host has no network for 60 s",
        lambda target: target.cluster.unplug(target.host),
        60,
        lambda target: target.cluster.plug(target.host),
        states=GONE,
    ),
    Fault(
        "host stopped",
        "all processes of a host are stopped for 60 s (SIGSTOP)",
        lambda target: _stop_all(target, signal.SIGSTOP),
        60,
        lambda target: _stop_all(target, signal.SIGCONT),
        states=GONE | {"silent"},  # who asks on the same machine sees that its supervisor exists
    ),
    Fault(
        "read-only",
        "the shared folder is read-only on one host for 40 s",
        _read_only,
        40,
        _unmount,
        states=GONE | {"silent"},
    ),
    Fault(
        "full disk",
        "the disk of the shared folder is full for 40 s",
        _fill,
        40,
        lambda target: (target.cluster.folder / "filler").unlink(),
        states=ALIVE | GONE | {"silent"},
        others=ALIVE | GONE | {"silent"},
    ),
    Fault(
        "slow disk",
        "every operation on the shared folder takes 3 s on one host, for 40 s (FUSE)",
        _delay(3),
        40,
        _delay(0),
        prepare=_mount_slow_disk,
        clean_up=_unmount,
        needs="/usr/lib/python3/dist-packages/fusepy.py",
    ),
    Fault(
        "clock ahead",
        "the clock of a host steps 300 s forward",
        _step_clock(300),
        40,
        prepare=_fake_clock,
        clean_up=_real_clock,
        states=ALIVE,
        needs=COMPILER,
    ),
    Fault(
        "clock behind",
        "the clock of a host steps 300 s back",
        _step_clock(-300),
        40,
        prepare=_fake_clock,
        clean_up=_real_clock,
        states=ALIVE,
        needs=COMPILER,
    ),
)


def leader_of(folder: JobFolder) -> int:
    """The leading host (1 is the first)."""
    deadline = time.monotonic() + 60
    while (endpoint := folder.endpoint()) is None:
        assert time.monotonic() < deadline, "there is no leader"
        time.sleep(0.2)
    return endpoint.host + 1
