"""Samples of memory, clocks and power while a run works."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from machine import gpu_query, gpu_values

MIB = 2**20
Sample = tuple[float, float]  # seconds since 1970, value


@dataclass(frozen=True, slots=True)
class ProcessMemory:
    """One process of the machine, as /proc shows it."""

    pid: int
    parent: int
    session: int
    rss_mib: float
    private_mib: float  # resident, and not shared with files or other processes


@dataclass(slots=True)
class HostSamples:
    """Memory of a process, which leads a session, and of everything that it started; call `take` now and then.

    `rss_mib` counts a shared page once for each process that has it.
    """

    pid: int
    values: dict[str, list[Sample]] = field(default_factory=dict)

    def take(self) -> None:
        now = time.time()
        own = family(all_processes(), self.pid)
        used = {
            "processes": float(len(own)),
            "rss_mib": sum(one.rss_mib for one in own),
            "private_mib": sum(one.private_mib for one in own),
            "machine_used_mib": machine_used_mib(),
        }
        for name, value in used.items():
            self.values.setdefault(name, []).append((now, value))


class GpuSamples:
    """What nvidia-smi says every `every_s` seconds, in the background; without a GPU there are no samples."""

    def __init__(self, every_s: float) -> None:
        self.values: dict[str, list[Sample]] = {}
        self._process: subprocess.Popen[str] | None = None
        try:
            self._process = subprocess.Popen(
                gpu_query(f"--loop-ms={round(1e3 * every_s)}"),
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
        except FileNotFoundError:
            return
        self._reader = threading.Thread(target=self._read, name="gpu-samples", daemon=True)
        self._reader.start()

    def close(self) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait()
            self._reader.join()

    def _read(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        for line in self._process.stdout:
            now = time.time()
            for name, value in gpu_values(line).items():
                self.values.setdefault(name, []).append((now, value))


def family(processes: list[ProcessMemory], pid: int) -> list[ProcessMemory]:
    """`pid`, the processes of its session, and all that descend from one of them."""
    known = {one.pid for one in processes if one.pid == pid or one.session == pid}
    while more := {one.pid for one in processes if one.parent in known} - known:
        known |= more
    return [one for one in processes if one.pid in known]


def all_processes() -> list[ProcessMemory]:
    """The processes of this machine that have not ended while they were listed."""
    page_mib = os.sysconf("SC_PAGE_SIZE") / MIB
    found = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        with suppress(FileNotFoundError, ProcessLookupError):  # it has ended
            # The name, in parentheses, may contain anything.
            _, parent, _, session, *_ = (folder / "stat").read_text().rpartition(")")[2].split()
            _, resident, shared, *_ = (int(part) for part in (folder / "statm").read_text().split())
            sizes_mib = (resident * page_mib, (resident - shared) * page_mib)
            found.append(ProcessMemory(int(folder.name), int(parent), int(session), *sizes_mib))
    return found


def machine_used_mib() -> float:
    """Memory of the machine that is in use and not a cache of files."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    kib = {name: int(rest.split()[0]) for name, rest in (line.split(":", 1) for line in lines)}
    return (kib["MemTotal"] - kib["MemAvailable"]) / 1024
