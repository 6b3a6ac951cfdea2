"""Copies or verifies one file of a staging."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

from maskfleet.data.stage.feed import Fed, Source
from maskfleet.data.stage.index import FileState
from maskfleet.data.stage.manifest import FileProblem, FileRecord, Item


class Location(Source, Protocol):
    """What can be copied from and to: a folder or an S3 prefix.

    `opener` returns a function that opens the same location in another process, or None if that cannot be done.
    """

    def opener(self) -> Opener | None: ...
    def read_range(self, path: str, start: int, num_bytes: int) -> bytes: ...
    def records(self) -> Iterator[FileRecord]: ...
    def claimed(self) -> AbstractContextManager[None]: ...
    def is_interrupted(self) -> bool: ...
    def why_too_long(self, path: str) -> str | None: ...
    def expect_space(self, need_bytes: int) -> None: ...
    def reopen(self, records: Iterable[FileRecord]) -> None: ...
    def invalidate(self, path: str) -> None: ...
    def note(self, record: FileRecord) -> None: ...
    def store(self, item: Item, chunks: Iterable[bytes]) -> tuple[str, str]: ...
    def finish(self, records: Iterable[FileRecord]) -> None: ...


Opener = Callable[[], Location]


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

    def add_copied(self, num_files: int, num_bytes: int) -> None:
        """Count files that were copied."""
        with self._lock:
            self.files_copied += num_files
            self.bytes_copied += num_bytes


def copy_file(origin: Source, target: Location, file: FileState, tally: Tally) -> FileRecord:
    """Copy one file, unless the destination already has it, and note that the destination has it."""
    item = file.item
    record = _existing_record(origin, target, file)
    if record is not None:
        tally.add_bytes(item.bytes)
    else:
        version, chunks = origin.read(item)
        digest = hashlib.sha256()
        etag, stored_version = target.store(item, _verified(chunks, file, digest, tally))
        tally.add_copied(1, item.bytes)
        record = FileRecord(
            item.path, item.bytes, digest.hexdigest(), etag or item.etag, stored_version or version, item.mtime_ns
        )
    target.note(record)
    return record


def check_file(origin: Source, target: Location, file: FileState, tally: Tally) -> FileRecord:
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


def _existing_record(origin: Source, target: Location, file: FileState) -> FileRecord | None:
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
    local: Source = target if target.is_folder else origin
    if isinstance(local, Fed) and not local.is_repeatable:
        return None
    sha256, etag = _two_digests(local, item if local is origin else present)
    if file.expected_sha256 not in (None, sha256):
        return None
    recorded = file.record is not None and (file.record.sha256, file.record.etag) == (sha256, known_etag)
    by_manifest = local is target and sha256 == file.expected_sha256
    if by_manifest or (known_etag and (etag == known_etag or (recorded and local is origin))):
        return FileRecord(item.path, item.bytes, sha256, known_etag, "", item.mtime_ns)
    return None


def _two_digests(location: Source, item: Item) -> tuple[str, str]:
    """SHA-256 of a file, and its etag in S3."""
    from maskfleet.data.stage.s3 import etag_of

    digest = hashlib.sha256()

    def hashed() -> Iterator[bytes]:
        for chunk in location.read(item)[1]:
            digest.update(chunk)
            yield chunk

    etag = etag_of(hashed(), item.bytes)
    return digest.hexdigest(), etag


def _sha256(location: Source, item: Item, tally: Tally | None = None) -> str:
    digest = hashlib.sha256()
    for chunk in location.read(item)[1]:
        digest.update(chunk)
        if tally is not None:
            tally.add_bytes(len(chunk))
            if tally.stopped:
                raise FileProblem(item.path, "was not verified because the check was stopped")
    return digest.hexdigest()
