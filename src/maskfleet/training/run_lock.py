"""A run directory is for one run at a time, on whichever machine it is trained."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from maskfleet.config.load import write_run_file
from maskfleet.config.run import RunConfig
from maskfleet.errors import ConfigError
from maskfleet.log import logger
from maskfleet.training.distributed import Ranks

NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK)


@contextmanager
def claimed(run_dir: Path, config: RunConfig, ranks: Ranks, *, wait_s: float = 0) -> Iterator[None]:
    """Inside the block `run_dir` is this run's alone; what goes wrong goes wrong on every rank.

    A file server gives the lock of a machine that died away after a minute or two: `wait_s` is for that.
    """
    # A lock by the mere existence of a file, which filelock would fall back to, outlives a killed process for ever.
    lock = FileLock(run_dir / ".lock", fallback_to_soft=False)
    failure = _failure(lock, run_dir, config, wait_s) if ranks.worker.is_chief else None
    failure = ranks.broadcast(failure)
    try:
        if failure is not None:
            raise ConfigError(failure[0], remedy=failure[1])
        yield
    finally:
        lock.release()


def _failure(lock: FileLock, run_dir: Path, config: RunConfig, wait_s: float) -> tuple[str, str] | None:
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        _acquire(lock, run_dir, wait_s)
        write_run_file(run_dir, config)
    except Timeout:
        return f"another process is training in {run_dir}", "wait for it, stop it, or use another run directory"
    except ConfigError as error:
        return error.what, error.remedy
    except OSError as error:
        return f"cannot write to {run_dir}: {error.strerror}", "choose a run directory that you may write to"
    return None


def _acquire(lock: FileLock, run_dir: Path, wait_s: float) -> None:
    try:
        lock.acquire(timeout=0)
    except Timeout:
        if not wait_s:
            raise
        logger.warning("another process is training in %s: its end is waited for up to %.0f s", run_dir, wait_s)
        lock.acquire(timeout=wait_s)
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        logger.warning("%s is on a file system without locks: see to it that nothing else trains there", run_dir)
