"""`maskfleet data stage`: copy a data set from a folder, an archive or S3 to a folder or S3, verified and resumable."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path

from maskfleet.data.files.shard_index import INDEX_NAME
from maskfleet.data.stage.archives.open import open_archive
from maskfleet.data.stage.archives.shards import Sharded, add_index, store_index
from maskfleet.data.stage.feed import Source, with_sources
from maskfleet.data.stage.folder import Folder
from maskfleet.data.stage.index import FileState, Index, temporary_folder_errors
from maskfleet.data.stage.manifest import FileProblem, FileRecord, Item, accepted, records_of, why_refused
from maskfleet.data.stage.parallel import Result, Work, in_parallel, processes_for
from maskfleet.data.stage.transfer import Location, Tally, check_file, copy_file
from maskfleet.errors import DataError

DEFAULT_WORKERS = 16
_RECORDS_AT_ONCE = 500
_NAMED = 5  # files listed in a message


@dataclass(frozen=True, slots=True)
class Staged:
    """The result of a staging or a check."""

    files: int
    total_bytes: int
    files_copied: int
    bytes_copied: int
    manifest: str
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Job:
    origin: Source
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
    check: bool = False,
    shard_bytes: int | None = None,
    progress: Callable[[Tally], None],
) -> Staged:
    """Copy all files of `source` to `destination` and verify them; complete files are not copied again.

    Each is s3://bucket/prefix or a folder; `source` may also be a zip or tar archive. With `shard_bytes`, the images
    are packed into tar shards of that size. `manifest` lists the files that the source must have; the default is its
    own manifest. With `check`, copy nothing: read all files of `destination` and compare them with its manifest and
    with `source`. Records of bad files are deleted, so that they are copied again, unless the destination is read-only.
    """
    _expect_valid_locations(source, destination)
    if check and not _is_s3(destination) and not Path(destination).is_dir():
        raise DataError(f"{destination} does not exist", remedy="stage it first: the same command without --check")
    may_write = not check or _is_s3(destination) or os.access(destination, os.W_OK)
    with temporary_folder_errors(), ExitStack() as stack:
        origin, target = _source(source, workers, stack), _location(destination, workers, stack)
        if may_write:
            stack.enter_context(target.claimed())
        index = stack.enter_context(closing(Index()))
        _load_source(index, origin, manifest)
        unexpected = index.count_unexpected()
        if shard_bytes is not None:
            origin = stack.enter_context(closing(Sharded(origin, index, shard_bytes)))
            index = stack.enter_context(closing(Index()))
            _load_source(index, origin, None)
        index.load("present", _storable(target.items()))
        index.load("record", target.records())
        if not check:
            _expect_storable(index, target)
        job = _Job(origin, target, index, workers, progress)
        tally = _check_all(job, may_write=may_write) if check else _copy_incomplete(job)
        return _staged(job, tally, unexpected)


def _copy_incomplete(job: _Job) -> Tally:
    """Copy the incomplete files, write the index of shards, then the manifest."""
    num_files, num_bytes, need_bytes = job.index.incomplete_total()
    tally = Tally(files=num_files, total_bytes=num_bytes)
    if num_files:
        job.target.expect_space(need_bytes)
        job.target.reopen(job.index.records())
        if isinstance(job.origin, Sharded):
            job.target.invalidate(INDEX_NAME)
        _copy_all(job, tally)
        job.index.load("present", _storable(job.target.items()))
        changed = [
            FileProblem(file.item.path, "changed after it was written")
            for file in islice(job.index.incomplete(), _NAMED + 1)
        ]
        _raise_for(changed, f"{job.target.name} was changed by another process", "run the same command again")
    if isinstance(job.origin, Sharded):
        store_index(job.origin, job.target, job.index)
    job.target.finish(job.index.records())
    return tally


def _check_all(job: _Job, *, may_write: bool) -> Tally:
    """Read and compare all files of the destination."""
    if next(job.target.manifest(), None) is None:
        raise DataError(
            f"{job.target.name} has no manifest: no staging into it has finished",
            remedy="run the same command without --check",
        )
    if isinstance(job.origin, Sharded):
        add_index(job.index)
    num_files, num_bytes = job.index.source_total()
    tally = Tally(files=num_files, total_bytes=num_bytes)
    problems, is_manifest_wrong = [], False
    with closing(_each(job, job.index.files(), check_file, tally)) as results:
        for file, result in results:
            if isinstance(result, FileProblem):
                problems.append(result)
                is_manifest_wrong |= file.record is not None
                job.index.delete(file.item.path)
    # A file that was never staged there, as all are if `source` is the wrong one, does not make the manifest wrong.
    if is_manifest_wrong and may_write:
        job.target.reopen(chain(job.index.records(), job.index.other_records()))
    as_writer = "" if may_write else ", as a user who may write there"
    remedy = f"run the same command without --check{as_writer}"
    _raise_for(problems, f"{job.target.name} has missing or changed files", remedy)
    return tally


def _is_s3(text: str) -> bool:
    return text.startswith("s3://")


def _source(text: str, workers: int, stack: ExitStack) -> Source:
    if not _is_s3(text) and Path(text).is_file():
        return stack.enter_context(closing(open_archive(Path(text))))
    return _location(text, workers, stack)


def _location(text: str, workers: int, stack: ExitStack) -> Location:
    if not _is_s3(text):
        return Folder(Path(text))
    from maskfleet.data.stage.s3 import Prefix

    prefix = Prefix(text, workers=workers)
    stack.callback(prefix.close)
    return prefix


def _expect_valid_locations(source: str, destination: str) -> None:
    for text in (source, destination):
        if "://" in text and not _is_s3(text):
            raise DataError(
                f"{text!r} is neither an S3 URL nor a folder", remedy="write s3://bucket/prefix or a folder"
            )
    if _is_s3(source) and _is_s3(destination):
        raise DataError(
            "source and destination are both in S3; all bytes would pass through this machine",
            remedy=f"aws s3 sync {source} {destination} copies inside S3",
        )
    if not _is_s3(source) and not Path(source).exists():
        raise DataError(
            f"{source} does not exist",
            remedy="give the folder that contains annotations/ and the images, or a zip or tar archive of it",
        )
    if not _is_s3(destination) and Path(destination).exists() and not Path(destination).is_dir():
        raise DataError(f"{destination} is a file", remedy="give a folder")
    if not _is_s3(source) and not _is_s3(destination):
        here, there = Path(source).resolve(), Path(destination).resolve()
        if here.is_relative_to(there) or there.is_relative_to(here):
            raise DataError(f"{source} and {destination} overlap", remedy="give two separate folders")


def _load_source(index: Index, origin: Source, manifest: Path | None) -> None:
    refused: list[FileProblem] = []
    index.load("source", accepted(origin.items(), refused))
    refused += [FileProblem(path, "is both a file and a folder") for path in index.file_and_folder(_NAMED)]
    _raise_for(refused, f"some names in {origin.name} cannot be stored in a folder", "rename or remove them")
    if index.source_total()[0] == 0:
        raise DataError(
            f"there are no files in {origin.name}",
            remedy="check the path; a prefix is a folder-like part of object names, not the name of one object",
        )
    index.load("expected", _expected(manifest) if manifest is not None else origin.manifest())
    _expect_as_listed(index, origin, str(manifest) if manifest is not None else origin.manifest_name)


def _expect_storable(index: Index, target: Location) -> None:
    """Raise before the first byte is copied for names that are too long below the destination's own."""
    refused = [
        FileProblem(path, why)
        for path in index.longest_paths(_NAMED + 1)
        if (why := target.why_too_long(path)) is not None
    ]
    remedy = "rename them, give a shorter destination, or pack the images with --shards"
    _raise_for(refused, f"some names are too long for {target.name}", remedy)


def _storable(items: Iterable[Item]) -> Iterator[Item]:
    """Files of a destination that could come from a source; others are ignored."""
    return (item for item in items if why_refused(item) is None)


def _expected(manifest: Path) -> Iterator[FileRecord]:
    try:
        with manifest.open("rb") as file:
            yield from records_of(file, str(manifest))
    except OSError as error:
        raise DataError(
            f"{manifest}: {error.strerror}", remedy="give the manifest.jsonl of an earlier staging"
        ) from error


def _expect_as_listed(index: Index, origin: Source, manifest_name: str) -> None:
    different = [
        FileProblem(path, "is missing" if found is None else f"has {found:,} bytes instead of {size:,}")
        for path, size, found in index.unexpected_sizes(_NAMED + 1)
    ]
    _raise_for(
        different,
        f"{origin.name} does not match {manifest_name}",
        "fix the files and write a new manifest by staging them there with `maskfleet data stage`, "
        "or delete the manifest if the files are correct",
    )


def _copy_all(job: _Job, tally: Tally) -> None:
    problems: list[FileProblem] = []
    with closing(_each(job, job.index.incomplete(), copy_file, tally)) as results:
        while some := list(islice(results, _RECORDS_AT_ONCE)):
            problems += [result for _, result in some if isinstance(result, FileProblem)]
            job.index.add_all([result for _, result in some if isinstance(result, FileRecord)])
    _raise_for(
        problems,
        f"{tally.files - len(problems):,} of {tally.files:,} files were copied to {job.target.name}; these failed",
        "fix them at the source if they are broken there; then run the same command again: it copies only "
        "missing files",
    )


def _each(
    job: _Job,
    files: Iterable[FileState],
    work: Work,
    tally: Tally,
) -> Generator[Result, None, None]:
    size = {"num_files": tally.files, "num_bytes": tally.total_bytes}
    return in_parallel(
        with_sources(job.origin, files),
        lambda origin, file: work(origin, job.target, file, tally),
        tally,
        workers=job.workers,
        processes=processes_for(job.origin, job.target, work, workers=job.workers, **size),
        tick=job.progress,
    )


def _staged(job: _Job, tally: Tally, unexpected: int) -> Staged:
    files, total_bytes = job.index.source_total()
    notes = []
    if unexpected:
        notes.append(
            f"{unexpected:,} files of {job.origin.name} are not in its manifest, so only their sizes were compared"
        )
    if left_over := job.index.count_left_over():
        notes.append(f"{left_over:,} files from an earlier staging are no longer in {job.origin.name}; they were kept")
    return Staged(files, total_bytes, tally.files_copied, tally.bytes_copied, job.target.manifest_name, tuple(notes))


def _raise_for(problems: Sequence[FileProblem], what: str, remedy: str) -> None:
    """Raise an error that lists the first few of `problems`, if there are any."""
    if problems:
        lines = [f"{what}:", *map(str, problems[:_NAMED])]
        if len(problems) > _NAMED:
            lines.append(f"and {len(problems) - _NAMED:,} more")
        raise DataError("\n    ".join(lines), remedy=remedy)
