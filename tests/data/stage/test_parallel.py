"""Many small files, which several processes copy."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from flaky_s3 import Answer, Fault, FlakyS3, Request
from stage_server import bring, files_in, get, manifest_in, numbered, put, recheck, write

from maskfleet.data.stage import parallel
from maskfleet.data.stage.folder import Folder
from maskfleet.data.stage.manifest import FileRecord, Item
from maskfleet.data.stage.transfer import copy_file
from maskfleet.errors import MaskfleetError

pytest_plugins = ("stage_fixtures",)
STATE = ".maskfleet-stage"


@pytest.fixture
def two_processes(monkeypatch: pytest.MonkeyPatch) -> list[parallel.FileProcesses]:
    """Stagings of any size use two processes; those that were started are in the list."""
    started: list[parallel.FileProcesses] = []
    real = parallel.FileProcesses.__init__

    def counted(self: parallel.FileProcesses, *arguments: object, **options: object) -> None:
        real(self, *arguments, **options)  # type: ignore[arg-type]
        started.append(self)

    monkeypatch.setattr(parallel, "MIN_FILES", 1)
    monkeypatch.setattr(parallel, "_cores", lambda: 2)
    monkeypatch.setattr(parallel.FileProcesses, "__init__", counted)
    return started


@pytest.mark.slow
def test_processes_copy_verify_and_upload_the_same_bytes(
    two_processes: list[parallel.FileProcesses], s3: FlakyS3, tmp_path: Path
) -> None:
    files = numbered(30) | {"annotations/large.json": bytes(3 << 20)}
    put(s3, files)
    done = bring("s3://coco-data/sets/coco", tmp_path / "there")
    assert (done.files_copied, done.bytes_copied) == (31, sum(map(len, files.values())))
    assert files_in(tmp_path / "there") == files
    assert list(manifest_in(tmp_path / "there")) == sorted(files)
    assert sorted(path.name for path in (tmp_path / "there" / STATE).iterdir()) == ["lock"]
    recheck("s3://coco-data/sets/coco", tmp_path / "there")
    bring(tmp_path / "there", "s3://coco-data/again")
    assert all(get(s3, f"again/{path}") == content for path, content in files.items())
    assert len(two_processes) == 3


@pytest.mark.slow
def test_a_file_that_fails_in_a_process_is_named_and_the_others_are_copied(
    two_processes: list[parallel.FileProcesses], s3: FlakyS3, tmp_path: Path
) -> None:
    put(s3, numbered(20))

    def gone(request: Request) -> Fault | None:
        return Answer(404, "NoSuchKey") if request.is_get and "0007.jpg" in request.path else None

    s3.fault = gone
    with pytest.raises(MaskfleetError, match=r"19 of 20 files[\s\S]*0007.jpg' was deleted while it was copied"):
        bring("s3://coco-data/sets/coco", tmp_path / "there")
    s3.fault = lambda request: None
    assert bring("s3://coco-data/sets/coco", tmp_path / "there").files_copied == 1
    assert files_in(tmp_path / "there") == numbered(20)
    assert two_processes


@pytest.mark.slow
def test_an_error_in_a_process_stops_all_and_keeps_what_is_complete(
    two_processes: list[parallel.FileProcesses], s3: FlakyS3, tmp_path: Path
) -> None:
    put(s3, numbered(40))

    def refused(request: Request) -> Fault | None:
        return Answer(403, "AccessDenied") if request.is_get and len(s3.gets()) > 12 else None

    s3.fault = refused
    with pytest.raises(MaskfleetError, match="not allowed to read") as caught:
        bring("s3://coco-data/sets/coco", tmp_path / "there")
    assert "s3:GetObject" in caught.value.remedy
    finished = {path: (tmp_path / "there" / path).stat().st_ino for path in journaled(tmp_path / "there")}
    assert finished, "the files of processes that were stopped are in their journals"
    s3.fault = lambda request: None
    s3.requests.clear()
    bring("s3://coco-data/sets/coco", tmp_path / "there")
    assert files_in(tmp_path / "there") == numbered(40)
    assert {path: (tmp_path / "there" / path).stat().st_ino for path in finished} == finished
    assert not [path for path in finished if f"/coco-data/sets/coco/{path}" in s3.gets()]


@pytest.mark.slow
def test_a_process_that_is_killed_is_reported_with_a_remedy(
    two_processes: list[parallel.FileProcesses], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = parallel.FileProcesses.send

    def killed(self: parallel.FileProcesses) -> object:
        for process in self._processes._processes:
            process.kill()
            process.join()
        return real(self)

    source = write(tmp_path / "set", numbered(20))
    monkeypatch.setattr(parallel.FileProcesses, "send", killed)
    with pytest.raises(MaskfleetError, match="a worker process died") as caught:
        bring(source, tmp_path / "there")
    assert "fewer --workers" in caught.value.remedy
    monkeypatch.setattr(parallel.FileProcesses, "send", real)
    bring(source, tmp_path / "there")
    assert files_in(tmp_path / "there") == numbered(20)


@pytest.mark.slow
def test_ten_kills_leave_every_byte_right_and_nothing_finished_is_fetched_again(s3: FlakyS3, tmp_path: Path) -> None:
    files = numbered(parallel.MIN_FILES + 50)
    put(s3, files)
    there, finished, kills = tmp_path / "there", dict[str, int](), 0
    generator = random.Random(3)
    for _ in range(10):
        s3.requests.clear()
        process = subprocess.Popen(
            [sys.executable, "-m", "maskfleet", "data", "stage", "s3://coco-data/sets/coco", there],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        while process.poll() is None and not any(path in files for path in fetched(s3)):
            time.sleep(0.005)
        time.sleep(generator.uniform(0, 0.15))
        kills += process.poll() is None
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert not finished.keys() & fetched(s3), "a finished file was fetched again"
        finished = {path: (there / path).stat().st_ino for path in journaled(there)}
        assert all((there / path).read_bytes() == files[path] for path in finished)
    assert kills >= 3
    bring("s3://coco-data/sets/coco", there)
    assert {path: (there / path).stat().st_ino for path in finished} == finished
    assert files_in(there) == files
    recheck("s3://coco-data/sets/coco", there)


def test_a_process_of_a_killed_staging_cannot_write_for_the_next(tmp_path: Path) -> None:
    item, first = Item("a.jpg", 3), Folder(tmp_path)
    with first.claimed():
        late = first.opener()()
        late.store(item, [b"old"])
    with Folder(tmp_path).claimed():
        with pytest.raises(MaskfleetError, match="No such file"):
            late.store(item, [b"new"])
        assert (tmp_path / "a.jpg").read_bytes() == b"old"


def test_records_of_processes_are_kept_in_one_journal_by_the_next_staging(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    records = [FileRecord(f"{number}.jpg", 3, f"{number}" * 64) for number in range(3)]
    with folder.claimed():
        folder.reopen([records[0]])
        helper = folder.opener()()
        helper.note(records[1])
        assert helper._journal is not None
        helper._journal.close()
        folder.note(records[2])
    after = Folder(tmp_path)
    assert sorted(after.records()) == records
    with after.claimed():
        after.reopen(after.records())
        assert [path.name for path in (tmp_path / STATE).glob("journal*")] == ["journal.jsonl"]
        assert sorted(after.records()) == records


def test_few_or_large_files_and_a_single_core_need_no_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, options = Folder(tmp_path), {"workers": 4, "num_files": 5000, "num_bytes": 5000}
    monkeypatch.setattr(parallel, "_cores", lambda: 2)
    monkeypatch.setattr(parallel, "FileProcesses", lambda *arguments, **options: "processes")
    asked = [options, options | {"num_files": 10}, options | {"num_bytes": 10**11}, options | {"workers": 1}]
    found = [parallel.processes_for(folder, folder, copy_file, **one) for one in asked]
    assert found == ["processes", None, None, None]


def fetched(s3: FlakyS3) -> set[str]:
    return {path.removeprefix("/coco-data/sets/coco/") for path in s3.gets()}


def journaled(there: Path) -> list[str]:
    """Files that a staging has recorded as complete."""
    files = [*sorted((there / STATE).glob("journal*.jsonl")), there / "manifest.jsonl"]
    lines = [line for file in files if file.exists() for line in file.read_bytes().splitlines(keepends=True)]
    return [json.loads(line)["path"] for line in lines if line.endswith(b"\n")]
