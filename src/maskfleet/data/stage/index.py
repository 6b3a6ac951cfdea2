"""All files of a staging in a temporary SQLite database, so that memory use does not grow with their number."""

from __future__ import annotations

import errno
import sqlite3
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from maskfleet.data.stage.manifest import FileRecord, Item
from maskfleet.errors import DataError

_PAGE = 1000
_CACHE_KIB = 16_384
# Files of the source and of the destination, what the source's manifest expects, and verified records.
_TABLES: dict[str, type[Item] | type[FileRecord]] = {
    "source": Item,
    "present": Item,
    "expected": FileRecord,
    "record": FileRecord,
}
_FULL = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR)
Table = Literal["source", "present", "expected", "record"]
_JOINED = "source LEFT JOIN present USING (path) LEFT JOIN expected USING (path) LEFT JOIN record USING (path)"
# A file is complete if its record matches the source's current file, and the destination still has that file.
_COMPLETE = """(
  record.bytes IS source.bytes AND present.bytes IS source.bytes
  AND (source.etag = '' OR source.etag = record.etag)
  AND (source.mtime_ns = 0 OR source.mtime_ns = record.mtime_ns)
  AND (present.etag = '' OR present.etag = record.etag)
  AND (expected.sha256 IS NULL OR expected.sha256 = record.sha256)
)"""
_COLUMNS = """source.path, source.bytes, source.etag, source.mtime_ns, source.position,
  present.bytes, present.etag, expected.sha256,
  record.bytes, record.sha256, record.etag, record.version, record.mtime_ns"""


@contextmanager
def temporary_folder_errors() -> Iterator[None]:
    """Turn a full temporary folder, where the index and lists of shards are, into an error for the user."""
    try:
        yield
    except sqlite3.Error as error:
        if getattr(error, "sqlite_errorcode", 0) & 0xFF not in _FULL:
            raise
        raise _full() from error
    except OSError as error:  # of other folders they are DataErrors by now
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise _full() from error


def _full() -> DataError:
    return DataError(
        f"the temporary folder {tempfile.gettempdir()} is full",
        remedy="free space in it, or set TMPDIR to a folder with more; then run the same command again",
    )


@dataclass(frozen=True, slots=True)
class FileState:
    """Everything known about one file of the source."""

    item: Item
    present: Item | None
    expected_sha256: str | None
    record: FileRecord | None


class RecordCounts(NamedTuple):
    """Records compared with files."""

    matching: int
    matching_bytes: int
    missing: int
    changed: int
    unlisted: int
    unlisted_bytes: int


class Index:
    """Files of source and destination, the expected files of the source's manifest, and verified records."""

    def __init__(self) -> None:
        self._db = sqlite3.connect("", isolation_level=None)  # "" is a private temporary file
        self._db.executescript(f"PRAGMA journal_mode = OFF; PRAGMA cache_size = -{_CACHE_KIB};")
        for table, kind in _TABLES.items():
            columns = ", ".join(kind._fields[1:])
            self._db.execute(f"CREATE TABLE {table} (path TEXT PRIMARY KEY, {columns}) WITHOUT ROWID")
        self._db.execute("CREATE INDEX in_order ON source (position, path)")

    def close(self) -> None:
        """Delete the temporary file."""
        self._db.close()

    def load(self, table: Table, rows: Iterable[Item] | Iterable[FileRecord]) -> None:
        """Replace the rows of a table; a later row of a file replaces an earlier one."""
        marks = ", ".join("?" * len(_TABLES[table]._fields))
        self._db.execute("BEGIN")
        self._db.execute(f"DELETE FROM {table}")  # noqa: S608
        self._db.executemany(f"INSERT OR REPLACE INTO {table} VALUES ({marks})", rows)  # noqa: S608
        self._db.execute("COMMIT")

    def add(self, record: FileRecord) -> None:
        """Add or replace one record."""
        self.add_all([record])

    def add_all(self, records: Iterable[FileRecord]) -> None:
        """Add or replace records, by one transaction: one for each would take most of the time of a staging."""
        self._db.execute("BEGIN")
        self._db.executemany("INSERT OR REPLACE INTO record VALUES (?, ?, ?, ?, ?, ?)", records)
        self._db.execute("COMMIT")

    def add_to_source(self, item: Item) -> None:
        """Add a file that staging itself makes, such as the index of shards."""
        self._db.execute("INSERT OR REPLACE INTO source VALUES (?, ?, ?, ?, ?)", item)

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
        """Incomplete files, in the order of the source; records may be added during iteration."""
        yield from self._in_order(f"NOT {_COMPLETE}")

    def files(self) -> Iterator[FileState]:
        """All files, in the order of the source; records may be added and deleted during iteration."""
        yield from self._in_order("TRUE")

    def by_path(self) -> Iterator[FileState]:
        """All files of the source, by path."""
        query = f"""SELECT {_COLUMNS} FROM {_JOINED} WHERE source.path > ?
          ORDER BY source.path LIMIT {_PAGE}"""  # noqa: S608
        after = ""
        while page := self._db.execute(query, (after,)).fetchall():
            after = page[-1][0]
            yield from map(_file_state, page)

    def records(self) -> Iterator[FileRecord]:
        """Records of the source's files, by path."""
        return (file.record for file in self.by_path() if file.record is not None)

    def state(self, path: str) -> FileState | None:
        """What is known about one file of the source."""
        query = f"SELECT {_COLUMNS} FROM {_JOINED} WHERE source.path = ?"  # noqa: S608
        row = self._db.execute(query, (path,)).fetchone()
        return None if row is None else _file_state(row)

    def other_records(self) -> Iterator[FileRecord]:
        """Records of files that the source does not have and the destination still has, by path."""
        query = f"""SELECT record.* FROM record JOIN present USING (path)
          WHERE path > ? AND path NOT IN (SELECT path FROM source) AND present.bytes = record.bytes
          AND (present.etag = '' OR present.etag = record.etag) ORDER BY path LIMIT {_PAGE}"""  # noqa: S608
        after = ""
        while page := self._db.execute(query, (after,)).fetchall():
            after = page[-1][0]
            yield from (FileRecord(*row) for row in page)

    def file_and_folder(self, limit: int) -> list[str]:
        """Source paths that are both a file and a folder, at most `limit`: a file system cannot have both."""
        # '0' is the character after '/': the range contains everything that starts with the path and a slash.
        query = """SELECT path FROM source AS file WHERE EXISTS (
          SELECT 1 FROM source AS inside WHERE inside.path >= file.path || '/' AND inside.path < file.path || '0'
        ) LIMIT ?"""
        return [path for (path,) in self._db.execute(query, (limit,))]

    def longest_paths(self, limit: int) -> list[str]:
        """The source's longest paths in bytes, at most `limit`."""
        query = "SELECT path FROM source ORDER BY length(CAST(path AS BLOB)) DESC, path LIMIT ?"
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

    def compare_records(self) -> RecordCounts:
        """How the records compare with the files of the destination."""
        matches = "present.bytes IS record.bytes AND (present.etag = '' OR present.etag = record.etag)"
        query = f"""SELECT
          coalesce(sum({matches}), 0), coalesce(sum(CASE WHEN {matches} THEN record.bytes END), 0),
          coalesce(sum(present.path IS NULL), 0), coalesce(sum(present.path IS NOT NULL AND NOT ({matches})), 0)
          FROM record LEFT JOIN present USING (path)"""  # noqa: S608
        unlisted = """SELECT count(*), coalesce(sum(bytes), 0) FROM present
          WHERE path NOT IN (SELECT path FROM record)"""
        return RecordCounts(*self._db.execute(query).fetchone(), *self._db.execute(unlisted).fetchone())

    def different_records(self, limit: int) -> list[str]:
        """Paths of recorded files that are missing or different, at most `limit`."""
        query = """SELECT path FROM record LEFT JOIN present USING (path)
          WHERE present.bytes IS NOT record.bytes OR (present.etag != '' AND present.etag != record.etag)
          ORDER BY path LIMIT ?"""
        return [path for (path,) in self._db.execute(query, (limit,))]

    def is_present(self, path: str) -> bool:
        """Whether the destination has this file."""
        return self._db.execute("SELECT 1 FROM present WHERE path = ?", (path,)).fetchone() is not None

    def _in_order(self, condition: str) -> Iterator[FileState]:
        """Query page by page, because a statement must not stay open while its tables change."""
        query = f"""SELECT {_COLUMNS} FROM {_JOINED} WHERE (source.position, source.path) > (?, ?) AND {condition}
          ORDER BY source.position, source.path LIMIT {_PAGE}"""  # noqa: S608
        after = (-1, "")
        while page := self._db.execute(query, after).fetchall():
            after = (page[-1][4], page[-1][0])
            yield from map(_file_state, page)


def _file_state(columns: tuple[Any, ...]) -> FileState:
    path, size, etag, mtime_ns, position, present_bytes, present_etag, expected_sha256, *record = columns
    return FileState(
        Item(path, size, etag, mtime_ns, position),
        None if present_bytes is None else Item(path, present_bytes, present_etag),
        expected_sha256,
        None if record[0] is None else FileRecord(path, *record),
    )
