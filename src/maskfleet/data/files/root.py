"""The root of a data set: a folder of files, a folder with shards, or a prefix of an S3 bucket."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Protocol

from maskfleet.config.run import DataConfig
from maskfleet.data.files.catalog import Catalog, CatalogFile, Shard, write_catalog
from maskfleet.data.files.shard_index import INDEX_NAME, files_of, shards_of
from maskfleet.data.files.stored import ImageFolder, StoredFolder, StoredRoot
from maskfleet.data.store.cache_folders import CACHE_FOLDER, first_writable, user_cache_dir
from maskfleet.errors import DataError, DataSourceError
from maskfleet.system.files import replacing
from maskfleet.system.lock import LockHeldError, NoLocksError, locked

_FETCH_TIMEOUT_S = 1800.0
_LISTING_S = 300.0  # a listing of S3 is used again for so long, by the same process
_BYTES_PER_GB = 10**9
_listings: dict[tuple[str, Path, int], tuple[float, StoredDataRoot]] = {}


class DataRoot(Protocol):
    """Where annotation files and image folders are found by their names below the root."""

    name: str

    def exists(self) -> bool: ...
    def listed(self, folder: str) -> list[str]:
        """Names of the files directly in `folder`."""

    def file(self, path: str) -> Path | None:
        """A file on this machine, copied here if needed; None if there is none."""

    def folder(self, path: str) -> ImageFolder | None:
        """A folder of images; None if there is none."""


class FolderRoot:
    """A folder of files."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self.name = str(root)

    def exists(self) -> bool:
        """Whether it is a folder."""
        return self._root.is_dir()

    def listed(self, folder: str) -> list[str]:
        """Names of the files directly in `folder`."""
        found = self._root / folder
        return [path.name for path in found.iterdir() if path.is_file()] if found.is_dir() else []

    def file(self, path: str) -> Path | None:
        """The file; None if there is none."""
        found = self._root / Path(path).expanduser()
        return found if found.is_file() else None

    def folder(self, path: str) -> ImageFolder | None:
        """The folder; None if there is none."""
        found = self._root / Path(path).expanduser()
        return found if found.is_dir() else None


class StoredDataRoot:
    """A folder with shards, or a prefix of an S3 bucket; absolute paths are still those of this machine."""

    def __init__(self, root: StoredRoot) -> None:
        self._root = root
        self._catalog = Catalog(root.catalog)
        self._local = None if root.is_remote else FolderRoot(Path(root.uri))
        self.name = root.uri

    def exists(self) -> bool:
        """True: it was listed."""
        return True

    def listed(self, folder: str) -> list[str]:
        """Names of the files directly in `folder`."""
        return self._local.listed(folder) if self._local is not None else self._catalog.below(folder)

    def file(self, path: str) -> Path | None:
        """The file, fetched from S3 if needed; None if there is none."""
        if Path(path).expanduser().is_absolute():
            return FolderRoot(Path()).file(path)
        if self._local is not None:
            return self._local.file(path)
        found = self._catalog.find(path)
        return None if found is None else _fetched(self._root, found)

    def folder(self, path: str) -> ImageFolder | None:
        """The folder; None if there is none."""
        if Path(path).expanduser().is_absolute():
            return FolderRoot(Path()).folder(path)
        path = path.rstrip("/")
        if self._catalog.has_folder(path):
            return StoredFolder(self._root, path)
        return self._local.folder(path) if self._local is not None else None


def open_root(location: str | Path, data: DataConfig | None = None) -> DataRoot:
    """The root at `location`; `data` says where to cache what is read, and how much of it."""
    data = data or DataConfig()
    if isinstance(location, str) and location.startswith("s3://"):
        return _s3_root(location.rstrip("/"), data)
    root = Path(location).expanduser()
    if (root / INDEX_NAME).is_file():
        folders = [_given(data)] if data.cache_dir else [root / CACHE_FOLDER, user_cache_dir()]
        with (root / INDEX_NAME).open("rb") as file:
            return StoredDataRoot(_shard_root(str(root), file, root / INDEX_NAME, folders))
    return FolderRoot(root)


def _given(data: DataConfig) -> Path:
    return Path(data.cache_dir or "").expanduser()


def _shard_root(uri: str, lines: Iterator[bytes], index: Path, folders: list[Path]) -> StoredRoot:
    first = next(iter(lines), b"")
    sizes = shards_of(first, str(index))
    shards = [Shard(size.name, "", size.bytes) for size in sizes]
    found = (
        CatalogFile(file.path, file.bytes, shard, file.offset, file.sha256)
        for file, shard in files_of(lines, sizes, str(index))
    )
    folder = _writable(folders)
    return StoredRoot(uri, write_catalog(folder, found, shards, name=uri), folder, 0)


def _s3_root(uri: str, data: DataConfig) -> DataRoot:
    folder = _writable([_given(data) / "s3"] if data.cache_dir else [user_cache_dir().parent / "s3"])
    key = (uri, folder, int(data.cache_gb * _BYTES_PER_GB))
    listed_at, known = _listings.get(key, (0.0, None))
    if known is None or time.monotonic() - listed_at > _LISTING_S:
        known = StoredDataRoot(_listed(*key))
        _listings[key] = (time.monotonic(), known)
    return known


def _listed(uri: str, folder: Path, cache_bytes: int) -> StoredRoot:
    """The catalog of all objects below `uri`: from its manifest if it was staged, otherwise from a listing."""
    from maskfleet.data.stage.s3 import Prefix

    with closing(Prefix(uri, workers=1)) as prefix:
        files = [CatalogFile(one.path, one.bytes, sha256=one.sha256, etag=one.etag) for one in prefix.manifest()]
        files = files or [CatalogFile(one.path, one.bytes, etag=one.etag) for one in prefix.items()]
    if not files:
        raise DataError(f"there are no objects in {uri}", remedy="check the bucket and the prefix")
    by_path = {file.path: file for file in files}
    shards: list[Shard] = []
    if INDEX_NAME in by_path:
        bare = StoredRoot(uri, write_catalog(folder, files, [], name=uri), folder, cache_bytes)
        index = _fetched(bare, by_path[INDEX_NAME])
        with index.open("rb") as lines:
            sizes = shards_of(next(iter(lines), b""), f"{uri}/{INDEX_NAME}")
            if missing := [size.name for size in sizes if size.name not in by_path]:
                raise DataSourceError(
                    f"{uri} has an index of shards, but not {missing[0]}", remedy="stage the shards there again"
                )
            shards = [Shard(size.name, by_path[size.name].etag, size.bytes) for size in sizes]
            names = {shard.name for shard in shards}
            files = [file for file in files if file.path not in names]
            files += [
                CatalogFile(file.path, file.bytes, shard, file.offset, file.sha256)
                for file, shard in files_of(lines, sizes, f"{uri}/{INDEX_NAME}")
            ]
    return StoredRoot(uri, write_catalog(folder, files, shards, name=uri), folder, cache_bytes)


def _fetched(root: StoredRoot, file: CatalogFile) -> Path:
    """A copy of an object on this machine; other processes of this host wait for the one that fetches it."""
    from maskfleet.data.stage.manifest import FileProblem, Item
    from maskfleet.data.stage.s3 import Prefix

    version = hashlib.sha256(f"{root.uri}/{file.path} {file.etag}".encode()).hexdigest()[:24]
    path = root.cache_dir / "files" / version / file.path.rpartition("/")[2]
    if path.is_file() and path.stat().st_size == file.bytes:
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        with suppress(LockHeldError, NoLocksError):  # then two processes fetch it, and the file appears by a rename
            stack.enter_context(locked(path.parent / "lock", f"fetching {path.name}", wait_s=_FETCH_TIMEOUT_S))
        if path.is_file() and path.stat().st_size == file.bytes:
            return path
        prefix = stack.enter_context(closing(Prefix(root.uri, workers=1)))
        try:
            _, chunks = prefix.read(Item(file.path, file.bytes, etag=file.etag))
            with replacing(path) as target:
                for chunk in chunks:
                    target.write(chunk)
        except FileProblem as problem:
            remedy = "run the same command again: the objects are listed again"
            raise DataSourceError(f"{root.uri}: {problem}", remedy=remedy) from None
        except OSError as error:
            raise DataError(
                f"{path} cannot be written: {error.strerror}", remedy="set data.cache_dir to a folder with more space"
            ) from error
    return path


def _writable(folders: list[Path]) -> Path:
    found = first_writable(folders)
    if found is None:
        raise DataError(
            f"nothing can be cached in {' or in '.join(map(str, folders))}",
            remedy="set data.cache_dir to a folder that can be written",
        )
    return found
