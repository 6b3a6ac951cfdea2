"""All files of a staging in a temporary database on disk, so that memory stays flat however many there are."""

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
# A file is complete when its record is of what the source holds now, and the destination still holds that.
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
    """All that is known of one file of the source."""

    item: Item
    present: Item | None
    expected_sha256: str | None
    record: FileRecord | None


class Index:
    """The source's and the destination's files, what the source's manifest expects, and what was verified."""

    def __init__(self) -> None:
        self._db = sqlite3.connect("", isolation_level=None)  # "" is a file that nobody else sees and that goes with us
        self._db.executescript(f"PRAGMA journal_mode = OFF; PRAGMA cache_size = -{_CACHE_KIB}; {_TABLES}")

    def close(self) -> None:
        """Give the temporary file back."""
        self._db.close()

    def load_source(self, items: Iterable[Item]) -> None:
        """Take the source's files."""
        self._load("source", 4, ((item.path, item.bytes, item.etag, item.mtime_ns) for item in items))

    def load_present(self, items: Iterable[Item]) -> None:
        """Take the destination's files, in place of those known before."""
        self._db.execute("DELETE FROM present")
        self._load("present", 3, ((item.path, item.bytes, item.etag) for item in items))

    def load_expected(self, records: Iterable[FileRecord]) -> None:
        """Take what the source must hold."""
        self._load("expected", 3, ((one.path, one.bytes, one.sha256) for one in records))

    def load_records(self, records: Iterable[FileRecord]) -> None:
        """Take what is verified; a later record of a file replaces an earlier one."""
        self._load("record", 6, map(_values, records))

    def put(self, record: FileRecord) -> None:
        """Take one record."""
        self._db.execute("INSERT OR REPLACE INTO record VALUES (?, ?, ?, ?, ?, ?)", _values(record))

    def forget(self, path: str) -> None:
        """Drop one record."""
        self._db.execute("DELETE FROM record WHERE path = ?", (path,))

    def source_total(self) -> tuple[int, int]:
        """Files and bytes of the source."""
        files, total_bytes = self._db.execute("SELECT count(*), coalesce(sum(bytes), 0) FROM source").fetchone()
        return int(files), int(total_bytes)

    def todo_total(self) -> tuple[int, int, int]:
        """Files and bytes that are not complete, and the bytes by which the destination will grow."""
        more = "max(0, source.bytes - coalesce(present.bytes, 0))"
        columns = f"count(*), coalesce(sum(source.bytes), 0), coalesce(sum({more}), 0)"
        files, total_bytes, need_bytes = self._db.execute(
            f"SELECT {columns} FROM {_JOINED} WHERE NOT {_COMPLETE}"  # noqa: S608
        ).fetchone()
        return int(files), int(total_bytes), int(need_bytes)

    def todo(self) -> Iterator[FileState]:
        """Files that are not complete, by path; records may be put meanwhile."""
        yield from self._rows(f"NOT {_COMPLETE}")

    def rows(self) -> Iterator[FileState]:
        """All files of the source, by path; records may be put and forgotten meanwhile."""
        yield from self._rows("TRUE")

    def records(self) -> Iterator[FileRecord]:
        """Records of the source's files, by path."""
        for row in self.rows():
            if row.record is not None:
                yield row.record

    def below_files(self, limit: int) -> list[str]:
        """Files of the source that are also folders of it, at most `limit`: a file system cannot hold both."""
        # '0' is the character after '/': the range holds all that starts with the path and a slash.
        query = """SELECT path FROM source AS file WHERE EXISTS (
          SELECT 1 FROM source AS inside WHERE inside.path >= file.path || '/' AND inside.path < file.path || '0'
        ) LIMIT ?"""
        return [path for (path,) in self._db.execute(query, (limit,))]

    def unlike_expected(self, limit: int) -> list[tuple[str, int, int | None]]:
        """(path, bytes expected, bytes of the source or None) of files that cannot be as expected, at most `limit`."""
        query = """SELECT path, expected.bytes, source.bytes FROM expected LEFT JOIN source USING (path)
          WHERE source.bytes IS NOT expected.bytes ORDER BY path LIMIT ?"""
        return list(self._db.execute(query, (limit,)))

    def count_unexpected(self) -> int:
        """Files of the source that its manifest does not name; 0 where there is no manifest."""
        query = """SELECT count(*) FROM source
          WHERE EXISTS (SELECT 1 FROM expected) AND path NOT IN (SELECT path FROM expected)"""
        return int(self._db.execute(query).fetchone()[0])

    def count_left_over(self) -> int:
        """Files that were staged before and that the source has no longer."""
        query = "SELECT count(*) FROM record WHERE path NOT IN (SELECT path FROM source)"
        return int(self._db.execute(query).fetchone()[0])

    def _load(self, table: str, columns: int, values: Iterable[tuple[str | int, ...]]) -> None:
        marks = ", ".join("?" * columns)
        self._db.execute("BEGIN")
        self._db.executemany(f"INSERT OR REPLACE INTO {table} VALUES ({marks})", values)  # noqa: S608
        self._db.execute("COMMIT")

    def _rows(self, condition: str) -> Iterator[FileState]:
        """Page by page, because a statement must not run on while its tables change."""
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
