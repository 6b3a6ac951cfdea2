from __future__ import annotations

import contextlib
import copy
import io
from typing import Any

import numpy as np
import pytest
from slow_reference import Box, random_case

from maskfleet.evaluation.analysis.bootstrap import image_draws, interval, sampled_ap
from maskfleet.evaluation.analysis.curves import precision_curves
from maskfleet.evaluation.analysis.examples import best_and_worst, counted_images
from maskfleet.evaluation.analysis.matches import Matches, matches_of
from maskfleet.evaluation.coco_eval import loaded_pair


def matches(truth: dict[str, Any], results: list[Box]) -> Matches:
    return matches_of(loaded_pair(truth, results, kinds=("bbox",)), "bbox")


def pycocotools_precision(truth: dict[str, Any], results: list[Box]) -> np.ndarray:
    """[T, R, K] over all sizes, at most 100 detections."""
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    with contextlib.redirect_stdout(io.StringIO()):
        coco = COCO()
        coco.dataset = copy.deepcopy(truth)
        coco.createIndex()
        evaluation = COCOeval(coco, coco.loadRes(copy.deepcopy(results)), "bbox")
        evaluation.evaluate()
        evaluation.accumulate()
    precision: np.ndarray = evaluation.eval["precision"][..., 0, -1]
    return precision


@pytest.mark.parametrize("seed", range(8))
def test_precision_recall_curves_equal_pycocotools(seed: int) -> None:
    truth, results = random_case(seed, images=12, crowds=seed % 2 == 1)
    assert np.array_equal(precision_curves(matches(truth, results)), pycocotools_precision(truth, results))


def test_equal_scores_and_a_class_without_objects_are_those_of_pycocotools() -> None:
    truth, results = random_case(3, images=20)
    results = [one | {"score": round(one["score"], 1)} for one in results]
    truth["annotations"] = [one for one in truth["annotations"] if one["category_id"] != 2]
    curves = precision_curves(matches(truth, results))
    assert (curves[:, :, 1] == -1).all()
    assert np.array_equal(curves, pycocotools_precision(truth, results))


def repeated(truth: dict[str, Any], results: list[Box], draw: np.ndarray) -> tuple[dict[str, Any], list[Box]]:
    """The data set that a draw describes: each image as often as it was drawn, under new ids."""
    images, annotations, found = [], [], []
    for image, times in zip(truth["images"], draw.astype(int), strict=True):
        for _ in range(times):
            images.append(image | {"id": len(images) + 1})
            for one in truth["annotations"]:
                if one["image_id"] == image["id"]:
                    annotations.append(one | {"id": len(annotations) + 1, "image_id": len(images)})
            found += [one | {"image_id": len(images)} for one in results if one["image_id"] == image["id"]]
    return {**truth, "images": images, "annotations": annotations}, found


@pytest.mark.parametrize("crowds", [False, True])
def test_a_bootstrap_sample_has_the_ap_of_a_data_set_with_the_drawn_images(crowds: bool) -> None:
    truth, results = random_case(11, images=10, crowds=crowds)
    draws = image_draws(10, samples=6, seed=5)
    assert (draws.sum(axis=1) == 10).all()
    sampled = sampled_ap(matches(truth, results), draws)
    for draw, values in zip(draws, sampled, strict=True):
        precision = pycocotools_precision(*repeated(truth, results, draw))
        expected = [precision[t][precision[t] > -1].mean() for t in (slice(None), 0, 5)]
        assert values == pytest.approx(expected, abs=1e-12)


def test_an_interval_is_the_spread_of_the_samples_placed_at_the_value() -> None:
    samples = np.concatenate([np.linspace(0.3, 0.5, 1001), [np.nan]])  # mean 0.4
    found = interval(0.35, samples)
    assert found is not None
    assert (found.low, found.high) == (pytest.approx(0.255), pytest.approx(0.445))
    assert found.excludes_zero
    assert not interval(0.01, samples).excludes_zero  # type: ignore[union-attr]
    assert interval(0.5, np.array([np.nan])) is None


def test_samples_of_a_set_without_objects_are_not_numbers() -> None:
    truth, results = random_case(0)
    truth["annotations"] = []
    assert np.isnan(sampled_ap(matches(truth, results), image_draws(6, samples=2))).all()


def test_images_are_counted_and_ranked_by_hand() -> None:
    def box(image_id: int, x: float, score: float | None = None) -> Box:
        one: Box = {"image_id": image_id, "category_id": 1, "bbox": [x, 0.0, 10.0, 10.0]}
        return one | ({"area": 100.0, "iscrowd": 0} if score is None else {"score": score})

    truth = {
        "images": [{"id": identity, "height": 100, "width": 100} for identity in (1, 2, 3, 4)],
        "categories": [{"id": 1, "name": "cat"}],
        "annotations": [box(1, 0), box(1, 20), box(2, 0), box(2, 20), box(3, 0)],
    }
    results = [box(1, 0, 0.9), box(1, 20, 0.8), box(2, 0, 0.9), box(2, 50, 0.7), box(3, 0, 0.2), box(4, 0, 0.1)]
    counted = counted_images(matches(truth, results), min_score=0.5)
    assert [(one.right, one.wrong, one.missed) for one in counted] == [(2, 0, 0), (1, 1, 1), (0, 0, 1), (0, 0, 0)]
    assert [one.f1 for one in counted[:3]] == [1.0, 0.5, 0.0]
    best, worst = best_and_worst(counted, best=1, worst=5)
    assert [one.image_id for one in best] == [1]
    assert [one.image_id for one in worst] == [3, 2]
