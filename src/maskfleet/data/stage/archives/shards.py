"""Packs the images of a source into tar shards with an index; all other files stay files.

A shard is an ordinary tar archive. Its last member lists the others with offset and SHA-256, so that an interrupted
staging resumes shard by shard, and the index of all shards can be made from the shards alone. Names, order, headers and
sizes of all shards are known before the first byte is copied: a shard is copied like a file whose content is made on
the way.
"""

from __future__ import annotations

import hashlib
import json
import os
import tarfile
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import BinaryIO

from maskfleet.data.files.shard_index import (
    INDEX_NAME,
    SHARD_NAME,
    ShardFile,
    header_line,
    line_of_file,
    member_line,
    members_of,
)
from maskfleet.data.image_formats import IMAGE_SUFFIXES
from maskfleet.data.stage.feed import Source
from maskfleet.data.stage.folder import CHUNK_BYTES
from maskfleet.data.stage.index import FileState, Index
from maskfleet.data.stage.manifest import FileProblem, FileRecord, Item
from maskfleet.data.stage.transfer import Location
from maskfleet.errors import DataError

MAX_MEMBERS = 10_000  # of a shard: its list of members is kept in memory
_BLOCK = 512
_NO_SHA256 = "0" * 64
_OWN_MEMBER = ".maskfleet-shards/{}.jsonl"


@dataclass(slots=True)
class _Shard:
    """What is known about a shard before it is written."""

    name: str
    position: int  # of its first member in the source
    plan_at: int  # where the list of its members is in the plan
    plan_bytes: int = 0
    members: int = 0
    content_bytes: int = 0  # headers, members and their padding, without the list of members
    list_bytes: int = 0
    fingerprint: hashlib._Hash = field(default_factory=hashlib.sha256)

    @property
    def bytes(self) -> int:
        return self.content_bytes + self.list_header_bytes + _padded(self.list_bytes) + 2 * _BLOCK

    @property
    def list_at(self) -> int:
        return self.content_bytes + self.list_header_bytes

    @property
    def list_header_bytes(self) -> int:
        return len(_header(_OWN_MEMBER.format(self.name), self.list_bytes))

    def item(self) -> Item:
        changes_with = int.from_bytes(self.fingerprint.digest()[:7], "little") + 1  # below 2**63, and never 0
        return Item(self.name, self.bytes, mtime_ns=changes_with, position=self.position)


class Sharded:
    """The files of `origin`, with its images packed into shards of at most `shard_bytes`, or of one image."""

    is_folder = True

    def __init__(self, origin: Source, index: Index, shard_bytes: int) -> None:
        self.name = origin.name
        self.manifest_name = origin.manifest_name
        self.is_sequential = origin.is_sequential
        self._origin = origin
        self._index = index
        self._plan = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `close`
        self._shards = {shard.name: shard for shard in _planned(index, shard_bytes, self._plan)}
        self._plan.flush()
        if not self._shards:
            self._plan.close()
            raise DataError(f"there are no images in {origin.name}", remedy="check the path, or stage without --shards")

    def close(self) -> None:
        """Delete the plan."""
        self._plan.close()

    def items(self) -> Iterator[Item]:
        """The shards and all files that are not images."""
        yield from (shard.item() for shard in self._shards.values())
        yield from (file.item for file in self._index.files() if not is_image(file.item.path))

    def manifest(self) -> Iterator[FileRecord]:
        """Expected content of the files that are not images; that of images is compared when shards are made."""
        for file in self._index.files():
            if file.expected_sha256 is not None and not is_image(file.item.path):
                yield FileRecord(file.item.path, file.item.bytes, file.expected_sha256)

    def read(self, item: Item) -> tuple[str, Iterator[bytes]]:
        """The version, which shards do not have, and the bytes of a shard or file."""
        shard = self._shards.get(item.path)
        return self._origin.read(item) if shard is None else ("", self._shard_chunks(shard))

    def index_lines(self, target: Location) -> Iterator[bytes]:
        """The index of all shards, from the lists of members inside the shards of `target`."""
        shards = list(self._shards.values())
        yield header_line([(shard.name, shard.bytes) for shard in shards])
        for number, shard in enumerate(shards):
            listed = target.read_range(shard.name, shard.list_at, shard.list_bytes)
            planned = self._members(shard)
            for found, (file, _) in zip(members_of(listed, shard.name), planned, strict=True):
                if (found.path, found.bytes) != (file.path, file.bytes):
                    raise DataError(
                        f"{shard.name} in {target.name} is not the one that was written",
                        remedy="run the same command again",
                    )
                yield line_of_file(found, number)

    def _members(self, shard: _Shard) -> Iterator[tuple[Item, str | None]]:
        """Planned members and their expected SHA-256."""
        lines = os.pread(self._plan.fileno(), shard.plan_bytes, shard.plan_at)
        for line in lines.splitlines():
            *fields, expected = json.loads(line)
            yield Item(*fields), expected

    def _shard_chunks(self, shard: _Shard) -> Iterator[bytes]:
        listed, at = bytearray(), 0
        for item, expected in self._members(shard):
            header = _header(item.path, item.bytes)
            yield header
            at += len(header)
            digest = hashlib.sha256()
            yield from _checked(self._origin.read(item)[1], item, digest)
            if expected not in (None, digest.hexdigest()):
                raise FileProblem(item.path, f"has SHA-256 {digest.hexdigest()}, its manifest says {expected}")
            listed += member_line(ShardFile(item.path, at, item.bytes, digest.hexdigest()))
            yield _padding(item.bytes)
            at += _padded(item.bytes)
        yield _header(_OWN_MEMBER.format(shard.name), len(listed))
        yield bytes(listed) + _padding(len(listed)) + bytes(2 * _BLOCK)


def is_image(path: str) -> bool:
    """Whether a file goes into a shard."""
    return path[path.rfind(".") :].lower() in IMAGE_SUFFIXES


def store_index(sharded: Sharded, target: Location, index: Index) -> None:
    """Write the index of the shards, after all of them, and add it to the files and records in `index`."""
    with tempfile.TemporaryFile() as file:
        digest = hashlib.sha256()
        for line in sharded.index_lines(target):
            file.write(line)
            digest.update(line)
        item = Item(INDEX_NAME, file.tell())
        index.add_to_source(item)
        known = index.state(INDEX_NAME)
        assert known is not None, "it was just added"
        record, present = known.record, known.present
        is_complete = record is not None and record.sha256 == digest.hexdigest() and present is not None
        if is_complete and present is not None and present.bytes == item.bytes:
            return
        file.seek(0)
        etag, version = target.store(item, iter(lambda: file.read(CHUNK_BYTES), b""))
        index.add(FileRecord(INDEX_NAME, item.bytes, digest.hexdigest(), etag, version))


def add_index(index: Index) -> None:
    """Add the index of the shards, as it was recorded, to the files in `index` that are to be checked."""
    index.add_to_source(Item(INDEX_NAME, 0))
    known = index.state(INDEX_NAME)
    if known is not None and known.record is not None:
        index.add_to_source(Item(INDEX_NAME, known.record.bytes))


def _planned(index: Index, shard_bytes: int, plan: BinaryIO) -> Iterator[_Shard]:
    """The shards of the images in `index`, in the order of the source; their members are written to `plan`."""
    shard: _Shard | None = None
    number = 0
    for file in index.files():
        if not is_image(file.item.path):
            continue
        size = len(_header(file.item.path, file.item.bytes)) + _padded(file.item.bytes)
        if shard is not None and (shard.members == MAX_MEMBERS or shard.content_bytes + size > shard_bytes):
            yield shard
            shard = None
        if shard is None:
            shard = _Shard(SHARD_NAME.format(number), file.item.position, plan.tell())
            number += 1
        _add(shard, file, size, plan)
    if shard is not None:
        yield shard


def _add(shard: _Shard, file: FileState, size: int, plan: BinaryIO) -> None:
    item = file.item
    line = json.dumps([*item, file.expected_sha256]).encode() + b"\n"
    plan.write(line)
    content_at = shard.content_bytes + len(_header(item.path, item.bytes))
    shard.list_bytes += len(member_line(ShardFile(item.path, content_at, item.bytes, _NO_SHA256)))
    shard.fingerprint.update(json.dumps([item.path, item.bytes, item.etag, item.mtime_ns]).encode())
    shard.plan_bytes += len(line)
    shard.content_bytes += size
    shard.members += 1


def _checked(chunks: Iterable[bytes], item: Item, digest: hashlib._Hash) -> Iterator[bytes]:
    seen = 0
    for chunk in chunks:
        seen += len(chunk)
        digest.update(chunk)
        yield chunk
    if seen != item.bytes:
        raise FileProblem(item.path, f"has {seen:,} bytes instead of the {item.bytes:,} that were listed")


def _header(path: str, num_bytes: int) -> bytes:
    """The tar header of a file: the same for the same name and size, on any machine and at any time."""
    entry = tarfile.TarInfo(path)
    entry.size, entry.mode = num_bytes, 0o644
    return entry.tobuf(tarfile.GNU_FORMAT, "utf-8", "strict")


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // _BLOCK) * _BLOCK


def _padding(num_bytes: int) -> bytes:
    return bytes(_padded(num_bytes) - num_bytes)
