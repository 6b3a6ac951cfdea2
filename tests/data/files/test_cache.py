"""The cache of S3 objects: limited, least recently read first, shared, and never a damaged entry."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import time
from pathlib import Path

import pytest

from maskfleet.data.files.cache import ObjectCache

ENTRY = 1016  # with its header of 16 bytes an entry takes 1032


def entries(folder: Path) -> list[Path]:
    return [path for path in (folder / "entries").glob("*/*") if not path.name.endswith(".tmp")]


def total(folder: Path) -> int:
    return sum(path.stat().st_size for path in (folder / "entries").glob("*/*"))


def content_of(name: str) -> bytes:
    return (name.encode() * ENTRY)[:ENTRY]


def test_what_was_put_comes_back(tmp_path: Path) -> None:
    cache = ObjectCache(tmp_path, 10_000)
    assert cache.get("a") is None
    cache.put("a", b"content")
    assert ObjectCache(tmp_path, 10_000).get("a") == b"content"


def test_a_limit_of_zero_keeps_nothing(tmp_path: Path) -> None:
    cache = ObjectCache(tmp_path, 0)
    cache.put("a", b"content")
    assert cache.get("a") is None
    assert not (tmp_path / "entries").exists()


def test_the_entries_that_were_not_read_for_longest_go_first(tmp_path: Path) -> None:
    cache = ObjectCache(tmp_path, 10 * 1032)
    for number in range(10):
        cache.put(str(number), content_of(str(number)))
        os.utime(cache._path(str(number)), ns=(number, number))
    assert cache.get("0") == content_of("0")  # read now: the newest
    cache.put("new", content_of("new"))
    assert cache.get("0") is not None
    assert cache.get("1") is None
    assert cache.get("9") is not None
    assert cache.get("new") is not None
    assert total(tmp_path) <= 10 * 1032


def test_an_entry_larger_than_the_limit_is_not_kept(tmp_path: Path) -> None:
    cache = ObjectCache(tmp_path, 2000)
    cache.put("small", b"x")
    cache.put("large", bytes(3000))
    assert cache.get("large") is None
    assert cache.get("small") == b"x"


@pytest.mark.parametrize("damage", ["shorter", "changed", "empty"])
def test_a_damaged_entry_is_dropped(tmp_path: Path, damage: str) -> None:
    cache = ObjectCache(tmp_path, 10_000)
    cache.put("a", b"content")
    [entry] = entries(tmp_path)
    whole = entry.read_bytes()
    entry.write_bytes({"shorter": whole[:-1], "changed": whole[:-1] + b"?", "empty": b""}[damage])
    assert cache.get("a") is None
    assert entries(tmp_path) == []


def test_a_count_that_is_wrong_is_corrected_by_what_is_there(tmp_path: Path) -> None:
    cache = ObjectCache(tmp_path, 10 * 1032)
    cache.put("a", content_of("a"))
    (tmp_path / "bytes").write_bytes(b"%-32d" % 10**12)
    cache.put("b", content_of("b"))
    assert cache.get("a") is not None, "a process that died had counted what it never wrote"
    assert int((tmp_path / "bytes").read_bytes()) == 2 * 1032
    (tmp_path / "bytes").write_bytes(b"rubbish")
    cache.put("c", content_of("c"))
    assert int((tmp_path / "bytes").read_bytes()) == 3 * 1032


def test_temporary_files_of_dead_writers_are_deleted_with_the_oldest(tmp_path: Path) -> None:
    cache = ObjectCache(tmp_path, 10 * 1032)
    cache.put("a", content_of("a"))
    folder = entries(tmp_path)[0].parent
    for name, age_s in ((".dead.tmp", 7200), (".alive.tmp", 0)):
        (folder / name).write_bytes(bytes(4000))
        os.utime(folder / name, (time.time() - age_s,) * 2)
    (tmp_path / "bytes").unlink()
    for number in range(4):
        cache.put(str(number), content_of(str(number)))
    assert not (folder / ".dead.tmp").exists()
    assert (folder / ".alive.tmp").exists()


def test_a_folder_that_cannot_be_written_only_costs_speed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("not a folder")
    cache = ObjectCache(tmp_path / "file", 10_000)
    with caplog.at_level(logging.WARNING):
        cache.put("a", b"x")
        cache.put("b", b"x")
    assert cache.get("a") is None
    assert caplog.text.count("cannot write to the cache") == 1


def _fill(folder: Path, first: int, limit_bytes: int) -> None:
    cache = ObjectCache(folder, limit_bytes)
    for number in range(first, first + 10**6):
        name = str(number % 200)
        found = cache.get(name)
        assert found is None or found == content_of(name)
        cache.put(name, content_of(name))


@pytest.mark.slow
def test_processes_that_are_killed_leave_no_damaged_entry_and_keep_the_limit(tmp_path: Path) -> None:
    limit = 60 * 1032
    context = multiprocessing.get_context("fork")
    for first in range(10):
        group = [context.Process(target=_fill, args=(tmp_path, first * 20 + number, limit)) for number in range(3)]
        for process in group:
            process.start()
        before = len(entries(tmp_path)) if (tmp_path / "entries").exists() else 0
        while not before and not (tmp_path / "entries").exists():
            time.sleep(0.01)
        time.sleep(0.1)
        for process in group:
            assert process.is_alive(), "it found a damaged entry"
            assert process.pid is not None
            os.kill(process.pid, signal.SIGKILL)
            process.join()
        for path in entries(tmp_path):
            content = path.read_bytes()
            assert content[:8] == b"MFCACHE1"
            assert len(content) == 1032
    assert total(tmp_path) <= limit + 30 * 1032, "the limit, and at most what each killed process was writing"
