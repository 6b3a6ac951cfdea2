"""`maskfleet data stage` between folders and a real S3 server (moto): what arrives, what resumes, what is checked."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from flaky_s3 import FlakyS3, Request
from stage_server import bring, direct, files_in, get, manifest_in, numbered, put, recheck, write

from maskfleet.data.stage import s3 as stage_s3
from maskfleet.errors import DataError

pytest_plugins = ("stage_fixtures",)

AWKWARD = {
    "with blank.jpg": b"blank",
    "quo'te\".jpg": b"quotes",
    "größe/图.jpg": b"unicode",
    "$(touch x);{{ .Values }}.jpg": b"shell",
    "plus+and%41.jpg": b"percent",
    "empty.txt": b"",
}


def test_a_prefix_arrives_in_a_folder_with_its_manifest(s3: FlakyS3, tmp_path: Path) -> None:
    put(s3, {"annotations/a.json": b"{}", "train2017/1.jpg": b"jpeg"})
    put(s3, {"other/2.jpg": b"not mine"}, prefix="sets/coco-2/")
    done = bring("s3://coco-data/sets/coco", tmp_path / "efs")
    assert (done.files, done.total_bytes, done.files_copied) == (2, 6, 2)
    assert files_in(tmp_path / "efs") == {"annotations/a.json": b"{}", "train2017/1.jpg": b"jpeg"}
    assert manifest_in(tmp_path / "efs")["train2017/1.jpg"] == {
        "path": "train2017/1.jpg",
        "bytes": 4,
        "sha256": hashlib.sha256(b"jpeg").hexdigest(),
        "etag": hashlib.md5(b"jpeg").hexdigest(),
    }


def test_awkward_names_and_empty_files_go_up_and_come_down_unchanged(s3: FlakyS3, tmp_path: Path) -> None:
    bring(write(tmp_path / "mine", AWKWARD), "s3://coco-data/sets/coco/")
    bring("s3://coco-data/sets/coco", tmp_path / "back")
    assert files_in(tmp_path / "back") == AWKWARD
    assert recheck("s3://coco-data/sets/coco", tmp_path / "back").files == len(AWKWARD)


def test_directory_markers_are_no_files(s3: FlakyS3, tmp_path: Path) -> None:
    put(s3, {"": b"", "train2017/": b"", "train2017/1.jpg": b"jpeg"})
    bring("s3://coco-data/sets/coco", tmp_path / "efs")
    assert files_in(tmp_path / "efs") == {"train2017/1.jpg": b"jpeg"}


def test_what_is_complete_is_not_copied_again(s3: FlakyS3, tmp_path: Path) -> None:
    put(s3, numbered(5))
    bring("s3://coco-data/sets/coco", tmp_path / "efs")
    s3.requests.clear()
    assert bring("s3://coco-data/sets/coco", tmp_path / "efs").files_copied == 0
    assert s3.gets() == ["/coco-data/sets/coco/manifest.jsonl"]


def test_changed_missing_and_shortened_files_are_copied_again(s3: FlakyS3, tmp_path: Path) -> None:
    put(s3, numbered(6))
    names = sorted(numbered(6))
    bring("s3://coco-data/sets/coco", tmp_path / "efs")
    (tmp_path / "efs" / names[0]).unlink()
    (tmp_path / "efs" / names[1]).write_bytes(b"short")
    put(s3, {names[2]: b"x" * len(numbered(6)[names[2]])})  # as long as before
    assert bring("s3://coco-data/sets/coco", tmp_path / "efs").files_copied == 3
    assert files_in(tmp_path / "efs") == {**numbered(6), names[2]: b"x" * len(numbered(6)[names[2]])}


def test_a_folder_that_was_filled_by_other_means_is_taken_over(s3: FlakyS3, tmp_path: Path) -> None:
    put(s3, numbered(4))
    write(tmp_path / "fsx", {**numbered(4), sorted(numbered(4))[0]: b"y" * len(numbered(4)[sorted(numbered(4))[0]])})
    assert bring("s3://coco-data/sets/coco", tmp_path / "fsx").files_copied == 1  # the one that differs
    assert files_in(tmp_path / "fsx") == numbered(4)


def test_an_upload_is_verified_and_resumes_without_a_journal(s3: FlakyS3, tmp_path: Path) -> None:
    folder = write(tmp_path / "mine", numbered(5))
    put(s3, dict(list(numbered(5).items())[:3]))  # what an upload that was killed had sent
    assert bring(folder, "s3://coco-data/sets/coco").files_copied == 2
    lines = [json.loads(line) for line in get(s3, "sets/coco/manifest.jsonl").splitlines()]
    assert [line["path"] for line in lines] == sorted(numbered(5))
    assert all(line["sha256"] == hashlib.sha256(numbered(5)[line["path"]]).hexdigest() for line in lines)
    s3.requests.clear()
    assert bring(folder, "s3://coco-data/sets/coco").files_copied == 0
    assert s3.puts() == ["/coco-data/sets/coco/manifest.jsonl"]


def test_an_edited_file_of_the_same_length_is_uploaded_again(s3: FlakyS3, tmp_path: Path) -> None:
    folder = write(tmp_path / "mine", {"annotations/a.json": b'{"a": 1}'})
    bring(folder, "s3://coco-data/sets/coco")
    write(folder, {"annotations/a.json": b'{"a": 2}'})
    assert bring(folder, "s3://coco-data/sets/coco").files_copied == 1
    assert get(s3, "sets/coco/annotations/a.json") == b'{"a": 2}'


def test_a_large_file_goes_up_in_parts_and_is_known_by_its_etag(s3: FlakyS3, tmp_path: Path) -> None:
    content = os.urandom(2 * stage_s3.PART_BYTES + 12_345)
    folder = write(tmp_path / "mine", {"weights.npz": content})
    bring(folder, "s3://coco-data/sets/coco")
    assert len([request for request in s3.requests if "partNumber" in request.query]) == 3
    assert get(s3, "sets/coco/weights.npz") == content
    client = direct(s3)
    client.delete_object(Bucket="coco-data", Key="sets/coco/manifest.jsonl")
    assert bring(folder, "s3://coco-data/sets/coco").files_copied == 0


def test_part_sizes_stay_within_what_s3_takes() -> None:
    for size in (stage_s3.PART_BYTES + 1, 10**11, 5 * 2**40):
        part = stage_s3.part_bytes(size)
        assert part % 2**20 == 0
        assert part >= 5 * 2**20
        assert -(-size // part) <= 10_000


def test_the_sources_manifest_is_kept_to(s3: FlakyS3, tmp_path: Path) -> None:
    bring(write(tmp_path / "mine", numbered(3)), "s3://coco-data/sets/coco")
    name = sorted(numbered(3))[1]
    put(s3, {name: b"z" * len(numbered(3)[name])})  # as long, with another content
    with pytest.raises(DataError, match=f"'{name}' has SHA-256 .* its manifest says") as caught:
        bring("s3://coco-data/sets/coco", tmp_path / "efs")
    assert "2 of 3 files were copied" in caught.value.what
    assert set(files_in(tmp_path / "efs")) == set(numbered(3)) - {name}
    assert not (tmp_path / "efs" / "manifest.jsonl").exists()


def test_files_that_a_manifest_names_and_the_source_lacks_are_named(s3: FlakyS3, tmp_path: Path) -> None:
    bring(write(tmp_path / "mine", numbered(8)), "s3://coco-data/sets/coco")
    client = direct(s3)
    for name in numbered(8):
        client.delete_object(Bucket="coco-data", Key=f"sets/coco/{name}")
    put(s3, {"new.jpg": b"new"})
    with pytest.raises(DataError, match=r"'train2017/000000000000.jpg' is missing(.|\n)*and 1 more"):
        bring("s3://coco-data/sets/coco", tmp_path / "efs")


def test_files_beside_a_manifest_are_copied_and_mentioned(s3: FlakyS3, tmp_path: Path) -> None:
    bring(write(tmp_path / "mine", numbered(2)), "s3://coco-data/sets/coco")
    put(s3, {"more.npz": b"weights"})
    done = bring("s3://coco-data/sets/coco", tmp_path / "efs")
    assert files_in(tmp_path / "efs") == {**numbered(2), "more.npz": b"weights"}
    assert "1 files of s3://coco-data/sets/coco are not in its manifest" in done.notes[0]


def test_versions_of_a_versioned_bucket_are_recorded(s3: FlakyS3, tmp_path: Path) -> None:
    bucket = "coco-versions"
    client = direct(s3)
    client.create_bucket(Bucket=bucket)
    client.put_bucket_versioning(Bucket=bucket, VersioningConfiguration={"Status": "Enabled"})
    version = client.put_object(Bucket=bucket, Key="x/a.jpg", Body=b"jpeg")["VersionId"]
    bring(f"s3://{bucket}/x", tmp_path / "efs")
    assert manifest_in(tmp_path / "efs")["a.jpg"]["version"] == version


def test_a_manifest_can_be_given(s3: FlakyS3, tmp_path: Path) -> None:
    put(s3, {"a.jpg": b"jpeg"})
    manifest = tmp_path / "m.jsonl"
    manifest.write_text(json.dumps({"path": "a.jpg", "bytes": 4, "sha256": "0" * 64}) + "\n")
    with pytest.raises(DataError, match="its manifest says 000"):
        bring("s3://coco-data/sets/coco", tmp_path / "efs", manifest=manifest)
    manifest.write_text(json.dumps({"path": "a.jpg", "bytes": 4, "sha256": hashlib.sha256(b"jpeg").hexdigest()}))
    assert bring("s3://coco-data/sets/coco", tmp_path / "efs", manifest=manifest).files_copied == 1


def test_check_finds_damaged_files_and_staging_fixes_them(s3: FlakyS3, tmp_path: Path) -> None:
    put(s3, numbered(6))
    names = sorted(numbered(6))
    bring("s3://coco-data/sets/coco", tmp_path / "efs")
    before = (tmp_path / "efs" / names[0]).stat()
    (tmp_path / "efs" / names[0]).write_bytes(b"x" * before.st_size)  # as a bad disk does: neither length nor time tell
    os.utime(tmp_path / "efs" / names[0], ns=(before.st_atime_ns, before.st_mtime_ns))
    (tmp_path / "efs" / names[1]).unlink()
    put(s3, {names[2]: b"changed"})
    with pytest.raises(DataError) as caught:
        recheck("s3://coco-data/sets/coco", tmp_path / "efs")
    assert f"'{names[0]}' has SHA-256" in caught.value.what
    assert f"'{names[1]}' is missing" in caught.value.what
    assert f"'{names[2]}' changed at the source" in caught.value.what
    assert caught.value.remedy == "run the same command without --check"
    assert not (tmp_path / "efs" / "manifest.jsonl").exists()
    assert bring("s3://coco-data/sets/coco", tmp_path / "efs").files_copied == 3
    assert recheck("s3://coco-data/sets/coco", tmp_path / "efs").files == 6


def test_check_of_an_upload_reads_the_bucket(s3: FlakyS3, tmp_path: Path) -> None:
    folder = write(tmp_path / "mine", numbered(3))
    bring(folder, "s3://coco-data/sets/coco")
    assert recheck(folder, "s3://coco-data/sets/coco").files == 3
    put(s3, {sorted(numbered(3))[0]: b"other"})
    with pytest.raises(DataError, match="has 5 bytes instead of"):
        recheck(folder, "s3://coco-data/sets/coco")
    assert bring(folder, "s3://coco-data/sets/coco").files_copied == 1


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "maskfleet", "data", "stage", *map(str, arguments)]


def test_a_killed_staging_leaves_no_partial_files_and_resumes(s3: FlakyS3, tmp_path: Path) -> None:
    content = {f"{number:03d}.bin": os.urandom(200_000) for number in range(40)}
    put(s3, content)
    reached, released = threading.Event(), threading.Event()

    def hold(request: Request) -> None:
        if len([one for one in s3.gets() if one.endswith(".bin")]) > 20:
            reached.set()
            released.wait(240)

    s3.fault = hold
    with subprocess.Popen(
        command("s3://coco-data/sets/coco", tmp_path / "efs", "--workers", 3), stderr=subprocess.PIPE
    ) as process:
        assert reached.wait(240)
        process.send_signal(signal.SIGKILL)
        process.communicate()
    released.set()
    s3.fault = lambda request: None
    left = files_in(tmp_path / "efs")
    assert 10 < len(left) < 40
    assert all(content[name] == found for name, found in left.items())
    assert not (tmp_path / "efs" / "manifest.jsonl").exists()
    s3.requests.clear()
    done = subprocess.run(
        command("s3://coco-data/sets/coco", tmp_path / "efs"), capture_output=True, text=True, check=True
    )
    assert files_in(tmp_path / "efs") == content
    assert f"{40 - len(left)} copied" in done.stdout
    assert len([one for one in s3.gets() if one.endswith(".bin")]) == 40 - len(left)
    assert list((tmp_path / "efs" / ".maskfleet-stage").glob("partial*")) == []


def test_a_killed_upload_resumes(s3: FlakyS3, tmp_path: Path) -> None:
    content = {f"{number:03d}.bin": os.urandom(20_000) for number in range(30)}
    write(tmp_path / "mine", content)
    reached, released = threading.Event(), threading.Event()

    def hold(request: Request) -> None:
        if len(s3.puts()) > 15:
            reached.set()
            released.wait(240)

    s3.fault = hold
    with subprocess.Popen(command(tmp_path / "mine", "s3://coco-data/up"), stderr=subprocess.PIPE) as process:
        assert reached.wait(240)
        process.send_signal(signal.SIGKILL)
        process.communicate()
    released.set()
    s3.fault = lambda request: None
    done = bring(tmp_path / "mine", "s3://coco-data/up")
    assert 0 < done.files_copied < 30
    bring("s3://coco-data/up", tmp_path / "back")
    assert files_in(tmp_path / "back") == content
