"""Copies or verifies one file of a staging, and many in parallel."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
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


@dataclass(slots=True)
class Tally:
    """Progress of a staging or check; updated by several threads."""

    files: int
    total_bytes: int
    files_done: int = 0
    bytes_done: int = 0
    files_copied: int = 0
    bytes_copied: int = 0
    stopped: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add_bytes(self, num_bytes: int) -> None:
        """Count bytes that were read; negative if they will be read again."""
        with self._lock:
            self.bytes_done += num_bytes

    def add_copied_file(self, num_bytes: int) -> None:
        """Count a file that was copied."""
        with self._lock:
            self.files_copied += 1
            self.bytes_copied += num_bytes


def copy_file(origin: Location, target: Location, file: FileState, tally: Tally) -> FileRecord:
    """Copy one file, unless the destination already has it."""
    item = file.item
    existing = _existing_record(origin, target, file)
    if existing is not None:
        tally.add_bytes(item.bytes)
        return existing
    version, chunks = origin.read(item)
    digest = hashlib.sha256()
    etag, stored_version = target.store(item, _verified(chunks, file, digest, tally))
    tally.add_copied_file(item.bytes)
    return FileRecord(
        item.path, item.bytes, digest.hexdigest(), etag or item.etag, stored_version or version, item.mtime_ns
    )


def check_file(origin: Location, target: Location, file: FileState, tally: Tally) -> FileRecord:
    """Verify one file of the destination by reading it -> its record."""
    item, record, present = file.item, file.record, file.present
    if present is None:
        raise FileProblem(item.path, "is missing")
    if record is None:
        raise FileProblem(item.path, "is not in the manifest")
    touched = item.mtime_ns != record.mtime_ns and item.bytes == record.bytes
    if record.bytes != item.bytes or (item.etag and item.etag != record.etag):
        raise FileProblem(item.path, "changed at the source after it was copied")
    if item.mtime_ns and touched and _sha256(origin, item) != record.sha256:
        raise FileProblem(item.path, "changed at the source after it was copied")
    if file.expected_sha256 not in (None, record.sha256):
        raise FileProblem(item.path, "has another SHA-256 in the source's manifest")
    if present.bytes != record.bytes:
        raise FileProblem(item.path, f"has {present.bytes:,} bytes instead of {record.bytes:,}")
    found = _sha256(target, present, tally)
    if found != record.sha256:
        raise FileProblem(item.path, f"has SHA-256 {found} instead of {record.sha256}")
    return record


def in_parallel(
    files: Iterable[FileState],
    work: Callable[[FileState], FileRecord],
    tally: Tally,
    *,
    workers: int,
    tick: Callable[[Tally], None],
) -> Generator[tuple[FileState, FileRecord | FileProblem], None, None]:
    """Each file with the result of `work`, in any order; only as many are queued as keep the workers busy.

    Close the generator to stop its threads. Any exception but FileProblem stops all work.
    """

    def attempt(file: FileState) -> tuple[FileState, FileRecord | FileProblem]:
        try:
            return file, work(file)
        except FileProblem as problem:
            return file, problem

    pending: set[Future[tuple[FileState, FileRecord | FileProblem]]] = set()

    def results(limit: int) -> Iterator[tuple[FileState, FileRecord | FileProblem]]:
        nonlocal pending
        while len(pending) > limit:
            done, pending = wait(pending, timeout=_TICK_S, return_when=FIRST_COMPLETED)
            # Successful files first: they are recorded before a failure stops the staging.
            for future in sorted(done, key=lambda one: one.exception() is not None):
                tally.files_done += 1
                yield future.result()
            tick(tally)

    with ThreadPoolExecutor(workers, thread_name_prefix="stage") as pool:
        try:
            for file in files:
                pending.add(pool.submit(attempt, file))
                yield from results(limit=2 * workers)
            yield from results(limit=0)
        except BaseException:
            tally.stopped = True
            for future in pending:
                future.cancel()
            raise


def _verified(chunks: Iterable[bytes], file: FileState, digest: hashlib._Hash, tally: Tally) -> Iterator[bytes]:
    """Pass the chunks on; raise before the end if the content is wrong, so that the file is never published."""
    item, seen = file.item, 0
    try:
        for chunk in chunks:
            if tally.stopped:
                raise FileProblem(item.path, "was not copied because the staging was stopped")
            digest.update(chunk)
            seen += len(chunk)
            tally.add_bytes(len(chunk))
            yield chunk
        if seen != item.bytes:
            raise FileProblem(item.path, f"has {seen:,} bytes instead of the {item.bytes:,} that were listed")
        if file.expected_sha256 not in (None, digest.hexdigest()):
            raise FileProblem(item.path, f"has SHA-256 {digest.hexdigest()}, its manifest says {file.expected_sha256}")
    except BaseException:
        tally.add_bytes(-seen)
        raise


def _existing_record(origin: Location, target: Location, file: FileState) -> FileRecord | None:
    """A record for a file that the destination has without a record, or None.

    The file must match the SHA-256 of the source's manifest, or an etag that is the MD5 of its content. This avoids
    copying files again that a killed upload has sent, or that FSx for Lustre has imported.
    """
    item, present = file.item, file.present
    if present is None or present.bytes != item.bytes:
        return None
    known_etag = present.etag or item.etag
    if not known_etag and file.expected_sha256 is None:
        return None
    local = target if target.is_folder else origin
    sha256, etag = _two_digests(local, item if local is origin else present)
    if file.expected_sha256 not in (None, sha256):
        return None
    recorded = file.record is not None and (file.record.sha256, file.record.etag) == (sha256, known_etag)
    by_manifest = local is target and sha256 == file.expected_sha256
    if by_manifest or (known_etag and (etag == known_etag or (recorded and local is origin))):
        return FileRecord(item.path, item.bytes, sha256, known_etag, "", item.mtime_ns)
    return None


def _two_digests(location: Location, item: Item) -> tuple[str, str]:
    """SHA-256 of a file, and its etag in S3."""
    from maskfleet.data.stage.s3 import etag_of

    digest = hashlib.sha256()

    def hashed() -> Iterator[bytes]:
        for chunk in location.read(item)[1]:
            digest.update(chunk)
            yield chunk

    etag = etag_of(hashed(), item.bytes)
    return digest.hexdigest(), etag


def _sha256(location: Location, item: Item, tally: Tally | None = None) -> str:
    digest = hashlib.sha256()
    for chunk in location.read(item)[1]:
        digest.update(chunk)
        if tally is not None:
            tally.add_bytes(len(chunk))
            if tally.stopped:
                raise FileProblem(item.path, "was not verified because the check was stopped")
    return digest.hexdigest()
