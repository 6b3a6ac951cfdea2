"""Downloads that are killed, two at once, and downloads to a real S3 server."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from coco_zips import coco_files, merged, serve, write_catalogue, zipped
from flaky_s3 import FlakyS3, Keep
from stage_server import direct, files_in, get
from web_server import Answer, Asked, WebServer

from maskfleet.data.get import archive
from maskfleet.data.get.catalogue import DataSet
from maskfleet.data.get.get import Origin, get_data_set
from maskfleet.data.stage.stage import stage
from maskfleet.errors import DataError

pytestmark = pytest.mark.slow
pytest_plugins = ("stage_fixtures",)
PROGRAM = Path(__file__).with_name("get_process.py")


def start(catalogue: Path, destination: str, workers: int = 4, *, before: Sequence[str] = ()) -> subprocess.Popen[str]:
    """A download in a process of its own; `before` is a command that runs its arguments."""
    paths = [str(PROGRAM.parent), str(PROGRAM.parents[2] / "system/web")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    command = [*before, sys.executable, str(PROGRAM), str(catalogue), destination, str(workers)]
    return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)


def slow_data_set(web: WebServer, tmp_path: Path, images: int) -> tuple[dict[str, bytes], DataSet]:
    files = coco_files(images=images, size=4000)
    coco = serve(web, {path: zipped(of_archive) for path, of_archive in files.items()})
    write_catalogue(tmp_path / "catalogue.json", coco)
    return merged(files), coco


def test_ten_kills_lose_nothing(web: WebServer, tmp_path: Path) -> None:
    """Killed at random moments, it ends with exact bytes, and no complete file is fetched again."""
    wanted, coco = slow_data_set(web, tmp_path, images=1000)
    target, generator = tmp_path / "coco", random.Random(0)
    offsets = {
        one.path: (f"/coco/{facts.path}", one.start, one.end)
        for facts in coco.archives
        for one in archive.open_archive(facts, _Memory(web.files[f"/coco/{facts.path}"]), archive.MemberNames()).members
    }
    journal = target / ".maskfleet-stage/journal.jsonl"
    complete: set[str] = set()
    web.fault = _pause
    for kill in range(10):
        before = len(web.asked)
        process = start(tmp_path / "catalogue.json", str(target), workers=2)  # so slow that no run gets to the end
        size = journal.stat().st_size if journal.exists() else 0
        wait_until(lambda size=size: journal.exists() and journal.stat().st_size > size, process)  # type: ignore[misc]
        time.sleep(generator.uniform(0, 0.15))
        assert process.poll() is None, f"it finished before kill {kill}"
        process.send_signal(signal.SIGKILL)
        process.communicate()
        assert not (target / "manifest.jsonl").exists()
        _expect_not_fetched(web.asked[before:], complete, offsets)
        complete |= {line.split('"')[3] for line in journal.read_text().splitlines()[:-1]}
        assert all((target / path).read_bytes() == wanted[path] for path in complete)
    before = len(web.asked)
    process = start(tmp_path / "catalogue.json", str(target))
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    _expect_not_fetched(web.asked[before:], complete, offsets)
    assert files_in(target) == wanted
    again = stage(str(target), str(tmp_path / "copy"), progress=lambda tally: None)
    assert again.files_copied == len(wanted)


def _pause(asked: Asked) -> Answer | None:
    time.sleep(0.03)
    return None


class _Memory:
    def __init__(self, content: bytes) -> None:
        self.content, self.size = content, len(content)

    def read(self, start: int, end: int):  # type: ignore[no-untyped-def]
        yield self.content[start:end]


def _expect_not_fetched(asked: list[Asked], complete: set[str], offsets: dict[str, tuple[str, int, int]]) -> None:
    """No request overlaps a complete file, but for those that read the directory at the end of an archive."""
    for path in complete:
        of_archive, start_at, end = offsets[path]
        last = max(one.end for one in asked if one.path == of_archive)
        overlapping = [
            one
            for one in asked
            if one.path == of_archive and one.start < end and one.end > start_at and one.end < last and one.end > 1
        ]
        assert not overlapping, (path, overlapping)


def wait_until(happened, process: subprocess.Popen[str]) -> None:  # type: ignore[no-untyped-def]
    deadline = time.monotonic() + 240
    while not happened():
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_two_at_once_the_second_is_refused(web: WebServer, tmp_path: Path) -> None:
    wanted, _ = slow_data_set(web, tmp_path, images=30)
    pins, refused = tmp_path / "coco/.maskfleet-stage/pins.json", threading.Event()
    web.fault = lambda asked: _wait(refused) if pins.exists() else None  # the first is not done before the second ends
    process = start(tmp_path / "catalogue.json", str(tmp_path / "coco"), workers=1)
    try:
        wait_until(pins.exists, process)
        second = start(tmp_path / "catalogue.json", str(tmp_path / "coco"))
        assert "another process is staging into" in second.communicate(timeout=240)[1]
    finally:
        refused.set()
    assert process.wait(timeout=240) == 0
    process.communicate()
    assert files_in(tmp_path / "coco") == wanted


def _wait(event: threading.Event) -> None:
    assert event.wait(timeout=300)


def test_a_file_system_that_becomes_full(web: WebServer, tmp_path: Path) -> None:
    """A real one of 600 kB: the files would fit by their sizes, but each takes a block of 4 kB."""
    if subprocess.run(["unshare", "-rm", "true"], check=False, capture_output=True).returncode != 0:
        pytest.skip("this machine does not allow mounts in a name space of one's own (unshare -rm)")
    files = {f"train2017/{number:012d}.jpg": b"small" for number in range(400)}
    write_catalogue(tmp_path / "catalogue.json", serve(web, {"zips/train2017.zip": zipped(files)}))
    (tmp_path / "coco").mkdir()
    mounted = 'mount -t tmpfs -o size=600k none "$0" && exec "$@"'
    before = ["unshare", "-rm", "sh", "-c", mounted, str(tmp_path / "coco")]
    process = start(tmp_path / "catalogue.json", str(tmp_path / "coco"), before=before)
    errors = process.communicate(timeout=120)[1]
    assert process.returncode == 1
    assert f"{tmp_path / 'coco'} is full" in errors
    assert "free space and run the same command again" in errors


def to_s3(coco: DataSet) -> int:
    done = get_data_set(coco, "s3://coco-data/sets/coco", origin=Origin(), workers=4, progress=lambda tally: None)
    return done.files_copied


def keys(s3: FlakyS3) -> set[str]:
    listed = direct(s3).list_objects_v2(Bucket="coco-data").get("Contents", ())
    return {one["Key"] for one in listed}


def test_s3_gets_files_and_manifest_and_keeps_no_journal(
    s3: FlakyS3, web: WebServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archive, "SEGMENT_BYTES", 20_000)
    wanted, coco = slow_data_set(web, tmp_path, images=30)
    assert to_s3(coco) == len(wanted)
    state = {"sets/coco/manifest.jsonl", "sets/coco/.maskfleet-stage/get/pins.json"}
    assert keys(s3) == {f"sets/coco/{path}" for path in wanted} | state
    assert all(get(s3, f"sets/coco/{path}") == content for path, content in wanted.items())
    assert to_s3(coco) == 0
    stage("s3://coco-data/sets/coco", str(tmp_path / "copy"), progress=lambda tally: None)
    assert files_in(tmp_path / "copy") == wanted


def test_s3_has_no_record_of_a_replaced_archive_without_permission_to_delete(
    s3: FlakyS3, web: WebServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The roles of our stacks may not delete; S3 then answers 200, with an error for each object."""
    monkeypatch.setattr(archive, "SEGMENT_BYTES", 20_000)
    files = coco_files(images=30, size=4000)
    coco = serve(web, {path: zipped(of_archive) for path, of_archive in files.items()})
    other = dict(files["zips/train2017.zip"])
    changed = min(other)
    web.files["/coco/zips/train2017.zip"] = zipped(other | {changed: bytes(len(other[changed]))})
    s3.fault = lambda request: Keep() if request.method == "POST" and "delete" in request.query else None
    for _ in range(2):  # the second run has no reason to trust the files of the first
        with pytest.raises(DataError, match=r"train2017\.zip has SHA-256 .* instead of"):
            to_s3(coco)
    assert "sets/coco/manifest.jsonl" not in keys(s3)


def test_s3_without_permission_to_delete_is_enough(s3: FlakyS3, web: WebServer, tmp_path: Path) -> None:
    wanted, coco = slow_data_set(web, tmp_path, images=5)
    s3.fault = lambda request: Keep() if request.method == "POST" and "delete" in request.query else None
    assert [to_s3(coco), to_s3(coco)] == [len(wanted), 0]
    journal = [key for key in keys(s3) if "/journal/" in key]
    assert journal
    assert [get(s3, key) for key in journal] == [b""] * len(journal)


def test_s3_resumes_from_its_journal(
    s3: FlakyS3, web: WebServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The source fails for one segment; the others are not fetched again."""
    monkeypatch.setattr(archive, "SEGMENT_BYTES", 20_000)
    wanted, coco = slow_data_set(web, tmp_path, images=30)
    train = "/coco/zips/train2017.zip"
    last = len(web.files[train]) // 2

    def fault(asked: Asked) -> Answer | None:
        return Answer(403, body=b"") if asked.path == train and 1 < asked.end < last else None

    web.fault = fault
    with pytest.raises(Exception, match="may not be read"):
        to_s3(coco)
    kept = [key for key in keys(s3) if "/journal/" in key]
    assert kept
    web.fault = lambda asked: None
    again = to_s3(coco)
    assert 0 < again < len(wanted)
    assert all(get(s3, f"sets/coco/{path}") == content for path, content in wanted.items())


def test_s3_keeps_no_record_of_an_archive_with_a_wrong_sha256(s3: FlakyS3, web: WebServer, tmp_path: Path) -> None:
    wanted, coco = slow_data_set(web, tmp_path, images=6)
    real = web.files["/coco/zips/train2017.zip"]
    files = {path: content for path, content in wanted.items() if path.startswith("train2017/")}
    files["train2017/000000000001.jpg"] = bytes(len(files["train2017/000000000001.jpg"]))
    web.files["/coco/zips/train2017.zip"] = zipped(files)
    assert len(web.files["/coco/zips/train2017.zip"]) == len(real)
    with pytest.raises(DataError, match="SHA-256"):
        to_s3(coco)
    journal = b"".join(get(s3, key) for key in keys(s3) if "/journal/" in key)
    assert b"val2017/" in journal
    assert b"train2017/0" not in journal
