"""The work on one file of a staging, and many of them at once."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager
from typing import Protocol

from maskfleet.data.stage.index import FileState
from maskfleet.data.stage.manifest import FileProblem, FileRecord, Item

_TICK_S = 0.25


class Location(Protocol):
    """A folder or an S3 prefix."""

    name: str
    manifest_name: str
    is_folder: bool

    def items(self) -> Iterator[Item]: ...
    def read(self, item: Item) -> tuple[str, Iterator[bytes]]: ...
    def manifest(self) -> Iterator[FileRecord]: ...
    def records(self) -> Iterator[FileRecord]: ...
    def claimed(self) -> AbstractContextManager[None]: ...
    def expect_space(self, need_bytes: int) -> None: ...
    def reopen(self, records: Iterable[FileRecord]) -> None: ...
    def note(self, record: FileRecord) -> None: ...
    def store(self, item: Item, chunks: Iterable[bytes]) -> tuple[str, str]: ...
    def finish(self, records: Iterable[FileRecord]) -> None: ...


class Tally:
    """How far the copying or checking is; threads add to it."""

    def __init__(self, *, files: int, total_bytes: int) -> None:
        self.files = files
        self.total_bytes = total_bytes
        self.files_done = 0
        self.bytes_done = 0
        self.files_copied = 0
        self.bytes_copied = 0
        self.stopped = False
        self._lock = threading.Lock()

    def moved(self, num_bytes: int) -> None:
        """Count bytes as they pass; fewer than none if they have to pass again."""
        with self._lock:
            self.bytes_done += num_bytes

    def copied(self, num_bytes: int) -> None:
        """Count a file that was really copied."""
        with self._lock:
            self.files_copied += 1
            self.bytes_copied += num_bytes


def brought(origin: Location, target: Location, row: FileState, tally: Tally) -> FileRecord:
    """Copy one file, unless the destination turns out to have it."""
    item = row.item
    there = _adopted(origin, target, row)
    if there is not None:
        tally.moved(item.bytes)
        return there
    version, chunks = origin.read(item)
    digest = hashlib.sha256()
    etag, stored_version = target.store(item, _verified(chunks, row, digest, tally))
    tally.copied(item.bytes)
    return FileRecord(
        item.path, item.bytes, digest.hexdigest(), etag or item.etag, stored_version or version, item.mtime_ns
    )


def checked(origin: Location, target: Location, row: FileState, tally: Tally) -> FileRecord:
    """Read one file of the destination -> the record that it still fits."""
    item, record, present = row.item, row.record, row.present
    if present is None:
        raise FileProblem(item.path, "is missing")
    if record is None:
        raise FileProblem(item.path, "is not in the manifest")
    touched = item.mtime_ns != record.mtime_ns and item.bytes == record.bytes
    if record.bytes != item.bytes or (item.etag and item.etag != record.etag):
        raise FileProblem(item.path, "was changed at the source after it was copied")
    if item.mtime_ns and touched and _sha256(origin, item) != record.sha256:
        raise FileProblem(item.path, "was changed at the source after it was copied")
    if row.expected_sha256 not in (None, record.sha256):
        raise FileProblem(item.path, "has another SHA-256 in the source's manifest")
    if present.bytes != record.bytes:
        raise FileProblem(item.path, f"has {present.bytes:,} bytes instead of {record.bytes:,}")
    found = _sha256(target, present, tally)
    if found != record.sha256:
        raise FileProblem(item.path, f"has SHA-256 {found} instead of {record.sha256}")
    return record


def in_parallel(
    rows: Iterable[FileState],
    work: Callable[[FileState], FileRecord],
    tally: Tally,
    *,
    workers: int,
    tick: Callable[[Tally], None],
) -> Generator[tuple[FileState, FileRecord | FileProblem], None, None]:
    """Each row with what `work` makes of it, in any order; no more wait than keep the workers busy.

    Close it: threads end with it. What is no FileProblem ends all.
    """

    def attempt(row: FileState) -> tuple[FileState, FileRecord | FileProblem]:
        try:
            return row, work(row)
        except FileProblem as problem:
            return row, problem

    waiting: set[Future[tuple[FileState, FileRecord | FileProblem]]] = set()

    def results(at_most: int) -> Iterator[tuple[FileState, FileRecord | FileProblem]]:
        nonlocal waiting
        while len(waiting) > at_most:
            done, waiting = wait(waiting, timeout=_TICK_S, return_when=FIRST_COMPLETED)
            # What went well first: it is noted before what did not ends all.
            for future in sorted(done, key=lambda one: one.exception() is not None):
                tally.files_done += 1
                yield future.result()
            tick(tally)

    with ThreadPoolExecutor(workers, thread_name_prefix="stage") as pool:
        try:
            for row in rows:
                waiting.add(pool.submit(attempt, row))
                yield from results(at_most=2 * workers)
            yield from results(at_most=0)
        except BaseException:
            tally.stopped = True
            for future in waiting:
                future.cancel()
            raise


def _verified(chunks: Iterable[bytes], row: FileState, digest: hashlib._Hash, tally: Tally) -> Iterator[bytes]:
    """Pass the bytes on; raise before the end if they are not what they should be, so that they get no name."""
    item, seen = row.item, 0
    try:
        for chunk in chunks:
            if tally.stopped:
                raise FileProblem(item.path, "was left because the staging ended")
            digest.update(chunk)
            seen += len(chunk)
            tally.moved(len(chunk))
            yield chunk
        if seen != item.bytes:
            raise FileProblem(item.path, f"has {seen:,} bytes, and {item.bytes:,} were listed")
        if row.expected_sha256 not in (None, digest.hexdigest()):
            raise FileProblem(item.path, f"has SHA-256 {digest.hexdigest()}, its manifest says {row.expected_sha256}")
    except BaseException:
        tally.moved(-seen)
        raise


def _adopted(origin: Location, target: Location, row: FileState) -> FileRecord | None:
    """The record of a file that the destination has although no record says so, or None.

    Proof is the SHA-256 of the source's manifest, or an etag that is the content's MD5. It spares copying again what a
    killed upload has sent, and on Lustre what FSx has imported by itself.
    """
    item, present = row.item, row.present
    if present is None or present.bytes != item.bytes:
        return None
    known_etag = present.etag or item.etag
    if not known_etag and row.expected_sha256 is None:
        return None
    local = target if target.is_folder else origin
    sha256, etag = _two_digests(local, item if local is origin else present)
    if row.expected_sha256 not in (None, sha256):
        return None
    recorded = row.record is not None and (row.record.sha256, row.record.etag) == (sha256, known_etag)
    by_manifest = local is target and sha256 == row.expected_sha256
    if by_manifest or (known_etag and (etag == known_etag or (recorded and local is origin))):
        return FileRecord(item.path, item.bytes, sha256, known_etag, "", item.mtime_ns)
    return None


def _two_digests(place: Location, item: Item) -> tuple[str, str]:
    """SHA-256 of a file, and the etag that S3 would give it."""
    from maskfleet.data.stage.s3 import etag_of

    digest = hashlib.sha256()

    def hashed() -> Iterator[bytes]:
        for chunk in place.read(item)[1]:
            digest.update(chunk)
            yield chunk

    etag = etag_of(hashed(), item.bytes)
    return digest.hexdigest(), etag


def _sha256(place: Location, item: Item, tally: Tally | None = None) -> str:
    digest = hashlib.sha256()
    for chunk in place.read(item)[1]:
        digest.update(chunk)
        if tally is not None:
            tally.moved(len(chunk))
            if tally.stopped:
                raise FileProblem(item.path, "was left because the check ended")
    return digest.hexdigest()
