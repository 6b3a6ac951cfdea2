"""Reads files from tar shards in a folder, often on EFS or FSx for Lustre."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path

from maskfleet.data.files.catalog import CatalogFile, Shard
from maskfleet.errors import DataSourceError

_REMEDY = "stage the shards again: `maskfleet data stage` copies only what is missing or different"
_DAMAGED = "stage it again, first with --check, which reads all files and finds those that are damaged, then without"


class ShardReader:
    """The shards of a folder, each opened once; any number of threads may read."""

    def __init__(self, root: Path, shards: Sequence[Shard]) -> None:
        self._root = root
        self._shards = shards
        self._descriptors: dict[int, int] = {}
        self._lock = threading.Lock()

    def read(self, file: CatalogFile) -> bytes:
        """The content of a file, compared with its SHA-256."""
        shard = self._shards[file.shard]
        try:
            content = os.pread(self._descriptor(file.shard), file.bytes, file.offset)
        except OSError as error:
            raise DataSourceError(
                f"{self._root / shard.name} cannot be read: {error.strerror}", remedy=_REMEDY
            ) from error
        expect_sha256(content, file, f"{self._root / shard.name}")
        return content

    def read_ahead(self, files: Iterable[CatalogFile]) -> None:
        """Nothing: the operating system reads ahead."""

    def _descriptor(self, number: int) -> int:
        with self._lock:
            found = self._descriptors.get(number)
            if found is None:
                found = os.open(self._root / self._shards[number].name, os.O_RDONLY | os.O_CLOEXEC)
                self._descriptors[number] = found
            return found


def expect_sha256(content: bytes, file: CatalogFile, where: str) -> None:
    """DataSourceError if the content is not the one that was stored."""
    if len(content) != file.bytes:
        raise DataSourceError(f"{where} is truncated: {file.path} is not all there", remedy=_REMEDY)
    if file.sha256 and hashlib.sha256(content).hexdigest() != file.sha256:
        raise DataSourceError(f"{file.path} in {where} does not match its SHA-256: it changed", remedy=_DAMAGED)
