"""Folders for what can be made again: next to the data, or in the user's cache."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

from maskfleet.system.files import cache_folder

CACHE_FOLDER = ".maskfleet"  # next to annotation files and shards


def user_cache_dir() -> Path:
    """The user's folder for stores of data sets that are on read-only file systems."""
    return cache_folder("stores")


def first_writable(folders: Sequence[Path]) -> Path | None:
    """The first writable folder, created if needed."""
    for folder in folders:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                return folder
        except OSError:
            continue
    return None
