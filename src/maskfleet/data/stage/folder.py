"""A local folder, often on EFS or FSx for Lustre, as the source or destination of a staging."""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import stat
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import BinaryIO

from maskfleet.data.stage.manifest import (
    MANIFEST,
    MAX_LINE_BYTES,
    STATE_FOLDER,
    FileProblem,
    FileRecord,
    Item,
    is_own_file,
    line_of,
    records_of,
    size_text,
)
from maskfleet.data.store.cache_folders import CACHE_FOLDER
from maskfleet.errors import DataError
from maskfleet.system.files import replacing
from maskfleet.system.lock import locked

CHUNK_BYTES = 1 << 20
_MAX_PATH_BYTES = 4095  # of Linux
_MAX_KNOWN_PARENTS = 10_000
_REMOVALS = 40
_REMOVAL_PAUSE_S = 0.05


class Folder:
    """A folder; a file gets its name only after it is written completely."""

    is_folder = True
    is_sequential = False

    def __init__(self, root: Path) -> None:
        self.root = root
        self.name = str(root)
        self.manifest_name = str(root / MANIFEST)
        self._state = root / STATE_FOLDER
        # Below a name of its own: after a kill, what still writes for an earlier staging cannot write for this one.
        self._parts = self._state / "partial" / secrets.token_hex(4)
        self._journal_path = self._state / "journal.jsonl"
        self._journal: BinaryIO | None = None
        self._journal_lock = threading.Lock()
        self._safe_parents: set[Path] = set()

    @classmethod
    def in_process(cls, root: Path, parts: Path) -> Folder:
        """The folder in a process that helps with a staging; it has a journal of its own."""
        folder = cls(root)
        folder._parts = parts
        folder._journal_path = folder._state / f"journal-{os.getpid()}.jsonl"
        return folder

    def opener(self) -> Callable[[], Folder]:
        """Opens the folder in another process."""
        return partial(Folder.in_process, self.root, self._parts)

    def items(self) -> Iterator[Item]:
        """All files, following links; none if the folder does not exist."""
        with folder_errors(self.name):
            yield from self._walk()

    def read(self, item: Item) -> tuple[str, Iterator[bytes]]:
        """An empty version, and the bytes of a file; a file that changes while it is read is a problem."""
        return "", self._chunks(item)

    def read_range(self, path: str, start: int, num_bytes: int) -> bytes:
        """A part of a file."""
        with folder_errors(self.name), (self.root / path).open("rb") as file:
            file.seek(start)
            return file.read(num_bytes)

    def manifest(self) -> Iterator[FileRecord]:
        """Records of the folder's manifest, if it has one."""
        yield from _records_in(self.root / MANIFEST, allow_partial_end=False)

    def records(self) -> Iterator[FileRecord]:
        """The verified files: records of the manifest, then those of a staging that was interrupted."""
        yield from self.manifest()
        for journal in self._journals():
            yield from _records_in(journal, allow_partial_end=True)

    @contextmanager
    def claimed(self) -> Iterator[None]:
        """Keep other stagings out, on this and on other machines; drop what an earlier one left half written."""
        with ExitStack() as stack:
            with folder_errors(self.name):
                self._state.mkdir(parents=True, exist_ok=True)
                stack.enter_context(locked(self._state / "lock", f"staging into {self.name}"))
                self._remove_parts()
                self._parts.mkdir(parents=True)
            try:
                yield
            finally:
                if self._journal is not None:
                    self._journal.close()
                self._remove_parts()

    def is_interrupted(self) -> bool:
        """Whether a staging into it runs, or was killed."""
        return self._parts.parent.exists() or any(journal.exists() for journal in self._journals())

    def why_too_long(self, path: str) -> str | None:
        """Why no file can have this name below the folder, or None."""
        is_too_long = len(os.fsencode(self.root.absolute() / path)) > _MAX_PATH_BYTES
        return f"makes a path of more than {_MAX_PATH_BYTES} bytes" if is_too_long else None

    def expect_space(self, need_bytes: int) -> None:
        """Raise before the first byte is copied if the file system has too little free space."""
        free_bytes = shutil.disk_usage(self.root).free
        if need_bytes > free_bytes:
            raise DataError(
                f"{self.name} has {size_text(free_bytes)} free, but {size_text(need_bytes)} remain to be copied",
                remedy="free space or choose a larger file system; files that are complete are not copied again",
            )

    def reopen(self, records: Iterable[FileRecord]) -> None:
        """Remove the manifest while the folder is incomplete; a journal keeps the verified records."""
        with folder_errors(self.name):
            self._write_records(self._journal_path, records)
            self._remove_journals_of_processes()
            if self._journal is not None:
                self._journal.close()
            self._journal = self._journal_path.open("ab")
            (self.root / MANIFEST).unlink(missing_ok=True)

    def invalidate(self, path: str) -> None:
        """Remove a file that says that others are complete, before they change."""
        with folder_errors(self.name):
            (self.root / path).unlink(missing_ok=True)

    def note(self, record: FileRecord) -> None:
        """Add to the journal, so that a later staging can resume if this one is killed; any thread may call this."""
        line = line_of(record).encode()
        with folder_errors(self.name), self._journal_lock:
            if self._journal is None:
                self._journal = self._journal_path.open("ab")
            self._journal.write(line)
            self._journal.flush()

    def store(self, item: Item, chunks: Iterable[bytes]) -> tuple[str, str]:
        """Write a file under a temporary name and rename it; neither etag nor version."""
        with folder_errors(self.name):
            try:
                with replacing(self._target(item.path), durable=False, temporary_in=self._parts) as file:
                    for chunk in chunks:
                        file.write(chunk)
            except OSError as error:
                if error.errno not in (errno.EISDIR, errno.ENOTDIR, errno.EEXIST, errno.ENOTEMPTY, errno.ENAMETOOLONG):
                    raise
                raise FileProblem(item.path, f"cannot be stored: {error.strerror}, {error.filename}") from error
        return "", ""

    def finish(self, records: Iterable[FileRecord]) -> None:
        """Write the manifest after all of its files are on disk."""
        with folder_errors(self.name):
            os.sync()  # once, instead of one fsync for each of a hundred thousand files
            self._write_records(self.root / MANIFEST, records)
            self._journal_path.unlink(missing_ok=True)
            self._remove_journals_of_processes()

    def _journals(self) -> list[Path]:
        """The journal of the staging, then those of its processes."""
        return [self._journal_path, *sorted(self._state.glob("journal-*.jsonl"))]

    def _remove_journals_of_processes(self) -> None:
        for journal in self._journals()[1:]:
            journal.unlink()

    def _remove_parts(self) -> None:
        """Remove partial files; processes of a killed staging may add some until they notice its end."""
        partial_files = self._parts.parent
        for _ in range(_REMOVALS):
            shutil.rmtree(partial_files, ignore_errors=True)
            if not partial_files.exists():
                return
            time.sleep(_REMOVAL_PAUSE_S)

    def _write_records(self, path: Path, records: Iterable[FileRecord]) -> None:
        with replacing(path, temporary_in=self._parts) as file:
            for record in records:
                file.write(line_of(record).encode())

    def _walk(self) -> Iterator[Item]:
        """All files in any order; iterative, so that deep trees do not exceed the recursion limit."""
        pending: list[tuple[str, tuple[tuple[int, int], ...]]] = [("", ())] if self.root.exists() else []
        while pending:
            prefix, above = pending.pop()
            folder = self.root / prefix
            found = folder.stat()
            here = (found.st_dev, found.st_ino)
            if here in above:
                yield Item(prefix.rstrip("/"), -1)  # a link to one of its parent folders is endless
                continue
            with os.scandir(folder) as entries:
                for entry in entries:
                    item = _item_of(entry, prefix + entry.name)
                    if item is None:
                        pending.append((f"{prefix}{entry.name}/", (*above, here)))
                    elif not is_own_file(item.path):
                        yield item

    def _chunks(self, item: Item) -> Iterator[bytes]:
        try:
            with (self.root / item.path).open("rb") as file:
                before = os.fstat(file.fileno())
                while chunk := file.read(CHUNK_BYTES):
                    yield chunk
                after = os.fstat(file.fileno())
        except FileNotFoundError as error:
            raise FileProblem(item.path, "was removed while it was read") from error
        except PermissionError as error:
            raise FileProblem(item.path, "is not readable by this user") from error
        except OSError as error:
            raise FileProblem(item.path, f"cannot be read: {error.strerror}") from error
        changed = (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns)
        if changed or (item.mtime_ns and item.mtime_ns != after.st_mtime_ns):
            raise FileProblem(item.path, "changed while it was read")

    def _target(self, path: str) -> Path:
        """The target of `path`, whose folder is created. A link that points outside the root is not followed."""
        target = self.root / path
        parent = target.parent
        if parent not in self._safe_parents:
            nearest = next(one for one in (parent, *parent.parents) if one.exists())
            if not nearest.resolve().is_relative_to(self.root.resolve()):
                raise FileProblem(path, f"is below {nearest}, a link that points outside {self.root}")
            parent.mkdir(parents=True, exist_ok=True)
            if len(self._safe_parents) >= _MAX_KNOWN_PARENTS:
                self._safe_parents.clear()
            self._safe_parents.add(parent)
        return target


def _item_of(entry: os.DirEntry[str], path: str) -> Item | None:
    """A file, or None for a folder to list; links are followed."""
    try:
        found = entry.stat()
    except OSError:
        return Item(path, -1)
    if stat.S_ISDIR(found.st_mode):
        return None if path != STATE_FOLDER and entry.name != CACHE_FOLDER else Item(path, 0)
    return Item(path, found.st_size, mtime_ns=found.st_mtime_ns) if stat.S_ISREG(found.st_mode) else Item(path, -1)


@contextmanager
def folder_errors(name: str) -> Iterator[None]:
    """Turn an error of the operating system into one for the user."""
    try:
        yield
    except OSError as error:
        raise folder_error(error, name) from error


def folder_error(error: OSError, name: str) -> DataError:
    """What went wrong with a folder, and what to do."""
    where = error.filename or name
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return DataError(
            f"{name} is full",
            remedy="free space and run the same command again; files that are complete are not copied again",
        )
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return DataError(
            f"user {os.getuid()} may not write or read {where}: {error.strerror}",
            remedy="give the folder to that user (chown), mount it writable, or on EFS mount it by an access point",
        )
    return DataError(
        f"{where}: {error.strerror or error}", remedy="check the folder and its mount, then run this again"
    )


def _records_in(path: Path, *, allow_partial_end: bool) -> Iterator[FileRecord]:
    with folder_errors(str(path)), suppress(FileNotFoundError), path.open("rb") as file:
        # a line is read at most one byte beyond the longest that a manifest may have
        lines = iter(lambda: file.readline(MAX_LINE_BYTES + 1), b"")
        yield from records_of(lines, str(path), allow_partial_end=allow_partial_end)
