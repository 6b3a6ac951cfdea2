"""`maskfleet data stage` and an S3 (moto) that refuses, breaks, changes or hides something."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from flaky_s3 import Answer, Cut, FlakyS3, Page, Request, Spoil
from stage_server import bring, direct, files_in, numbered, put, write

from maskfleet.data.stage import s3 as stage_s3
from maskfleet.data.stage.status import staging_status
from maskfleet.errors import DataError, MaskfleetError

pytest_plugins = ("stage_fixtures",)


def test_an_upload_in_parts_that_fails_leaves_no_parts(s3: FlakyS3, tmp_path: Path) -> None:
    folder = write(tmp_path / "mine", {"weights.npz": bytes(2 * stage_s3.PART_BYTES + 1)})
    s3.fault = lambda request: Answer(403, "AccessDenied") if "partNumber=3" in request.query else None
    with pytest.raises(DataError, match=r"not allowed to write s3://coco-data/sets/coco/weights\.npz"):
        bring(folder, "s3://coco-data/sets/coco")
    client = direct(s3)
    assert "Uploads" not in client.list_multipart_uploads(Bucket="coco-data")


@pytest.mark.parametrize("name", ["../escaped.jpg", "a/../../escaped.jpg", "a/./b.jpg", "a//b.jpg", "/etc/x.jpg"])
def test_a_name_that_leads_elsewhere_is_refused_and_named(s3: FlakyS3, tmp_path: Path, name: str) -> None:
    put(s3, {name: b"out", "train2017/1.jpg": b"in"})
    with pytest.raises(DataError, match="cannot be stored in a folder") as caught:
        bring("s3://coco-data/sets/coco", tmp_path / "root" / "efs")
    assert repr(name) in str(caught.value)
    assert files_in(tmp_path / "root") == {}


def test_a_name_too_long_for_the_prefix_is_refused_before_anything_is_copied(s3: FlakyS3, tmp_path: Path) -> None:
    name = "/".join(["n" * 200] * 5) + ".jpg"  # 1,008 bytes, to which the prefix adds 21
    source = write(tmp_path / "set", {"a.jpg": b"a", name: b"b"})
    with pytest.raises(DataError, match="too long for s3://coco-data/") as caught:
        bring(source, "s3://coco-data/a-prefix-of-21-bytes")
    assert "more than 1024 bytes" in caught.value.what
    assert "shorter destination" in caught.value.remedy
    assert direct(s3).list_objects_v2(Bucket="coco-data")["KeyCount"] == 0
    bring(source, "s3://coco-data/p")


def test_odd_characters_in_names_come_back_as_they_were(s3: FlakyS3, tmp_path: Path) -> None:
    files = {"e\x01f.jpg": b"3", "g h+i%0a&.jpg": b"4", "\x7f.jpg": b"5"}
    bring(write(tmp_path / "set", files), "s3://coco-data/set")
    assert staging_status("s3://coco-data/set").state == "complete"
    bring("s3://coco-data/set", tmp_path / "back")
    assert {name: (tmp_path / "back" / name).read_bytes() for name in files} == files


def test_an_object_that_is_also_a_folder_is_refused_and_named(s3: FlakyS3, tmp_path: Path) -> None:
    put(s3, {"train2017": b"file", "train2017/1.jpg": b"jpeg", "train2017-more": b"fine"})
    with pytest.raises(DataError, match="'train2017' is both a file and a folder"):
        bring("s3://coco-data/sets/coco", tmp_path / "efs")


def test_bytes_damaged_in_transit_are_detected(s3: FlakyS3, tmp_path: Path) -> None:
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


def test_throttled_requests_are_retried(s3: FlakyS3, tmp_path: Path) -> None:
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


@pytest.mark.slow
@pytest.mark.parametrize("status", [429, 500])
def test_a_server_that_stays_overloaded_is_given_up_with_a_remedy(
    s3: FlakyS3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    monkeypatch.setattr("maskfleet.system.s3.objects._BACKOFF_S", 0.001)
    put(s3, numbered(3))
    s3.fault = lambda request: (
        Answer(status, {429: "SlowDown", 500: "InternalError"}[status]) if request.path.endswith("2.jpg") else None
    )
    with pytest.raises(DataError, match=r"S3 still answers \w+ after ten attempts to read") as caught:
        bring("s3://coco-data/sets/coco", tmp_path / "efs")
    assert "fewer --workers" in caught.value.remedy
    s3.fault = lambda request: None
    s3.requests.clear()
    bring("s3://coco-data/sets/coco", tmp_path / "efs")
    assert [path.rpartition("/")[2] for path in s3.gets() if path.endswith(".jpg")] == ["000000000002.jpg"]


@pytest.mark.parametrize("is_at_start", [True, False], ids=["listing", "object"])
def test_a_token_that_expires_is_named_and_the_staging_resumes(s3: FlakyS3, tmp_path: Path, is_at_start: bool) -> None:
    put(s3, numbered(3))
    expired = Answer(400, "ExpiredToken")
    s3.fault = lambda request: expired if is_at_start or request.path.endswith("2.jpg") else None
    with pytest.raises(DataError, match=r"does not accept the credentials in use \(ExpiredToken\)") as caught:
        bring("s3://coco-data/sets/coco", tmp_path / "efs")
    assert "aws sso login" in caught.value.remedy
    s3.fault = lambda request: None
    bring("s3://coco-data/sets/coco", tmp_path / "efs")
    assert files_in(tmp_path / "efs") == numbered(3)


@pytest.mark.slow
@pytest.mark.parametrize("is_at_start", [True, False], ids=["listing", "object"])
def test_the_page_of_a_proxy_is_not_taken_for_an_answer_of_s3(s3: FlakyS3, tmp_path: Path, is_at_start: bool) -> None:
    put(s3, numbered(3))
    s3.fault = lambda request: Page() if is_at_start or request.path.endswith("2.jpg") else None
    with pytest.raises(DataError, match=r"is not S3's own|2\.jpg' has 46 bytes instead of"):
        bring("s3://coco-data/sets/coco", tmp_path / "efs")
    assert not (tmp_path / "efs" / "manifest.jsonl").exists()
    assert not (tmp_path / "efs" / "train2017" / "000000000002.jpg").exists()


def test_no_such_bucket(s3: FlakyS3, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="the bucket of s3://no-such-bucket/x does not exist"):
        bring("s3://no-such-bucket/x", tmp_path / "efs")
    with pytest.raises(DataError, match="the bucket of s3://no-such-bucket/x does not exist"):
        bring(write(tmp_path / "mine", {"a": b"a"}), "s3://no-such-bucket/x")


def test_no_permission_to_list(s3: FlakyS3, tmp_path: Path) -> None:
    s3.fault = lambda request: Answer(403, "AccessDenied")
    with pytest.raises(DataError, match=r"not allowed to list s3://coco-data/sets/coco \(403\)") as caught:
        bring("s3://coco-data/sets/coco", tmp_path / "efs")
    assert "s3:ListBucket" in caught.value.remedy


def test_no_permission_to_read_stops_at_once(s3: FlakyS3, tmp_path: Path) -> None:
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
    with pytest.raises(MaskfleetError, match="nobody"):
        bring("s3://coco-data/sets/coco", tmp_path / "efs")


def test_the_region_that_the_chart_sets_is_the_one_that_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_REGION", "eu-central-1")
    client = stage_s3._new_client(1)
    try:
        assert client.meta.region_name == "eu-central-1"
    finally:
        client.close()


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
def test_an_invalid_location_is_refused(url: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"write s3://bucket/prefix"):
        bring(url, tmp_path)


def test_from_s3_to_s3_is_left_to_s3() -> None:
    with pytest.raises(DataError, match="aws s3 sync s3://aaa/x s3://bbb/y"):
        bring("s3://aaa/x", "s3://bbb/y")


def test_without_boto3_the_error_says_what_to_install(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['boto3'] = None; sys.argv = ['maskfleet', 'data', 'stage', 's3://bucket/x', 'y'];"
        "from maskfleet.cli.main import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "pip install 'maskfleet[aws]'" in done.stderr
    assert "Traceback" not in done.stderr
