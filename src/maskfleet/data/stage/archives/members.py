"""What zip and tar archives have in common as sources: which members are files, and errors for users."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from maskfleet.data.stage.folder import CHUNK_BYTES, folder_errors
from maskfleet.data.stage.manifest import MANIFEST, FileProblem, FileRecord, Item, is_own_file, records_of
from maskfleet.data.stage.member_names import Kind, MemberNames, why_bomb
from maskfleet.errors import DataError

_NAMED = 5  # members listed in a message


class Members:
    """The members of one archive, judged one after the other; the archive's own manifest is kept aside."""

    def __init__(self, path: Path, archive_bytes: int) -> None:
        self._path = path
        self._archive_bytes = archive_bytes
        self._names = MemberNames()
        self._refused: list[str] = []
        self._total_bytes = 0

    def is_file(self, name: str, kind: Kind, num_bytes: int) -> bool:
        """Whether a member is a file to copy; DataError if the archive unpacks to far more than its own size."""
        if is_own_file(name.removeprefix("./")):
            return False
        self._total_bytes += num_bytes
        bomb = why_bomb(self._archive_bytes, self._total_bytes)
        if bomb is not None:
            raise DataError(
                f"{self._path} is refused: {bomb}", remedy="unpack it yourself if you trust it, and stage the folder"
            )
        why = self._names.why_refused(member_path(name), kind, num_bytes) if name not in (".", "./") else None
        if why is not None:
            self._refused.append(f"{name!r} {why}")
        return why is None and kind == "file"

    def refuse(self, name: str, why: str) -> None:
        """Refuse a member for a reason of its format."""
        self._refused.append(f"{name!r} {why}")

    def expect_accepted(self) -> None:
        """DataError that lists the refused members, if there are any."""
        if self._refused:
            lines = [f"some members of {self._path} cannot be stored:", *self._refused[:_NAMED]]
            if len(self._refused) > _NAMED:
                lines.append(f"and {len(self._refused) - _NAMED:,} more")
            raise DataError("\n    ".join(lines), remedy="make the archive again without them")


class OwnManifest:
    """The manifest inside an archive of a staged folder, kept in a temporary file."""

    def __init__(self, archive: str) -> None:
        self.name = f"{MANIFEST} in {archive}"
        self._file: BinaryIO | None = None

    def keep(self, chunks: Iterable[bytes]) -> None:
        """Copy the manifest out of the archive."""
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `close`
        for chunk in chunks:
            self._file.write(chunk)

    def records(self) -> Iterator[FileRecord]:
        """The records of the manifest; none if the archive has no manifest."""
        if self._file is not None:
            self._file.seek(0)
            yield from records_of(self._file, self.name)

    def close(self) -> None:
        """Delete the temporary file."""
        if self._file is not None:
            self._file.close()


class OpenArchive:
    """An archive file that is open for reading, and notices that it changes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with folder_errors(str(path)):
            self.file = path.open("rb")
            found = os.fstat(self.file.fileno())
        self.bytes, self.mtime_ns = found.st_size, found.st_mtime_ns

    def expect_unchanged(self, member: str) -> None:
        """FileProblem if the archive was written to since it was opened."""
        found = os.fstat(self.file.fileno())
        if (found.st_size, found.st_mtime_ns) != (self.bytes, self.mtime_ns):
            raise FileProblem(member, f"cannot be trusted: {self.path} changed while it was read")

    def chunks_at(self, start: int, num_bytes: int) -> Iterator[bytes]:
        """A range of the file; any number of threads may read at the same time."""
        while num_bytes > 0:
            chunk = os.pread(self.file.fileno(), min(num_bytes, CHUNK_BYTES), start)
            if not chunk:
                return
            yield chunk
            start += len(chunk)
            num_bytes -= len(chunk)

    def close(self) -> None:
        """Close the file."""
        self.file.close()


def member_path(name: str) -> str:
    """The name of a member as a path: `tar c .` writes ./ before each."""
    return name.removeprefix("./")


def damaged(path: Path, error: Exception) -> DataError:
    """The error for an archive that cannot be listed to its end."""
    return DataError(
        f"{path} is truncated or damaged: {error}", remedy="copy or download it again, and compare its size or checksum"
    )


@contextmanager
def member_problems(item: Item, kinds: tuple[type[Exception], ...]) -> Iterator[None]:
    """Turn an error while a member is read into one about this member alone."""
    try:
        yield
    except kinds as error:
        raise FileProblem(item.path, f"is damaged in the archive: {error}") from error
