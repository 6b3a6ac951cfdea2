"""Members of a zip archive out of a stream of its bytes, and the checksum of the whole archive beside it."""

from __future__ import annotations

import hashlib
import struct
import threading
import zlib
from collections import defaultdict
from collections.abc import Iterator

from maskfleet.data.get.archive import SEGMENT_BYTES, Member
from maskfleet.data.stage.folder import CHUNK_BYTES
from maskfleet.data.stage.manifest import FileProblem

_LOCAL_HEADER = struct.Struct("<4s5H3L2H")
_SIGNATURE = b"PK\x03\x04"


class ArchiveStream:
    """The bytes of an archive from `start` on, taken in order."""

    def __init__(self, chunks: Iterator[bytes], start: int) -> None:
        self._chunks = chunks
        self._buffer = b""
        self.at = start

    def some(self, limit: int) -> bytes:
        """At least one and at most `limit` bytes; none at the end."""
        while not self._buffer:
            chunk = next(self._chunks, None)
            if chunk is None:
                return b""
            self._buffer = chunk
        found, self._buffer = self._buffer[:limit], self._buffer[limit:]
        self.at += len(found)
        return found

    def exactly(self, size: int) -> bytes:
        """The next `size` bytes, or fewer at the end."""
        parts = []
        while size and (part := self.some(size)):
            parts.append(part)
            size -= len(part)
        return b"".join(parts)

    def skip_to(self, position: int) -> None:
        """Drop bytes up to `position`."""
        while self.at < position and self.some(position - self.at):
            pass


def unpacked(stream: ArchiveStream, member: Member) -> Iterator[bytes]:
    """The content of `member`, which is next in `stream`.

    Raises FileProblem before the last chunk is handed over if the size or the CRC-32 is not that of the directory, so
    that a wrong file never gets its name, and as soon as there are more bytes than announced.
    """
    header = _LOCAL_HEADER.unpack(_all(stream.exactly(_LOCAL_HEADER.size), _LOCAL_HEADER.size, member))
    name = _all(stream.exactly(header[9]), header[9], member)
    if header[0] != _SIGNATURE or name != _encoded(member.path, utf8=bool(header[2] & 0x800)):
        raise FileProblem(member.path, "is not where the directory of its archive says")
    stream.skip_to(stream.at + header[10])
    crc, seen, last = 0, 0, b""
    for chunk in _inflated(stream, member) if member.deflated else _stored(stream, member):
        crc, seen = zlib.crc32(chunk, crc), seen + len(chunk)
        if seen > member.bytes:
            raise FileProblem(member.path, f"unpacks to more than the {member.bytes:,} bytes that were announced")
        if last:
            yield last
        last = chunk
    if seen != member.bytes:
        raise FileProblem(member.path, f"has {seen:,} bytes instead of {member.bytes:,}")
    if crc != member.crc32:
        raise FileProblem(member.path, f"has CRC-32 {crc:08x} instead of {member.crc32:08x}")
    if last:
        yield last


def _stored(stream: ArchiveStream, member: Member) -> Iterator[bytes]:
    left = member.packed_bytes
    while left:
        chunk = stream.some(min(left, CHUNK_BYTES))
        if not chunk:
            return
        left -= len(chunk)
        yield chunk


def _inflated(stream: ArchiveStream, member: Member) -> Iterator[bytes]:
    """Never more than one chunk at a time, however much a few packed bytes unpack to."""
    engine = zlib.decompressobj(-zlib.MAX_WBITS)
    try:
        for packed in _stored(stream, member):
            rest = packed
            while rest and not engine.eof:
                chunk = engine.decompress(rest, CHUNK_BYTES)
                rest = engine.unconsumed_tail
                if chunk:
                    yield chunk
        while not engine.eof and (chunk := engine.decompress(engine.unconsumed_tail, CHUNK_BYTES)):
            yield chunk
    except zlib.error as error:
        raise FileProblem(member.path, f"cannot be unpacked: {error}") from error


def _all(found: bytes, size: int, member: Member) -> bytes:
    if len(found) != size:
        raise FileProblem(member.path, "is cut short")
    return found


def _encoded(name: str, *, utf8: bool) -> bytes:
    return name.encode("utf-8" if utf8 else "cp437", errors="replace")


class WholeDigest:
    """SHA-256 of an archive whose segments are fetched in parallel.

    The segment that is next updates the digest; those after it keep their bytes, and wait when they have kept
    `limit_bytes`. Segments must be started in order, so that the one that is next always runs.
    """

    def __init__(self, limit_bytes: int = SEGMENT_BYTES) -> None:
        self._digest = hashlib.sha256()
        self._limit = limit_bytes
        self._next = 0
        self._kept: dict[int, list[bytes]] = defaultdict(list)
        self._turn = threading.Condition()
        self._stopped = False

    def watched(self, chunks: Iterator[bytes], number: int) -> Iterator[bytes]:
        """Pass on all chunks of segment `number`; the digest has seen them when the iterator ends."""
        kept = 0
        for chunk in chunks:
            with self._turn:
                while number != self._next and kept + len(chunk) > self._limit and not self._stopped:
                    self._turn.wait()
                is_next = number == self._next
                if not is_next:
                    self._kept[number].append(chunk)
                    kept += len(chunk)
            if is_next:
                self._flush(number)
                self._digest.update(chunk)
            yield chunk
        self._finish(number)

    def stop(self) -> None:
        """Let all segments continue: the digest will not be needed."""
        with self._turn:
            self._stopped = True
            self._turn.notify_all()

    def hexdigest(self) -> str:
        """The digest, after all segments ended."""
        return self._digest.hexdigest()

    def _flush(self, number: int) -> None:
        for chunk in self._kept.pop(number, ()):
            self._digest.update(chunk)

    def _finish(self, number: int) -> None:
        with self._turn:
            while number != self._next and not self._stopped:
                self._turn.wait()
        self._flush(number)
        with self._turn:
            self._next = number + 1
            self._turn.notify_all()
