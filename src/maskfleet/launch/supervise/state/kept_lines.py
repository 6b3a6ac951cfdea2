"""A file of lines that survives a full disk: lines that cannot be written now are kept, and written later, in order."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import BinaryIO

from maskfleet.system.files import sync_open_file

STAMP_LENGTH = len("2026-01-01T00:00:00.000000Z ")
LIMIT = 8 << 20  # bytes kept in memory: hours of the log of a run, minutes of one that prints a lot


class KeptLines:
    """Appends lines to `path`, which no other process writes; several threads may add lines."""

    def __init__(self, path: Path, *, durable: bool = False, limit: int = LIMIT, echo: BinaryIO | None = None) -> None:
        self.path = path
        self._echo = echo  # gets every line too, without its time stamp
        self._durable, self._limit = durable, limit
        self._lock = threading.Lock()
        self._waiting = bytearray()
        self._in_line = False  # whether the last byte written is inside a line: the disk filled up there

    def add(self, line: bytes) -> None:
        """Append `line`, which ends with a newline; it waits in memory while the file cannot be written."""
        with self._lock:
            self._write_echo(line)
            self._waiting += line
            self._write()
            self._drop_oldest()

    def flush(self) -> OSError | None:
        """Try to write the lines that wait; returns why it is not possible."""
        with self._lock:
            return self._write()

    def _write(self) -> OSError | None:
        if not self._waiting:
            return None
        try:
            self._append()
        except OSError as error:
            return error
        return None

    def _write_echo(self, line: bytes) -> None:
        if self._echo is None:
            return
        try:
            self._echo.write(line[STAMP_LENGTH:])
            self._echo.flush()
        except OSError:
            self._echo = None  # nobody reads it any more

    def _append(self) -> None:
        # Opened for each write: a file handle of a network file system can become stale.
        is_new = not self.path.exists()
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        try:
            self._end_line_of_killed_writer(descriptor)
            while self._waiting:
                written = os.write(descriptor, self._waiting)
                self._in_line = self._waiting[written - 1] != ord("\n")
                del self._waiting[:written]
            if self._durable:
                sync_open_file(descriptor, self.path, is_new=is_new)
        finally:
            os.close(descriptor)

    def _end_line_of_killed_writer(self, descriptor: int) -> None:
        size = os.fstat(descriptor).st_size
        if size and not self._in_line and os.pread(descriptor, 1, size - 1) != b"\n":
            os.write(descriptor, b"\n")

    def _drop_oldest(self) -> None:
        """Drop the oldest lines beyond the limit, which only a failure of hours reaches."""
        excess = len(self._waiting) - self._limit
        if excess > 0:
            end = self._waiting.find(b"\n", excess) + 1
            del self._waiting[: end or len(self._waiting)]
