"""`maskfleet data get` from a real HTTPS server into folders."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
from coco_zips import coco_files, data_set_of, merged, serve, zip64, zipped
from stage_server import files_in, manifest_in
from typer.testing import CliRunner
from web_server import Answer, WebServer

from maskfleet.cli.main import app
from maskfleet.data.get import archive, catalogue
from maskfleet.data.get.catalogue import COCO2017, DataSet
from maskfleet.data.get.get import Origin, get_data_set
from maskfleet.data.get.unpack import WholeDigest
from maskfleet.data.stage.stage import Staged, stage
from maskfleet.errors import DataError
from maskfleet.system.lock import LockHeldError, locked
from maskfleet.system.web.ranges import WebError

FILES = coco_files()


@pytest.fixture(autouse=True)
def _small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archive, "SEGMENT_BYTES", 5000)


@pytest.fixture
def coco(web: WebServer) -> DataSet:
    return serve(web, {path: zipped(files) for path, files in FILES.items()})


def fetch(data_set: DataSet, destination: Path, **options: Any) -> Staged:
    origin = options.pop("origin", Origin())
    return get_data_set(data_set, str(destination), origin=origin, workers=3, progress=lambda tally: None, **options)


def test_files_arrive_with_a_manifest_that_stage_accepts(coco: DataSet, tmp_path: Path) -> None:
    done = fetch(coco, tmp_path / "coco")
    wanted = merged(FILES)
    assert files_in(tmp_path / "coco") == wanted
    assert (done.files, done.files_copied, done.notes) == (len(wanted), len(wanted), ())
    lines = manifest_in(tmp_path / "coco")
    assert {path: line["sha256"] for path, line in lines.items()} == {
        path: hashlib.sha256(content).hexdigest() for path, content in wanted.items()
    }
    assert list(lines) == sorted(lines)
    copied = stage(str(tmp_path / "coco"), str(tmp_path / "copy"), progress=lambda tally: None)
    assert (copied.files_copied, copied.notes) == (len(wanted), ())


def test_nothing_is_fetched_twice_and_lost_files_are(coco: DataSet, web: WebServer, tmp_path: Path) -> None:
    fetch(coco, tmp_path / "coco")
    web.asked.clear()
    assert fetch(coco, tmp_path / "coco").files_copied == 0
    assert all(one.end - one.start == 1 or one.path.endswith(".zip") for one in web.asked)
    lost = tmp_path / "coco/train2017/000000000003.jpg"
    content = lost.read_bytes()
    lost.unlink()
    done = fetch(coco, tmp_path / "coco")
    assert done.files_copied == 1
    assert lost.read_bytes() == content
    assert "1 of 12 files of train2017.zip were fetched in this run: they were checked by" in done.notes[0]


def test_zip64_archives_are_read(web: WebServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archives = {path: zip64(files, monkeypatch) for path, files in FILES.items()}
    fetch(serve(web, archives), tmp_path / "coco")
    assert files_in(tmp_path / "coco") == merged(FILES)


@pytest.mark.slow
def test_an_archive_with_something_before_its_first_member_is_read(web: WebServer, tmp_path: Path) -> None:
    archives = {path: b"#! self-extracting\n" + zipped(files) for path, files in FILES.items()}
    fetch(serve(web, archives), tmp_path / "coco")
    assert files_in(tmp_path / "coco") == merged(FILES)


def test_breaks_do_not_show(coco: DataSet, web: WebServer, tmp_path: Path) -> None:
    web.fault = lambda asked: Answer(cut_after=1500) if asked.end - asked.start > 1500 else None
    assert fetch(coco, tmp_path / "coco").notes == ()
    assert files_in(tmp_path / "coco") == merged(FILES)


@pytest.mark.slow
def test_optional_archives_come_only_with_test(web: WebServer, tmp_path: Path) -> None:
    test_files = {"test2017/1.jpg": b"one"}
    coco = serve(
        web, {path: zipped(files) for path, files in FILES.items()} | {"zips/test2017.zip": zipped(test_files)}
    )
    fetch(coco, tmp_path / "coco")
    assert files_in(tmp_path / "coco") == merged(FILES)
    assert fetch(coco, tmp_path / "coco", test=True).files_copied == 1
    assert files_in(tmp_path / "coco") == merged(FILES) | test_files
    fetch(coco, tmp_path / "coco")
    assert "test2017/1.jpg" in manifest_in(tmp_path / "coco"), "files of an earlier run stay in the manifest"


@pytest.mark.slow
@pytest.mark.parametrize("flat", [False, True])
def test_a_mirror_and_a_folder_of_archives(web: WebServer, tmp_path: Path, flat: bool) -> None:
    archives = {path: zipped(files) for path, files in FILES.items()}
    coco = data_set_of(archives, "https://127.0.0.1:9/unreachable")
    for path, content in archives.items():
        name = path.rpartition("/")[2] if flat else path
        web.files[f"/mirror/{name}"] = content
        (tmp_path / "zips" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "zips" / name).write_bytes(content)
    fetch(coco, tmp_path / "a", origin=Origin(mirror=f"{web.url}/mirror/"))
    fetch(coco, tmp_path / "b", origin=Origin(folder=tmp_path / "zips"))
    assert files_in(tmp_path / "a") == files_in(tmp_path / "b") == merged(FILES)
    (tmp_path / "b/train2017/000000000003.jpg").unlink()
    assert "SHA-256 was compared" in fetch(coco, tmp_path / "b", origin=Origin(folder=tmp_path / "zips")).notes[0]


def test_a_missing_archive_of_a_folder_is_named(coco: DataSet, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no annotations_trainval2017\.zip in") as raised:
        fetch(coco, tmp_path / "coco", origin=Origin(folder=tmp_path))
    assert f"{coco.addresses[0]}/annotations/annotations_trainval2017.zip" in raised.value.remedy


def test_another_archive_of_the_same_size_is_refused_when_resuming(
    coco: DataSet, web: WebServer, tmp_path: Path
) -> None:
    fetch(coco, tmp_path / "coco")
    other = dict(FILES["zips/train2017.zip"])
    other["train2017/000000000003.jpg"] = bytes(len(other["train2017/000000000003.jpg"]))
    web.files["/coco/zips/train2017.zip"] = zipped(other)
    with pytest.raises(DataError, match=r"train2017\.zip is not the archive that .*coco was begun with"):
        fetch(coco, tmp_path / "coco")


def test_a_wrong_sha256_leaves_no_record_of_that_archive(coco: DataSet, web: WebServer, tmp_path: Path) -> None:
    """All files have the right CRC-32, as those of a mirror that replaced an image would."""
    other = dict(FILES["zips/train2017.zip"])
    other["train2017/000000000003.jpg"] = bytes(len(other["train2017/000000000003.jpg"]))
    web.files["/coco/zips/train2017.zip"] = zipped(other)
    with pytest.raises(DataError, match=r"train2017\.zip has SHA-256 .* instead of"):
        fetch(coco, tmp_path / "coco")
    journal = (tmp_path / "coco/.maskfleet-stage/journal.jsonl").read_text()
    assert "val2017/" in journal
    assert "train2017/" not in journal
    assert not (tmp_path / "coco/manifest.jsonl").exists()


def test_two_at_once_are_refused(coco: DataSet, tmp_path: Path) -> None:
    state = tmp_path / "coco/.maskfleet-stage"
    state.mkdir(parents=True)
    with locked(state / "lock", "staging"), pytest.raises(LockHeldError):
        fetch(coco, tmp_path / "coco")


def test_the_digest_is_that_of_the_bytes_in_order() -> None:
    """Later segments keep their bytes until the earlier ones have ended."""
    digest = WholeDigest()
    first, second = digest.watched(iter([b"one", b"two"]), 0), digest.watched(iter([b"three"]), 1)
    assert next(second) == b"three"
    assert list(first) == [b"one", b"two"]
    assert list(second) == []
    assert digest.hexdigest() == hashlib.sha256(b"onetwothree").hexdigest()


@pytest.mark.slow
def test_the_command(coco: DataSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(catalogue.DATA_SETS, "coco2017", coco)
    done = CliRunner().invoke(app, ["data", "get", "coco2017", str(tmp_path / "coco"), "--workers", "2"])
    assert done.exit_code == 0, done.output
    assert f"{len(merged(FILES))} fetched" in done.output
    assert "manifest.jsonl" in done.output


def test_unknown_data_sets_and_two_sources_are_errors(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no data set 'imagenet'"):
        catalogue.data_set("imagenet")
    done = CliRunner().invoke(app, ["data", "get", "coco2017", "x", "--mirror", "https://a", "--archives", "b"])
    assert "both given" in str(done.exception)
    done = CliRunner().invoke(
        app, ["data", "get", "coco2017", str(tmp_path), "--mirror", "https://me:secret@host/coco"]
    )
    assert "Getting coco2017 from https://host/coco" in done.output
    assert "secret" not in done.output


def test_the_catalogue_is_coco() -> None:
    assert [one.name for one in COCO2017.archives if not one.optional] == [
        "annotations_trainval2017.zip",
        "val2017.zip",
        "train2017.zip",
    ]
    assert all(len(bytes.fromhex(one.sha256)) == 32 for one in COCO2017.archives)
    assert all(address.startswith("https://") for address in COCO2017.addresses)


def test_an_unreachable_server_is_named(tmp_path: Path, web: WebServer) -> None:
    coco = data_set_of({"a.zip": zipped({"a/1.jpg": b"1"})}, "https://127.0.0.1:9")
    with pytest.raises(WebError, match=r"127\.0\.0\.1:9/a\.zip cannot be read: no connection"):
        fetch(coco, tmp_path / "coco")
