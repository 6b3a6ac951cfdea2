"""Zip and tar archives as sources: the same files and manifest as from a folder, and no trick leads anywhere."""

from __future__ import annotations

import gzip
import io
import os
import re
import stat
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from stage_server import bring, files_in, manifest_in, numbered, recheck, write

from maskfleet.errors import DataError

KINDS = ("zip", "tar", "tar.gz")
FILES = {"annotations/instances_train2017.json": b"[0, 1]" * 400_000, "empty.txt": b"", **numbered(30)}


def packed(kind: str, path: Path, files: dict[str, bytes]) -> Path:
    if kind == "zip":
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, content in files.items():
                archive.writestr(name, content)
        return path
    with tarfile.open(path, "w:gz" if kind == "tar.gz" else "w") as tar:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    return path


@pytest.mark.parametrize("kind", KINDS)
def test_an_archive_gives_the_same_files_and_manifest_as_a_folder(tmp_path: Path, kind: str) -> None:
    shuffled = dict(sorted(FILES.items(), key=lambda file: file[0][::-1]))
    archive = packed(kind, tmp_path / "set", shuffled)
    done = bring(archive, tmp_path / "there")
    bring(write(tmp_path / "folder", FILES), tmp_path / "other")
    assert files_in(tmp_path / "there") == FILES
    ours, theirs = manifest_in(tmp_path / "there"), manifest_in(tmp_path / "other")
    assert list(ours) == list(theirs)
    assert [line["sha256"] for line in ours.values()] == [line["sha256"] for line in theirs.values()]
    assert done.files_copied == len(FILES)
    assert bring(archive, tmp_path / "there").files_copied == 0
    recheck(archive, tmp_path / "there")


@pytest.mark.parametrize("kind", KINDS)
def test_only_missing_and_changed_files_are_copied_again(tmp_path: Path, kind: str) -> None:
    archive = packed(kind, tmp_path / "set", FILES)
    bring(archive, tmp_path / "there")
    names = list(numbered(30))
    (tmp_path / "there" / names[3]).unlink()
    (tmp_path / "there" / names[7]).write_bytes(b"x")
    assert bring(archive, tmp_path / "there").files_copied == 2
    assert files_in(tmp_path / "there") == FILES


@pytest.mark.parametrize("kind", KINDS)
def test_the_manifest_in_an_archive_is_what_its_files_are_compared_with(tmp_path: Path, kind: str) -> None:
    bring(write(tmp_path / "folder", FILES), tmp_path / "staged")
    manifest = (tmp_path / "staged" / "manifest.jsonl").read_bytes()
    bring(packed(kind, tmp_path / "good", {**FILES, "manifest.jsonl": manifest}), tmp_path / "there")
    assert files_in(tmp_path / "there") == FILES
    name = next(iter(numbered(1)))
    wrong = {**FILES, name: FILES[name][:-1] + b"?", "manifest.jsonl": manifest}
    with pytest.raises(DataError, match=r"has SHA-256 \w+, its manifest says"):
        bring(packed(kind, tmp_path / "bad", wrong), tmp_path / "elsewhere")
    assert not (tmp_path / "elsewhere" / name).exists()


def test_names_that_tar_writes_with_a_leading_dot_are_taken(tmp_path: Path) -> None:
    bring(packed("tar", tmp_path / "set.tar", {"./a/x.jpg": b"x"}), tmp_path / "there")
    assert files_in(tmp_path / "there") == {"a/x.jpg": b"x"}


BAD_NAMES = {
    "../out.jpg": "contains . or ..",
    "a/../../out.jpg": "contains . or ..",
    "/etc/passwd": "is an absolute path",
    "a//b.jpg": "contains an empty name",
    "c:/x.jpg": "contains a backslash, a drive",
    "a\\b.jpg": "contains a backslash",
    "x" * 256: "of more than 255 bytes",
    "TRAIN2017/000000000000.jpg": "differs from",
    "train2017/000000000000.jpg/x": "which is a file",
    ".maskfleet-STAGE/lock": "staging itself uses",
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", BAD_NAMES)
def test_a_name_that_tricks_is_refused_before_anything_is_copied(tmp_path: Path, kind: str, name: str) -> None:
    archive = packed(kind, tmp_path / "set", {**numbered(1), name: b"evil"})
    with pytest.raises(DataError, match=re.escape(BAD_NAMES[name])):
        bring(archive, tmp_path / "there")
    assert files_in(tmp_path / "there") == {}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["set", "there"]


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize("kind", KINDS)
def test_a_name_that_occurs_twice_is_refused(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "set"
    if kind == "zip":
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("a.jpg", b"1")
            archive.writestr("a.jpg", b"2")
    else:
        with tarfile.open(path, "w:gz" if kind == "tar.gz" else "w") as tar:
            tar.addfile(tarfile.TarInfo("a.jpg"))
            tar.addfile(tarfile.TarInfo("a.jpg"))
    with pytest.raises(DataError, match=r"'a.jpg' occurs twice"):
        bring(path, tmp_path / "there")


@pytest.mark.parametrize(
    ("kind", "word"),
    [(tarfile.SYMTYPE, "link"), (tarfile.LNKTYPE, "link"), (tarfile.CHRTYPE, "device"), (tarfile.FIFOTYPE, "device")],
)
def test_links_and_devices_in_a_tar_are_refused(tmp_path: Path, kind: bytes, word: str) -> None:
    with tarfile.open(tmp_path / "set.tar", "w") as tar:
        entry = tarfile.TarInfo("a.jpg")
        entry.type, entry.linkname = kind, "/etc/passwd"
        tar.addfile(entry)
    with pytest.raises(DataError, match=f"'a.jpg' is a {word}"):
        bring(tmp_path / "set.tar", tmp_path / "there")


def test_a_link_in_a_zip_is_refused(tmp_path: Path) -> None:
    entry = zipfile.ZipInfo("a.jpg")
    entry.create_system, entry.external_attr = 3, (stat.S_IFLNK | 0o777) << 16
    with zipfile.ZipFile(tmp_path / "set.zip", "w") as archive:
        archive.writestr(entry, "/etc/passwd")
    with pytest.raises(DataError, match=r"'a.jpg' is a link"):
        bring(tmp_path / "set.zip", tmp_path / "there")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["zip", "tar.gz"])
def test_a_bomb_is_refused_before_anything_is_written(tmp_path: Path, kind: str) -> None:
    archive = packed(kind, tmp_path / "bomb", {"a.jpg": bytes(180_000_000)})
    with pytest.raises(DataError, match="would unpack to 180,000,000"):
        bring(archive, tmp_path / "there")
    assert files_in(tmp_path / "there") == {}


def test_a_tar_header_that_announces_gigabytes_takes_no_memory(tmp_path: Path) -> None:
    entry = tarfile.TarInfo("x")
    entry.type, entry.size = tarfile.XHDTYPE, 1 << 33
    with gzip.open(tmp_path / "set.tar.gz", "wb") as file:
        file.write(entry.tobuf(tarfile.GNU_FORMAT) + bytes(100_000))
    with pytest.raises(DataError, match="is truncated or damaged"):
        bring(tmp_path / "set.tar.gz", tmp_path / "there")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("share", [0.2, 0.5, 0.9])
def test_a_truncated_archive_is_called_truncated(tmp_path: Path, kind: str, share: float) -> None:
    whole = packed(kind, tmp_path / "whole", {**numbered(40), "z.bin": os.urandom(200_000)}).read_bytes()
    (tmp_path / "cut").write_bytes(whole[: int(len(whole) * share)])
    with pytest.raises(DataError, match="is truncated or damaged"):
        bring(tmp_path / "cut", tmp_path / "there")
    assert files_in(tmp_path / "there") == {}


def test_a_tar_cut_between_two_members_is_called_truncated(tmp_path: Path) -> None:
    whole = packed("tar", tmp_path / "whole", {"a.jpg": b"x" * 512, "b.jpg": b"y" * 512}).read_bytes()
    (tmp_path / "cut").write_bytes(whole[:1024])
    with pytest.raises(DataError, match="its end marker is missing"):
        bring(tmp_path / "cut", tmp_path / "there")


def test_a_damaged_member_of_a_zip_is_named_and_the_others_are_copied(tmp_path: Path) -> None:
    files = {"a.jpg": b"a" * 100, "b.jpg": b"b" * 100}
    path = tmp_path / "set.zip"
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    content = path.read_bytes()
    path.write_bytes(content.replace(b"b" * 100, b"b" * 99 + b"c"))
    with pytest.raises(DataError, match=r"'b.jpg' is damaged in the archive"):
        bring(path, tmp_path / "there")
    assert files_in(tmp_path / "there") == {"a.jpg": files["a.jpg"]}


def test_an_encrypted_zip_is_refused(tmp_path: Path) -> None:
    path = packed("zip", tmp_path / "set.zip", {"a.jpg": b"a" * 100})
    content = bytearray(path.read_bytes())
    content[content.index(b"PK\x01\x02") + 8] |= 1
    content[6] |= 1
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"'a.jpg' is encrypted"):
        bring(path, tmp_path / "there")


@pytest.mark.parametrize("kind", KINDS)
def test_an_archive_that_changes_while_it_is_read_is_named(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from maskfleet.data.stage.folder import Folder

    archive = packed(kind, tmp_path / "set", FILES)
    store: Callable[..., tuple[str, str]] = Folder.store

    def touching(self: Folder, *arguments: object) -> tuple[str, str]:
        os.utime(archive, ns=(1, 1))
        return store(self, *arguments)

    monkeypatch.setattr(Folder, "store", touching)
    with pytest.raises(DataError, match="set changed while it was read"):
        bring(archive, tmp_path / "there")
    assert not (tmp_path / "there" / "manifest.jsonl").exists()


def test_a_file_that_is_no_archive_is_refused(tmp_path: Path) -> None:
    (tmp_path / "set.zip").write_bytes(b"<html>not found</html>")
    with pytest.raises(DataError, match="neither a folder nor a zip, tar"):
        bring(tmp_path / "set.zip", tmp_path / "there")
    (tmp_path / "set.gz").write_bytes(gzip.compress(b"just a text" * 100))
    with pytest.raises(DataError, match="is truncated or damaged"):
        bring(tmp_path / "set.gz", tmp_path / "there")
