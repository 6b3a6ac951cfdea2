"""Where a download goes: a folder or an S3 prefix, with what a later run needs to resume.

Pins are the SHA-256 of the archives' directories: a resumed download must find the archives that it began with.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

from maskfleet.data.stage.folder import Folder, folder_errors
from maskfleet.data.stage.manifest import STATE_FOLDER, FileRecord, Item, line_of, records_of
from maskfleet.data.stage.transfer import Location
from maskfleet.errors import DataError
from maskfleet.system.files import read_json, write_atomically

_PINS = "pins.json"


class Destination(Protocol):
    """A location, and the state of a download into it."""

    location: Location

    def claimed(self) -> AbstractContextManager[None]: ...
    def records(self) -> Iterator[FileRecord]: ...
    def note(self, records: Sequence[FileRecord]) -> None: ...
    def keep_only(self, records: Iterable[FileRecord]) -> None: ...
    def pins(self) -> dict[str, str]: ...
    def write_pins(self, pins: dict[str, str]) -> None: ...
    def forget(self) -> None: ...
    def close(self) -> None: ...


class FolderDestination:
    """A folder, whose journal gets a line for every file."""

    def __init__(self, root: Path) -> None:
        self._folder = Folder(root)
        self._pins = root / STATE_FOLDER / _PINS
        self.location: Location = self._folder

    def claimed(self) -> AbstractContextManager[None]:
        """Keep other downloads and stagings out."""
        return self._folder.claimed()

    def records(self) -> Iterator[FileRecord]:
        """Files that are complete."""
        return self._folder.records()

    def note(self, records: Sequence[FileRecord]) -> None:
        """Record complete files."""
        for record in records:
            self._folder.note(record)

    def keep_only(self, records: Iterable[FileRecord]) -> None:
        """Replace all records."""
        self._folder.reopen(records)

    def pins(self) -> dict[str, str]:
        """Pins of an earlier run, by archive."""
        return read_json(self._pins)

    def write_pins(self, pins: dict[str, str]) -> None:
        """Store the pins before the first file."""
        with folder_errors(self._folder.name):
            write_atomically(self._pins, json.dumps(pins))

    def forget(self) -> None:
        """The journal was replaced by the manifest; the pins stay, for a later run."""

    def close(self) -> None:
        """Nothing is open."""


class PrefixDestination:
    """An S3 prefix; its journal is one object per segment, because S3 cannot append to an object."""

    def __init__(self, url: str, *, workers: int) -> None:
        from maskfleet.data.stage.s3 import Prefix

        self._prefix = Prefix(url, workers=workers)
        self._state = Prefix(f"{url.rstrip('/')}/{STATE_FOLDER}/get", workers=1)
        self.location: Location = self._prefix

    def claimed(self) -> AbstractContextManager[None]:
        """Uploads replace whole objects, so that two downloads of the same archives do no harm."""
        return self._prefix.claimed()

    def records(self) -> Iterator[FileRecord]:
        """Files that are complete: those of the manifest, then those of the journal."""
        yield from self._prefix.manifest()
        for item in self._state.items():
            if item.path != _PINS:
                yield from records_of(self._content(item).splitlines(), f"{self._state.name}/{item.path}")

    def note(self, records: Sequence[FileRecord]) -> None:
        """Record complete files; the same segment has the same name in every run."""
        if records:
            content = "".join(map(line_of, records)).encode()
            name = hashlib.sha256(records[0].path.encode()).hexdigest()
            self._store(f"journal/{name}.jsonl", content)

    def keep_only(self, records: Iterable[FileRecord]) -> None:
        """Replace all records."""
        self.forget()
        self.note(list(records))

    def pins(self) -> dict[str, str]:
        """Pins of an earlier run, by archive."""
        for item in self._state.items():
            if item.path == _PINS:
                return _read_pins(self._content(item), f"{self._state.name}/{_PINS}")
        return {}

    def write_pins(self, pins: dict[str, str]) -> None:
        """Store the pins before the first file."""
        self._store(_PINS, json.dumps(pins).encode())

    def forget(self) -> None:
        """Delete the journal, which the manifest replaces; the pins stay, for a later run.

        The roles of our stacks write objects and delete none: what stays is emptied, or its records would count.
        """
        for path in self._state.delete(item.path for item in self._state.items() if item.path != _PINS):
            self._store(path, b"")

    def close(self) -> None:
        """Close the connections."""
        self._prefix.close()
        self._state.close()

    def _content(self, item: Item) -> bytes:
        return b"".join(self._state.read(item)[1])

    def _store(self, path: str, content: bytes) -> None:
        self._state.store(Item(path, len(content)), [content])


def destination_at(text: str, *, workers: int) -> Destination:
    """The folder or S3 prefix that `text` names."""
    if text.startswith("s3://"):
        return PrefixDestination(text, workers=workers)
    if "://" in text:
        raise DataError(f"{text!r} is neither an S3 URL nor a folder", remedy="write s3://bucket/prefix or a folder")
    if Path(text).exists() and not Path(text).is_dir():
        raise DataError(f"{text} is a file", remedy="give a folder")
    return FolderDestination(Path(text))


def _read_pins(content: bytes, name: str) -> dict[str, str]:
    try:
        found: Any = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{name} is not JSON: {error}", remedy="delete it and run the same command again") from error
    return found if isinstance(found, dict) else {}
