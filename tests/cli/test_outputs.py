"""Commands try the place of their result before the work, and never write over what they read."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import cv2
import numpy as np
import pytest

from maskfleet.errors import MaskfleetError

Command = Callable[..., subprocess.CompletedProcess[str]]


def refuse_to_work(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    def work(*_: object, **__: object) -> None:
        raise MaskfleetError("the work was started", remedy="none")

    monkeypatch.setattr(name, work)


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    folder = tmp_path / "photos"
    (folder / "more").mkdir(parents=True)
    image = np.random.default_rng(0).integers(0, 255, (40, 64, 3), np.uint8)
    for name in ("a.png", "b.jpg", "more/c.png"):
        assert cv2.imwrite(str(folder / name), image)
    return folder


@pytest.mark.parametrize("out", ["photos", "photos/../photos", "link"])
def test_drawn_images_do_not_replace_the_photos(
    command: Command, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, out: str
) -> None:
    (tmp_path / "link").symlink_to("photos")
    refuse_to_work(monkeypatch, "maskfleet.inference.load.load")
    before = {path: path.read_bytes() for path in photos.rglob("*") if path.is_file()}
    done = command("predict", "run", photos, "--out", out)
    assert done.returncode == 2
    assert "a.png would replace" in done.stderr.replace("\n", " ")
    assert {path: path.read_bytes() for path in photos.rglob("*") if path.is_file()} == before


def test_photos_of_another_format_may_have_results_beside_them(
    command: Command, photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_to_work(monkeypatch, "maskfleet.inference.load.load")
    done = command("predict", "run", photos / "b.jpg", "--out", photos)
    assert "the work was started" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "work"),
    [
        (["predict", "run", "photos", "--out", "file/predictions"], "maskfleet.inference.load.load"),
        (["export", "run", "--out", "file/model.safetensors"], "maskfleet.inference.load.load"),
        (["export", "run", "--out", "folder.safetensors"], "maskfleet.inference.load.load"),
        (["report", "run", "--output", "file/page.html"], "maskfleet.training.output.record.record_of"),
        (["weights", "convert", "x.npz", "file/y.safetensors"], "maskfleet.model.weights.read_file"),
    ],
    ids=["predict", "export", "folder", "report", "convert"],
)
def test_a_place_that_cannot_be_written_is_named_before_the_work(
    command: Command,
    photos: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    work: str,
) -> None:
    (tmp_path / "file").write_text("a file, not a folder")
    (tmp_path / "folder.safetensors").mkdir()
    monkeypatch.setattr("maskfleet.training.output.record.checked_run", lambda folder: folder)
    refuse_to_work(monkeypatch, work)
    done = command(*arguments)
    assert done.returncode == 2
    assert f"{arguments[-1]}" in done.stderr
    assert "cannot be written" in done.stderr
    assert "the work was started" not in done.stderr


def test_trying_the_place_leaves_nothing(command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_to_work(monkeypatch, "maskfleet.inference.load.load")
    done = command("export", "run", "--out", "new/deep/model.safetensors")
    assert "the work was started" in done.stderr
    assert not list(tmp_path.iterdir())


def test_inspect_tries_its_page_first(command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(folder: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("maskfleet.cli.outputs.expect_new_file", full)
    refuse_to_work(monkeypatch, "maskfleet.data.inspect.report.splits_to_inspect")
    done = command("data", "inspect", "coco")
    assert done.returncode == 2
    assert "inspect.html cannot be written: No space left on device" in done.stderr
