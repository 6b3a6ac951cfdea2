"""Feeds the files of a source that can only be read from start to end to threads that store them."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable, Iterator
from typing import Protocol

from maskfleet.data.stage.index import FileState
from maskfleet.data.stage.manifest import FileProblem, FileRecord, Item

_IN_MEMORY_BYTES = 1 << 20  # larger files are passed on in chunks while they are read
_QUEUED_CHUNKS = 4
_POLL_S = 0.1


class Source(Protocol):
    """What can be copied from: a folder, an S3 prefix, an archive, or shards made of one of them.

    A sequential source is read from start to end, by one thread, in the order of `Item.position`.
    """

    name: str
    manifest_name: str
    is_folder: bool
    is_sequential: bool

    def items(self) -> Iterator[Item]: ...
    def read(self, item: Item) -> tuple[str, Iterator[bytes]]: ...
    def manifest(self) -> Iterator[FileRecord]: ...


class Fed:
    """One file whose content another thread reads and feeds to the thread that stores it."""

    is_folder = True
    is_sequential = True

    def __init__(self, origin: Source) -> None:
        self.name = origin.name
        self.manifest_name = origin.manifest_name
        self._content: bytes | FileProblem | None = None
        self._queue: queue.Queue[bytes | FileProblem | None] = queue.Queue(_QUEUED_CHUNKS)
        self._closed = threading.Event()

    def items(self) -> Iterator[Item]:
        """No listing: the origin has it."""
        yield from ()

    def manifest(self) -> Iterator[FileRecord]:
        """No manifest: the origin has it."""
        yield from ()

    def read(self, item: Item) -> tuple[str, Iterator[bytes]]:
        """An empty version, and the content."""
        return "", self._chunks()

    @property
    def is_repeatable(self) -> bool:
        """Whether the content can be read again."""
        return self._content is not None

    def fill(self, chunks: Iterable[bytes]) -> None:
        """Keep the content of a small file."""
        try:
            self._content = b"".join(chunks)
        except FileProblem as problem:
            self._content = problem

    def pump(self, chunks: Iterable[bytes]) -> None:
        """Pass on the content of a large file; return early if nobody reads it any more."""
        try:
            for chunk in chunks:
                self._put(chunk)
                if self._closed.is_set():
                    return
            self._put(None)
        except FileProblem as problem:
            self._put(problem)

    def close(self) -> None:
        """Nobody reads any more."""
        self._closed.set()

    def _put(self, chunk: bytes | FileProblem | None) -> None:
        while not self._closed.is_set():
            try:
                self._queue.put(chunk, timeout=_POLL_S)
                return
            except queue.Full:
                continue

    def _chunks(self) -> Iterator[bytes]:
        if isinstance(self._content, FileProblem):
            raise self._content
        if self._content is not None:
            yield self._content
            return
        while (chunk := self._queue.get()) is not None:
            if isinstance(chunk, FileProblem):
                raise chunk
            yield chunk


def with_sources(origin: Source, files: Iterable[FileState]) -> Iterator[tuple[FileState, Source]]:
    """Each file with the source to read it from: `origin`, or if that is sequential, its content read here."""
    if not origin.is_sequential:
        yield from ((file, origin) for file in files)
        return
    for file in files:
        fed = Fed(origin)
        chunks = origin.read(file.item)[1]
        if file.item.bytes <= _IN_MEMORY_BYTES:
            fed.fill(chunks)
            yield file, fed
        else:
            yield file, fed
            fed.pump(chunks)
