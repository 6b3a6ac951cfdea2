"""All files of a staging in a temporary SQLite database, so that memory use does not grow with their number."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from maskfleet.data.stage.manifest import FileRecord, Item

_PAGE = 1000
_CACHE_KIB = 16_384
_TABLES = """
CREATE TABLE source (path TEXT PRIMARY KEY, bytes INTEGER, etag TEXT, mtime_ns INTEGER) WITHOUT ROWID;
CREATE TABLE present (path TEXT PRIMARY KEY, bytes INTEGER, etag TEXT) WITHOUT ROWID;
CREATE TABLE expected (path TEXT PRIMARY KEY, bytes INTEGER, sha256 TEXT) WITHOUT ROWID;
CREATE TABLE record (
  path TEXT PRIMARY KEY, bytes INTEGER, sha256 TEXT, etag TEXT, version TEXT, mtime_ns INTEGER
) WITHOUT ROWID;
"""
_JOINED = "source LEFT JOIN present USING (path) LEFT JOIN expected USING (path) LEFT JOIN record USING (path)"
# A file is complete if its record matches the source's current file, and the destination still has that file.
_COMPLETE = """(
  record.bytes IS source.bytes AND present.bytes IS source.bytes
  AND (source.etag = '' OR source.etag = record.etag)
  AND (source.mtime_ns = 0 OR source.mtime_ns = record.mtime_ns)
  AND (present.etag = '' OR present.etag = record.etag)
  AND (expected.sha256 IS NULL OR expected.sha256 = record.sha256)
)"""
_COLUMNS = """source.path, source.bytes, source.etag, source.mtime_ns, present.bytes, present.etag, expected.sha256,
  record.bytes, record.sha256, record.etag, record.version, record.mtime_ns"""


@dataclass(frozen=True, slots=True)
class FileState:
    """Everything known about one file of the source."""

    item: Item
    present: Item | None
    expected_sha256: str | None
    record: FileRecord | None


class Index:
    """Files of source and destination, the expected files of the source's manifest, and verified records."""

    def __init__(self) -> None:
        self._db = sqlite3.connect("", isolation_level=None)  # "" is a private temporary file
        self._db.executescript(f"PRAGMA journal_mode = OFF; PRAGMA cache_size = -{_CACHE_KIB}; {_TABLES}")

    def close(self) -> None:
        """Delete the temporary file."""
        self._db.close()

    def load_source(self, items: Iterable[Item]) -> None:
        """Add the source's files."""
        self._load("source", 4, ((item.path, item.bytes, item.etag, item.mtime_ns) for item in items))

    def load_present(self, items: Iterable[Item]) -> None:
        """Replace the destination's files."""
        self._db.execute("DELETE FROM present")
        self._load("present", 3, ((item.path, item.bytes, item.etag) for item in items))

    def load_expected(self, records: Iterable[FileRecord]) -> None:
        """Add the files that the source must have."""
        self._load("expected", 3, ((one.path, one.bytes, one.sha256) for one in records))

    def load_records(self, records: Iterable[FileRecord]) -> None:
        """Add verified records; a later record of a file replaces an earlier one."""
        self._load("record", 6, map(_values, records))

    def add(self, record: FileRecord) -> None:
        """Add or replace one record."""
        self._db.execute("INSERT OR REPLACE INTO record VALUES (?, ?, ?, ?, ?, ?)", _values(record))

    def delete(self, path: str) -> None:
        """Delete one record."""
        self._db.execute("DELETE FROM record WHERE path = ?", (path,))

    def source_total(self) -> tuple[int, int]:
        """Number and bytes of the source's files."""
        files, total_bytes = self._db.execute("SELECT count(*), coalesce(sum(bytes), 0) FROM source").fetchone()
        return int(files), int(total_bytes)

    def incomplete_total(self) -> tuple[int, int, int]:
        """Number and bytes of incomplete files, and the bytes by which the destination will grow."""
        more = "max(0, source.bytes - coalesce(present.bytes, 0))"
        columns = f"count(*), coalesce(sum(source.bytes), 0), coalesce(sum({more}), 0)"
        files, total_bytes, need_bytes = self._db.execute(
            f"SELECT {columns} FROM {_JOINED} WHERE NOT {_COMPLETE}"  # noqa: S608
        ).fetchone()
        return int(files), int(total_bytes), int(need_bytes)

    def incomplete(self) -> Iterator[FileState]:
        """Incomplete files, by path; records may be added during iteration."""
        yield from self._rows(f"NOT {_COMPLETE}")

    def files(self) -> Iterator[FileState]:
        """All files of the source, by path; records may be added and deleted during iteration."""
        yield from self._rows("TRUE")

    def records(self) -> Iterator[FileRecord]:
        """Records of the source's files, by path."""
        for row in self.files():
            if row.record is not None:
                yield row.record

    def file_and_folder(self, limit: int) -> list[str]:
        """Source paths that are both a file and a folder, at most `limit`: a file system cannot have both."""
        # '0' is the character after '/': the range contains everything that starts with the path and a slash.
        query = """SELECT path FROM source AS file WHERE EXISTS (
          SELECT 1 FROM source AS inside WHERE inside.path >= file.path || '/' AND inside.path < file.path || '0'
        ) LIMIT ?"""
        return [path for (path,) in self._db.execute(query, (limit,))]

    def unexpected_sizes(self, limit: int) -> list[tuple[str, int, int | None]]:
        """(path, bytes expected, bytes of the source or None) of files that differ, at most `limit`."""
        query = """SELECT path, expected.bytes, source.bytes FROM expected LEFT JOIN source USING (path)
          WHERE source.bytes IS NOT expected.bytes ORDER BY path LIMIT ?"""
        return list(self._db.execute(query, (limit,)))

    def count_unexpected(self) -> int:
        """Number of source files that its manifest does not list; 0 if there is no manifest."""
        query = """SELECT count(*) FROM source
          WHERE EXISTS (SELECT 1 FROM expected) AND path NOT IN (SELECT path FROM expected)"""
        return int(self._db.execute(query).fetchone()[0])

    def count_left_over(self) -> int:
        """Number of files that were staged before and are no longer in the source."""
        query = "SELECT count(*) FROM record WHERE path NOT IN (SELECT path FROM source)"
        return int(self._db.execute(query).fetchone()[0])

    def _load(self, table: str, columns: int, values: Iterable[tuple[str | int, ...]]) -> None:
        marks = ", ".join("?" * columns)
        self._db.execute("BEGIN")
        self._db.executemany(f"INSERT OR REPLACE INTO {table} VALUES ({marks})", values)  # noqa: S608
        self._db.execute("COMMIT")

    def _rows(self, condition: str) -> Iterator[FileState]:
        """Query page by page, because a statement must not stay open while its tables change."""
        query = f"""SELECT {_COLUMNS} FROM {_JOINED} WHERE source.path > ? AND {condition}
          ORDER BY source.path LIMIT {_PAGE}"""  # noqa: S608
        after = ""
        while page := self._db.execute(query, (after,)).fetchall():
            after = page[-1][0]
            yield from map(_row, page)


def _values(record: FileRecord) -> tuple[str | int, ...]:
    return (record.path, record.bytes, record.sha256, record.etag, record.version, record.mtime_ns)


def _row(columns: tuple[str | int, ...]) -> FileState:
    path, size, etag, mtime_ns, present_bytes, present_etag, expected, record_bytes, *rest = columns
    present = None if present_bytes is None else Item(str(path), int(present_bytes), str(present_etag))
    record = None
    if record_bytes is not None:
        sha256, record_etag, version, record_mtime_ns = rest
        record = FileRecord(
            str(path), int(record_bytes), str(sha256), str(record_etag), str(version), int(record_mtime_ns)
        )
    item = Item(str(path), int(size), str(etag), int(mtime_ns))
    return FileState(item, present, None if expected is None else str(expected), record)
