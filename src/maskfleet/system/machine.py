"""Which machine this is, what its kernel says of GPUs, and clocks and processes that clock changes do not disturb."""

from __future__ import annotations

import functools
import os
import re
import socket
import time
from pathlib import Path

_XID = re.compile(r"^\d+,\d+,(?P<us>\d+),[^;\n]*;(?P<text>NVRM: Xid.*)$", re.MULTILINE)  # in a record of /dev/kmsg
_NAMESPACES = ("pid", "time")  # processes and boot clocks of different namespaces cannot be compared


@functools.cache
def machine_id() -> str:
    """The same for all processes that see each other's ids and share a boot clock; another one after a reboot."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    inside = [str((Path("/proc/self/ns") / name).readlink()) for name in _NAMESPACES if _has_namespace(name)]
    return " ".join([boot, *inside])


def installation_id() -> str:
    """The same after a reboot, another one on every machine, also where they share a home directory."""
    try:
        installed = Path("/etc/machine-id").read_text(encoding="ascii").strip()
    except OSError:
        installed = ""
    return f"{installed}:{socket.gethostname()}"


def file_system_of(path: Path, mounts: Path = Path("/proc/self/mountinfo")) -> str:
    """The kind of file system that `path` is on: ext4, nfs4, lustre; empty if the kernel does not tell."""
    try:
        lines = mounts.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return ""
    inside, longest, found = path.resolve(), -1, ""
    for line in lines:
        fields = line.split(" ")
        point = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), fields[4])  # a space is written as \040
        if inside.is_relative_to(point) and len(point) >= longest:  # a later mount covers an earlier one
            longest, found = len(point), fields[fields.index("-") + 1]
    return found


def boot_clock() -> float:
    """Seconds since this machine booted, with the time it was suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def process_start(pid: int) -> int | None:
    """When the process started, in ticks since boot; None if it has exited. Ids are used again, with another start."""
    try:
        fields = (Path("/proc") / str(pid) / "stat").read_text(encoding="utf-8", errors="replace").rsplit(")", 1)[1]
    except (FileNotFoundError, ProcessLookupError):
        return None
    state, *others = fields.split()
    return None if state in "ZX" else int(others[18])


def _has_namespace(name: str) -> bool:
    return (Path("/proc/self/ns") / name).is_symlink()


def gpu_errors(recent_s: float = 600.0, log: Path = Path("/dev/kmsg")) -> list[str]:
    """What NVIDIA's driver reported to the kernel lately, oldest first; none without permission to read the log."""
    since_us = (time.clock_gettime(time.CLOCK_MONOTONIC) - recent_s) * 1e6
    try:
        descriptor = os.open(log, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return []
    try:
        text = "".join(iter(lambda: _kernel_records(descriptor), ""))
    finally:
        os.close(descriptor)
    return [match["text"] for match in _XID.finditer(text) if int(match["us"]) >= since_us]


def _kernel_records(descriptor: int) -> str:
    """The next records of the kernel's log; empty at its end."""
    while True:
        try:
            return os.read(descriptor, 8192).decode(errors="replace")
        except BrokenPipeError:
            continue  # the oldest records were overwritten: the next read gives the oldest that is left
        except OSError:
            return ""
