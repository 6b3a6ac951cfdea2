"""A cache of parts of S3 objects on a local disk, shared by all processes of a host.

An entry is one file: 16 bytes of header (magic, length and CRC-32 of the content), then the content. It appears by a
rename, so a process that is killed leaves no damaged entry; a power cut may, and the header tells. The bytes in use are
counted in a file under a lock. When they exceed the limit, the entries that were not read for the longest time are
deleted, and the count is corrected by the sizes that are really there.
"""

from __future__ import annotations

import hashlib
import os
import time
import zlib
from contextlib import suppress
from pathlib import Path

from maskfleet.log import logger
from maskfleet.system.files import replacing
from maskfleet.system.lock import briefly_locked

_MAGIC = b"MFCACHE1"
_HEADER_BYTES = 16
_KEEP_SHARE = 0.9  # of the limit is left after entries were deleted
_ABANDONED_S = 3600.0  # a temporary file of this age has no writer any more


class ObjectCache:
    """Entries in `folder`, of at most `limit_bytes` in total; 0 keeps nothing."""

    def __init__(self, folder: Path, limit_bytes: int) -> None:
        self._entries = folder / "entries"
        self._count = folder / "bytes"
        self._limit_bytes = limit_bytes
        self._is_broken = False

    def get(self, name: str) -> bytes | None:
        """The content of an entry, which counts as read now; None if there is none, or a damaged one."""
        if not self._limit_bytes:
            return None
        path = self._path(name)
        try:
            content = path.read_bytes()
            os.utime(path)
        except OSError:
            return None
        if content[:_HEADER_BYTES] != _header(content[_HEADER_BYTES:]):
            path.unlink(missing_ok=True)
            return None
        return content[_HEADER_BYTES:]

    def put(self, name: str, content: bytes) -> None:
        """Keep `content`; a disk that is full or cannot be written only costs speed, and is reported once."""
        size = len(content) + _HEADER_BYTES
        if self._is_broken or size > self._limit_bytes:
            return
        path = self._path(name)
        try:
            self._entries.mkdir(parents=True, exist_ok=True)
            self._reserve(size)
            path.parent.mkdir(exist_ok=True)
            with replacing(path, durable=False) as file:
                file.write(_header(content) + content)
        except OSError as error:
            self._is_broken = True
            logger.warning("cannot write to the cache %s (%s); reading without it", self._entries, error.strerror)

    def _path(self, name: str) -> Path:
        digest = hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()
        return self._entries / digest[:2] / digest[2:42]

    def _reserve(self, size: int) -> None:
        """Count `size` bytes; delete old entries first if they would exceed the limit."""
        with briefly_locked(self._count) as file:
            text = file.read(32).strip()
            used = int(text) if text.isdigit() else self._evict()
            if used + size > self._limit_bytes:
                used = self._evict(size)
            file.seek(0)
            file.write(b"%-32d" % (used + size))

    def _evict(self, size: int = 0) -> int:
        """Delete the oldest entries until `size` more bytes fit -> bytes that remain."""
        found, used, now = [], 0, time.time()
        for folder in os.scandir(self._entries):
            for entry in os.scandir(folder):
                with suppress(FileNotFoundError):  # another process has just renamed or deleted it
                    state = entry.stat()
                    used += state.st_size
                    is_temporary = entry.name.endswith(".tmp")
                    if not is_temporary or now - state.st_mtime > _ABANDONED_S:
                        found.append((0.0 if is_temporary else state.st_mtime, state.st_size, entry.path))
        if used + size <= self._limit_bytes:
            return used
        for _, entry_bytes, path in sorted(found):
            if used + size <= self._limit_bytes * _KEEP_SHARE or not used:
                break
            Path(path).unlink(missing_ok=True)
            used -= entry_bytes
        return used


def _header(content: bytes) -> bytes:
    return _MAGIC + len(content).to_bytes(4, "little") + zlib.crc32(content).to_bytes(4, "little")
