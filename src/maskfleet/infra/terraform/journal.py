"""What was last done to each root, for `status`: also when the doer did not live to tell."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from maskfleet.infra.terraform.backend import OVERRIDE_FILE
from maskfleet.system.files import read_json, write_private_json


@dataclass(frozen=True, slots=True)
class Entry:
    """The last thing done to a root."""

    did: str = ""
    ended: str = ""
    at: str = ""
    fingerprint: str = ""

    @property
    def text(self) -> str:
        if not self.did:
            return "nothing was done from this work folder"
        return f"{self.did} {self.ended or 'began and did not end here'} at {self.at}"


def entry(journal: Path, root: str) -> Entry:
    """The last thing done to `root`."""
    found = read_json(journal).get(root)
    return Entry(**found) if isinstance(found, dict) else Entry()


@contextmanager
def recorded(journal: Path, root: str, did: str, folder: Path) -> Iterator[None]:
    """Note in `journal` that `did` is under way on a root, then how it ended."""
    note = {"did": did, "at": time.strftime("%Y-%m-%d %H:%M:%S"), "fingerprint": fingerprint(folder)}
    write_private_json(journal, {**read_json(journal), root: {**note, "ended": ""}})
    ended = "failed"
    try:
        yield
        ended = "ended well"
    finally:
        note["at"] = time.strftime("%Y-%m-%d %H:%M:%S")
        write_private_json(journal, {**read_json(journal), root: {**note, "ended": ended}})


def fingerprint(folder: Path) -> str:
    """Checksum of a root's files and settings: what an apply makes real."""
    total = hashlib.sha256()
    for file in sorted([*folder.glob("*.tf"), *folder.glob("*.tfvars"), *folder.glob("*.json")]):
        if file.name != OVERRIDE_FILE:
            total.update(f"{file.name}\0".encode() + file.read_bytes())
    return total.hexdigest()
