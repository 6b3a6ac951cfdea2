"""The last command that changed each root, for `status`; also one that was killed."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from maskfleet.infra.terraform.backend import OVERRIDE_FILE
from maskfleet.system.files import read_json, write_private_json


@dataclass(frozen=True, slots=True)
class JournalEntry:
    """The last command that changed a root."""

    did: str = ""
    ended: str = ""
    at: str = ""
    fingerprint: str = ""

    @property
    def text(self) -> str:
        if not self.did:
            return "no command has changed it from this work folder"
        return f"{self.did} {self.ended or 'started and did not finish'} at {self.at}"


def last_entry(journal: Path, root: str) -> JournalEntry:
    """The last command that changed `root`."""
    found = read_json(journal).get(root)
    return JournalEntry(**found) if isinstance(found, dict) else JournalEntry()


@contextmanager
def recorded(journal: Path, root: str, did: str, folder: Path) -> Iterator[None]:
    """Record in `journal` that the command `did` runs on a root, then how it ended."""
    applied = fingerprint(folder)

    def write(ended: str) -> None:
        entry = JournalEntry(did, ended, time.strftime("%Y-%m-%d %H:%M:%S"), applied)
        write_private_json(journal, {**read_json(journal), root: asdict(entry)})

    write("")
    try:
        yield
    except BaseException:
        write("failed")
        raise
    write("succeeded")


def fingerprint(folder: Path) -> str:
    """Checksum of the files and settings of a root, which an apply puts into effect."""
    total = hashlib.sha256()
    for file in sorted([*folder.glob("*.tf"), *folder.glob("*.tfvars"), *folder.glob("*.json")]):
        if file.name != OVERRIDE_FILE:
            total.update(f"{file.name}\0".encode() + file.read_bytes())
    return total.hexdigest()
