"""`maskfleet data stage` between folders and a real S3 server (moto)."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

boto3 = pytest.importorskip("boto3", reason="boto3 is not here: pip install 'maskfleet[aws]'")

from flaky_s3 import Answer, Cut, FlakyS3, Request, Spoil, flaky_s3, moto_server  # noqa: E402

from maskfleet.data import stage_s3  # noqa: E402
from maskfleet.data.stage import Staged, check, stage  # noqa: E402
from maskfleet.errors import DataError  # noqa: E402

AWKWARD = {
    "with blank.jpg": b"blank",
    "quo'te\".jpg": b"quotes",
    "größe/图.jpg": b"unicode",
    "$(touch x);{{ .Values }}.jpg": b"shell",
    "plus+and%41.jpg": b"percent",
    "empty.txt": b"",
}


@pytest.fixture(scope="module")
def moto(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with moto_server(tmp_path_factory.mktemp("moto") / "log") as url:
        yield url
        _client(url).close()


@pytest.fixture
def s3(moto: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FlakyS3]:
    """An S3 that is empty but for the bucket `coco-data`; AWS_ENDPOINT_URL names it."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "no-config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "no-credentials"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    with flaky_s3(moto) as flaky:
        monkeypatch.setenv("AWS_ENDPOINT_URL", flaky.url)
        client = direct(flaky)
        client.create_bucket(Bucket="coco-data")
        flaky.requests.clear()
        yield flaky
        for page in client.get_paginator("list_objects_v2").paginate(Bucket="coco-data"):
            for found in page.get("Contents", ()):
                client.delete_object(Bucket="coco-data", Key=found["Key"])
        client.delete_bucket(Bucket="coco-data")


def direct(s3: FlakyS3) -> Any:
    """A client that goes past the proxy."""
    return _client(s3.behind)


@functools.cache
def _client(url: str) -> Any:
    return boto3.session.Session("test", "test", region_name="us-east-1").client("s3", endpoint_url=url)


def put(s3: FlakyS3, files: dict[str, bytes], prefix: str = "sets/coco/") -> None:
    client = direct(s3)
    for path, content in files.items():
        client.put_object(Bucket="coco-data", Key=prefix + path, Body=content)


def get(s3: FlakyS3, key: str) -> bytes:
    content: bytes = direct(s3).get_object(Bucket="coco-data", Key=key)["Body"].read()
    return content


def write(folder: Path, files: dict[str, bytes]) -> Path:
    for path, content in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(content)
    return folder


def files_in(folder: Path) -> dict[str, bytes]:
    """All files that a user sees; staging's own are left out."""
    paths = [path for path in folder.rglob("*") if path.is_file() and ".maskfleet-stage" not in path.parts]
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths if path.name != "manifest.jsonl"}


def manifest_in(folder: Path) -> dict[str, dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "manifest.jsonl").read_text("utf-8").splitlines()]
    return {line["path"]: line for line in lines}


def bring(source: object, destination: object, **options: Any) -> Staged:
    return stage(str(source), str(destination), workers=4, progress=lambda tally: None, **options)


def recheck(source: object, destination: object, **options: Any) -> Staged:
    return check(str(source), str(destination), workers=4, progress=lambda tally: None, **options)


def numbered(count: int) -> dict[str, bytes]:
    return {f"train2017/{number:012d}.jpg": f"image {number}".encode() * 50 for number in range(count)}


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


def test_an_upload_is_verified_and_goes_on_without_a_journal(s3: FlakyS3, tmp_path: Path) -> None:
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


def test_an_upload_in_parts_that_fails_leaves_no_parts(s3: FlakyS3, tmp_path: Path) -> None:
    folder = write(tmp_path / "mine", {"weights.npz": bytes(2 * stage_s3.PART_BYTES + 1)})
    s3.fault = lambda request: Answer(403, "AccessDenied") if "partNumber=3" in request.query else None
    with pytest.raises(DataError, match=r"not allowed to write s3://coco-data/sets/coco/weights\.npz"):
        bring(folder, "s3://coco-data/sets/coco")
    client = direct(s3)
    assert "Uploads" not in client.list_multipart_uploads(Bucket="coco-data")


def test_part_sizes_stay_within_what_s3_takes() -> None:
    for size in (stage_s3.PART_BYTES + 1, 10**11, 5 * 2**40):
        part = stage_s3.part_bytes(size)
        assert part % 2**20 == 0
        assert part >= 5 * 2**20
        assert -(-size // part) <= 10_000


@pytest.mark.parametrize("name", ["../escaped.jpg", "a/../../escaped.jpg", "a/./b.jpg", "a//b.jpg", "/etc/x.jpg"])
def test_a_name_that_leads_elsewhere_is_refused_and_named(s3: FlakyS3, tmp_path: Path, name: str) -> None:
    put(s3, {name: b"out", "train2017/1.jpg": b"in"})
    with pytest.raises(DataError, match="cannot be files below a folder") as caught:
        bring("s3://coco-data/sets/coco", tmp_path / "root" / "efs")
    assert repr(name) in str(caught.value)
    assert files_in(tmp_path / "root") == {}


def test_an_object_that_is_also_a_folder_is_refused_and_named(s3: FlakyS3, tmp_path: Path) -> None:
    put(s3, {"train2017": b"file", "train2017/1.jpg": b"jpeg", "train2017-more": b"fine"})
    with pytest.raises(DataError, match="'train2017' is a file and a folder at once"):
        bring("s3://coco-data/sets/coco", tmp_path / "efs")


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


def test_bytes_spoilt_on_the_way_are_noticed(s3: FlakyS3, tmp_path: Path) -> None:
    bring(write(tmp_path / "mine", {"a.jpg": b"jpeg"}), "s3://coco-data/sets/coco")
    s3.fault = lambda request: Spoil() if request.is_get and request.path.endswith("a.jpg") else None
    with pytest.raises(DataError, match=r"'a\.jpg' (has SHA-256|does not fit the checksum)"):
        bring("s3://coco-data/sets/coco", tmp_path / "efs")
    assert files_in(tmp_path / "efs") == {}


def test_an_object_that_changes_during_the_copy_is_not_taken(s3: FlakyS3, tmp_path: Path) -> None:
    put(s3, numbered(3))
    name = sorted(numbered(3))[0]

    def change(request: Request) -> None:
        if request.is_get and request.path.endswith(name):
            put(s3, {name: b"newer"})

    s3.fault = change
    with pytest.raises(DataError, match=f"'{name}' changed while it was copied") as caught:
        bring("s3://coco-data/sets/coco", tmp_path / "efs")
    assert "run the same command again" in caught.value.remedy
    assert set(files_in(tmp_path / "efs")) == set(numbered(3)) - {name}
    s3.fault = lambda request: None
    assert bring("s3://coco-data/sets/coco", tmp_path / "efs").files_copied == 1
    assert files_in(tmp_path / "efs")[name] == b"newer"


def test_an_object_deleted_during_the_copy_is_named(s3: FlakyS3, tmp_path: Path) -> None:
    put(s3, {"a.jpg": b"a", "b.jpg": b"b"})
    s3.fault = lambda request: Answer(404, "NoSuchKey") if request.is_get and request.path.endswith("a.jpg") else None
    with pytest.raises(DataError, match=r"'a\.jpg' was deleted while it was copied"):
        bring("s3://coco-data/sets/coco", tmp_path / "efs")


def test_an_archived_object_is_named_with_what_to_do(s3: FlakyS3, tmp_path: Path) -> None:
    put(s3, {"a.jpg": b"a"})
    s3.fault = lambda one: Answer(403, "InvalidObjectState") if one.is_get and one.path.endswith("a.jpg") else None
    with pytest.raises(DataError, match="restore it first"):
        bring("s3://coco-data/sets/coco", tmp_path / "efs")


def test_throttling_is_waited_out(s3: FlakyS3, tmp_path: Path) -> None:
    put(s3, numbered(4))
    refused: list[Request] = []

    def throttle(request: Request) -> Answer | None:
        if len(refused) >= 2 or not request.is_get:
            return None
        refused.append(request)
        return Answer(503, "SlowDown")

    s3.fault = throttle
    bring("s3://coco-data/sets/coco", tmp_path / "efs")
    assert len(refused) == 2
    assert files_in(tmp_path / "efs") == numbered(4)


def test_a_broken_connection_is_opened_again_where_it_broke(s3: FlakyS3, tmp_path: Path) -> None:
    content = os.urandom(3_000_000)
    put(s3, {"a.bin": content})
    broken: list[Request] = []

    def cut(request: Request) -> Cut | None:
        if len(broken) >= 2 or not request.path.endswith("a.bin"):
            return None
        broken.append(request)
        return Cut(1_200_000)

    s3.fault = cut
    bring("s3://coco-data/sets/coco", tmp_path / "efs")
    assert files_in(tmp_path / "efs") == {"a.bin": content}
    assert [request.range for request in s3.requests if request.path.endswith("a.bin")][1].startswith("bytes=1")


def test_no_such_bucket(s3: FlakyS3, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="the bucket of s3://no-such-bucket/x does not exist"):
        bring("s3://no-such-bucket/x", tmp_path / "efs")
    with pytest.raises(DataError, match="the bucket of s3://no-such-bucket/x does not exist"):
        bring(write(tmp_path / "mine", {"a": b"a"}), "s3://no-such-bucket/x")


def test_no_right_to_list(s3: FlakyS3, tmp_path: Path) -> None:
    s3.fault = lambda request: Answer(403, "AccessDenied")
    with pytest.raises(DataError, match=r"not allowed to list s3://coco-data/sets/coco \(403\)") as caught:
        bring("s3://coco-data/sets/coco", tmp_path / "efs")
    assert "s3:ListBucket" in caught.value.remedy


def test_no_right_to_read_ends_it_at_once(s3: FlakyS3, tmp_path: Path) -> None:
    put(s3, numbered(200))
    deny = {"Effect": "Deny", "Principal": "*", "Action": "s3:GetObject", "Resource": "arn:aws:s3:::coco-data/*"}
    client = direct(s3)
    client.put_bucket_policy(Bucket="coco-data", Policy=json.dumps({"Version": "2012-10-17", "Statement": [deny]}))
    with pytest.raises(DataError, match="not allowed to read") as caught:
        bring("s3://coco-data/sets/coco", tmp_path / "efs")
    assert "s3:GetObject" in caught.value.remedy
    assert len(s3.gets()) < 20
    client.delete_bucket_policy(Bucket="coco-data")


def test_no_credentials(s3: FlakyS3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(DataError, match="no AWS credentials to list s3://coco-data/sets/coco with") as caught:
        bring("s3://coco-data/sets/coco", tmp_path / "efs")
    assert "aws sso login" in caught.value.remedy
    monkeypatch.setenv("AWS_PROFILE", "nobody")
    with pytest.raises(DataError, match="nobody"):
        bring("s3://coco-data/sets/coco", tmp_path / "efs")


def test_nothing_answers(s3: FlakyS3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setattr(stage_s3, "ATTEMPTS", 1)
    with pytest.raises(DataError, match="cannot reach S3"):
        bring("s3://coco-data/sets/coco", tmp_path / "efs")


def test_an_empty_prefix(s3: FlakyS3, tmp_path: Path) -> None:
    put(s3, {"": b""})
    with pytest.raises(DataError, match="there are no files in s3://coco-data/sets/coco"):
        bring("s3://coco-data/sets/coco", tmp_path / "efs")


@pytest.mark.parametrize("url", ["s3://", "s3://B/x", "s3://a", "s3:///x", "gs://bucket/x", "https://bucket/x"])
def test_a_place_that_is_none_is_refused(url: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"write s3://bucket/prefix"):
        bring(url, tmp_path)


def test_from_s3_to_s3_is_left_to_s3() -> None:
    with pytest.raises(DataError, match="aws s3 sync s3://aaa/x s3://bbb/y"):
        bring("s3://aaa/x", "s3://bbb/y")


def test_check_finds_what_became_bad_and_staging_mends_it(s3: FlakyS3, tmp_path: Path) -> None:
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
    assert f"'{names[2]}' was changed at the source" in caught.value.what
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


def test_a_killed_staging_leaves_no_half_files_and_goes_on(s3: FlakyS3, tmp_path: Path) -> None:
    content = {f"{number:03d}.bin": os.urandom(200_000) for number in range(40)}
    put(s3, content)
    reached, go_on = threading.Event(), threading.Event()

    def hold(request: Request) -> None:
        if len([one for one in s3.gets() if one.endswith(".bin")]) > 20:
            reached.set()
            go_on.wait(60)

    s3.fault = hold
    with subprocess.Popen(
        command("s3://coco-data/sets/coco", tmp_path / "efs", "--workers", 3), stderr=subprocess.PIPE
    ) as process:
        assert reached.wait(60)
        process.send_signal(signal.SIGKILL)
        process.communicate()
    go_on.set()
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


def test_a_killed_upload_goes_on(s3: FlakyS3, tmp_path: Path) -> None:
    content = {f"{number:03d}.bin": os.urandom(20_000) for number in range(30)}
    write(tmp_path / "mine", content)
    reached, go_on = threading.Event(), threading.Event()

    def hold(request: Request) -> None:
        if len(s3.puts()) > 15:
            reached.set()
            go_on.wait(60)

    s3.fault = hold
    with subprocess.Popen(command(tmp_path / "mine", "s3://coco-data/up"), stderr=subprocess.PIPE) as process:
        assert reached.wait(60)
        process.send_signal(signal.SIGKILL)
        process.communicate()
    go_on.set()
    s3.fault = lambda request: None
    done = bring(tmp_path / "mine", "s3://coco-data/up")
    assert 0 < done.files_copied < 30
    bring("s3://coco-data/up", tmp_path / "back")
    assert files_in(tmp_path / "back") == content


def test_without_boto3_the_error_says_what_to_install(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['boto3'] = None; sys.argv = ['maskfleet', 'data', 'stage', 's3://bucket/x', 'y'];"
        "from maskfleet.cli.main import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "pip install 'maskfleet[aws]'" in done.stderr
    assert "Traceback" not in done.stderr
