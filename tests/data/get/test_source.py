"""Data sets staged from Python: by name or from where they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from maskfleet.data.get import source
from maskfleet.data.get.source import stage_data
from maskfleet.data.stage.stage import Staged
from maskfleet.data.stage.status import staging_status
from maskfleet.errors import DataError


def test_a_folder_is_copied_once_and_its_progress_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "LINE_EVERY_S", 0.0)
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "a.jpg").write_bytes(b"12345")
    said: list[str] = []
    done = stage_data(str(tmp_path / "set"), str(tmp_path / "copy"), say=said.append)
    assert (done.files, done.files_copied) == (1, 1)
    assert said[-1] == "1 of 1 files, 5 B of 5 B"
    assert staging_status(str(tmp_path / "copy")).state == "complete"
    assert stage_data(str(tmp_path / "set"), str(tmp_path / "copy")).files_copied == 0


def test_a_public_data_set_is_downloaded_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Any, ...]] = []

    def get(found: Any, destination: str, **options: Any) -> Staged:
        asked.append((found.name, destination, options["origin"].mirror))
        return Staged(0, 0, 0, 0, "", ())

    monkeypatch.setattr(source, "get_data_set", get)
    stage_data("coco2017", "s3://lab/data")
    assert asked == [("coco2017", "s3://lab/data", None)]


def test_a_name_that_is_neither_a_data_set_nor_a_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError):
        stage_data("coco2018", str(tmp_path / "copy"))
