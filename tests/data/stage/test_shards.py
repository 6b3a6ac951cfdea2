"""Tar shards: ordinary tar archives, an index written last, made again shard by shard after an interruption."""

from __future__ import annotations

import hashlib
import json
import tarfile
from pathlib import Path

import pytest
from flaky_s3 import Answer, FlakyS3, Request
from stage_server import bring, direct, files_in, get, manifest_in, numbered, put, recheck, write

from maskfleet.errors import DataError

pytest_plugins = ("stage_fixtures",)

LONG = "train2017/" + "ä" * 90 + ".PNG"
FILES = {"annotations/instances_train2017.json": b"{}" * 600, **numbered(40), LONG: b"p" * 700}
IMAGES = {name: content for name, content in FILES.items() if not name.endswith(".json")}


def unpacked(folder: Path) -> dict[str, bytes]:
    found = {}
    for shard in sorted(folder.glob("shard-*.tar")):
        with tarfile.open(shard, "r:") as tar:
            for entry in tar:
                file = tar.extractfile(entry)
                assert file is not None
                found[entry.name] = file.read()
    return {name: content for name, content in found.items() if not name.startswith(".maskfleet-shards/")}


def indexed(folder: Path) -> dict[str, bytes]:
    """The files that the index finds in the shards, each compared with its SHA-256."""
    first, *lines = [json.loads(line) for line in (folder / "shards.jsonl").read_text("utf-8").splitlines()]
    found = {}
    for line in lines:
        content = (folder / first["shards"][line["shard"]]["name"]).read_bytes()
        content = content[line["offset"] : line["offset"] + line["bytes"]]
        assert hashlib.sha256(content).hexdigest() == line["sha256"]
        found[line["path"]] = content
    return found


def test_a_check_against_another_source_keeps_the_manifest(tmp_path: Path) -> None:
    """Such as --check without the --shards of the staging: the files that the manifest lists are all right."""
    source, there = write(tmp_path / "set", FILES), tmp_path / "there"
    bring(source, there, shard_bytes=20_000)
    manifest = (there / "manifest.jsonl").read_bytes()
    with pytest.raises(DataError, match="missing or changed"):
        recheck(source, there)
    assert (there / "manifest.jsonl").read_bytes() == manifest
    (there / "annotations" / "instances_train2017.json").write_bytes(b"[]" * 600)
    with pytest.raises(DataError, match="missing or changed"):
        recheck(source, there)
    assert not (there / "manifest.jsonl").exists(), "one of its files changed"
    assert bring(source, there, shard_bytes=20_000).files_copied == 1, "the shards are not copied again"


def test_shards_hold_the_images_and_the_index_finds_them(tmp_path: Path) -> None:
    source = write(tmp_path / "set", FILES)
    done = bring(source, tmp_path / "there", shard_bytes=20_000)
    assert unpacked(tmp_path / "there") == IMAGES == indexed(tmp_path / "there")
    assert (tmp_path / "there" / "annotations" / "instances_train2017.json").read_bytes() == b"{}" * 600
    shards = sorted((tmp_path / "there").glob("shard-*.tar"))
    assert len(shards) > 2
    assert set(manifest_in(tmp_path / "there")) == {
        "annotations/instances_train2017.json",
        "shards.jsonl",
        *(shard.name for shard in shards),
    }
    assert done.files == len(shards) + 2
    recheck(source, tmp_path / "there", shard_bytes=20_000)
    assert bring(source, tmp_path / "there", shard_bytes=20_000).files_copied == 0


def test_images_in_shards_count_as_compared_with_the_manifest_of_their_source(tmp_path: Path) -> None:
    source = tmp_path / "set"
    bring(write(tmp_path / "first", FILES), source)
    assert bring(source, tmp_path / "there", shard_bytes=20_000).notes == ()
    write(source, {"train2017/new.jpg": b"new"})
    (note,) = bring(source, tmp_path / "other", shard_bytes=20_000).notes
    assert note == f"1 files of {source} are not in its manifest, so only their sizes were compared"


def test_the_same_source_gives_the_same_shards_to_the_last_byte(tmp_path: Path) -> None:
    bring(write(tmp_path / "a", FILES), tmp_path / "there", shard_bytes=20_000)
    bring(write(tmp_path / "b", FILES), tmp_path / "other", shard_bytes=20_000)
    assert files_in(tmp_path / "there") == files_in(tmp_path / "other")


def test_a_changed_image_of_the_same_size_makes_its_shard_again(tmp_path: Path) -> None:
    source = write(tmp_path / "set", FILES)
    bring(source, tmp_path / "there", shard_bytes=20_000)
    name = next(iter(IMAGES))
    (source / name).write_bytes(IMAGES[name][:-1] + b"?")
    assert bring(source, tmp_path / "there", shard_bytes=20_000).files_copied == 1
    assert indexed(tmp_path / "there") == {**IMAGES, name: IMAGES[name][:-1] + b"?"}


def test_a_shard_that_is_missing_or_damaged_is_found_and_made_again(tmp_path: Path) -> None:
    source = write(tmp_path / "set", FILES)
    bring(source, tmp_path / "there", shard_bytes=20_000)
    shard = tmp_path / "there" / "shard-000001.tar"
    content = bytearray(shard.read_bytes())
    content[600] ^= 1
    shard.write_bytes(content)
    with pytest.raises(DataError, match=r"'shard-000001.tar' has SHA-256"):
        recheck(source, tmp_path / "there", shard_bytes=20_000)
    assert bring(source, tmp_path / "there", shard_bytes=20_000).files_copied == 1
    assert indexed(tmp_path / "there") == IMAGES
    (tmp_path / "there" / "shards.jsonl").unlink()
    bring(source, tmp_path / "there", shard_bytes=20_000)
    assert indexed(tmp_path / "there") == IMAGES


def test_there_is_no_index_while_a_shard_fails(tmp_path: Path) -> None:
    source = write(tmp_path / "set", FILES)
    bring(source, tmp_path / "staged")
    manifest = tmp_path / "staged" / "manifest.jsonl"
    name = next(iter(IMAGES))
    (source / name).write_bytes(IMAGES[name][:-1] + b"?")
    with pytest.raises(DataError, match=f"'{name}' has SHA-256"):
        bring(source, tmp_path / "there", shard_bytes=20_000, manifest=manifest)
    assert not (tmp_path / "there" / "shards.jsonl").exists()
    assert not (tmp_path / "there" / "manifest.jsonl").exists()
    (source / name).write_bytes(IMAGES[name])
    done = bring(source, tmp_path / "there", shard_bytes=20_000, manifest=manifest)
    assert done.files_copied == 1
    assert indexed(tmp_path / "there") == IMAGES


def test_a_set_without_images_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="there are no images"):
        bring(write(tmp_path / "set", {"a.json": b"{}"}), tmp_path / "there", shard_bytes=20_000)


@pytest.mark.slow
def test_shards_go_to_s3_and_come_back_as_files(s3: FlakyS3, tmp_path: Path) -> None:
    source = write(tmp_path / "set", FILES)
    bring(source, "s3://coco-data/shards", shard_bytes=20_000)
    bring("s3://coco-data/shards", tmp_path / "there")
    assert indexed(tmp_path / "there") == IMAGES
    s3.requests.clear()
    assert bring(source, "s3://coco-data/shards", shard_bytes=20_000).files_copied == 0
    assert s3.puts() == ["/coco-data/shards/manifest.jsonl"]


@pytest.mark.slow
def test_an_upload_of_shards_that_fails_resumes_shard_by_shard(s3: FlakyS3, tmp_path: Path) -> None:
    source = write(tmp_path / "set", FILES)

    def denied(request: Request) -> Answer | None:
        late = request.method == "PUT" and "shard-000001" in request.path
        return Answer(403, "AccessDenied") if late else None

    s3.fault = denied
    with pytest.raises(DataError, match="not allowed to write"):
        bring(source, "s3://coco-data/shards", shard_bytes=20_000)
    s3.fault = lambda request: None
    listed = {found["Key"] for found in direct(s3).list_objects_v2(Bucket="coco-data")["Contents"]}
    assert "shards/shards.jsonl" not in listed
    s3.requests.clear()
    bring(source, "s3://coco-data/shards", shard_bytes=20_000)
    assert not {key for key in listed if f"/coco-data/{key}" in s3.puts()}, "what was sent is not sent again"
    assert len(get(s3, "shards/shards.jsonl").splitlines()) == len(IMAGES) + 1


@pytest.mark.slow
def test_shards_can_be_made_from_s3(s3: FlakyS3, tmp_path: Path) -> None:
    put(s3, FILES)
    bring("s3://coco-data/sets/coco", tmp_path / "there", shard_bytes=20_000)
    assert indexed(tmp_path / "there") == IMAGES
