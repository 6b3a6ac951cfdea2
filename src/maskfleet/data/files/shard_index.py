"""The index of tar shards: which bytes of which shard are which file.

`shards.jsonl` is written last, so where it exists the shards are complete. Its first line lists the shards with their
sizes; each further line is one file with the number of its shard, its offset in bytes, its length and its SHA-256.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, TypeGuard

from maskfleet.errors import DataError

INDEX_NAME = "shards.jsonl"
SHARD_NAME = "shard-{:06d}.tar"
_FORMAT = "maskfleet-shards-1"
_SHARD = re.compile(r"shard-\d{6,}\.tar")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_REMEDY = "make the shards again with `maskfleet data stage --shards`, or copy them again"


class ShardFile(NamedTuple):
    """One file inside a shard."""

    path: str
    offset: int
    bytes: int
    sha256: str


class ShardSize(NamedTuple):
    """One shard as the index lists it."""

    name: str
    bytes: int


def header_line(shards: Iterable[tuple[str, int]]) -> bytes:
    """The first line of the index."""
    listed = [{"name": name, "bytes": size} for name, size in shards]
    return json.dumps({"format": _FORMAT, "shards": listed}).encode() + b"\n"


def member_line(file: ShardFile) -> bytes:
    """The line of a file in the list that a shard has of its own members."""
    return json.dumps(file._asdict(), ensure_ascii=False).encode() + b"\n"


def line_of_file(file: ShardFile, shard: int) -> bytes:
    """The line of a file in the index of all shards."""
    return json.dumps({**file._asdict(), "shard": shard}, ensure_ascii=False).encode() + b"\n"


def members_of(lines: bytes, name: str) -> Iterator[ShardFile]:
    """The files in the list of a shard's members."""
    for number, line in enumerate(lines.splitlines(), 1):
        yield _file(_parsed(line, name, number), name, number)


def shards_of(first_line: bytes, name: str) -> list[ShardSize]:
    """The shards that the first line of the index lists."""
    found = _parsed(first_line, name, 1)
    try:
        shards = [ShardSize(str(shard["name"]), shard["bytes"]) for shard in found["shards"]]
    except (KeyError, TypeError) as error:
        raise _broken(name, 1, "does not list the shards") from error
    if found.get("format") != _FORMAT:
        raise _broken(name, 1, f"has the format {found.get('format')!r} instead of {_FORMAT!r}")
    if not all(_SHARD.fullmatch(shard.name) and _is_count(shard.bytes) for shard in shards):
        raise _broken(name, 1, "lists something that is not a shard")
    return shards


def files_of(lines: Iterable[bytes], shards: list[ShardSize], name: str) -> Iterator[tuple[ShardFile, int]]:
    """The files of the index, after its first line -> (file, number of its shard)."""
    for number, line in enumerate(lines, 2):
        found = _parsed(line, name, number)
        file, shard = _file(found, name, number), found.get("shard", -1)
        if not _is_count(shard) or shard >= len(shards):
            raise _broken(name, number, f"names shard {shard!r}, which does not exist")
        if file.offset + file.bytes > shards[shard].bytes:
            raise _broken(name, number, f"ends after the end of {shards[shard].name}")
        yield file, shard


def _parsed(line: bytes, name: str, number: int) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise _broken(name, number, f"is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise _broken(name, number, "is not a JSON object")
    return found


def _file(found: dict[str, Any], name: str, number: int) -> ShardFile:
    path, offset, size, sha256 = (found.get(key) for key in ShardFile._fields)
    if not isinstance(path, str) or not path:
        raise _broken(name, number, "has no path")
    if not _is_count(offset) or not _is_count(size):
        raise _broken(name, number, "has no offset or length")
    if not isinstance(sha256, str) or not _SHA256.fullmatch(sha256):
        raise _broken(name, number, "has no SHA-256")
    return ShardFile(path, offset, size, sha256)


def _is_count(value: Any) -> TypeGuard[int]:
    return type(value) is int and 0 <= value < 2**62


def _broken(name: str, number: int, why: str) -> DataError:
    return DataError(f"{name}, line {number}: {why}", remedy=_REMEDY)
