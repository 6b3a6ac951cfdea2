"""`maskfleet data stage`: copy a data set between S3 and folders, in parallel, verified, and go on where it stopped."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from maskfleet.data.stage.folder import Folder
from maskfleet.data.stage.index import FileState, Index
from maskfleet.data.stage.manifest import FileProblem, FileRecord, Item, records_of, why_refused
from maskfleet.data.stage.transfer import Location, Tally, brought, checked, in_parallel
from maskfleet.errors import DataError

DEFAULT_WORKERS = 16
_NAMED = 5  # files that a message names


@dataclass(frozen=True, slots=True)
class Staged:
    """What a staging, or a check of one, found and did."""

    files: int
    total_bytes: int
    files_copied: int
    bytes_copied: int
    manifest: str
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Job:
    origin: Location
    target: Location
    index: Index
    workers: int
    progress: Callable[[Tally], None]


def stage(
    source: str,
    destination: str,
    *,
    manifest: Path | None = None,
    workers: int = DEFAULT_WORKERS,
    progress: Callable[[Tally], None],
) -> Staged:
    """Make `destination` hold all files of `source`, verified; what is there and complete is not copied again.

    Each is s3://bucket/prefix or a folder. `manifest` says what the source must hold; its own is used by default.
    """
    with _job(source, destination, manifest, workers, progress) as job:
        num_files, num_bytes, need_bytes = job.index.todo_total()
        tally = Tally(files=num_files, total_bytes=num_bytes)
        if num_files:
            job.target.expect_space(need_bytes)
            job.target.reopen(job.index.records())
            _copy_all(job, tally)
            job.index.load_present(_storable(job.target.items()))
            _expect_complete(job)
        job.target.finish(job.index.records())
        return _staged(job, tally)


def check(
    source: str,
    destination: str,
    *,
    manifest: Path | None = None,
    workers: int = DEFAULT_WORKERS,
    progress: Callable[[Tally], None],
) -> Staged:
    """Read all of `destination` again and compare it with its manifest and with `source`; copy nothing.

    What is found bad is forgotten, so that `stage` copies it again; a destination that may only be read is only read.
    """
    if not _is_s3(destination) and not Path(destination).is_dir():
        raise DataError(f"{destination} is not there", remedy="stage it first: the same command without --check")
    may_write = _is_s3(destination) or os.access(destination, os.W_OK)
    with _job(source, destination, manifest, workers, progress, claim=may_write) as job:
        if next(job.target.manifest(), None) is None:
            raise DataError(
                f"{job.target.name} has no manifest: no staging into it has ended",
                remedy="run the same command without --check",
            )
        total_files, total_bytes = job.index.source_total()
        tally = Tally(files=total_files, total_bytes=total_bytes)
        problems = _Problems()
        with closing(_each(job, job.index.rows(), checked, tally)) as results:
            for row, result in results:
                if isinstance(result, FileProblem):
                    problems.add(result)
                    job.index.forget(row.item.path)
        if problems.count:
            if may_write:
                job.target.reopen(job.index.records())
            problems.complain(
                f"{job.target.name} is not what it should be",
                "run the same command without --check" + ("" if may_write else ", as a user who may write there"),
            )
        return _staged(job, tally)


@contextmanager
def _job(
    source: str,
    destination: str,
    manifest: Path | None,
    workers: int,
    progress: Callable[[Tally], None],
    *,
    claim: bool = True,
) -> Iterator[_Job]:
    _expect_two_places(source, destination)
    with ExitStack() as stack:
        origin, target = _place(source, workers, stack), _place(destination, workers, stack)
        if claim:
            stack.enter_context(target.claimed())
        index = Index()
        stack.callback(index.close)
        _load(index, origin, target, manifest)
        yield _Job(origin, target, index, workers, progress)


def _is_s3(text: str) -> bool:
    return text.startswith("s3://")


def _place(text: str, workers: int, stack: ExitStack) -> Location:
    if not _is_s3(text):
        return Folder(Path(text))
    from maskfleet.data.stage.s3 import Prefix

    prefix = Prefix(text, workers=workers)
    stack.callback(prefix.close)
    return prefix


def _expect_two_places(source: str, destination: str) -> None:
    for text in (source, destination):
        if "://" in text and not _is_s3(text):
            raise DataError(f"{text!r} is neither in S3 nor a folder", remedy="write s3://bucket/prefix or a folder")
    if _is_s3(source) and _is_s3(destination):
        raise DataError(
            "both places are in S3, and all bytes would pass through this machine",
            remedy=f"aws s3 sync {source} {destination} copies inside S3",
        )
    if not _is_s3(source) and not Path(source).is_dir():
        raise DataError(f"{source} is no folder", remedy="name the folder that holds annotations/ and the images")
    if not _is_s3(destination) and Path(destination).exists() and not Path(destination).is_dir():
        raise DataError(f"{destination} is a file", remedy="name a folder")
    if not _is_s3(source) and not _is_s3(destination):
        here, there = Path(source).resolve(), Path(destination).resolve()
        if here.is_relative_to(there) or there.is_relative_to(here):
            raise DataError(f"{source} and {destination} are inside each other", remedy="name two separate folders")


def _load(index: Index, origin: Location, target: Location, manifest: Path | None) -> None:
    refused = _Problems()
    index.load_source(_accepted(origin.items(), refused))
    for path in index.below_files(_NAMED):
        refused.add(FileProblem(path, "is a file and a folder at once"))
    if refused.count:
        refused.complain(f"names in {origin.name} cannot be files below a folder", "rename or remove them")
    if index.source_total()[0] == 0:
        raise DataError(
            f"there are no files in {origin.name}",
            remedy="check the spelling; a prefix is a folder-like part of object names, not the name of one object",
        )
    index.load_expected(_expected(manifest) if manifest is not None else origin.manifest())
    _expect_as_listed(index, origin, str(manifest) if manifest is not None else origin.manifest_name)
    index.load_present(_storable(target.items()))
    index.load_records(target.records())


def _accepted(items: Iterable[Item], refused: _Problems) -> Iterator[Item]:
    for item in items:
        why = why_refused(item)
        if why is None:
            yield item
        else:
            refused.add(FileProblem(item.path, why))


def _storable(items: Iterable[Item]) -> Iterator[Item]:
    """Files of a destination that can be files of a source; others there are nobody's concern."""
    return (item for item in items if why_refused(item) is None)


def _expected(manifest: Path) -> Iterator[FileRecord]:
    try:
        with manifest.open("rb") as file:
            yield from records_of(file, str(manifest))
    except OSError as error:
        raise DataError(
            f"{manifest}: {error.strerror}", remedy="name a manifest.jsonl of an earlier staging"
        ) from error


def _expect_as_listed(index: Index, origin: Location, manifest_name: str) -> None:
    unlike = _Problems()
    for path, size, found in index.unlike_expected(_NAMED + 1):
        why = "is missing" if found is None else f"has {found:,} bytes instead of {size:,}"
        unlike.add(FileProblem(path, why))
    if unlike.count:
        unlike.complain(
            f"{origin.name} is not what {manifest_name} says",
            "put the files right and write the manifest anew by staging them there with `maskfleet data stage`, "
            "or remove the manifest if the files are right",
        )


def _copy_all(job: _Job, tally: Tally) -> None:
    problems = _Problems()
    with closing(_each(job, job.index.todo(), brought, tally)) as results:
        for _, result in results:
            if isinstance(result, FileProblem):
                problems.add(result)
            else:
                job.index.put(result)
                job.target.note(result)
    if problems.count:
        problems.complain(
            f"{tally.files - problems.count:,} of {tally.files:,} files were copied to {job.target.name}, others not",
            "mend them at the source if they are broken there; then run the same command again, which copies "
            "only what is missing",
        )


def _each(
    job: _Job,
    rows: Iterable[FileState],
    work: Callable[[Location, Location, FileState, Tally], FileRecord],
    tally: Tally,
) -> Generator[tuple[FileState, FileRecord | FileProblem], None, None]:
    return in_parallel(
        rows,
        lambda row: work(job.origin, job.target, row, tally),
        tally,
        workers=job.workers,
        tick=job.progress,
    )


def _expect_complete(job: _Job) -> None:
    problems = _Problems()
    for row in islice(job.index.todo(), _NAMED + 1):
        problems.add(FileProblem(row.item.path, "is not as it was written"))
    if problems.count:
        problems.complain(f"{job.target.name} was changed by others meanwhile", "run the same command again")


def _staged(job: _Job, tally: Tally) -> Staged:
    files, total_bytes = job.index.source_total()
    notes = []
    if unexpected := job.index.count_unexpected():
        notes.append(f"{unexpected:,} files of {job.origin.name} are not in its manifest, so only sizes were compared")
    if left_over := job.index.count_left_over():
        notes.append(f"{left_over:,} files staged before are no longer in {job.origin.name}; they were left in place")
    return Staged(files, total_bytes, tally.files_copied, tally.bytes_copied, job.target.manifest_name, tuple(notes))


class _Problems:
    """Files that something is wrong with: all counted, the first few kept."""

    def __init__(self) -> None:
        self.count = 0
        self._first: list[FileProblem] = []

    def add(self, problem: FileProblem) -> None:
        self.count += 1
        if len(self._first) < _NAMED:
            self._first.append(problem)

    def complain(self, what: str, remedy: str) -> None:
        """Raise an error that names the first few."""
        more = f"\n    and {self.count - len(self._first):,} more" if self.count > len(self._first) else ""
        raise DataError(what + ":" + "".join(f"\n    {problem}" for problem in self._first) + more, remedy=remedy)
