"""Files of a data set in shards or in S3, in the place of `pathlib.Path` for files of a folder."""

from __future__ import annotations

import errno
import functools
import posixpath
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from maskfleet.data.files.catalog import Catalog, CatalogFile


@dataclass(frozen=True, slots=True)
class StoredRoot:
    """Where a data set is, and how this host reads it; small, because loader processes get a copy."""

    uri: str  # s3://bucket/prefix, or a folder with shards
    catalog: Path
    cache_dir: Path
    cache_bytes: int

    @property
    def is_remote(self) -> bool:
        """Whether reading a file takes a request over the network."""
        return self.uri.startswith("s3://")


class Reader(Protocol):
    """Reads the files of a root."""

    def read(self, file: CatalogFile) -> bytes: ...
    def read_ahead(self, files: Iterable[CatalogFile]) -> None: ...


class StoredFile:
    """One file; it may not exist."""

    __slots__ = ("_path", "_root")

    def __init__(self, root: StoredRoot, path: str) -> None:
        self._root = root
        self._path = path

    def __reduce__(self) -> tuple[type[StoredFile], tuple[StoredRoot, str]]:
        return StoredFile, (self._root, self._path)

    def __str__(self) -> str:
        return f"{self._root.uri}/{self._path}"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StoredFile) and str(self) == str(other)

    def __hash__(self) -> int:
        return hash(str(self))

    @property
    def name(self) -> str:
        """The last part of the name."""
        return posixpath.basename(self._path)

    @property
    def is_remote(self) -> bool:
        """Whether reading it takes a request over the network."""
        return self._root.is_remote

    @property
    def size(self) -> int:
        """Its size in bytes; FileNotFoundError if there is no such file."""
        return self._found().bytes

    def read(self) -> bytes:
        """Its content; FileNotFoundError if there is no such file, DataSourceError if the place cannot be read."""
        return _opened(self._root)[1].read(self._found())

    def _found(self) -> CatalogFile:
        found = _opened(self._root)[0].find(self._path)
        if found is None:
            raise FileNotFoundError(errno.ENOENT, "there is no such file", str(self))
        return found


class StoredFolder:
    """A folder of files; `folder / name` is a file of it, as with `pathlib.Path`."""

    __slots__ = ("path", "root")

    def __init__(self, root: StoredRoot, path: str) -> None:
        self.root = root
        self.path = path

    def __reduce__(self) -> tuple[type[StoredFolder], tuple[StoredRoot, str]]:
        return StoredFolder, (self.root, self.path)

    def __str__(self) -> str:
        return f"{self.root.uri}/{self.path}"

    def __truediv__(self, name: str) -> StoredFile:
        return StoredFile(self.root, posixpath.normpath(f"{self.path}/{name}"))

    def read_ahead(self, names: Iterable[str]) -> None:
        """Start to read these files, which will be wanted soon."""
        if self.root.is_remote:
            catalog, reader = _opened(self.root)
            files = (catalog.find(posixpath.normpath(f"{self.path}/{name}")) for name in names)
            reader.read_ahead(file for file in files if file is not None)


ImagePath = Path | StoredFile
ImageFolder = Path | StoredFolder


def leads_out_of(name: str) -> bool:
    """Whether a name, relative to a stored folder, leads out of it."""
    normal = posixpath.normpath(name)
    return normal.startswith(("/", "../")) or normal in ("..", ".")


@functools.cache
def _opened(root: StoredRoot) -> tuple[Catalog, Reader]:
    """Catalog and reader of a root, once per process."""
    if root.is_remote:
        from maskfleet.data.files.s3 import S3Reader

        catalog = Catalog(root.catalog)
        return catalog, S3Reader(root.uri, catalog.shards, root.cache_dir, root.cache_bytes)
    from maskfleet.data.files.local import ShardReader

    catalog = Catalog(root.catalog)
    return catalog, ShardReader(Path(root.uri), catalog.shards)
