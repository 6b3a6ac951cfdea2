"""The manifest of a staged folder or prefix: one JSON line per file, written last; if it exists, all files do."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from maskfleet.data.store.cache_folders import CACHE_FOLDER
from maskfleet.errors import DataError

MANIFEST = "manifest.jsonl"
STATE_FOLDER = ".maskfleet-stage"  # in a destination folder: lock, journal and partial files
MAX_LINE_BYTES = 16_384
_SHA256 = re.compile(r"[0-9a-f]{64}")
_MAX_PART_BYTES = 255  # limit of file names on Linux, EFS and Lustre


class Item(NamedTuple):
    """One file in the listing of a location; `bytes` is -1 if it is not a regular file.

    `mtime_ns` changes with the content: it is the modification time of the file, or of the archive that contains it,
    or a fingerprint of the members of a shard. Files are copied in the order of `position`, then of their paths.
    """

    path: str
    bytes: int
    etag: str = ""
    mtime_ns: int = 0
    position: int = 0


class FileRecord(NamedTuple):
    """One file that was copied and verified."""

    path: str
    bytes: int
    sha256: str
    etag: str = ""
    version: str = ""
    mtime_ns: int = 0


class FileProblem(Exception):  # noqa: N818 - it stops one file, not the staging
    """One file that cannot be copied or is not as expected; the other files continue."""

    def __init__(self, path: str, why: str) -> None:
        super().__init__(f"{path!r} {why}")
        self.path = path
        self.why = why

    def __reduce__(self) -> tuple[type[FileProblem], tuple[str, str]]:
        """How it is sent from one process to another."""
        return FileProblem, (self.path, self.why)


def why_refused(item: Item) -> str | None:
    """Why an item cannot be stored as a file in a folder, or None.

    Object names may be any text: they must not point outside the destination or to another file in it.
    """
    parts = item.path.split("/")
    try:
        longest = max(len(part.encode()) for part in parts)
    except UnicodeEncodeError:
        return "is not UTF-8"
    if item.bytes < 0:
        return "is not a regular file or a link to one"
    if item.path.startswith("/"):
        return "is an absolute path"
    if ".." in parts or "." in parts:
        return "contains . or .."
    if "" in parts:
        return "contains an empty name"
    if "\0" in item.path:
        return "contains a null byte"
    if longest > _MAX_PART_BYTES:
        return f"contains a name of more than {_MAX_PART_BYTES} bytes"
    return None


def accepted(items: Iterable[Item], refused: list[FileProblem]) -> Iterator[Item]:
    """The items that can be stored as files; what is wrong with the others is added to `refused`."""
    for item in items:
        why = why_refused(item)
        if why is None:
            yield item
        else:
            refused.append(FileProblem(item.path, why))


def is_own_file(path: str) -> bool:
    """Whether `path` is a file that staging itself writes, or a cache of training; such files are never copied."""
    parts = path.split("/")
    return path == MANIFEST or parts[0] == STATE_FOLDER or CACHE_FOLDER in parts


def line_of(record: FileRecord) -> str:
    """The manifest line of a record, without empty fields."""
    fields = {name: value for name, value in record._asdict().items() if value or name == "bytes"}
    return json.dumps(fields, ensure_ascii=False) + "\n"


def records_of(lines: Iterable[bytes], name: str, *, allow_partial_end: bool = False) -> Iterator[FileRecord]:
    """The records of a manifest's lines; a journal may end with a partial line if its writer was killed."""
    invalid: DataError | None = None
    for number, line in enumerate(lines, 1):
        if invalid is not None:
            raise invalid
        if not line.strip():
            continue
        try:
            record = _record(line)
            if not is_own_file(record.path):  # older manifests list caches
                yield record
        except (ValueError, RecursionError) as error:
            invalid = DataError(
                f"{name}, line {number}: {error}",
                remedy="each line is a JSON object with path, bytes and sha256; delete it if it is not a manifest "
                "of `maskfleet data stage`, and stage again",
            )
            if not allow_partial_end:
                raise invalid from error


def size_text(num_bytes: float) -> str:
    """A size in powers of 1000: `512 B`, `4.2 MB`."""
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.1f} TB"


def _record(line: bytes) -> FileRecord:
    if len(line) > MAX_LINE_BYTES:
        raise ValueError(f"is longer than {MAX_LINE_BYTES} bytes")
    found = json.loads(line)
    if not isinstance(found, dict):
        raise ValueError("is not a JSON object")
    path, size, sha256 = found.get("path"), found.get("bytes"), found.get("sha256")
    etag, version, mtime_ns = found.get("etag", ""), found.get("version", ""), found.get("mtime_ns", 0)
    if not isinstance(path, str):
        raise ValueError("path is not a string")
    if type(size) is not int or not 0 <= size < 2**63:
        raise ValueError("bytes is not a non-negative integer")
    if not isinstance(sha256, str) or not _SHA256.fullmatch(sha256):
        raise ValueError("sha256 is not 64 hexadecimal digits")
    if not isinstance(etag, str) or not isinstance(version, str):
        raise ValueError("etag or version is not a string")
    if type(mtime_ns) is not int or not -(2**63) <= mtime_ns < 2**63:
        raise ValueError("mtime_ns is not an integer")
    refused = why_refused(Item(path, size))
    if refused:
        raise ValueError(f"path {path!r} {refused}")
    return FileRecord(path, size, sha256, etag, version, mtime_ns)
