"""`maskfleet data stage` from folder to folder: what does not need S3."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from maskfleet.data.stage import folder as stage_folder
from maskfleet.data.stage.folder import Folder
from maskfleet.data.stage.index import Index
from maskfleet.data.stage.manifest import Item
from maskfleet.data.stage.stage import Staged, stage
from maskfleet.errors import DataError
from maskfleet.system.lock import LockHeldError, NoLocksError

FILES = {"annotations/a.json": b"{}", "train2017/1.jpg": b"one", "train2017/2.jpg": b"two", "empty": b""}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write(tmp_path / "source", FILES)


def write(folder: Path, files: dict[str, bytes]) -> Path:
    for path, content in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(content)
    return folder


def seen(folder: Path) -> dict[str, bytes]:
    paths = [path for path in folder.rglob("*") if path.is_file() and ".maskfleet-stage" not in path.parts]
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths if path.name != "manifest.jsonl"}


def bring(source: object, destination: object, **options: Any) -> Staged:
    return stage(str(source), str(destination), workers=2, progress=lambda tally: None, **options)


def test_a_folder_is_copied_and_its_manifest_is_sorted(source: Path, tmp_path: Path) -> None:
    done = bring(source, tmp_path / "there")
    assert (done.files, done.total_bytes, done.files_copied) == (4, 8, 4)
    assert seen(tmp_path / "there") == FILES
    lines = (tmp_path / "there" / "manifest.jsonl").read_text().splitlines()
    assert [json.loads(line)["path"] for line in lines] == sorted(FILES)
    assert bring(source, tmp_path / "there").files_copied == 0


def test_an_edited_file_of_the_same_length_is_copied_again(source: Path, tmp_path: Path) -> None:
    bring(source, tmp_path / "there")
    write(source, {"train2017/1.jpg": b"ONE"})
    assert bring(source, tmp_path / "there").files_copied == 1
    assert seen(tmp_path / "there")["train2017/1.jpg"] == b"ONE"


def test_check_sees_an_edit_at_the_source_but_not_a_mere_touch(source: Path, tmp_path: Path) -> None:
    bring(source, tmp_path / "there")
    os.utime(source / "train2017/2.jpg", ns=(1, 1))
    assert stage(str(source), str(tmp_path / "there"), check=True, progress=lambda tally: None).files == 4
    write(source, {"train2017/1.jpg": b"ONE"})
    with pytest.raises(DataError, match=r"'train2017/1\.jpg' changed at the source"):
        stage(str(source), str(tmp_path / "there"), check=True, progress=lambda tally: None)


def test_files_that_the_source_lost_are_left_and_mentioned(source: Path, tmp_path: Path) -> None:
    bring(source, tmp_path / "there")
    (source / "empty").unlink()
    done = bring(source, tmp_path / "there")
    assert seen(tmp_path / "there") == FILES
    assert "1 files from an earlier staging are no longer in" in done.notes[0]
    assert '"empty"' not in (tmp_path / "there" / "manifest.jsonl").read_text()


def test_files_of_others_in_the_destination_are_left_alone(source: Path, tmp_path: Path) -> None:
    write(tmp_path / "there", {"logs/mine.txt": b"mine"})
    bring(source, tmp_path / "there")
    assert seen(tmp_path / "there") == {**FILES, "logs/mine.txt": b"mine"}


def test_a_staged_folder_can_be_a_source(source: Path, tmp_path: Path) -> None:
    bring(source, tmp_path / "one")
    bring(tmp_path / "one", tmp_path / "two")
    assert seen(tmp_path / "two") == FILES
    assert "one" not in (tmp_path / "two" / "manifest.jsonl").read_text()


def test_links_are_followed_and_one_without_end_is_named(source: Path, tmp_path: Path) -> None:
    write(tmp_path / "elsewhere", {"3.jpg": b"three"})
    (source / "val2017").symlink_to(tmp_path / "elsewhere")
    (source / "train2017" / "4.jpg").symlink_to(tmp_path / "elsewhere" / "3.jpg")
    bring(source, tmp_path / "there")
    assert seen(tmp_path / "there") == {**FILES, "val2017/3.jpg": b"three", "train2017/4.jpg": b"three"}
    (source / "train2017" / "loop").symlink_to(source)
    with pytest.raises(DataError, match="'train2017/loop' is not a regular file"):
        bring(source, tmp_path / "again")


@pytest.mark.parametrize("is_index", [True, False])
def test_a_full_temporary_folder_is_named_with_what_to_do(
    is_index: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Index.__init__

    def small(self: Index) -> None:
        real(self)
        self._db.execute("PRAGMA max_page_count = 20")

    def full() -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Index, "__init__", small) if is_index else monkeypatch.setattr("tempfile.TemporaryFile", full)
    (tmp_path / "set").mkdir()
    for number in range(700):
        (tmp_path / "set" / f"{number:0200d}.jpg").write_bytes(b"x")
    with pytest.raises(DataError, match=r"temporary folder .* is full") as caught:
        stage(str(tmp_path / "set"), str(tmp_path / "there"), shard_bytes=1000, progress=lambda tally: None)
    assert "TMPDIR" in caught.value.remedy
    assert not (tmp_path / "there" / ".maskfleet-stage" / "partial").exists()


def test_a_path_too_long_for_the_destination_is_refused_before_anything_is_copied(tmp_path: Path) -> None:
    destination = tmp_path / "there"
    for _ in range(15):
        destination /= "d" * 250
    source = tmp_path / "set"
    (source / ("x" * 200) / ("y" * 200)).mkdir(parents=True)
    (source / ("x" * 200) / ("y" * 200) / "a.jpg").write_bytes(b"a")
    with pytest.raises(DataError, match="too long for") as caught:
        stage(str(source), str(destination), progress=lambda tally: None)
    assert "more than 4095 bytes" in caught.value.what


def test_anything_but_a_regular_file_is_refused_and_named(source: Path, tmp_path: Path) -> None:
    os.mkfifo(source / "pipe")
    (source / "dangling").symlink_to("nowhere")
    (source / os.fsdecode(b"latin-\xff.jpg")).write_bytes(b"x")
    with pytest.raises(DataError) as caught:
        bring(source, tmp_path / "there")
    for name in ("'pipe' is not a regular file", "'dangling' is not a regular file", "jpg' is not UTF-8"):
        assert name in caught.value.what
    str(caught.value).encode()  # can be printed


def test_a_link_out_of_the_destination_is_not_followed(source: Path, tmp_path: Path) -> None:
    (tmp_path / "victim").mkdir()
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "train2017").symlink_to(tmp_path / "victim")
    with pytest.raises(DataError, match="a link that points outside"):
        bring(source, tmp_path / "there")
    assert list((tmp_path / "victim").iterdir()) == []


def test_a_file_where_a_folder_must_be_is_named(source: Path, tmp_path: Path) -> None:
    write(tmp_path / "there", {"train2017": b"a file"})
    with pytest.raises(DataError, match=r"'train2017/1\.jpg' cannot be stored"):
        bring(source, tmp_path / "there")
    assert seen(tmp_path / "there")["train2017"] == b"a file"


@pytest.mark.parametrize(
    ("source", "destination", "message"),
    [
        ("none", "there", "none does not exist"),
        ("a-file", "there", "a-file is neither a folder nor a zip"),
        ("set", "a-file", "a-file is a file"),
        ("set", "set", "overlap"),
        ("set", "set/inside", "overlap"),
        ("set/inside", "set", "overlap"),
        ("empty", "there", "there are no files in empty"),
    ],
)
def test_locations_that_make_no_sense_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, destination: str, message: str
) -> None:
    monkeypatch.chdir(write(tmp_path, {"a-file": b"x", "set/inside/x": b"x"}))
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=message):
        bring(source, destination)


def test_a_full_disk_is_reported_and_staging_resumes_later(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Folder.store

    def full_after_two(self: Folder, item: Item, chunks: Iterable[bytes]) -> tuple[str, str]:
        def cut() -> Iterable[bytes]:
            for chunk in chunks:
                yield chunk
                if item.path == "train2017/2.jpg":
                    raise OSError(errno.ENOSPC, "No space left on device")

        return store(self, item, cut())

    monkeypatch.setattr(Folder, "store", full_after_two)
    with pytest.raises(DataError, match="there is full") as caught:
        bring(source, tmp_path / "there")
    assert "run the same command again" in caught.value.remedy
    assert "train2017/2.jpg" not in seen(tmp_path / "there")
    assert list((tmp_path / "there" / ".maskfleet-stage").glob("partial*")) == []
    monkeypatch.undo()
    assert 1 <= bring(source, tmp_path / "there").files_copied < 4
    assert seen(tmp_path / "there") == FILES


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to mount a small file system")
def test_a_file_system_of_one_megabyte_is_really_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = tmp_path / "small"
    small.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", small], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"cannot mount here: {mounted.stderr.decode()}")
    try:
        source = write(tmp_path / "source", {f"{number}.bin": bytes(200_000) for number in range(10)})
        with pytest.raises(DataError, match=r"has 1\.0 MB free, but 2\.0 MB remain to be copied"):
            bring(source, small)
        monkeypatch.setattr(Folder, "expect_space", lambda self, need_bytes: None)  # a quota, which df does not show
        with pytest.raises(DataError, match="small is full"):
            bring(source, small)
        assert all(len(content) == 200_000 for content in seen(small).values())
        assert 3 <= len(seen(small)) < 6
    finally:
        subprocess.run(["umount", small], check=True)


def test_two_stagings_into_one_folder_keep_apart(source: Path, tmp_path: Path) -> None:
    code = (
        "import sys; from maskfleet.data.stage.folder import Folder; from pathlib import Path\n"
        "with Folder(Path(sys.argv[1])).claimed():\n    print('mine', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "there")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"mine\n"
        with pytest.raises(LockHeldError, match=rf"another process is staging into .*there \(process {other.pid} on "):
            bring(source, tmp_path / "there")
        other.kill()
    assert bring(source, tmp_path / "there").files_copied == 4  # a lock dies with its holder


@pytest.mark.skipif(os.getuid() == 0, reason="root may write everywhere")
def test_a_folder_that_may_not_be_written(source: Path, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir(mode=0o500)
    with pytest.raises(DataError, match="may not write"):
        bring(source, tmp_path / "there")


def test_a_refused_write_is_explained() -> None:
    for code in (errno.EACCES, errno.EROFS):
        error = stage_folder.folder_error(OSError(code, os.strerror(code), "/efs/data"), "/efs/data")
        assert "/efs/data" in error.what
        assert "access point" in error.remedy
    assert "ESTALE" not in str(stage_folder.folder_error(OSError(errno.ESTALE, "Stale file handle"), "/efs/data"))


def test_a_file_system_without_locks_is_reported(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(file: int, operation: int) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")  # as Lustre does without the option

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(NoLocksError, match="file system without locks") as caught:
        bring(source, tmp_path / "there")
    assert "option flock" in caught.value.remedy


def test_a_truncated_journal_is_read_up_to_its_last_complete_line(source: Path, tmp_path: Path) -> None:
    bring(source, tmp_path / "there")
    manifest = tmp_path / "there" / "manifest.jsonl"
    journal = tmp_path / "there" / ".maskfleet-stage" / "journal.jsonl"
    journal.write_text("".join(manifest.read_text().splitlines(keepends=True)[:3])[:-20])
    manifest.unlink()
    done = bring(source, tmp_path / "there")
    assert done.files_copied == 2
    assert not journal.exists()


def test_memory_stays_flat_for_large_files(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    for number in range(2):
        with (tmp_path / "source" / f"{number}.bin").open("wb") as file:
            file.truncate(150_000_000)
    code = (
        "import sys; from pathlib import Path; from maskfleet.data.stage.stage import stage\n"
        # The most memory so far; ru_maxrss would count the process that started this one.
        "peak = lambda: next(int(line.split()[1]) for line in Path('/proc/self/status').open() if 'VmHWM' in line)\n"
        "before = peak()\n"
        "stage(sys.argv[1], sys.argv[2], workers=2, progress=lambda tally: None)\n"
        "print(peak() - before)"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "source"), str(tmp_path / "there")]
    assert int(subprocess.check_output(command)) < 40_000  # KiB; the files are 300 MB


def test_check_of_a_folder_that_was_never_staged(source: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="does not exist"):
        stage(str(source), str(tmp_path / "there"), check=True, progress=lambda tally: None)
    write(tmp_path / "there", FILES)
    with pytest.raises(DataError, match="has no manifest"):
        stage(str(source), str(tmp_path / "there"), check=True, progress=lambda tally: None)


def test_check_only_reads_where_it_may_not_write(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there = tmp_path / "there"
    bring(source, there)
    shutil.rmtree(there / ".maskfleet-stage")
    monkeypatch.setattr(
        os, "access", lambda path, mode: False
    )  # as on FSx what it has imported itself; root may always
    assert stage(str(source), str(there), check=True, progress=lambda tally: None).files == 4
    (there / "train2017/1.jpg").unlink()
    with pytest.raises(DataError, match=r"'train2017/1\.jpg' is missing") as caught:
        stage(str(source), str(there), check=True, progress=lambda tally: None)
    assert "as a user who may write there" in caught.value.remedy
    assert (there / "manifest.jsonl").exists()
    assert not (there / ".maskfleet-stage").exists()
