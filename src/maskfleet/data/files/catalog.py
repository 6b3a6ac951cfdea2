"""The catalog of a data set that is not a folder of files: which bytes of which object are which file.

It is a file of columns that all ranks and loader processes of a host map, so that none of them keeps a list of a
hundred thousand names in its own memory. Its name contains the SHA-256 of its content: what changes gets a new catalog.

Columns: N files by the bytes of their names, S bytes of all names.
"""

from __future__ import annotations

import bisect
import hashlib
import json
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np

from maskfleet.data.store.columns import Column, DamagedFileError, map_columns, write_columns
from maskfleet.errors import DataError

_FORMAT = "catalog-v1"
_MAX_ETAG_BYTES = 64
_OWN_OBJECT = -1


class CatalogFile(NamedTuple):
    """One file. `shard` is the number of the shard that contains it, or -1 for an object of its own."""

    path: str
    bytes: int
    shard: int = _OWN_OBJECT
    offset: int = 0
    sha256: str = ""
    etag: str = ""


class Shard(NamedTuple):
    """One shard: its name below the root, its etag in S3 and its size."""

    name: str
    etag: str
    bytes: int


def write_catalog(folder: Path, files: Iterable[CatalogFile], shards: Sequence[Shard], *, name: str) -> Path:
    """Write the catalog of `files` into `folder`, unless it is there -> its path; `name` is for error messages."""
    ordered = sorted(files, key=lambda file: _bytes(file.path))
    digest = hashlib.sha256(json.dumps([_FORMAT, name, shards], ensure_ascii=True).encode())
    for file in ordered:
        digest.update(json.dumps(file).encode())
    path = folder / f"{digest.hexdigest()[:32]}.catalog"
    if not path.exists():
        names = [_bytes(file.path) for file in ordered]
        etags = b"".join(_etag(file.etag) for file in ordered)
        sums = b"".join(bytes.fromhex(file.sha256) if file.sha256 else bytes(32) for file in ordered)
        columns: dict[str, Column] = {
            "name_start": np.concatenate([[0], np.cumsum([len(one) for one in names])]).astype(np.int64),
            "names": np.frombuffer(b"".join(names), np.uint8),
            "bytes": np.array([file.bytes for file in ordered], np.int64),
            "shard": np.array([file.shard for file in ordered], np.int32),
            "offset": np.array([file.offset for file in ordered], np.int64),
            "sha256": np.frombuffer(sums, np.uint8).reshape(-1, 32),
            "etag": np.frombuffer(etags, np.uint8).reshape(-1, _MAX_ETAG_BYTES),
        }
        write_columns(path, columns, {"shards": [list(shard) for shard in shards], "name": name})
    return path


class Catalog:
    """A catalog, memory-mapped."""

    def __init__(self, path: Path) -> None:
        try:
            self._columns, meta = map_columns(path)
        except (OSError, DamagedFileError) as error:
            raise DataError(f"{path} cannot be read: {error}", remedy="delete it; it will be made again") from error
        self.shards = [Shard(*shard) for shard in meta["shards"]]

    def __len__(self) -> int:
        return len(self._columns["bytes"])

    def find(self, path: str) -> CatalogFile | None:
        """The file of this name, or None."""
        wanted = _bytes(path)
        index = self._first_from(wanted)
        if index == len(self) or self._name(index) != wanted:
            return None
        columns = self._columns
        sha256, etag = columns["sha256"][index].tobytes(), columns["etag"][index].tobytes()
        return CatalogFile(
            path,
            int(columns["bytes"][index]),
            int(columns["shard"][index]),
            int(columns["offset"][index]),
            sha256.hex() if any(sha256) else "",
            etag.rstrip(b"\0").decode(),
        )

    def has_folder(self, path: str) -> bool:
        """Whether a file is below `path`."""
        wanted = _bytes(f"{path}/")
        index = self._first_from(wanted)
        return index < len(self) and self._name(index).startswith(wanted)

    def below(self, folder: str) -> list[str]:
        """Names of the files directly in `folder`."""
        wanted = _bytes(f"{folder}/")
        names = []
        for index in range(self._first_from(wanted), len(self)):
            name = self._name(index)
            if not name.startswith(wanted):
                break
            names.append(name[len(wanted) :].decode("utf-8", "surrogatepass"))
        return [name for name in names if "/" not in name]

    def _first_from(self, wanted: bytes) -> int:
        return bisect.bisect_left(self._indices, wanted, key=self._name)

    @cached_property
    def _indices(self) -> range:
        return range(len(self))

    def _name(self, index: int) -> bytes:
        start, stop = self._columns["name_start"][index : index + 2].tolist()
        return self._columns["names"][start:stop].tobytes()


def _bytes(path: str) -> bytes:
    return path.encode("utf-8", "surrogatepass")


def _etag(etag: str) -> bytes:
    """The etag in a field of fixed length; none if it is longer than any that S3 gives."""
    content = etag.encode()
    return (content if len(content) <= _MAX_ETAG_BYTES else b"").ljust(_MAX_ETAG_BYTES, b"\0")
