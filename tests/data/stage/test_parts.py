"""Parts of `maskfleet data stage`: manifest, index, command and what it shows."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from maskfleet.cli import stage as stage_command
from maskfleet.cli.data import app
from maskfleet.cli.stage import Meter
from maskfleet.data.stage.folder import Folder
from maskfleet.data.stage.index import FileState, Index
from maskfleet.data.stage.manifest import FileRecord, Item, line_of, records_of, size_text, why_refused
from maskfleet.data.stage.parallel import in_parallel
from maskfleet.data.stage.stage import stage
from maskfleet.data.stage.transfer import Tally
from maskfleet.errors import DataError


@pytest.fixture
def source(tmp_path: Path) -> Path:
    (tmp_path / "source").mkdir()
    for name, content in {"a.json": b"{}", "1.jpg": b"one", "2.jpg": b"two", "empty": b""}.items():
        (tmp_path / "source" / name).write_bytes(content)
    return tmp_path / "source"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "Expecting property name"),
        ("[1]", "is not a JSON object"),
        ('{"path": 3, "bytes": 1, "sha256": "%s"}', "path is not a string"),
        ('{"path": "a", "bytes": -1, "sha256": "%s"}', "bytes is not a non-negative integer"),
        ('{"path": "a", "bytes": true, "sha256": "%s"}', "bytes is not a non-negative integer"),
        ('{"path": "a", "bytes": 1, "sha256": "xyz"}', "sha256 is not 64"),
        ('{"path": "../a", "bytes": 1, "sha256": "%s"}', "path '../a' contains . or .."),
        ('{"path": "a", "bytes": 1, "sha256": "%s", "etag": 4}', "etag or version is not a string"),
        ("[" * 10_000, "recursion"),
        ("x" * 20_000, "is longer than"),
    ],
)
def test_a_bad_manifest_line_is_named(source: Path, tmp_path: Path, line: str, message: str) -> None:
    (source / "manifest.jsonl").write_text("\n" + line.replace("%s", "0" * 64) + "\n" + "{}\n")
    with pytest.raises(DataError, match=r"source/manifest\.jsonl, line 2") as caught:
        stage(str(source), str(tmp_path / "there"), progress=lambda tally: None)
    assert message in caught.value.what


@given(
    path=st.text(min_size=1).filter(lambda path: why_refused(Item(path, 1)) is None),
    size=st.integers(0, 2**62),
    etag=st.text(),
    mtime_ns=st.integers(0, 2**62),
)
def test_a_record_comes_back_from_its_line(path: str, size: int, etag: str, mtime_ns: int) -> None:
    try:
        etag.encode()
    except UnicodeEncodeError:
        etag = ""
    record = FileRecord(path, size, "0" * 64, etag, "v1", mtime_ns)
    assert list(records_of([line_of(record).encode()], "x")) == [record]
    assert line_of(record).count("\n") == 1


@given(path=st.text(alphabet="a./\0\\", min_size=1, max_size=12))
def test_no_accepted_name_leads_out_of_the_folder(path: str) -> None:
    if why_refused(Item(path, 1)) is None:
        normal = os.path.normpath(os.path.join("/root/efs", path))  # noqa: PTH118 - what the system makes of it
        assert normal == f"/root/efs/{path}"


def test_the_index_pages_through_more_files_than_a_page() -> None:
    index = Index()
    index.load("source", (Item(f"{number:05d}", 1, etag="e") for number in range(2500)))
    index.load("present", (Item(f"{number:05d}", 1) for number in range(2500)))
    for count, file in enumerate(index.incomplete()):
        if count % 2:
            index.add(FileRecord(file.item.path, 1, "0" * 64, "e"))
    assert index.incomplete_total() == (1250, 1250, 0)
    assert len(list(index.records())) == 1250
    index.close()


def test_copied_files_are_reported_before_the_one_that_stops_all() -> None:
    broke = threading.Event()

    def rows() -> Iterator[tuple[FileState, Folder]]:
        yield from ((FileState(Item(path, 1), None, None, None), Folder(Path())) for path in "abcd")
        assert broke.wait(120)  # who asks for results is late: all of them are there at once

    def work(origin: object, file: FileState) -> FileRecord:
        if file.item.path == "d":
            broke.set()
            raise OSError("the disk is gone")
        return FileRecord(file.item.path, 1, "0" * 64, "e")

    told: list[str] = []
    results = in_parallel(
        rows(), work, Tally(files=4, total_bytes=4), workers=1, processes=None, tick=lambda tally: None
    )
    with pytest.raises(OSError, match="the disk is gone"):
        told.extend(file.item.path for file, _ in results)
    assert sorted(told) == ["a", "b", "c"]


def test_staging_loads_neither_torch_nor_numpy_nor_opencv() -> None:
    code = (
        "import sys, maskfleet.data.stage.stage, maskfleet.cli.main\n"
        "print(sorted({'torch', 'numpy', 'cv2', 'boto3'} & set(sys.modules)))"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "[]\n"


def test_the_command_says_what_it_did(source: Path, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["stage", str(source), str(tmp_path / "there"), "--workers", "3"])
    assert result.exit_code == 0
    assert "4 files, 8 B; 4 copied (8 B in " in result.output
    assert "there/manifest.jsonl" in result.output
    assert (
        "all were already complete" in CliRunner().invoke(app, ["stage", str(source), str(tmp_path / "there")]).output
    )
    assert "all match" in CliRunner().invoke(app, ["stage", str(source), str(tmp_path / "there"), "--check"]).output


def test_without_a_terminal_there_is_a_line_now_and_then(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage_command, "LINE_EVERY_S", 0.0)
    result = CliRunner().invoke(app, ["stage", str(source), str(tmp_path / "there")])
    lines = [line for line in result.output.splitlines() if line.startswith("copying: ")]
    assert lines[-1].startswith("copying: 4 of 4 files, 8 B of 8 B, ")


def test_on_a_terminal_there_is_a_bar(source: Path, tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "maskfleet", "data", "stage", str(source), str(tmp_path / "there")]
    with subprocess.Popen(command, stderr=theirs, env={**os.environ, "TERM": "xterm", "COLUMNS": "150"}) as process:
        os.close(theirs)
        shown = b""
        while True:
            try:
                shown += os.read(ours, 4096)
            except OSError:  # the other end is closed
                break
    os.close(ours)
    assert process.returncode == 0
    assert b"copying" in shown
    assert b"4 of 4 files" in shown


def test_the_command_ends_with_a_message_and_a_code(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "maskfleet", "data", "stage", str(tmp_path / "none"), str(tmp_path / "there")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "none does not exist" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_line_shows_rate_and_time_left() -> None:
    moments = iter([0.0, 10.0, 20.0, 60.0])
    meter = Meter(clock=lambda: next(moments))
    tally = Tally(files=100, total_bytes=1_000_000_000)
    tally.files_done, tally.bytes_done = 10, 100_000_000
    assert meter.text(tally) == "10 of 100 files, 100.0 MB of 1.0 GB, 10.0 MB/s, 1 min 30 s left"
    tally.bytes_done = 300_000_000
    assert "15.0 MB/s" in meter.text(tally)
    assert meter.text(tally).endswith("0 B/s, waiting")  # nothing came in the last half minute


def test_sizes_are_readable() -> None:
    sizes = [0, 999, 1000, 4_200_000, 19_300_000_000, 2.5e12]
    assert [size_text(size) for size in sizes] == ["0 B", "999 B", "1.0 kB", "4.2 MB", "19.3 GB", "2.5 TB"]
