"""`maskfleet data status`: complete, partial, unverified or empty, by a listing alone."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from flaky_s3 import FlakyS3
from stage_server import bring, direct, numbered, put, write
from typer.testing import CliRunner

from maskfleet.cli.data import app
from maskfleet.data.stage.folder import Folder
from maskfleet.data.stage.status import staging_status
from maskfleet.errors import DataError

pytest_plugins = ("stage_fixtures",)


def test_a_staged_folder_is_complete(tmp_path: Path) -> None:
    files = numbered(5)
    bring(write(tmp_path / "set", files), tmp_path / "there")
    found = staging_status(str(tmp_path / "there"))
    assert (found.state, found.files, found.bytes) == ("complete", 5, sum(map(len, files.values())))
    assert not found.is_sharded


def test_caches_of_training_are_neither_copied_nor_counted(tmp_path: Path) -> None:
    """`maskfleet data inspect` and `train` write them next to the annotations, also while the set is staged."""
    files = {"annotations/instances_val2017.json": b"{}", **numbered(2)}
    caches = {"annotations/.maskfleet/1-v2.store": b"cache", ".maskfleet/1.catalog": b"cache"}
    source = write(tmp_path / "set", files | caches)
    for target, shard_bytes in (("there", None), ("shards", 20_000)):
        bring(source, tmp_path / target, shard_bytes=shard_bytes)
        assert not list((tmp_path / target).rglob(".maskfleet"))
    write(tmp_path / "there", caches)
    assert staging_status(str(tmp_path / "there")).unlisted == 0
    older = {"path": "annotations/.maskfleet/1-v2.store", "bytes": 5, "sha256": "0" * 64}
    with (tmp_path / "there" / "manifest.jsonl").open("a") as manifest:
        manifest.write(json.dumps(older) + "\n")
    assert bring(tmp_path / "there", tmp_path / "again").files == 3


def test_missing_and_changed_files_make_it_partial(tmp_path: Path) -> None:
    bring(write(tmp_path / "set", numbered(5)), tmp_path / "there")
    names = list(numbered(5))
    (tmp_path / "there" / names[0]).unlink()
    (tmp_path / "there" / names[1]).write_bytes(b"x")
    (tmp_path / "there" / "more.txt").write_bytes(b"12345")
    found = staging_status(str(tmp_path / "there"))
    assert (found.state, found.files, found.missing, found.changed) == ("partial", 3, 1, 1)
    assert (found.unlisted, found.unlisted_bytes) == (1, 5)
    assert found.examples == (names[0], names[1])


def test_a_staging_that_stopped_is_partial(tmp_path: Path) -> None:
    source = write(tmp_path / "set", numbered(5))
    bring(source, tmp_path / "staged")
    name = list(numbered(5))[2]
    (source / name).write_bytes(b"y" * len(numbered(5)[name]))
    with pytest.raises(DataError):
        bring(source, tmp_path / "there", manifest=tmp_path / "staged" / "manifest.jsonl")
    found = staging_status(str(tmp_path / "there"))
    assert (found.state, found.files) == ("partial", 4)


def test_a_staging_that_was_killed_before_its_first_file_is_partial(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    folder = Folder(tmp_path / "there")
    claim = folder.claimed()
    claim.__enter__()  # and nothing of what follows, as after kill -9
    assert staging_status(str(tmp_path / "there")).state == "partial"
    claim.__exit__(None, None, None)
    assert staging_status(str(tmp_path / "there")).state == "empty"
    write(tmp_path / "there", numbered(2))
    with folder.claimed():
        folder.reopen([])
    assert staging_status(str(tmp_path / "there")).state == "partial"


def test_names_that_no_staging_writes_are_counted_and_printed_on_one_line(tmp_path: Path) -> None:
    bring(write(tmp_path / "set", numbered(3)), tmp_path / "there")
    os.mkfifo(tmp_path / "there" / "pipe\nline")
    Path(os.fsdecode(bytes(tmp_path / "there") + b"/caf\xe9.jpg")).write_bytes(b"123")
    found = staging_status(str(tmp_path / "there"))
    assert (found.state, found.files, found.unlisted, found.unstorable) == ("complete", 3, 0, 2)
    done = CliRunner().invoke(app, ["status", str(tmp_path / "there")])
    assert done.exit_code == 0
    assert "2 files that cannot be staged, first 'caf\\udce9.jpg' is not UTF-8: rename or remove them" in done.output


def test_files_without_a_manifest_are_unverified(tmp_path: Path) -> None:
    found = staging_status(str(write(tmp_path / "set", numbered(5))))
    assert (found.state, found.files, found.unlisted) == ("unverified", 0, 5)
    (tmp_path / "empty").mkdir()
    assert staging_status(str(tmp_path / "empty")).state == "empty"


def test_the_command_prints_it_and_exits_with_a_code(tmp_path: Path) -> None:
    bring(write(tmp_path / "set", numbered(5)), tmp_path / "there", shard_bytes=2_000)
    done = CliRunner().invoke(app, ["status", str(tmp_path / "there")])
    assert done.exit_code == 0
    assert "complete" in done.output
    assert "in shards" in done.output
    done = CliRunner().invoke(app, ["status", str(tmp_path / "set"), "--json"])
    assert done.exit_code == 1
    assert json.loads(done.output)["state"] == "unverified"
    with pytest.raises(DataError, match="is not a folder"):
        staging_status(str(tmp_path / "none"))


@pytest.mark.slow
def test_a_prefix_is_compared_by_etags_too(s3: FlakyS3, tmp_path: Path) -> None:
    bring(write(tmp_path / "set", numbered(3)), "s3://coco-data/set")
    assert staging_status("s3://coco-data/set").state == "complete"
    name = next(iter(numbered(1)))
    put(s3, {name: b"z" * len(numbered(1)[name])}, prefix="set/")
    found = staging_status("s3://coco-data/set")
    assert (found.state, found.changed, found.examples) == ("partial", 1, (name,))
    direct(s3).delete_object(Bucket="coco-data", Key="set/manifest.jsonl")
    assert staging_status("s3://coco-data/set").state == "unverified"
