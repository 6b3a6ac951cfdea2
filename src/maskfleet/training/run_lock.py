"""A run directory is for one run at a time, on whichever machine it is trained."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from maskfleet.config.load import write_run_file
from maskfleet.config.run import RunConfig
from maskfleet.errors import ConfigError, MaskfleetError, TrainingError
from maskfleet.log import logger
from maskfleet.system.lock import LockHeldError, NoLocksError, locked
from maskfleet.training.distributed import Ranks

_REFUSED = (errno.EISDIR, errno.ENOTDIR, errno.EEXIST, errno.EACCES, errno.EPERM, errno.EROFS)


@contextmanager
def claimed(run_dir: Path, config: RunConfig, ranks: Ranks, *, wait_s: float = 0) -> Iterator[None]:
    """Hold the lock of `run_dir` inside the block; what fails on the chief raises on every rank.

    A file server releases the lock of a machine that died after a minute or two: `wait_s` is for that.
    """
    with ExitStack() as stack:
        failure = _failure(stack, run_dir, config, wait_s) if ranks.worker.is_chief else None
        failure = ranks.broadcast(failure)
        if failure is not None:
            raise ConfigError(failure[0], remedy=failure[1])
        yield


@contextmanager
def refused_paths() -> Iterator[None]:
    """Turn a path that cannot be used because of what is there into an error; others may pass, such as I/O errors."""
    try:
        yield
    except OSError as error:
        if error.errno not in _REFUSED or error.filename is None:
            raise
        raise TrainingError(
            f"cannot use {error.filename}: {error.strerror}",
            remedy="get access to it, or move away what is there, then start the same command again to continue",
        ) from error


def _failure(stack: ExitStack, run_dir: Path, config: RunConfig, wait_s: float) -> tuple[str, str] | None:
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        _lock(stack, run_dir, wait_s)
        write_run_file(run_dir, config)
    except MaskfleetError as error:
        return error.what, error.remedy
    except OSError as error:
        return f"cannot write to {run_dir}: {error.strerror}", "choose a run directory that you may write to"
    return None


def _lock(stack: ExitStack, run_dir: Path, wait_s: float) -> None:
    path, use = run_dir / ".lock", f"training in {run_dir}"
    try:
        stack.enter_context(locked(path, use))
    except LockHeldError as error:
        if not wait_s:
            raise
        logger.warning("%s: waiting up to %.0f s for it to finish", error.what, wait_s)
        stack.enter_context(locked(path, use, wait_s=wait_s))
    except NoLocksError as error:
        logger.warning("%s: make sure that nothing else trains there", error.what)
