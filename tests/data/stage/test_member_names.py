"""Archives may not choose where their members go."""

from __future__ import annotations

import stat
import tarfile
import zipfile

import pytest

from maskfleet.data.stage.member_names import FREE_BYTES, MAX_EXPANSION, MemberNames, tar_kind, why_bomb, zip_kind


def test_names_of_coco_are_accepted() -> None:
    names = MemberNames()
    assert names.why_refused("val2017/", "folder", 0) is None
    assert names.why_refused("val2017/000000000139.jpg", "file", 161811) is None
    assert names.why_refused("val2017/000000000285.jpg", "file", 335861) is None
    assert names.why_refused("annotations/instances_val2017.json", "file", 0) is None


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("../evil", "contains . or .."),
        ("a/../../evil", "contains . or .."),
        ("/etc/passwd", "absolute"),
        ("a//b", "empty"),
        ("a/", "empty"),
        ("", "empty"),
        ("..\\evil", "backslash"),
        ("C:/evil", "drive"),
        ("a\nb", "control"),
        ("a\0b", "null byte"),
        ("x" * 256, "255"),
        ("manifest.jsonl", "staging itself"),
        ("Manifest.JSONL", "staging itself"),
        (".maskfleet-stage/journal.jsonl", "staging itself"),
        ("a\udcff", "UTF-8"),
    ],
)
def test_tricks_in_names_are_refused(name: str, why: str) -> None:
    found = MemberNames().why_refused(name, "file", 1)
    assert found is not None
    assert why in found


@pytest.mark.parametrize(
    ("first", "second", "why"),
    [
        ("a/b.jpg", "a/b.jpg", "twice"),
        ("a/b.jpg", "a/B.jpg", "case"),
        ("a/b.jpg", "A/B.jpg", "case"),
        ("caf\u00e9", "cafe\u0301", "case or accents"),
        ("a", "a/b", "which is a file"),
        ("a", "A/b/c", "which is a file"),
        ("a/b", "a", "both a file and a folder"),
        ("a/b/c", "A", "both a file and a folder"),
    ],
)
def test_a_member_cannot_replace_another(first: str, second: str, why: str) -> None:
    names = MemberNames()
    assert names.why_refused(first, "file", 1) is None
    found = names.why_refused(second, "file", 1)
    assert found is not None
    assert why in found


def test_a_folder_with_a_bad_name_is_refused_too() -> None:
    assert MemberNames().why_refused("../", "folder", 0) is not None


@pytest.mark.parametrize("kind", ["link", "device"])
def test_links_and_devices_are_refused(kind: str) -> None:
    assert "only regular files" in (MemberNames().why_refused("a", kind, 1) or "")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("mode", "kind"),
    [
        (stat.S_IFLNK | 0o777, "link"),
        (stat.S_IFCHR | 0o600, "device"),
        (stat.S_IFIFO | 0o600, "device"),
        (stat.S_IFSOCK | 0o600, "device"),
        (stat.S_IFREG | 0o644, "file"),
        (stat.S_IFDIR | 0o755, "folder"),
        (0, "file"),
    ],
)
def test_zip_modes(mode: int, kind: str) -> None:
    entry = zipfile.ZipInfo("a")
    entry.create_system, entry.external_attr = 3, mode << 16
    assert zip_kind(entry) == kind


def test_a_zip_name_that_ends_with_a_slash_is_a_folder() -> None:
    assert zip_kind(zipfile.ZipInfo("a/")) == "folder"


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (tarfile.SYMTYPE, "link"),
        (tarfile.LNKTYPE, "link"),
        (tarfile.CHRTYPE, "device"),
        (tarfile.FIFOTYPE, "device"),
        (tarfile.DIRTYPE, "folder"),
        (tarfile.REGTYPE, "file"),
    ],
)
def test_tar_types(kind: bytes, expected: str) -> None:
    entry = tarfile.TarInfo("a")
    entry.type = kind
    assert tar_kind(entry) == expected


def test_a_bomb_is_told_from_its_sizes() -> None:
    assert why_bomb(252_907_541, 820_000_000) is None
    assert why_bomb(1000, FREE_BYTES + MAX_EXPANSION * 1000) is None
    assert why_bomb(1000, FREE_BYTES + MAX_EXPANSION * 1000 + 1) is not None
