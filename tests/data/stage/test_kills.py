"""Stagings of archives and shards that are killed at any moment, or run twice at once."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest
from flaky_s3 import FlakyS3
from stage_server import bring, direct, files_in, recheck, write

from maskfleet.errors import MaskfleetError

pytest_plugins = ("stage_fixtures",)


def many(count: int, size: int) -> dict[str, bytes]:
    generator = random.Random(5)
    return {f"train2017/{number:012d}.jpg": generator.randbytes(size) for number in range(count)}


def tar_of(folder: Path, path: Path) -> Path:
    with tarfile.open(path, "w:gz", compresslevel=1) as tar:
        tar.add(folder, arcname=".")
    return path


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "maskfleet", "data", "stage", "--workers=2", *map(str, arguments)]


def begun(folder: Path) -> bool:
    state = folder / ".maskfleet-stage"
    return any(state.glob("partial/*/*")) or (state / "journal.jsonl").exists()


@pytest.mark.slow
@pytest.mark.parametrize("sharded", [False, True])
def test_ten_kills_leave_every_byte_right_and_nothing_is_copied_twice(tmp_path: Path, sharded: bool) -> None:
    files = many(3000, 10_000) if not sharded else many(300, 200_000)
    source = tar_of(write(tmp_path / "set", files), tmp_path / "set.tar.gz")
    there = tmp_path / "there"
    options = ["--shards", "--shard-size=1"] if sharded else []
    generator = random.Random(1)
    finished: dict[str, int] = {}
    kills = 0
    for _ in range(5):
        process = subprocess.Popen(
            command(*options, source, there), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        while process.poll() is None and not begun(there):
            time.sleep(0.005)
        time.sleep(generator.uniform(0, 0.3))
        kills += process.poll() is None
        process.send_signal(signal.SIGKILL)
        process.wait()
        now = {path: (there / path).stat().st_ino for path in files_in(there)}
        kept = journaled(there)
        assert {path: now.get(path) for path in finished} == finished, "a finished file was written again"
        finished = {path: now[path] for path in kept if path in now}
    assert kills >= 3
    bring(source, there, shard_bytes=10**6 if sharded else None)
    assert {path: (there / path).stat().st_ino for path in finished} == finished
    recheck(source, there, shard_bytes=10**6 if sharded else None)
    if not sharded:
        assert files_in(there) == files


def processes_of(session: int) -> set[int]:
    """The processes of a session."""
    found = set()
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = status.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[3]) == session and fields[0] != "Z":
            found.add(int(status.parent.name))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
@pytest.mark.parametrize("packed", [False, True])
def test_a_staging_that_is_told_to_stop_ends_all_its_processes_and_leaves_nothing_half(
    tmp_path: Path, packed: bool, number: signal.Signals
) -> None:
    files, there = many(3000, 10_000), tmp_path / "there"
    source = write(tmp_path / "set", files)
    if packed:
        source = tar_of(source, tmp_path / "set.tar.gz")
    process = subprocess.Popen(
        command(source, there), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True
    )
    state = there / ".maskfleet-stage"
    while process.poll() is None and not any(path.stat().st_size for path in state.glob("journal*.jsonl")):
        time.sleep(0.005)
    assert process.poll() is None
    process.send_signal(number)
    _, shown = process.communicate(timeout=120)
    assert process.returncode == 128 + number, shown
    assert b"Traceback" not in shown
    deadline = time.monotonic() + 60
    while left := processes_of(process.pid):
        assert time.monotonic() < deadline, left
        time.sleep(0.05)
    assert not (state / "partial").exists()
    assert not (there / "manifest.jsonl").exists()
    assert all(files[path] == content for path, content in files_in(there).items())
    assert 0 < bring(source, there).files_copied < len(files)


def journaled(there: Path) -> list[str]:
    import json

    paths = []
    for name in (".maskfleet-stage/journal.jsonl", "manifest.jsonl"):
        if (there / name).exists():
            for line in (there / name).read_bytes().splitlines(keepends=True):
                if line.endswith(b"\n"):
                    paths.append(json.loads(line)["path"])
    return [path for path in paths if path != "shards.jsonl"]


def test_two_stagings_of_shards_into_one_folder_at_once_are_refused(tmp_path: Path) -> None:
    from maskfleet.system.lock import locked

    source = write(tmp_path / "set", many(3, 100))
    bring(source, tmp_path / "there", shard_bytes=10**6)
    with (
        locked(tmp_path / "there" / ".maskfleet-stage" / "lock", "staging"),
        pytest.raises(MaskfleetError, match="another process is staging"),
    ):
        bring(source, tmp_path / "there", shard_bytes=10**6)


@pytest.mark.slow
def test_two_uploads_of_shards_at_once_agree(s3: FlakyS3, tmp_path: Path) -> None:
    source = write(tmp_path / "set", many(40, 50_000))
    pair = [
        subprocess.Popen(command("--shards", "--shard-size=1", source, "s3://coco-data/set"), stderr=subprocess.PIPE)
        for _ in range(2)
    ]
    for process in pair:
        _, shown = process.communicate()
        assert process.returncode == 0, shown
    recheck(source, "s3://coco-data/set", shard_bytes=10**6)
    assert direct(s3).head_object(Bucket="coco-data", Key="set/shards.jsonl")["ContentLength"] > 0


@pytest.mark.skipif(os.getuid() == 0, reason="root may write everywhere")
def test_a_read_only_target_of_shards_is_named(tmp_path: Path) -> None:
    source = write(tmp_path / "set", many(3, 100))
    (tmp_path / "there").mkdir(mode=0o500)
    with pytest.raises(MaskfleetError, match="may not write"):
        bring(source, tmp_path / "there", shard_bytes=10**6)


def test_a_full_disk_is_named_and_the_staging_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import errno

    from maskfleet.data.stage import folder

    source = write(tmp_path / "set", many(30, 10_000))
    real = folder.replacing

    def full(path: Path, **options: object) -> object:
        if path.name == "shard-000002.tar":
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        return real(path, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(folder, "replacing", full)
    with pytest.raises(MaskfleetError, match="there is full") as caught:
        bring(source, tmp_path / "there", shard_bytes=50_000)
    assert "free space" in caught.value.remedy
    assert not (tmp_path / "there" / "shards.jsonl").exists()
    monkeypatch.setattr(folder, "replacing", real)
    assert bring(source, tmp_path / "there", shard_bytes=50_000).files_copied < 10
    recheck(source, tmp_path / "there", shard_bytes=50_000)
