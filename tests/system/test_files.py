"""Files appear whole or not at all, whatever goes wrong while they are written."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from maskfleet.errors import MaskfleetError
from maskfleet.system import files
from maskfleet.system.files import (
    building_folder,
    move_into_place,
    read_json,
    remove_temporaries,
    replacing,
    replacing_by_path,
    set_aside,
    sha256,
    write_atomically,
    write_once,
    write_private_json,
)


@pytest.fixture
def umask() -> Iterator[None]:
    before = os.umask(0o027)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("content", ["ünïcode\n", b"\0bytes\r\n", ""])
def test_text_and_bytes_are_written_as_they_are(tmp_path: Path, content: str | bytes) -> None:
    write_atomically(tmp_path / "file", "before")
    write_atomically(tmp_path / "file", content)
    assert (tmp_path / "file").read_bytes() == (content.encode() if isinstance(content, str) else content)
    assert names(tmp_path) == ["file"]


def test_permissions_follow_the_umask_unless_the_file_is_private(tmp_path: Path, umask: None) -> None:
    write_atomically(tmp_path / "shared", "x")
    write_atomically(tmp_path / "secret", "x", private=True)
    write_private_json(tmp_path / "new" / "secret.json", {"a": 1})
    with replacing_by_path(tmp_path / "by_path") as temporary:
        temporary.unlink()
        temporary.touch(mode=0o600)  # as safetensors does
    assert mode(tmp_path / "shared") == mode(tmp_path / "by_path") == 0o640
    assert mode(tmp_path / "secret") == mode(tmp_path / "new" / "secret.json") == 0o600
    assert mode(tmp_path / "new") == 0o700


def test_a_private_file_is_private_before_its_first_byte(tmp_path: Path) -> None:
    with replacing(tmp_path / "secret", private=True) as file:
        [temporary] = tmp_path.iterdir()
        assert mode(temporary) == 0o600
        file.write(b"x")


@pytest.mark.parametrize("writer", [replacing, replacing_by_path])
@pytest.mark.parametrize("failure", [ValueError("bad"), KeyboardInterrupt(), OSError(errno.ENOSPC, "No space left")])
def test_a_failed_write_leaves_only_the_old_file(tmp_path: Path, writer: Any, failure: BaseException) -> None:
    (tmp_path / "file").write_text("before")

    def fail() -> None:
        block: AbstractContextManager[Any] = writer(tmp_path / "file")
        with block as target:
            target.write(b"half") if writer is replacing else target.write_bytes(b"half")
            raise failure

    with pytest.raises(type(failure)):
        fail()
    assert names(tmp_path) == ["file"]
    assert (tmp_path / "file").read_text() == "before"


def test_a_full_disk_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("before")

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=f"No space left on device: '{tmp_path}/file'"):
        write_atomically(tmp_path / "file", "after")
    assert names(tmp_path) == ["file"]
    assert (tmp_path / "file").read_text() == "before"


def test_an_error_names_the_target_and_not_the_temporary_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as caught:
        write_atomically(tmp_path / "absent" / "file", "x")
    assert str(caught.value) == f"[Errno 2] No such file or directory: '{tmp_path}/absent/file'"
    (tmp_path / "folder" / "full").mkdir(parents=True)
    with pytest.raises(OSError, match=rf"Is a directory: '{tmp_path}/folder'"):
        write_atomically(tmp_path / "folder", "x")
    assert names(tmp_path) == ["folder"]


@pytest.mark.skipif(os.getuid() == 0, reason="root may write everywhere")
def test_a_read_only_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir(mode=0o500)
    with pytest.raises(PermissionError, match="there/file"):
        write_atomically(tmp_path / "there" / "file", "x")


def test_content_is_synced_before_the_rename_and_the_folder_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[str] = []
    fsync, replace = os.fsync, Path.replace

    def synced(descriptor: int) -> None:
        steps.append("folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "content")
        fsync(descriptor)

    def renamed(self: Path, target: Path) -> Path:
        steps.append("rename")
        return replace(self, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "replace", renamed)
    write_atomically(tmp_path / "file", "x")
    with replacing_by_path(tmp_path / "by_path") as temporary:
        temporary.write_text("x")
    assert steps == ["content", "rename", "folder"] * 2
    steps.clear()
    write_atomically(tmp_path / "file", "x", durable=False)
    assert steps == ["rename"]
    steps.clear()
    write_once(tmp_path / "once", "x")
    assert steps == ["content", "folder"]


def test_a_file_system_that_cannot_sync_folders_is_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fsync, code = os.fsync, [errno.EINVAL]

    def refused(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(code[0], os.strerror(code[0]))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", refused)
    write_atomically(tmp_path / "file", "x")
    assert (tmp_path / "file").read_text() == "x"
    code[0] = errno.EIO
    with pytest.raises(OSError, match="Input/output error"):
        write_atomically(tmp_path / "file", "y")


def test_temporary_names_are_hidden_unique_and_short_enough(tmp_path: Path) -> None:
    path = tmp_path / ("ü" * 127)  # 254 bytes, one less than a name may have
    with replacing(path) as one, replacing(path) as other:
        one.write(b"one")
        other.write(b"other")
        assert len(names(tmp_path)) == 2
        assert all(name.startswith(".") and name.endswith(".tmp") for name in names(tmp_path))
    assert path.read_bytes() == b"one"
    assert names(tmp_path) == [path.name]


WRITE = """
import sys
from pathlib import Path
from maskfleet.system.files import write_atomically
for _ in range(200):
    write_atomically(Path(sys.argv[1]), sys.argv[2] * 100_000, durable=False)
"""


def test_readers_never_see_a_mix_of_two_writers(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_atomically(path, "a" * 100_000)
    writers = [subprocess.Popen([sys.executable, "-c", WRITE, str(path), letter]) for letter in "bc"]
    seen = set()
    while any(writer.poll() is None for writer in writers):
        seen.add(path.read_text())
    seen.add(path.read_text())
    assert [writer.wait() for writer in writers] == [0, 0]
    assert seen <= {letter * 100_000 for letter in "abc"}
    assert names(tmp_path) == ["file"]


def test_threads_may_write_the_same_file(tmp_path: Path) -> None:
    def write(text: str) -> None:
        for _ in range(50):
            write_atomically(tmp_path / "file", text, durable=False)

    threads = [threading.Thread(target=write, args=(letter * 10_000,)) for letter in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert names(tmp_path) == ["file"]
    assert (tmp_path / "file").read_text() in {letter * 10_000 for letter in "abcd"}


def test_only_temporary_files_of_killed_writers_are_removed(tmp_path: Path) -> None:
    code = "from maskfleet.system.files import replacing; from pathlib import Path; import os, sys\n"
    code += "with replacing(Path(sys.argv[1])) as file:\n    os.kill(os.getpid(), 9)"
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path / "file")], check=False).returncode == -9
    (tmp_path / ".hidden").touch()
    (tmp_path / "kept.tmp").touch()
    assert len(names(tmp_path)) == 3
    remove_temporaries(tmp_path)
    assert names(tmp_path) == [".hidden", "kept.tmp"]
    remove_temporaries(tmp_path / "absent")


def test_the_temporary_file_may_be_in_another_folder(tmp_path: Path) -> None:
    (tmp_path / "parts").mkdir()
    with replacing(tmp_path / "file", temporary_in=tmp_path / "parts") as file:
        file.write(b"x")
        assert names(tmp_path) == ["parts"]
    assert names(tmp_path) == ["file", "parts"]
    assert names(tmp_path / "parts") == []


def test_the_first_of_two_writers_wins(tmp_path: Path) -> None:
    assert write_once(tmp_path / "file", "first")
    assert not write_once(tmp_path / "file", "second")
    assert (tmp_path / "file").read_text() == "first"
    assert names(tmp_path) == ["file"]


def test_a_download_is_moved_into_place(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("old")
    (tmp_path / "file.part").write_text("new")
    move_into_place(tmp_path / "file.part", tmp_path / "file")
    assert names(tmp_path) == ["file"]
    assert (tmp_path / "file").read_text() == "new"


def test_a_folder_appears_when_it_is_complete(tmp_path: Path, umask: None) -> None:
    target = tmp_path / "new" / "set"
    with building_folder(target) as building:
        (building / "a").write_text("a")
        assert not target.exists()
    assert names(target.parent) == ["set"]
    assert mode(target) == 0o750
    with pytest.raises(FileNotFoundError), building_folder(tmp_path / "other") as building:
        (building / "absent" / "a").write_text("a")
    assert names(tmp_path) == ["new"]
    with pytest.raises(OSError, match="not empty"), building_folder(target):
        pass
    assert names(target.parent) == ["set"]


def test_a_folder_that_is_set_aside_is_restored_if_its_replacement_fails(tmp_path: Path) -> None:
    target = tmp_path / "set"
    target.mkdir()
    (target / "old").touch()
    with pytest.raises(FileNotFoundError), set_aside(target):
        (target / "new").touch()  # the folder is away
    assert names(target) == ["old"]
    with set_aside(target):
        target.mkdir()
    assert names(target) == []
    assert names(tmp_path) == ["set"]


def test_sha256_matches_a_known_value(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"abc")
    assert sha256(tmp_path / "file") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


@pytest.mark.parametrize(("text", "problem"), [("{", "is not JSON"), ("[1]", "does not hold a JSON object")])
def test_damaged_json_is_named_with_a_remedy(tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / "settings.json"
    assert read_json(path) == {}
    write_private_json(path, {"b": 1, "a": [2]})
    assert read_json(path) == {"a": [2], "b": 1}
    path.write_text(text)
    with pytest.raises(MaskfleetError, match=f"{path} {problem}") as caught:
        read_json(path)
    assert "delete it" in caught.value.remedy


def test_the_names_of_temporary_files_match_the_pattern_that_removes_them(tmp_path: Path) -> None:
    assert files._temporary_path(tmp_path / "run.yaml", tmp_path).match(files._TEMPORARIES[0])
