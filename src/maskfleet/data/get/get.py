"""`maskfleet data get`: download a data set and unpack it on the way, in parallel, verified and resumable."""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import closing
from dataclasses import dataclass, field
from itertools import islice
from operator import attrgetter
from pathlib import Path

from maskfleet.data.get.archive import Archive, ByteSource, LocalFile, Member, Segment, open_archive, segments_of
from maskfleet.data.get.catalogue import ArchiveFacts, DataSet
from maskfleet.data.get.destination import Destination, destination_at
from maskfleet.data.get.unpack import ArchiveStream, WholeDigest, unpacked
from maskfleet.data.stage.index import Index, temporary_folder_errors
from maskfleet.data.stage.manifest import FileProblem, FileRecord, Item, why_refused
from maskfleet.data.stage.member_names import MemberNames
from maskfleet.data.stage.stage import Staged
from maskfleet.data.stage.transfer import Tally
from maskfleet.errors import DataError
from maskfleet.system.files import sha256
from maskfleet.system.web.ranges import find_file

DEFAULT_WORKERS = 16
_TICK_S = 0.25
_NAMED = 5  # files listed in a message
_AGAIN = "run the same command again: files that are complete are not fetched again"


@dataclass(frozen=True, slots=True)
class Origin:
    """Where archives come from: the official addresses, a mirror, or a folder that has them already."""

    mirror: str | None = None
    folder: Path | None = None


@dataclass(slots=True)
class _Job:
    destination: Destination
    index: Index
    tally: Tally
    workers: int
    progress: Callable[[Tally], None]
    digests: dict[str, WholeDigest] = field(default_factory=dict)  # by archive, if all of it is fetched
    problems: list[FileProblem] = field(default_factory=list)


def get_data_set(
    data_set: DataSet,
    destination: str,
    *,
    origin: Origin,
    test: bool = False,
    workers: int = DEFAULT_WORKERS,
    progress: Callable[[Tally], None],
) -> Staged:
    """Download `data_set` to a folder or s3://bucket/prefix; files that are complete are not fetched again.

    Sizes of the archives are compared first, the CRC-32 and size of every file while it is written, and the SHA-256 of
    an archive when all of it was fetched in one run. `test` adds the archives that are optional.
    """
    facts = [archive for archive in data_set.archives if test or not archive.optional]
    with (
        temporary_folder_errors(),
        closing(destination_at(destination, workers=workers)) as target,
        target.claimed(),
        closing(Index()) as index,
    ):
        archives = _opened(data_set, facts, origin)
        _pin(target, archives)
        index.load("source", (Item(one.path, one.bytes) for archive in archives for one in archive.members))
        index.load("present", (item for item in target.location.items() if why_refused(item) is None))
        index.load("record", target.records())
        files, num_bytes, need_bytes = index.incomplete_total()
        tally = Tally(files=files, total_bytes=num_bytes)
        job = _Job(target, index, tally, workers, progress)
        notes = []
        if files:
            target.location.expect_space(need_bytes)
            target.location.reopen(_records(index))
            notes = _fetch_incomplete(job, archives)
        target.location.finish(_records(index))
        target.forget()
        total, total_bytes = index.source_total()
        manifest = target.location.manifest_name
        return Staged(total, total_bytes, tally.files_copied, tally.bytes_copied, manifest, tuple(notes))


def _opened(data_set: DataSet, facts: Sequence[ArchiveFacts], origin: Origin) -> list[Archive]:
    names = MemberNames()
    return [open_archive(one, _source(data_set, one, origin), names) for one in facts]


def _source(data_set: DataSet, facts: ArchiveFacts, origin: Origin) -> ByteSource:
    if origin.folder is None:
        return find_file(data_set.urls(facts, origin.mirror))
    for path in (origin.folder / facts.name, origin.folder / facts.path):
        if path.is_file():
            return LocalFile(path, path.stat().st_size)
    raise DataError(
        f"there is no {facts.name} in {origin.folder}",
        remedy=f"download it there from {data_set.urls(facts, None)[0]}, or leave out --archives",
    )


def _pin(target: Destination, archives: Sequence[Archive]) -> None:
    """Compare the archives with those of an earlier run into the same destination."""
    pins = target.pins()
    for archive in archives:
        if pins.get(archive.name, archive.pin) != archive.pin:
            raise DataError(
                f"{archive.name} is not the archive that {target.location.name} was begun with",
                remedy="use the source that you used first, or give another destination",
            )
    current = {archive.name: archive.pin for archive in archives}
    if pins | current != pins:
        target.write_pins(pins | current)


def _records(index: Index) -> Iterator[FileRecord]:
    """Records of the data set's files and of others that were staged there before, by path."""
    return heapq.merge(index.records(), index.other_records(), key=attrgetter("path"))


def _fetch_incomplete(job: _Job, archives: Sequence[Archive]) -> list[str]:
    """Fetch the incomplete files; what the user should know about the archives' checksums."""
    missing = {state.item.path for state in job.index.incomplete()}
    wanted = [(archive, [one for one in archive.members if one.path in missing]) for archive in archives]
    notes = []
    for archive, members in wanted:
        if len(members) == len(archive.members):
            job.digests[archive.name] = WholeDigest()
        elif members:
            notes.append(_partial_note(archive, len(members)))
    _run(job, (numbered for archive, members in wanted for numbered in _numbered(archive, members)))
    _expect_no_problems(job)
    for archive, members in wanted:
        if len(members) == len(archive.members):
            _expect_digest(job, archive)
    job.index.load("present", (item for item in job.destination.location.items() if why_refused(item) is None))
    changed = [state.item.path for state in islice(job.index.incomplete(), _NAMED)]
    if changed:
        name = job.destination.location.name
        raise DataError(f"{name} was changed by another process: {', '.join(changed)}", remedy=_AGAIN)
    return notes


def _partial_note(archive: Archive, count: int) -> str:
    fetched = f"{count:,} of {len(archive.members):,} files of {archive.name} were fetched in this run"
    if isinstance(archive.source, LocalFile):
        found = sha256(archive.source.path)
        _compare(archive, found)
        return f"{fetched}; its SHA-256 was compared"
    return f"{fetched}: they were checked by size and CRC-32; its SHA-256 needs all of it at once"


def _numbered(archive: Archive, members: Sequence[Member]) -> Iterator[tuple[int, Segment]]:
    """Segments to fetch, by number; for a checksum of the whole archive they cover all of its bytes."""
    found = list(segments_of(archive, members))
    if len(members) == len(archive.members):
        found = list(_covering(archive, found))
    yield from enumerate(found)


def _covering(archive: Archive, found: Sequence[Segment]) -> Iterator[Segment]:
    """The same segments without gaps, and the directory as a last one without members."""
    at = 0
    for segment in found:
        yield Segment(archive, segment.members, at, segment.end)
        at = segment.end
    yield Segment(archive, (), at, archive.facts.bytes)


def _run(job: _Job, segments: Iterable[tuple[int, Segment]]) -> None:
    """Fetch segments in parallel, started in order; only as many are queued as keep the workers busy."""
    pending: set[Future[list[FileRecord]]] = set()

    def take(limit: int) -> None:
        nonlocal pending
        while len(pending) > limit:
            done, pending = wait(pending, timeout=_TICK_S, return_when=FIRST_COMPLETED)
            # Successful segments first: they are recorded before a failure stops the download.
            for future in sorted(done, key=lambda one: one.exception() is not None):
                records = future.result()
                for record in records:
                    job.index.add(record)
                job.destination.note(records)
                job.tally.files_done += len(records)
            job.progress(job.tally)

    with ThreadPoolExecutor(job.workers, thread_name_prefix="get") as pool:
        try:
            for number, segment in segments:
                pending.add(pool.submit(_fetch, job, number, segment))
                take(limit=2 * job.workers)
            take(limit=0)
        except BaseException:
            job.tally.stopped = True
            for digest in job.digests.values():
                digest.stop()
            for future in pending:
                future.cancel()
            raise


def _fetch(job: _Job, number: int, segment: Segment) -> list[FileRecord]:
    """Fetch one segment and store its members; problems of single members are collected."""
    digest = job.digests.get(segment.archive.name)
    with closing(_chunks(job, segment)) as chunks:
        stream = ArchiveStream(digest.watched(chunks, number) if digest is not None else chunks, segment.start)
        records = []
        for member in segment.members:
            stream.skip_to(member.start)
            try:
                records.append(_store(job, stream, member))
            except FileProblem as problem:
                job.problems.append(problem)
        stream.skip_to(segment.end)
        stream.some(1)  # the end of the stream, which closes the segment for the digest
    return records


def _chunks(job: _Job, segment: Segment) -> Generator[bytes, None, None]:
    for chunk in segment.archive.source.read(segment.start, segment.end):
        if job.tally.stopped:
            raise DataError(f"{segment.archive.name} was not fetched: the download was stopped", remedy=_AGAIN)
        yield chunk


def _store(job: _Job, stream: ArchiveStream, member: Member) -> FileRecord:
    digest = hashlib.sha256()

    def counted() -> Iterator[bytes]:
        for chunk in unpacked(stream, member):
            digest.update(chunk)
            job.tally.add_bytes(len(chunk))
            yield chunk

    etag, version = job.destination.location.store(Item(member.path, member.bytes), counted())
    job.tally.add_copied(1, member.bytes)
    return FileRecord(member.path, member.bytes, digest.hexdigest(), etag, version)


def _expect_no_problems(job: _Job) -> None:
    if job.problems:
        lines = [f"{len(job.problems):,} of {job.tally.files:,} files could not be fetched:"]
        lines += map(str, job.problems[:_NAMED])
        if len(job.problems) > _NAMED:
            lines.append(f"and {len(job.problems) - _NAMED:,} more")
        raise DataError("\n    ".join(lines), remedy=f"{_AGAIN}; if they fail again, use another mirror")


def _expect_digest(job: _Job, archive: Archive) -> None:
    """DataError, and no record of the archive's files, if the archive is not the known one."""
    try:
        _compare(archive, job.digests[archive.name].hexdigest())
    except DataError:
        for member in archive.members:
            job.index.delete(member.path)
        job.destination.keep_only(_records(job.index))
        raise


def _compare(archive: Archive, found: str) -> None:
    if found != archive.facts.sha256:
        raise DataError(
            f"{archive.name} has SHA-256 {found} instead of {archive.facts.sha256}: it is not the original archive",
            remedy="use another mirror, or the official address without --mirror and --archives",
        )
