"""Average precision through hotcoco, with pycocotools as the oracle."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pycocotools import mask as oracle_mask
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from maskfleet.errors import DataError
from maskfleet.evaluation.coco_eval import CocoScores, evaluate_detections, metric_names

TWELVE = (
    *("ap", "ap50", "ap75", "ap_small", "ap_medium", "ap_large"),
    *("ar1", "ar10", "ar100", "ar_small", "ar_medium", "ar_large"),
)


def ellipse(rng: np.random.Generator, box: list[float], height: int, width: int) -> np.ndarray:
    """A bitmap [height, width] of the ellipse in an xywh box, with a few pixels knocked over."""
    x, y, w, h = box
    rows, columns = np.mgrid[:height, :width] + 0.5
    inside = ((columns - x - w / 2) / max(w / 2, 0.5)) ** 2 + ((rows - y - h / 2) / max(h / 2, 0.5)) ** 2 <= 1
    return (inside ^ (inside & (rng.random((height, width)) < 0.05))).astype(np.uint8)


def rle_of(bitmap: np.ndarray) -> dict[str, Any]:
    rle = oracle_mask.encode(np.asfortranarray(bitmap))
    return {"size": list(rle["size"]), "counts": rle["counts"].decode("ascii")}


def uncompressed(bitmap: np.ndarray) -> dict[str, Any]:
    flat = bitmap.ravel(order="F")
    bounds = np.flatnonzero(np.diff(flat, prepend=0)).tolist()
    return {"size": list(bitmap.shape), "counts": np.diff([0, *bounds, len(flat)]).tolist()}


def ellipse_polygon(rng: np.random.Generator, box: list[float]) -> list[float]:
    x, y, w, h = box
    angle = np.sort(rng.random(9)) * 2 * np.pi
    points = np.stack([x + w / 2 + w / 2 * np.cos(angle), y + h / 2 + h / 2 * np.sin(angle)], axis=1)
    return points.ravel().round(2).tolist()


def fuzzed(seed: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """A small data set and results with everything that makes scoring hard."""
    rng = np.random.default_rng(seed)
    category_ids = rng.choice(np.arange(1, 91), size=rng.integers(1, 5), replace=False).tolist()
    image_ids = rng.choice(np.arange(1, 10**6), size=rng.integers(1, 7), replace=False).tolist()
    images = [
        {"id": i, "file_name": f"{i}.jpg", "height": int(rng.integers(40, 150)), "width": int(rng.integers(40, 150))}
        for i in image_ids
    ]
    annotations: list[dict[str, Any]] = []
    results: list[dict[str, Any]] = []
    next_id = int(rng.integers(1, 1000))
    for image in images:
        height, width = image["height"], image["width"]
        for _ in range(int(rng.choice([0, 1, 3, 8]))):
            box = random_box(rng, height, width)
            crowd = bool(rng.random() < 0.2)
            bitmap = ellipse(rng, box, height, width)
            mask = uncompressed(bitmap) if crowd else [ellipse_polygon(rng, box)]
            area = float(bitmap.sum()) if rng.random() < 0.9 else box[2] * box[3] * 20
            category_id = int(rng.choice(category_ids[:-1] or category_ids))  # the last one often has no objects
            next_id += int(rng.integers(1, 9))
            common = {"image_id": image["id"], "category_id": category_id}
            annotations.append(
                {**common, "id": next_id, "bbox": box, "area": area, "iscrowd": int(crowd), "segmentation": mask}
            )
            for _ in range(int(rng.choice([0, 1, 2, 4]))):
                results.append({**common, **detection(rng, jittered(rng, box, height, width), height, width)})
        for _ in range(int(rng.choice([0, 2, 130], p=[0.5, 0.4, 0.1]))):
            common = {"image_id": image["id"], "category_id": int(rng.choice(category_ids))}
            results.append({**common, **detection(rng, random_box(rng, height, width), height, width)})
    rng.shuffle(results)
    categories = [{"id": i, "name": f"thing {i}"} for i in category_ids]
    return {"images": images, "annotations": annotations, "categories": categories}, results


def random_box(rng: np.random.Generator, height: int, width: int) -> list[float]:
    w, h = rng.uniform(2, 0.9 * width), rng.uniform(2, 0.9 * height)
    return [round(float(v), 2) for v in (rng.uniform(0, width - w), rng.uniform(0, height - h), w, h)]


def jittered(rng: np.random.Generator, box: list[float], height: int, width: int) -> list[float]:
    x, y, w, h = np.array(box) + rng.normal(0, 0.08, 4) * (box[2:] * 2)
    x, y = float(np.clip(x, 0, width - 2)), float(np.clip(y, 0, height - 2))
    return [round(v, 3) for v in (x, y, float(np.clip(w, 1, width - x)), float(np.clip(h, 1, height - y)))]


def detection(rng: np.random.Generator, box: list[float], height: int, width: int) -> dict[str, Any]:
    score = float(rng.integers(1, 8)) / 8 if rng.random() < 0.6 else round(float(rng.random()), 4)  # mostly ties
    return {"bbox": box, "score": score, "segmentation": rle_of(ellipse(rng, box, height, width))}


def oracle(
    truth: dict[str, Any], results: list[dict[str, Any]], kind: str
) -> tuple[np.ndarray, dict[int, list[float]]]:
    """pycocotools' twelve values, and AP and AP50 of each category."""
    with contextlib.redirect_stdout(io.StringIO()):
        gt = COCO()
        gt.dataset = json.loads(json.dumps(truth))
        gt.createIndex()
        if results:
            dt = gt.loadRes(json.loads(json.dumps(results)))
        else:  # loadRes itself fails on an empty list
            dt = COCO()
            dt.dataset = {**gt.dataset, "annotations": []}
            dt.createIndex()
        evaluation = COCOeval(gt, dt, kind)
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    per_class = {}
    for place, category_id in enumerate(evaluation.params.catIds):
        precision = evaluation.eval["precision"][:, :, place, 0, 2]
        known = [p[p > -1] for p in (precision, precision[0])]
        per_class[category_id] = [float(p.mean()) if p.size else -1.0 for p in known]
    return evaluation.stats, per_class


def twelve(scores: CocoScores) -> list[float]:
    return [getattr(scores, name) for name in TWELVE]


@pytest.mark.parametrize("seed", range(80))
def test_all_values_equal_those_of_pycocotools_on_fuzzed_data(seed: int, capfd: pytest.CaptureFixture[str]) -> None:
    truth, results = fuzzed(seed)
    scores = evaluate_detections(truth, results)
    assert capfd.readouterr() == ("", "")
    for kind in ("bbox", "segm"):
        stats, per_class = oracle(truth, results, kind)
        np.testing.assert_allclose(twelve(scores[kind]), stats, rtol=0, atol=1e-9)
        assert [score.category_id for score in scores[kind].per_class] == sorted(per_class)
        for score in scores[kind].per_class:
            np.testing.assert_allclose([score.ap, score.ap50], per_class[score.category_id], rtol=0, atol=1e-9)


def test_the_fuzz_covers_what_it_claims_to() -> None:
    sets = [fuzzed(seed) for seed in range(80)]
    per_image = [np.unique([r["image_id"] for r in results], return_counts=True)[1] for _, results in sets if results]
    assert any(not results for _, results in sets)
    assert any(not truth["annotations"] for truth, _ in sets)
    assert any(count > 100 for counts in per_image for count in counts)
    assert sum(any(a["iscrowd"] for a in truth["annotations"]) for truth, _ in sets) > 20
    assert sum(len({a["image_id"] for a in t["annotations"]}) < len(t["images"]) for t, _ in sets) > 20
    spread = [evaluate_detections(truth, results)["segm"].ap for truth, results in sets[:20]]
    assert sum(0.05 < ap < 0.95 for ap in spread) > 5
    areas = [a["area"] for truth, _ in sets for a in truth["annotations"]]
    assert min(areas) < 32**2 < 64**2 < 96**2 < max(areas)


@pytest.mark.parametrize("seed", range(5))
def test_unchecked_results_score_the_same(seed: int) -> None:
    truth, results = fuzzed(seed)
    assert evaluate_detections(truth, results, check_results=False) == evaluate_detections(truth, results)


def test_no_detections_score_zero_and_no_ground_truth_minus_one() -> None:
    truth, results = fuzzed(5)
    assert any(not annotation["iscrowd"] for annotation in truth["annotations"])
    for kind, score in evaluate_detections(truth, []).items():
        np.testing.assert_allclose(twelve(score), oracle(truth, [], kind)[0], rtol=0, atol=1e-9)
        assert score.ap == 0.0
    bare = {**truth, "annotations": []}
    assert results
    assert all(twelve(score) == [-1.0] * 12 for score in evaluate_detections(bare, results).values())


def square(**changes: Any) -> dict[str, Any]:
    return {"id": 1, "image_id": 3, "category_id": 7, "bbox": [10, 10, 20, 20], "area": 400, "iscrowd": 0, **changes}


def scene(*annotations: dict[str, Any]) -> dict[str, Any]:
    return {
        "images": [{"id": 3, "height": 60, "width": 80}, {"id": 9, "height": 60, "width": 80}],
        "categories": [{"id": 7, "name": "gear"}, {"id": 40, "name": "bolt"}],
        "annotations": list(annotations),
    }


def hit(**changes: Any) -> dict[str, Any]:
    bitmap = np.zeros((60, 80), np.uint8)
    bitmap[10:30, 10:30] = 1
    result = {"image_id": 3, "category_id": 7, "bbox": [10, 10, 20, 20], "score": 0.9, "segmentation": rle_of(bitmap)}
    return {**result, **changes}


def test_a_perfect_detection_scores_one_and_a_class_without_objects_minus_one() -> None:
    scores = evaluate_detections(scene(square()), [hit()], kinds=("bbox",))
    assert set(scores) == {"bbox"}
    gear, bolt = scores["bbox"].per_class
    assert (gear.name, gear.num_objects) == ("gear", 1)
    assert gear.ap == pytest.approx(1)
    assert (bolt.name, bolt.num_objects, bolt.ap, bolt.ap50) == ("bolt", 0, -1.0, -1.0)
    assert scores["bbox"].ap == pytest.approx(1)
    assert scores["bbox"].ap_large == -1.0


def test_a_false_hit_above_the_true_one_halves_the_precision() -> None:
    results = [hit(), hit(bbox=[50, 30, 20, 20], score=0.95)]
    assert evaluate_detections(scene(square()), results, kinds=("bbox",))["bbox"].ap50 == pytest.approx(0.5)


def test_crowds_are_not_counted_as_objects() -> None:
    truth = scene(square(), square(id=2, iscrowd=1, bbox=[40, 10, 30, 30]))
    gear, _ = evaluate_detections(truth, [hit()], kinds=("bbox",))["bbox"].per_class
    assert gear.num_objects == 1


def test_annotation_ids_of_zero_or_used_twice_do_not_lower_the_score() -> None:
    truth = scene(square(id=0), square(id=0, image_id=9))
    results = [hit(), hit(image_id=9)]
    assert evaluate_detections(truth, results, kinds=("bbox",))["bbox"].ap == pytest.approx(1)


def test_a_ground_truth_without_area_uses_its_box() -> None:
    annotation = square()
    del annotation["area"]
    scores = evaluate_detections(scene(annotation), [hit()], kinds=("bbox",))["bbox"]
    assert scores.ap_small == pytest.approx(1)
    assert scores.ap_medium == -1.0


def test_only_the_best_max_detections_of_an_image_and_class_count() -> None:
    results = [hit(bbox=[50, 30, 5, 5], score=0.99), hit()]
    assert evaluate_detections(scene(square()), results, kinds=("bbox",), max_detections=1)["bbox"].ap == 0.0
    assert evaluate_detections(scene(square()), results, kinds=("bbox",), max_detections=2)["bbox"].ap > 0.4


def test_more_than_a_hundred_detections_can_be_allowed() -> None:
    results = [hit(bbox=[50, 30, 5, 5], score=0.99)] * 150 + [hit()]
    recall = [evaluate_detections(scene(square()), results, kinds=("bbox",), max_detections=n) for n in (100, 151)]
    assert [scores["bbox"].ar100 for scores in recall] == pytest.approx([0, 1])


def test_files_give_the_same_scores_as_objects(tmp_path: Path) -> None:
    truth, results = fuzzed(5)
    (tmp_path / "truth.json").write_text(json.dumps(truth))
    (tmp_path / "found.json").write_text(json.dumps(results))
    assert evaluate_detections(tmp_path / "truth.json", tmp_path / "found.json") == evaluate_detections(truth, results)


def test_results_without_boxes_can_be_scored_by_mask_alone() -> None:
    truth, results = fuzzed(3)
    bare = [{key: value for key, value in result.items() if key != "bbox"} for result in results]
    scores = evaluate_detections(truth, bare, kinds=("segm",))["segm"]
    np.testing.assert_allclose(twelve(scores), oracle(truth, bare, "segm")[0], rtol=0, atol=1e-9)


def test_metric_names_are_those_of_tensorpack() -> None:
    scores = evaluate_detections(*fuzzed(2))
    names = metric_names(scores)
    ranges = ("IoU=0.5:0.95", "IoU=0.5", "IoU=0.75", "small", "medium", "large")
    assert list(names) == [f"mAP({kind})/{name}" for kind in ("bbox", "segm") for name in ranges]
    assert names["mAP(bbox)/IoU=0.5:0.95"] == scores["bbox"].ap
    assert names["mAP(segm)/IoU=0.5"] == scores["segm"].ap50
    assert names["mAP(segm)/large"] == scores["segm"].ap_large


GOOD_RLE = hit()["segmentation"]


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ({"image_id": 4}, "1 of 2 results have image_ids that the annotations do not list, first 4"),
        ({"category_id": 8}, "first 8"),
        ({"image_id": "3"}, "not a whole number"),
        ({"score": float("nan")}, "result 1 of image 3 has a score"),
        ({"score": float("inf")}, "result 1 of image 3 has a score"),
        ({"score": None}, "score of one number"),
        ({"bbox": [1, 2, 3]}, "bbox of four numbers"),
        ({"bbox": [1, 2, -3, 4]}, "negative side"),
        ({"bbox": [1, 2, float("nan"), 4]}, "not finite"),
        ({"segmentation": None}, "neither an RLE nor a list of polygons"),
        ({"segmentation": [[1, 2, 3, 4]]}, "three points or more"),
        ({"segmentation": [[1, 2, 3, 4, 5, "x"]]}, "not a number"),
        ({"segmentation": {**GOOD_RLE, "size": [80, 60]}}, "size is [80, 60]"),
        ({"segmentation": {**GOOD_RLE, "counts": GOOD_RLE["counts"][:-3]}}, "do not add up"),
        ({"segmentation": {**GOOD_RLE, "counts": "\x01é zz"}}, "do not add up"),
        ({"segmentation": {**GOOD_RLE, "counts": ":Kke4"}}, "do not add up"),  # 10 - 5 + 4795 = 60 * 80
        ({"segmentation": {**GOOD_RLE, "counts": "o" * 30 + "0"}}, "do not add up"),
        ({"segmentation": {**GOOD_RLE, "counts": ""}}, "counts are empty"),
        ({"segmentation": {**GOOD_RLE, "counts": [4800, -1, 1]}}, "neither a string nor a list of whole numbers"),
        ({"segmentation": {**GOOD_RLE, "counts": [4799]}}, "do not add up"),
    ],
)
def test_results_that_could_only_be_misread_are_refused(bad: dict[str, Any], says: str) -> None:
    truth = scene(square(segmentation=[[10, 10, 30, 10, 30, 30, 10, 30]]))
    with pytest.raises(DataError) as caught:
        evaluate_detections(truth, [hit(), hit(**bad)])
    assert says in caught.value.what
    assert caught.value.remedy


@pytest.mark.parametrize(
    ("truth", "says"),
    [
        ({"images": []}, "lack images, categories or annotations"),
        (scene(square(image_id=5)), "annotation 1 refers to an image or category"),
        (scene(square(category_id=5)), "annotation 1 refers to an image or category"),
        (scene(square(bbox=[1, 2, 3])), "no bbox of four numbers"),
        (scene(square()), "the mask of annotation 0 (image 3) cannot be read"),
        ({**scene(), "images": [{"id": 3}, {"id": 3}]}, "two images of the annotations have the same id"),
        ({**scene(), "images": [3]}, "is not a JSON object"),
        ({**scene(), "images": [{"id": 2**64}]}, "not a whole number"),
        ({**scene(), "images": [{"id": 3, "width": 10**9}]}, "width is 1000000000"),
        ({**scene(), "images": [{"id": 3, "height": {}}]}, "height is {}, not a whole number"),
        (scene(square(area={})), "an area that is not a number"),
        (scene(square(area=10**400)), "an area that is not a number"),
        (scene(square(bbox=[0, 0, 1, 10**400])), "no bbox of four numbers"),
        (scene(square(image_id=[3])), "image_id is [3], not a whole number"),
    ],
)
def test_broken_annotations_are_refused(truth: dict[str, Any], says: str) -> None:
    with pytest.raises(DataError, match="→") as caught:
        evaluate_detections(truth, [])
    assert says in caught.value.what


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"cannot read .*none\.json"):
        evaluate_detections(tmp_path / "none.json", [])
    (tmp_path / "half.json").write_text('{"images": [')
    with pytest.raises(DataError, match=r"half\.json is not JSON"):
        evaluate_detections(tmp_path / "half.json", [])
