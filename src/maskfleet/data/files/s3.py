"""Reads files of a data set from S3: a request for each, read-ahead in threads, and a cache on a local disk."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from maskfleet.data.files.cache import ObjectCache
from maskfleet.data.files.catalog import CatalogFile, Shard
from maskfleet.data.files.local import expect_sha256
from maskfleet.data.stage.s3 import ATTEMPTS, s3_error, split_url
from maskfleet.errors import DataSourceError
from maskfleet.system.aws import aws_exceptions, code_of
from maskfleet.system.s3.objects import S3Objects

READ_THREADS = 16
MAX_AHEAD = 256  # files that are read ahead and not yet used


class S3Reader:
    """The objects below s3://bucket/prefix; any number of threads may read."""

    def __init__(self, uri: str, shards: Sequence[Shard], cache_dir: Path, cache_bytes: int) -> None:
        self._bucket, self._prefix = split_url(uri)
        self._shards = shards
        self._cache = ObjectCache(cache_dir, cache_bytes)
        self._objects = S3Objects(connections=READ_THREADS, attempts=ATTEMPTS)
        self._pool = ThreadPoolExecutor(READ_THREADS, thread_name_prefix="read-ahead")
        self._ahead: dict[str, Future[bytes]] = {}
        self._lock = threading.Lock()

    def read(self, file: CatalogFile) -> bytes:
        """The content of a file, compared with its SHA-256 if that is known."""
        with self._lock:
            ahead = self._ahead.pop(file.path, None)
        return self._fetch(file) if ahead is None else ahead.result()

    def read_ahead(self, files: Iterable[CatalogFile]) -> None:
        """Start to read these files."""
        with self._lock:
            for file in files:
                if len(self._ahead) >= MAX_AHEAD:  # some were never used: images that another one replaced
                    self._ahead.pop(next(iter(self._ahead))).cancel()
                if file.path not in self._ahead:
                    self._ahead[file.path] = self._pool.submit(self._fetch, file)

    def _fetch(self, file: CatalogFile) -> bytes:
        name, etag = (file.path, file.etag) if file.shard < 0 else self._shards[file.shard][:2]
        where = f"s3://{self._bucket}/{self._prefix}{name}"
        kept_as = f"{where} {etag} {file.offset} {file.bytes}"
        content = self._cache.get(kept_as) if file.bytes else b""
        if content is None:
            span = (file.offset, file.offset + file.bytes)
            try:
                content = self._objects.get(self._bucket, self._prefix + name, span=span, etag=etag).content
            except aws_exceptions() as error:
                raise _error(error, where) from error
            expect_sha256(content, file, where)
            self._cache.put(kept_as, content)
        return content


def _error(error: Exception, where: str) -> Exception:
    match code_of(error):
        case "NoSuchKey" | "404":
            return FileNotFoundError(2, "was deleted from S3 after the run had started", where)
        case "PreconditionFailed" | "412" | "InvalidRange":
            return DataSourceError(
                f"{where} changed after the run had started",
                remedy="start the run again with its checkpoint: it takes the new object; do not write to the data of "
                "a run that is training",
            )
        case "SlowDown" | "503" | "500" | "ServiceUnavailable" | "InternalError" | "Throttling" as code:
            return DataSourceError(
                f"S3 still answers {code} after {ATTEMPTS} attempts to read {where}",
                remedy="run the same command again, with a smaller data.num_workers or with shards in a folder; a run "
                "continues from its newest checkpoint",
            )
    found = s3_error(error, where, "read")
    return DataSourceError(found.what, remedy=found.remedy)
