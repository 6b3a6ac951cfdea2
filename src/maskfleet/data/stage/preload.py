"""Bring the files of a folder from S3 to FSx for Lustre before the first epoch reads them one by one.

A file system that is linked to a bucket shows every object as a file, and loads its content when the file is first
read. Reading one byte makes Lustre load the whole file, as `lfs hsm_restore` does, but needs neither that command in
the image nor the rights of root.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from maskfleet.data.stage.folder import Folder, folder_errors
from maskfleet.data.stage.manifest import Item
from maskfleet.data.stage.transfer import Tally
from maskfleet.errors import DataError
from maskfleet.system.machine import file_system_of

LUSTRE = "lustre"
TICK_S = 1.0
QUEUED = 4  # files per worker that wait for it


@dataclass(frozen=True, slots=True)
class Preloaded:
    """What was loaded; no files where the file system has them already."""

    file_system: str
    files: int = 0
    total_bytes: int = 0


def preload(
    folder: Path,
    *,
    workers: int,
    progress: Callable[[Tally], None],
    kind_of: Callable[[Path], str] = file_system_of,
) -> Preloaded:
    """Load all files of `folder`, on Lustre; raises if one of them cannot be read."""
    if not folder.is_dir():
        raise DataError(f"there is no folder {folder}", remedy="name the data set's folder on the FSx file system")
    kind = kind_of(folder)
    if kind != LUSTRE:
        return Preloaded(kind)
    with folder_errors(str(folder)):
        items = list(Folder(folder).items())
    tally = Tally(len(items), sum(item.bytes for item in items))
    problems: list[str] = []
    with ThreadPoolExecutor(workers) as pool:
        left, running = iter(items), dict[Future[None], Item]()
        try:
            while True:
                queue = islice(left, QUEUED * workers - len(running))
                running |= {pool.submit(_touch, folder / item.path): item for item in queue}
                if not running:
                    break
                for one in wait(running, TICK_S, FIRST_COMPLETED).done:
                    item, error = running.pop(one), one.exception()
                    if error is not None:
                        problems.append(f"{item.path}: {error}")
                    tally.files_done += 1
                    tally.add_bytes(item.bytes)
                progress(tally)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    if problems:
        listed = "\n".join(f"  {line}" for line in problems[:10])
        raise DataError(
            f"{len(problems):,} of {tally.files:,} files in {folder} cannot be loaded:\n{listed}",
            remedy="check that the objects are still in the bucket and that FSx may read and decrypt them; then run it "
            "again",
        )
    return Preloaded(kind, tally.files, tally.total_bytes)


def _touch(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.read(descriptor, 1)  # returns when the whole file is loaded
    finally:
        os.close(descriptor)
