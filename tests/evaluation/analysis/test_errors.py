from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import slow_reference
from slow_reference import Box, Breakdown, random_case

from maskfleet.evaluation.analysis.analyze import Analysis, analyze
from maskfleet.evaluation.analysis.confusion import Confusion, confusion
from maskfleet.evaluation.analysis.error_types import TYPES, ErrorType, error_types
from maskfleet.evaluation.analysis.matches import matches_of, without_crowds
from maskfleet.evaluation.coco_eval import loaded_pair


def found_errors(truth: dict[str, Any], results: list[Box]) -> dict[str, ErrorType]:
    pair = loaded_pair(truth, results, kinds=("bbox",))
    pair = without_crowds(pair, matches_of(pair, "bbox"))
    return dict(zip(TYPES, error_types(pair, "bbox"), strict=True))


@pytest.mark.parametrize("crowds", [False, True])
def test_error_types_equal_the_slow_reference(crowds: bool) -> None:
    for seed in range(15):
        truth, results = random_case(seed, crowds=crowds)
        errors, reference = found_errors(truth, results), Breakdown(truth, results)
        assert {name: error.count for name, error in errors.items()} == reference.counts, seed
        costs = {name: error.ap50_cost for name, error in errors.items()}
        assert costs == pytest.approx(reference.costs, abs=1e-9), seed


def worked_example() -> tuple[dict[str, Any], list[Box]]:
    """One image, two classes, one error of each kind."""
    place = {"image_id": 1, "iscrowd": 0, "area": 100.0}
    objects = [
        {"category_id": 1, "bbox": [0, 0, 10, 10]},  # found, and found again
        {"category_id": 1, "bbox": [100, 0, 10, 10]},  # found with the wrong class
        {"category_id": 1, "bbox": [200, 0, 10, 10]},  # found at the wrong location
        {"category_id": 2, "bbox": [300, 0, 10, 10]},  # missed
    ]
    results = [
        {"category_id": 1, "bbox": [0, 0, 10, 10], "score": 0.9},
        {"category_id": 1, "bbox": [0, 1, 10, 10], "score": 0.8},  # duplicate
        {"category_id": 2, "bbox": [100, 0, 10, 10], "score": 0.7},  # class
        {"category_id": 1, "bbox": [206, 0, 10, 10], "score": 0.6},  # location: IoU 0.25
        {"category_id": 2, "bbox": [206, 0, 10, 10], "score": 0.5},  # class and location
        {"category_id": 2, "bbox": [400, 0, 10, 10], "score": 0.4},  # background
    ]
    return {
        "images": [{"id": 1, "height": 500, "width": 500}],
        "categories": [{"id": 1, "name": "cat"}, {"id": 2, "name": "dog"}],
        "annotations": [place | one for one in objects],
    }, [{"image_id": 1} | one for one in results]


def test_error_types_of_a_worked_example() -> None:
    errors = found_errors(*worked_example())
    assert {name: error.count for name, error in errors.items()} == dict.fromkeys(TYPES, 1)
    # Cats: 1 of 3 found, first of all: precision 1 at the 34 recall levels up to 1/3. Dogs: none found.
    base = (34 / 101 + 0) / 2
    # Corrected class: the second of three cats is at rank 3 of the scores, after the duplicate: 2/3 up to recall 2/3.
    assert errors["Cls"].ap50_cost == pytest.approx((34 + 33 * 2 / 3) / 101 / 2 - base)
    assert errors["Loc"].ap50_cost == pytest.approx((34 + 33 * 2 / 3) / 101 / 2 - base)
    assert errors["Dupe"].ap50_cost == errors["Bkg"].ap50_cost == errors["Both"].ap50_cost == 0
    assert errors["Miss"].ap50_cost == pytest.approx(0)  # the class has no other object


def test_confusion_of_the_worked_example() -> None:
    truth, results = worked_example()
    pair = loaded_pair(truth, results, kinds=("bbox",))
    found = confusion(pair, "bbox", min_score=0.45)
    assert found.names == ("cat", "dog")
    assert found.counts.tolist() == [[1, 1, 1], [0, 0, 1], [2, 1, 0]]
    assert found.most_frequent(5) == [("cat", "dog", 1, pytest.approx(1 / 3))]


@pytest.mark.parametrize("crowds", [False, True])
def test_confusion_equals_the_slow_reference(crowds: bool) -> None:
    for seed in range(15):
        truth, results = random_case(seed, crowds=crowds)
        pair = loaded_pair(truth, results, kinds=("bbox",))
        found = confusion(without_crowds(pair, matches_of(pair, "bbox")), "bbox", min_score=0.4)
        assert np.array_equal(found.counts, slow_reference.confusion(truth, results, 0.4)), seed


def test_most_frequent_confusions_come_first_and_empty_matrices_have_none() -> None:
    counts = np.array([[5, 3, 0, 2], [1, 9, 0, 0], [0, 4, 0, 0], [7, 7, 7, 0]])
    found = Confusion(("a", "b", "c"), counts).most_frequent(2)
    assert found == [("c", "b", 4, 1.0), ("a", "b", 3, 0.3)]
    assert Confusion((), np.zeros((1, 1), np.int64)).most_frequent(3) == []


def analysis_of(results: list[Box]) -> Analysis:
    truth, _ = random_case(2, images=8)
    return analyze(truth, results, kinds=("bbox",))


def test_an_analysis_tells_its_stages_and_agrees_with_the_scores() -> None:
    truth, results = random_case(2, images=8, crowds=True)
    stages: list[str] = []
    analysis = analyze(truth, results, kinds=("bbox",), progress=stages.append)
    assert len(stages) >= 4
    precision = analysis.main.precision
    assert analysis.main.scores.ap == pytest.approx(precision[precision > -1].mean(), abs=1e-12)


def test_a_model_that_detects_nothing_can_be_analyzed() -> None:
    analysis = analysis_of([])
    assert analysis.main.scores.ap == 0
    assert analysis.confusion.counts[:, :-1].sum() == 0
    assert [error.count for error in analysis.main.errors][:5] == [0] * 5
