"""A zip archive on a web server or on disk: its directory is read first, its members in the order of their bytes."""

from __future__ import annotations

import hashlib
import io
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from maskfleet.data.get.catalogue import ArchiveFacts
from maskfleet.data.stage.folder import CHUNK_BYTES, folder_errors
from maskfleet.data.stage.manifest import size_text
from maskfleet.data.stage.member_names import MemberNames, why_bomb, zip_kind
from maskfleet.errors import DataError

SEGMENT_BYTES = 8 << 20  # of neighbouring members that are fetched by one request
_MAX_DIRECTORY_BYTES = 1 << 28  # that of train2017.zip has about 10 MB
_TAIL_BYTES = 1 << 16
_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
_ENCRYPTED = 0x1
_LOCAL_HEADER_BYTES = 30
_ANOTHER = "use another mirror, or download the archive again if it came from --archives"


class ByteSource(Protocol):
    """Something whose bytes can be read in ranges."""

    @property
    def size(self) -> int: ...
    def read(self, start: int, end: int) -> Iterator[bytes]: ...


@dataclass(frozen=True, slots=True)
class LocalFile:
    """An archive on disk."""

    path: Path
    size: int

    def read(self, start: int, end: int) -> Iterator[bytes]:
        """The bytes from `start` up to, not including, `end`."""
        with folder_errors(str(self.path)), self.path.open("rb") as file:
            file.seek(start)
            while start < end:
                chunk = file.read(min(CHUNK_BYTES, end - start))
                if not chunk:
                    raise damaged(self.path.name, f"it ends at byte {start:,}")
                start += len(chunk)
                yield chunk


@dataclass(frozen=True, slots=True)
class Member:
    """One file in an archive; its header starts at byte `start`, the next thing in the archive at `end`."""

    path: str
    bytes: int
    packed_bytes: int
    crc32: int
    deflated: bool
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Archive:
    """An archive whose directory was read."""

    facts: ArchiveFacts
    source: ByteSource
    members: tuple[Member, ...]  # by `start`
    directory_start: int
    pin: str  # SHA-256 of names, sizes, checksums and offsets of all members

    @property
    def name(self) -> str:
        """The file name."""
        return self.facts.name


@dataclass(frozen=True, slots=True)
class Segment:
    """Neighbouring members of one archive, fetched together; without members, its directory."""

    archive: Archive
    members: tuple[Member, ...]
    start: int
    end: int


def open_archive(facts: ArchiveFacts, source: ByteSource, names: MemberNames) -> Archive:
    """Read the directory of an archive; DataError if its size or any of its members is not as it must be."""
    if source.size != facts.bytes:
        raise DataError(
            f"{facts.name} has {source.size:,} bytes instead of {facts.bytes:,}: it is another file, or incomplete",
            remedy=_ANOTHER,
        )
    try:
        with zipfile.ZipFile(_Seekable(source)) as opened:
            entries = sorted(opened.infolist(), key=lambda entry: entry.header_offset)
            directory_start = opened.start_dir
    except (zipfile.BadZipFile, NotImplementedError, ValueError) as error:
        raise damaged(facts.name, str(error)) from error
    _expect_safe(facts, entries, names)
    members = tuple(_members(facts.name, entries, directory_start))
    return Archive(facts, source, members, directory_start, _pin(entries))


def segments_of(archive: Archive, wanted: Iterable[Member]) -> Iterator[Segment]:
    """The members to fetch, in groups that are neighbours and together not much larger than SEGMENT_BYTES."""
    group: list[Member] = []
    for member in wanted:
        if group and (member.start != group[-1].end or member.end - group[0].start > SEGMENT_BYTES):
            yield Segment(archive, tuple(group), group[0].start, group[-1].end)
            group = []
        group.append(member)
    if group:
        yield Segment(archive, tuple(group), group[0].start, group[-1].end)


def damaged(name: str, why: str) -> DataError:
    """The error about an archive that cannot be read."""
    return DataError(f"{name} is damaged: {why}", remedy=_ANOTHER)


def _expect_safe(facts: ArchiveFacts, entries: list[zipfile.ZipInfo], names: MemberNames) -> None:
    for entry in entries:
        # orig_filename, because zipfile cuts a name at a null byte.
        why = names.why_refused(entry.orig_filename, zip_kind(entry), entry.file_size)
        if why is None and entry.flag_bits & _ENCRYPTED:
            why = "is encrypted"
        if why is None and entry.compress_type not in _METHODS:
            why = f"is packed by method {entry.compress_type}"
        if why is not None:
            raise DataError(f"{facts.name} is refused: its member {entry.orig_filename!r} {why}", remedy=_ANOTHER)
    bomb = why_bomb(facts.bytes, sum(entry.file_size for entry in entries))
    if bomb is not None:
        raise DataError(f"{facts.name} is refused: {bomb}", remedy=_ANOTHER)


def _members(name: str, entries: list[zipfile.ZipInfo], directory_start: int) -> Iterator[Member]:
    ends = [entry.header_offset for entry in entries[1:]] + [directory_start]
    for entry, end in zip(entries, ends, strict=True):
        least = _LOCAL_HEADER_BYTES + len(entry.orig_filename) + entry.compress_size
        if entry.header_offset < 0 or entry.header_offset + least > end:
            raise damaged(name, f"{entry.orig_filename!r} overlaps what follows it")
        if zip_kind(entry) == "file":
            deflated = entry.compress_type == zipfile.ZIP_DEFLATED
            sizes = entry.file_size, entry.compress_size
            yield Member(entry.orig_filename, *sizes, entry.CRC, deflated, entry.header_offset, end)


def _pin(entries: list[zipfile.ZipInfo]) -> str:
    digest = hashlib.sha256()
    for entry in entries:
        facts = (entry.orig_filename, entry.file_size, entry.compress_size, entry.CRC, entry.header_offset)
        digest.update(f"{facts!r}\n".encode())
    return digest.hexdigest()


class _Seekable(io.RawIOBase):
    """A source as a file for zipfile, which reads the end and the directory; the end is fetched once."""

    def __init__(self, source: ByteSource) -> None:
        self._source = source
        self._at = 0
        self._tail = b""

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._source.size}[whence]
        if base + offset < 0:
            raise ValueError("it is too short for a zip archive")
        self._at = base + offset
        return self._at

    def read(self, size: int = -1) -> bytes:
        total = self._source.size
        end = total if size is None or size < 0 else min(total, self._at + size)
        if end - self._at > _MAX_DIRECTORY_BYTES:
            raise ValueError(f"its directory has more than {size_text(_MAX_DIRECTORY_BYTES)}")
        tail_start = max(0, total - _TAIL_BYTES)
        if self._at < tail_start:
            found = b"".join(self._source.read(self._at, end))
        else:
            self._tail = self._tail or b"".join(self._source.read(tail_start, total))
            found = self._tail[self._at - tail_start : end - tail_start]
        self._at = max(self._at, end)
        return found
