"""A tar archive as the source of a staging: a plain one is read in parallel, a compressed one from start to end."""

from __future__ import annotations

import gzip
import tarfile
import zlib
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import BinaryIO, cast

from maskfleet.data.stage.archives.members import (
    Members,
    OpenArchive,
    OwnManifest,
    damaged,
    member_path,
    member_problems,
)
from maskfleet.data.stage.folder import CHUNK_BYTES
from maskfleet.data.stage.manifest import MANIFEST, FileRecord, Item
from maskfleet.data.stage.member_names import tar_kind

_BLOCK = 512
_MAX_READ_BYTES = 1 << 24  # tarfile reads a whole extended header at once: no real one is this long
_DAMAGE: tuple[type[Exception], ...] = (tarfile.TarError, zlib.error, EOFError, OSError)


class TarSource:
    """All files of a tar archive, plain or compressed with gzip."""

    is_folder = True

    def __init__(self, path: Path, *, compressed: bool) -> None:
        self.name = str(path)
        self.is_sequential = compressed
        self._archive = OpenArchive(path)
        self._manifest = OwnManifest(self.name)
        self.manifest_name = self._manifest.name
        self._unpacked: _Forward | None = None  # of a compressed archive, at the place up to which it was read

    def items(self) -> Iterator[Item]:
        """All files, in the order of the archive; DataError if the archive is damaged or some cannot be stored."""
        members = Members(self._archive.path, self._archive.bytes)
        with closing(self._opened()) as stream:
            try:
                # The headers are walked in stream mode: it never seeks, and checks that the data are all there.
                with tarfile.open(fileobj=cast(BinaryIO, stream), mode="r|", bufsize=CHUNK_BYTES) as tar:
                    yield from self._items(tar, members)
                    end = tar.offset
            except _DAMAGE as error:
                raise damaged(self._archive.path, error) from error
            if stream.position < end + _BLOCK:
                raise damaged(self._archive.path, EOFError("its end marker is missing"))
        members.expect_accepted()

    def read(self, item: Item) -> tuple[str, Iterator[bytes]]:
        """An empty version, and the bytes of a member; those of a compressed archive in the order of positions."""
        return "", self._chunks(item)

    def manifest(self) -> Iterator[FileRecord]:
        """Records of the manifest in the archive, if it has one."""
        return self._manifest.records()

    def close(self) -> None:
        """Close the archive."""
        if self._unpacked is not None:
            self._unpacked.close()
        self._manifest.close()
        self._archive.close()

    def _items(self, tar: tarfile.TarFile, members: Members) -> Iterator[Item]:
        while (entry := tar.next()) is not None:
            vars(tar)["members"].clear()  # tarfile keeps all of them, and an archive may have millions
            if member_path(entry.name) == MANIFEST and entry.isreg():
                file = tar.extractfile(entry)
                assert file is not None, "it is a regular file"
                self._manifest.keep(iter(partial(file.read, CHUNK_BYTES), b""))
            elif members.is_file(entry.name, tar_kind(entry), entry.size):
                if entry.issparse():
                    members.refuse(entry.name, "is a sparse file")
                path, mtime_ns = member_path(entry.name), self._archive.mtime_ns
                yield Item(path, entry.size, mtime_ns=mtime_ns, position=entry.offset_data)

    def _opened(self) -> _Forward:
        start = _Range(self._archive)
        return _Forward(gzip.GzipFile(fileobj=cast(BinaryIO, start)) if self.is_sequential else start)

    def _chunks(self, item: Item) -> Iterator[bytes]:
        with member_problems(item, _DAMAGE):
            if not self.is_sequential:
                yield from self._archive.chunks_at(item.position, item.bytes)
            else:
                if self._unpacked is None or self._unpacked.position > item.position:
                    self._unpacked = self._opened()
                self._unpacked.skip_to(item.position)
                left = item.bytes
                while left and (chunk := self._unpacked.read(min(left, CHUNK_BYTES))):
                    left -= len(chunk)
                    yield chunk
        self._archive.expect_unchanged(item.path)


class _Range:
    """The archive's bytes from the start, with a place of its own: several may read one open file."""

    def __init__(self, archive: OpenArchive) -> None:
        self._archive = archive
        self._at = 0

    def read(self, num_bytes: int = -1) -> bytes:
        limit = CHUNK_BYTES if num_bytes < 0 else num_bytes
        content = b"".join(self._archive.chunks_at(self._at, limit))
        self._at += len(content)
        return content


class _Forward:
    """A stream that counts the bytes that were read, and refuses to read too many at once."""

    def __init__(self, file: gzip.GzipFile | _Range) -> None:
        self._file = file
        self.position = 0

    def read(self, num_bytes: int) -> bytes:
        if num_bytes > _MAX_READ_BYTES:
            raise tarfile.ReadError(f"a header of {num_bytes:,} bytes")
        content = self._file.read(num_bytes)
        self.position += len(content)
        return content

    def skip_to(self, position: int) -> None:
        while self.position < position and self.read(min(position - self.position, CHUNK_BYTES)):
            pass

    def close(self) -> None:
        if isinstance(self._file, gzip.GzipFile):
            self._file.close()
