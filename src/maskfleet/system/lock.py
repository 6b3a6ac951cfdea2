"""One lock between processes, on this host and on others that share the file system.

The operating system releases it when its process ends, however it ends. A lock that is a mere file, which filelock
falls back to where a file system has no locks, would outlive a killed process, so it is never used. On a file system
without locks, `locked` raises NoLocksError, and the caller decides:

- training warns and continues: one process per run directory is the normal case
- building an annotation store continues: the store appears by an atomic rename, building it twice only costs time
- staging, supervisors and `maskfleet infra` refuse: two of them would damage each other's files

A file server releases the locks of a host that died only after a minute or two; `wait_s` covers that.
"""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from maskfleet.errors import MaskfleetError

_NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK)


class LockHeldError(MaskfleetError):
    """Another process holds the lock."""


class NoLocksError(MaskfleetError):
    """The file system has no locks."""


@contextmanager
def locked(path: Path, use: str, *, wait_s: float = 0) -> Iterator[None]:
    """Hold the lock file `path` inside the block; LockHeldError if another process still holds it after `wait_s`.

    `use` completes "another process is …", such as "training in runs/a". The lock file stays and names its last holder.
    """
    from filelock import FileLock, Timeout  # here, because few commands need it and importing it takes 40 ms

    lock = FileLock(path, fallback_to_soft=False)
    try:
        lock.acquire(timeout=wait_s)
    except Timeout:
        raise LockHeldError(
            f"another process is {use} ({_holder(path)})",
            remedy="wait until it finishes, or stop it; then run the same command again",
        ) from None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        raise NoLocksError(
            f"{path.parent} is on a file system without locks ({error.strerror}), so two processes could be {use}",
            remedy="mount it with locks, Lustre with the option flock (deploy/helm/storage does), or use another one",
        ) from error
    try:
        with suppress(OSError):  # the name of the holder is only for messages, and a full disk must not stop anybody
            path.write_text(f"process {os.getpid()} on {socket.gethostname()}\n", encoding="utf-8")
        yield
    finally:
        lock.release()


@contextmanager
def briefly_locked(path: Path) -> Iterator[BinaryIO]:
    """The file `path`, created if needed, open to read and write while no other thread or process has it so.

    For what takes microseconds: it waits without a limit and names no holder.
    """
    import fcntl  # here, because Windows has none

    with os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o666), "r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # released when the file is closed, also by the end of the process
        yield file


def is_held_here(path: Path) -> bool:
    """Whether a process of this machine holds the lock file `path`; looking does not touch the lock.

    The kernel lists locks by inode. On a file system whose files are known by other numbers there, and for a lock that
    another machine holds, the answer is False.
    """
    try:
        found, table = path.stat(), Path("/proc/locks").read_text(encoding="ascii")
    except OSError:
        return False
    device = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}:{found.st_ino}"
    return any(device in line.split() for line in table.splitlines() if "->" not in line)  # that one only waits


def _holder(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip() or "it did not write its name"
    except OSError as error:
        return f"its name cannot be read: {error.strerror}"
