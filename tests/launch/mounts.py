"""File systems that fail for real: a full one, and one that is read-only; both need root."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest


def _mount(*arguments: str) -> None:
    done = subprocess.run(["mount", *arguments], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"NOT TESTED: cannot mount here: {done.stderr.strip()}")


@contextmanager
def small_disk(path: Path, size_kib: int = 256) -> Iterator[Path]:
    """A file system of its own at `path`."""
    path.mkdir(exist_ok=True)
    _mount("-t", "tmpfs", "-o", f"size={size_kib}k", "tmpfs", str(path))
    try:
        yield path
    finally:
        subprocess.run(["umount", "--lazy", str(path)], check=True)


@contextmanager
def full(path: Path) -> Iterator[None]:
    """No space is left on the disk at `path` while the block runs."""
    filler = path / "filler"
    with filler.open("wb", buffering=0) as file, suppress(OSError):  # OSError: it is full now
        while True:
            file.write(b"x" * 512)
    assert filler.stat().st_size
    try:
        yield
    finally:
        filler.unlink()


@contextmanager
def read_only(path: Path) -> Iterator[None]:
    """Nothing can be written below `path` while the block runs; files that are open stay writable."""
    _mount("--bind", str(path), str(path))
    try:
        _mount("-o", "remount,bind,ro", str(path))
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(path)], check=True)
