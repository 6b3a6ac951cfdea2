from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from maskfleet.errors import DataError
from maskfleet.evaluation.coco_eval import ClassScore, CocoScores
from maskfleet.evaluation.detections_file import DetectionsOrigin, StoredDetections, read_detections, write_detections
from maskfleet.evaluation.evaluate import keep_detections
from maskfleet.inference.detections import Result

SCORES = {"bbox": CocoScores(*[0.1] * 11, -1.0, (ClassScore(3, "Ω", 0.25, 1 / 3, 7),))}


def some_results(*, masks: bool) -> list[Result]:
    def one(image_id: int, number: int) -> Result:
        result: Result = {"image_id": image_id, "category_id": 3, "bbox": [0.001, 1.0, 2.123, 1 / 3], "score": 0.1234}
        text = "0" * number
        return result | ({"segmentation": {"size": [40, 30 + number], "counts": text}} if masks else {})

    return [one(2**40, 1), one(2**40, 3), one(7, 2)]


@pytest.mark.parametrize("masks", [False, True])
def test_everything_comes_back_to_the_last_bit(masks: bool, tmp_path: Path) -> None:
    origin = DetectionsOrigin(12, "val", "/data/val.json", "f00")
    stored = StoredDetections(origin, some_results(masks=masks), [7, 9, 2**40], SCORES)
    path = write_detections(tmp_path, stored)
    assert [one.name for one in tmp_path.iterdir()] == [path.name] == ["detections.npz"]
    found = read_detections(tmp_path)
    assert found is not None
    assert (found.origin, found.scores) == (origin, SCORES)
    assert found.results == stored.results
    assert found.image_ids == [7, 9, 2**40]


def test_no_detections_and_no_file_are_something_else(tmp_path: Path) -> None:
    assert read_detections(tmp_path) is None
    write_detections(tmp_path, StoredDetections(DetectionsOrigin(None, "val", "a", "b"), [], [1], SCORES))
    found = read_detections(tmp_path)
    assert found is not None
    assert found.results == []
    assert found.image_ids == [1]


@pytest.mark.parametrize("damage", ["cut", "other", "pickle", "columns"])
def test_a_damaged_file_is_an_error_with_a_remedy(damage: str, tmp_path: Path) -> None:
    path = write_detections(
        tmp_path, StoredDetections(DetectionsOrigin(1, "val", "a", "b"), some_results(masks=True), [7, 2**40], SCORES)
    )
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:-100])
    elif damage == "other":
        path.write_text("{}")
    else:
        columns = dict(np.load(path))
        columns |= {"about": np.array([{}], object)} if damage == "pickle" else {"score": columns["score"][:1]}
        np.savez(path, **columns)
    with pytest.raises(DataError, match="cannot be read") as caught:
        read_detections(tmp_path)
    assert "delete the file" in caught.value.remedy


def test_random_damage_is_an_error_or_harmless(tmp_path: Path) -> None:
    results = some_results(masks=True) * 20
    path = write_detections(
        tmp_path, StoredDetections(DetectionsOrigin(1, "val", "a", "b"), results, [7, 2**40], SCORES)
    )
    intact, rng = path.read_bytes(), random.Random(3)
    refused = 0
    for _ in range(100):
        damaged = bytearray(intact)
        for _ in range(rng.randint(1, 4)):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        path.write_bytes(damaged)
        try:
            read_detections(tmp_path)
        except DataError:
            refused += 1
    assert refused > 60


def test_a_folder_that_cannot_be_written_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    stored = StoredDetections(DetectionsOrigin(1, "val", "a", "b"), [], [1], SCORES)
    keep_detections(tmp_path / "missing", stored)
    assert "the detections were not written" in caplog.text
