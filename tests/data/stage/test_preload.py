"""`maskfleet data preload`: every file of a Lustre folder is read once, and nothing elsewhere."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
from typer.testing import CliRunner

from maskfleet.cli.main import app
from maskfleet.data.stage import preload as module
from maskfleet.data.stage.preload import Preloaded, preload
from maskfleet.data.stage.transfer import Tally
from maskfleet.errors import DataError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    data = tmp_path / "coco"
    for number in range(40):
        path = data / f"train{number % 3}" / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x" * (100 + number))
    return data


def test_every_file_is_read_and_counted(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read, seen = list[Path](), list[tuple[int, int]]()
    touch = module._touch
    monkeypatch.setattr(module, "_touch", lambda path: (read.append(path), touch(path)))

    def note(tally: Tally) -> None:
        seen.append((tally.files_done, tally.bytes_done))

    done = preload(folder, workers=3, progress=note, kind_of=lambda path: "lustre")
    total = sum(100 + number for number in range(40))
    assert done == Preloaded("lustre", 40, total)
    assert sorted(read) == sorted(path for path in folder.rglob("*.jpg"))
    assert seen[-1] == (40, total)
    assert seen == sorted(seen)


def test_what_waits_is_dropped_when_it_is_interrupted(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read, may_finish = list[Path](), threading.Event()

    def touch(path: Path) -> None:
        read.append(path)
        if len(read) > 1:
            assert may_finish.wait(60)

    def interrupt(tally: Tally) -> None:
        threading.Timer(0.2, may_finish.set).start()
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "_touch", touch)
    with pytest.raises(KeyboardInterrupt):
        preload(folder, workers=2, progress=interrupt, kind_of=lambda path: "lustre")
    assert len(read) <= 3  # what was read, and what both threads were at


def test_other_file_systems_are_left_alone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_touch", lambda path: pytest.fail("a file was read"))
    assert preload(folder, workers=2, progress=lambda tally: None, kind_of=lambda path: "nfs4") == Preloaded("nfs4")


def test_files_that_cannot_be_loaded_are_named_after_all_were_tried(folder: Path) -> None:
    gone = folder / "train0" / "0.jpg"

    def fails(path: Path) -> None:
        if path == gone:
            raise OSError(5, "Input/output error")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_touch", fails)
        tallies = list[Tally]()
        with pytest.raises(DataError, match=r"1 of 40 files .* be loaded:\n  train0/0.jpg: .*Input/output error"):
            preload(folder, workers=2, progress=tallies.append, kind_of=lambda path: "lustre")
    assert tallies[-1].files_done == 40


def test_the_command_says_why_it_does_nothing_here(folder: Path) -> None:
    done = CliRunner().invoke(app, ["data", "preload", str(folder)])
    assert done.exit_code == 0
    assert "not on Lustre: there is nothing to load" in " ".join(done.output.split())
    missing = CliRunner().invoke(app, ["data", "preload", str(folder / "missing")])
    assert isinstance(missing.exception, DataError)
    assert os.fspath(folder) in missing.exception.what
