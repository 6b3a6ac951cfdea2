"""A zip archive as the source of a staging; its members are read in parallel."""

from __future__ import annotations

import lzma
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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
from maskfleet.data.stage.member_names import zip_kind

_ENCRYPTED = 1  # a bit of `flag_bits`
_DAMAGE: tuple[type[Exception], ...] = (
    zipfile.BadZipFile,
    zlib.error,
    lzma.LZMAError,
    EOFError,
    OSError,
    NotImplementedError,
    RuntimeError,
    ValueError,
)


class ZipSource:
    """All files of a zip archive; each is checked by the archive's CRC-32 when it is read."""

    is_folder = True
    is_sequential = False

    def __init__(self, path: Path) -> None:
        self.name = str(path)
        self._archive = OpenArchive(path)
        self._manifest = OwnManifest(self.name)
        self.manifest_name = self._manifest.name
        try:
            # a file that is passed is never closed by zipfile, whose count of open members is not safe with threads
            self._zip = zipfile.ZipFile(self._archive.file)
        except _DAMAGE as error:
            self._archive.close()
            raise damaged(path, error) from error

    def items(self) -> Iterator[Item]:
        """All files, in the order of the archive; DataError if some members cannot be stored."""
        members = Members(self._archive.path, self._archive.bytes)
        for entry in self._zip.infolist():
            if entry.filename == MANIFEST:
                self._manifest.keep(self._chunks(Item(MANIFEST, entry.file_size), entry))
            elif members.is_file(entry.filename, zip_kind(entry), entry.file_size):
                if entry.flag_bits & _ENCRYPTED:
                    members.refuse(entry.filename, "is encrypted")
                mtime_ns, position = self._archive.mtime_ns, entry.header_offset
                yield Item(member_path(entry.filename), entry.file_size, mtime_ns=mtime_ns, position=position)
        members.expect_accepted()

    def read(self, item: Item) -> tuple[str, Iterator[bytes]]:
        """An empty version, and the bytes of a member."""
        with member_problems(item, (KeyError,)):
            try:
                entry = self._zip.getinfo(item.path)
            except KeyError:
                entry = self._zip.getinfo(f"./{item.path}")
        return "", self._chunks(item, entry)

    def manifest(self) -> Iterator[FileRecord]:
        """Records of the manifest in the archive, if it has one."""
        return self._manifest.records()

    def close(self) -> None:
        """Close the archive."""
        self._zip.close()
        self._manifest.close()
        self._archive.close()

    def _chunks(self, item: Item, entry: zipfile.ZipInfo) -> Iterator[bytes]:
        with member_problems(item, _DAMAGE):
            file: Any
            with self._zip.open(entry) as file:
                while chunk := file.read(CHUNK_BYTES):
                    yield chunk
        self._archive.expect_unchanged(item.path)
