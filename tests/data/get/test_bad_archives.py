"""Archives that are damaged, or made to harm, and destinations that cannot be written."""

from __future__ import annotations

import errno
import io
import os
import stat
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from coco_zips import data_set_of, zipped

from maskfleet.data.get.get import Origin, get_data_set
from maskfleet.data.stage import folder as stage_folder
from maskfleet.data.stage import member_names
from maskfleet.errors import DataError

GOOD = {"val2017/1.jpg": b"one" * 100, "val2017/2.json": b"two " * 1000}


def get_archive(content: bytes, tmp_path: Path, *, known: bytes | None = None) -> Path:
    """Get a data set of one archive, which should be `known`, from a folder."""
    (tmp_path / "zips").mkdir()
    (tmp_path / "zips" / "a.zip").write_bytes(content)
    data_set = data_set_of({"a.zip": known or content}, "https://127.0.0.1:9")
    target = tmp_path / "coco"
    get_data_set(data_set, str(target), origin=Origin(folder=tmp_path / "zips"), workers=2, progress=lambda tally: None)
    return target


def with_member(name: str, *, mode: int = 0) -> bytes:
    """An archive with one good member, and one of this name and file mode."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("val2017/1.jpg", b"good")
        info = zipfile.ZipInfo(name)
        info.create_system, info.external_attr = 3, mode << 16
        archive.writestr(info, b"bad")
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (lambda: with_member("../evil"), "contains . or"),
        (lambda: with_member("/evil"), "absolute"),
        (lambda: with_member("link", mode=stat.S_IFLNK | 0o777), "is a link"),
        (lambda: with_member("device", mode=stat.S_IFCHR | 0o666), "is a device"),
        (lambda: with_member("VAL2017/1.JPG"), "only by case"),
        (lambda: with_member("val2017"), "both a file and a folder"),
        (lambda: with_member("manifest.jsonl"), "staging itself"),
    ],
)
def test_tricks_in_an_archive_are_refused_before_a_file_is_written(
    content: Callable[[], bytes], what: str, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=rf"a\.zip is refused: its member .*{what}"):
        get_archive(content(), tmp_path)
    assert not (tmp_path / "evil").exists()
    assert not (tmp_path / "coco/val2017").exists()


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_a_name_that_occurs_twice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"'val2017/1\.jpg' occurs twice"):
        get_archive(with_member("val2017/1.jpg"), tmp_path)


def test_the_same_name_in_two_archives_is_refused(tmp_path: Path) -> None:
    archives = {"a.zip": zipped(GOOD), "b.zip": zipped(GOOD)}
    for name, content in archives.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=r"b\.zip is refused: .* occurs twice"):
        get_data_set(
            data_set_of(archives, "https://127.0.0.1:9"),
            str(tmp_path / "coco"),
            origin=Origin(folder=tmp_path),
            progress=lambda tally: None,
        )


def test_a_name_with_a_null_byte_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="null byte"):
        get_archive(with_member("evil_jpg").replace(b"evil_jpg", b"evil\0jpg"), tmp_path)


def test_a_bomb_is_refused_from_its_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(member_names, "FREE_BYTES", 1000)
    with pytest.raises(DataError, match=r"bytes would unpack to 1,000,000"):
        get_archive(zipped({"a/zeros": bytes(1_000_000)}), tmp_path)


def test_members_that_share_their_bytes_are_refused(tmp_path: Path) -> None:
    """The directory names the same packed bytes twice, as bombs without recursion do."""
    content = bytearray(zipped({"a/1.jpg": b"x" * 50, "a/2.jpg": b"y" * 50}, folders=False))
    second = content.rindex(b"PK\x01\x02")
    content[second + 42 : second + 46] = struct.pack("<L", 0)
    with pytest.raises(DataError, match="overlaps what follows"):
        get_archive(bytes(content), tmp_path)


def announced(content: bytes, field_at: int, value: int) -> bytes:
    """The same archive with another number in the directory's entry of its last member."""
    changed = bytearray(content)
    entry = changed.rindex(b"PK\x01\x02")
    changed[entry + field_at : entry + field_at + 4] = struct.pack("<L", value)
    return bytes(changed)


@pytest.mark.parametrize(
    ("field_at", "value", "what"),
    [
        (16, 0x12345678, "has CRC-32 .* instead of 12345678"),
        (24, 100, "unpacks to more than the 100 bytes"),
        (24, 9000, "has 4,000 bytes instead of 9,000"),
    ],
)
def test_a_member_that_is_not_as_announced_never_gets_its_name(
    field_at: int, value: int, what: str, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=what):
        get_archive(announced(zipped(GOOD), field_at, value), tmp_path)
    assert (tmp_path / "coco/val2017/1.jpg").read_bytes() == GOOD["val2017/1.jpg"]
    assert not (tmp_path / "coco/val2017/2.json").exists()
    assert not list((tmp_path / "coco").rglob("*.tmp"))


def test_a_changed_byte_is_found_and_only_that_file_fetched_again(tmp_path: Path) -> None:
    good = zipped(GOOD)
    bad = bytearray(good)
    bad[good.index(b"oneone") + 3] ^= 1
    with pytest.raises(DataError, match=r"'val2017/1\.jpg' has CRC-32"):
        get_archive(bytes(bad), tmp_path, known=good)
    (tmp_path / "zips/a.zip").write_bytes(good)
    done = get_data_set(
        data_set_of({"a.zip": good}, "https://127.0.0.1:9"),
        str(tmp_path / "coco"),
        origin=Origin(folder=tmp_path / "zips"),
        progress=lambda tally: None,
    )
    assert done.files_copied == 1


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda good: good[:-1], "has .* bytes instead of"),
        (lambda good: good + b"more", "has .* bytes instead of"),
        (lambda good: b"<html>" + bytes(len(good) - 6), "is damaged: File is not a zip"),
        (lambda good: b"\0" * len(good), "is damaged"),
        (lambda good: announced(good, 8, 0x00080001), "is encrypted"),
        (lambda good: announced(good, 10, 12), "packed by method 12"),
    ],
)
def test_other_archives_are_refused(change: Callable[[bytes], bytes], what: str, tmp_path: Path) -> None:
    good = zipped(GOOD)
    with pytest.raises(DataError, match=what):
        get_archive(change(good), tmp_path, known=good)


def test_packed_bytes_that_are_damaged(tmp_path: Path) -> None:
    good = bytearray(zipped({"a/2.json": b"two " * 1000}))
    start = good.index(b"a/2.json") + len("a/2.json")
    good[start : start + 4] = b"\xff\xff\xff\xff"
    with pytest.raises(DataError, match="cannot be unpacked"):
        get_archive(bytes(good), tmp_path)


def test_a_local_header_with_another_name(tmp_path: Path) -> None:
    good = bytearray(zipped({"a/2.json": b"two"}, folders=False))
    good[good.index(b"a/2.json")] = ord("b")
    with pytest.raises(DataError, match="not where the directory of its archive says"):
        get_archive(bytes(good), tmp_path)


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file system becomes full in the middle of a file; after space was freed, the same command finishes."""
    real = stage_folder.replacing
    full = True

    def replacing(path: Path, **options: object) -> object:
        if full and path.name == "2.json":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return real(path, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(stage_folder, "replacing", replacing)
    with pytest.raises(DataError, match="is full") as raised:
        get_archive(zipped(GOOD), tmp_path)
    assert "run the same command again" in raised.value.remedy
    full = False
    get_data_set(
        data_set_of({"a.zip": zipped(GOOD)}, "https://127.0.0.1:9"),
        str(tmp_path / "coco"),
        origin=Origin(folder=tmp_path / "zips"),
        progress=lambda tally: None,
    )
    assert (tmp_path / "coco/val2017/2.json").read_bytes() == GOOD["val2017/2.json"]


def test_too_little_space_is_said_before_the_first_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage_folder.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 10}))
    with pytest.raises(DataError, match=r"10 B free, but 4\.3 kB remain"):
        get_archive(zipped(GOOD), tmp_path)
    assert not (tmp_path / "coco/val2017").exists()


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES])
def test_a_target_that_may_not_be_written(code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(path: Path, *args: object, **options: object) -> None:
        raise OSError(code, os.strerror(code), str(path))

    monkeypatch.setattr(stage_folder.Path, "mkdir", refused)
    data_set = data_set_of({"a.zip": zipped(GOOD)}, "https://127.0.0.1:9")
    with pytest.raises(DataError, match="may not write or read"):
        get_data_set(data_set, str(tmp_path / "coco"), origin=Origin(folder=tmp_path), progress=lambda tally: None)


def test_a_destination_that_is_a_file_or_another_kind_of_address(tmp_path: Path) -> None:
    data_set = data_set_of({"a.zip": zipped(GOOD)}, "https://127.0.0.1:9")
    (tmp_path / "file").write_text("")
    for target, what in ((str(tmp_path / "file"), "is a file"), ("gs://bucket/x", "neither an S3 URL nor a folder")):
        with pytest.raises(DataError, match=what):
            get_data_set(data_set, target, origin=Origin(), progress=lambda tally: None)
