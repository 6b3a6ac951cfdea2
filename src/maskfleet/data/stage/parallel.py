"""Copies or verifies many files in parallel: with threads, and many small ones with processes.

The threads of one process share one core, and a small file takes more processor time than anything else. Each process
opens source and destination itself, gets files in batches, and has a few threads because each waits for the network. It
notes a file as soon as that is complete, so a staging that is killed resumes where it was.
"""

from __future__ import annotations

import functools
import os
import secrets
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field

from maskfleet.data.stage.feed import Fed, Source
from maskfleet.data.stage.folder import Folder
from maskfleet.data.stage.index import FileState
from maskfleet.data.stage.manifest import FileProblem, FileRecord
from maskfleet.data.stage.s3 import Prefix
from maskfleet.data.stage.transfer import Location, Opener, Tally
from maskfleet.system.workers.processes import WorkerProcesses

MIN_FILES = 1000  # fewer are not worth the half second that the processes need to start
MAX_PROCESSES = 8
SMALL_BYTES = 1 << 20  # of a file; threads copy larger ones as fast as processes
_BATCH_FILES = 256
_BATCH_BYTES = 8 << 20
_TICK_S = 0.25
_BATCHES_PER_PROCESS = 4  # at least, so that all finish at about the same time

# What `in_parallel` does with a file, and what comes of it
Work = Callable[[Source, Location, FileState, Tally], FileRecord]
Result = tuple[FileState, FileRecord | FileProblem]


@dataclass(frozen=True, slots=True)
class FileResults:
    """The results of some files, and how much of them processes have read and copied."""

    results: list[Result]
    bytes_read: int = 0
    files_copied: int = 0
    bytes_copied: int = 0


def in_parallel(
    files: Iterable[tuple[FileState, Source]],
    work: Callable[[Source, FileState], FileRecord],
    tally: Tally,
    *,
    workers: int,
    processes: FileProcesses | None,
    tick: Callable[[Tally], None],
) -> Generator[Result, None, None]:
    """Each file with the result of `work` on its source; only as many are queued as keep the workers busy.

    `processes` do the same work on small files; they are stopped at the end. Close the generator to stop early. Any
    exception but FileProblem stops all work.
    """

    def attempt(file: FileState, origin: Source) -> FileResults:
        try:
            return FileResults([(file, work(origin, file))])
        except FileProblem as problem:
            return FileResults([(file, problem)])
        finally:
            if isinstance(origin, Fed):
                origin.close()

    pending: set[Future[FileResults]] = set()

    def results(limit: int) -> Iterator[Result]:
        nonlocal pending
        while len(pending) > limit:
            done, pending = wait(pending, timeout=_TICK_S, return_when=FIRST_COMPLETED)
            # Successful files first: they are recorded before a failure stops the staging.
            for future in sorted(done, key=lambda one: one.exception() is not None):
                batch = future.result()
                tally.files_done += len(batch.results)
                tally.add_bytes(batch.bytes_read)
                tally.add_copied(batch.files_copied, batch.bytes_copied)
                yield from batch.results
            tick(tally)

    with ThreadPoolExecutor(workers, thread_name_prefix="stage") as pool:
        try:
            for file, origin in files:
                if processes is None or file.item.bytes > SMALL_BYTES:
                    pending.add(pool.submit(attempt, file, origin))
                elif (batch := processes.add(file)) is not None:
                    pending.add(batch)
                yield from results(limit=2 * workers)
            if processes is not None:
                pending.add(processes.send())
            yield from results(limit=0)
        except BaseException:
            tally.stopped = True
            for future in pending:
                future.cancel()
            if processes is not None:
                processes.kill()
            raise
    if processes is not None:
        processes.close()


@dataclass(frozen=True, slots=True)
class _Task:
    """What every process of a staging does: the same for all batches, as its `token` says."""

    token: str
    origin: Opener = field(compare=False)
    target: Opener = field(compare=False)
    work: Work = field(compare=False)
    environment: dict[str, str] = field(compare=False, repr=False)  # credentials, endpoints, proxies
    threads: int


class FileProcesses:
    """Processes that do the same work on many small files."""

    def __init__(self, origin: Opener, target: Opener, work: Work, *, workers: int, num_files: int) -> None:
        num_processes = min(_cores(), workers, MAX_PROCESSES)
        self._task = _Task(
            secrets.token_hex(8), origin, target, work, dict(os.environ), threads=-(-workers // num_processes)
        )
        self._batch_files = max(1, min(_BATCH_FILES, num_files // (_BATCHES_PER_PROCESS * num_processes)))
        self._batch: list[FileState] = []
        self._batch_bytes = 0
        self._processes = WorkerProcesses(
            num_processes,
            preload=(__name__, "boto3"),
            if_killed="usually memory ran out (see dmesg): use fewer --workers, then run the same command again",
        )

    def add(self, file: FileState) -> Future[FileResults] | None:
        """Queue a file -> its batch if that is now full and was sent."""
        self._batch.append(file)
        self._batch_bytes += file.item.bytes
        is_full = len(self._batch) >= self._batch_files or self._batch_bytes >= _BATCH_BYTES
        return self.send() if is_full else None

    def send(self) -> Future[FileResults]:
        """Send the files that were added since the last batch."""
        batch, self._batch, self._batch_bytes = self._batch, [], 0
        return self._processes.submit(_work_on, self._task, batch)

    def close(self) -> None:
        """Stop the processes after what they are doing."""
        self._processes.close()

    def kill(self) -> None:
        """Stop the processes at once; what they have noted stays."""
        self._processes.kill()


def processes_for(
    origin: Source, target: Location, work: Work, *, workers: int, num_files: int, num_bytes: int
) -> FileProcesses | None:
    """Processes for a staging of many small files; None where threads do as well."""
    if num_files < MIN_FILES or num_bytes > num_files * SMALL_BYTES or min(_cores(), workers) == 1:
        return None
    open_origin = origin.opener() if isinstance(origin, Folder | Prefix) else None
    open_target = target.opener()
    if open_origin is None or open_target is None:
        return None
    return FileProcesses(open_origin, open_target, work, workers=workers, num_files=num_files)


def _cores() -> int:
    return len(os.sched_getaffinity(0))


def _work_on(task: _Task, files: Sequence[FileState]) -> FileResults:
    """Runs in a process: work on a batch with its threads."""
    origin, target, pool = _opened(task)
    waiting, results = deque(files), list[Result]()
    tally = Tally(files=len(files), total_bytes=0)

    def work_on_waiting() -> None:
        while True:
            try:
                file = waiting.popleft()
            except IndexError:
                return
            try:
                results.append((file, task.work(origin, target, file, tally)))
            except FileProblem as problem:
                results.append((file, problem))
            except BaseException:
                tally.stopped = True
                waiting.clear()
                raise

    for thread in [pool.submit(work_on_waiting) for _ in range(task.threads)]:
        thread.result()
    return FileResults(results, tally.bytes_done, tally.files_copied, tally.bytes_copied)


@functools.lru_cache(maxsize=1)
def _opened(task: _Task) -> tuple[Location, Location, ThreadPoolExecutor]:
    """Source, destination and threads, which a process keeps for all of its batches."""
    os.environ.clear()  # it is that of the moment when this program started its first process, perhaps long ago
    os.environ.update(task.environment)
    return task.origin(), task.target(), ThreadPoolExecutor(task.threads, thread_name_prefix="stage")
