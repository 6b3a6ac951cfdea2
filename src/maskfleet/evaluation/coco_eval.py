"""COCO's average precision of a list of results, computed by hotcoco.

The numbers equal those of pycocotools: detections are assigned to area ranges by the area of the box even for masks,
a mean over nothing is -1, and ties within an image keep the order of the results.

Shapes: T IoU thresholds (0.5:0.05:0.95), R recall levels, K categories by id, A area ranges, M detection limits.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import hotcoco
import numpy as np
from numpy.typing import NDArray

from maskfleet.errors import DataError
from maskfleet.rle import bad_mask

Kind = Literal["bbox", "segm"]
ALL, SMALL, MEDIUM, LARGE = range(4)  # indices in A
IOU_50, IOU_75 = 0, 5  # indices in T
NOTHING = -1.0  # the score if there is no ground truth


@dataclass(frozen=True, slots=True)
class ClassScore:
    """Average precision of one category; -1 if it has no objects."""

    category_id: int
    name: str
    ap: float
    ap50: float
    num_objects: int  # crowds not counted


@dataclass(frozen=True, slots=True)
class CocoScores:
    """COCO's twelve values, 0..1, or -1 where there is no ground truth to measure against.

    `ar100` and all values that name no limit use at most `max_detections` detections per image, 100 by default.
    """

    ap: float
    ap50: float
    ap75: float
    ap_small: float
    ap_medium: float
    ap_large: float
    ar1: float
    ar10: float
    ar100: float
    ar_small: float
    ar_medium: float
    ar_large: float
    per_class: tuple[ClassScore, ...]


@dataclass(frozen=True, slots=True, eq=False)
class CocoTruth:
    """Ground truth as hotcoco holds it."""

    coco: Any  # hotcoco.COCO
    dataset: dict[str, Any]  # the checked annotations; their ids count from 1


@dataclass(frozen=True, slots=True, eq=False)
class CocoPair:
    """Ground truth and results as hotcoco holds them."""

    truth: Any  # hotcoco.COCO
    results: Any  # hotcoco.COCO
    dataset: dict[str, Any]  # the checked annotations; their ids count from 1
    detections: Sequence[Mapping[str, Any]]  # the results; hotcoco numbers them from 1


MAX_SIDE_PX = 1 << 20
METRIC_FIELDS = {
    "IoU=0.5:0.95": "ap",
    "IoU=0.5": "ap50",
    "IoU=0.75": "ap75",
    "small": "ap_small",
    "medium": "ap_medium",
    "large": "ap_large",
}


def evaluate_detections(
    annotations: Path | Mapping[str, Any] | CocoTruth,
    results: Sequence[Mapping[str, Any]] | Path,
    *,
    kinds: Sequence[Kind] = ("bbox", "segm"),
    max_detections: int = 100,
    check_results: bool = True,
) -> dict[str, CocoScores]:
    """Score `results`, a COCO result list, against `annotations`, a COCO annotation file, for each of `kinds`.

    Every image of the annotations counts, with or without objects or results. `check_results` False skips checks that
    take longer than the scores; only for results that maskfleet computed in this process.
    """
    assert max_detections >= 1
    pair = loaded_pair(annotations, results, kinds=kinds, check_results=check_results)
    return {kind: scores_of(pair, kind, max_detections) for kind in kinds}


def loaded_truth(annotations: Path | Mapping[str, Any], *, kinds: Sequence[Kind]) -> CocoTruth:
    """`annotations` checked, and loaded into hotcoco."""
    truth = _read_json(annotations) if isinstance(annotations, Path) else annotations
    dataset = _checked_truth(truth, kinds)
    return CocoTruth(hotcoco.COCO(dataset), dataset)


def loaded_pair(
    annotations: Path | Mapping[str, Any] | CocoTruth,
    results: Sequence[Mapping[str, Any]] | Path,
    *,
    kinds: Sequence[Kind],
    check_results: bool = True,
) -> CocoPair:
    """`annotations` and `results` checked, and loaded into hotcoco; annotations and results are numbered from 1."""
    assert set(kinds) <= {"bbox", "segm"}
    detections = _read_json(results) if isinstance(results, Path) else results
    truth = annotations if isinstance(annotations, CocoTruth) else loaded_truth(annotations, kinds=kinds)
    if check_results:
        detections = _checked_results(detections, truth.dataset, kinds)
    coco_results = truth.coco.load_res(cast("list[dict[str, Any]]", detections))
    return CocoPair(truth.coco, coco_results, truth.dataset, detections)


def metric_names(scores: Mapping[str, CocoScores]) -> dict[str, float]:
    """The scores under the names that TensorPack logs: `mAP(bbox)/IoU=0.5:0.95`, ..., `mAP(segm)/large`."""
    return {
        f"mAP({kind})/{name}": getattr(score, field)
        for kind, score in scores.items()
        for name, field in METRIC_FIELDS.items()
    }


def scores_from(fields: Mapping[str, Any]) -> CocoScores:
    """The scores whose `asdict` is `fields`."""
    return CocoScores(**{**fields, "per_class": tuple(ClassScore(**one) for one in fields["per_class"])})


def scores_of(pair: CocoPair, kind: Kind, max_detections: int = 100) -> CocoScores:
    """COCO's twelve values and AP by class."""
    evaluation = hotcoco.COCOeval(pair.truth, pair.results, kind)
    limits = [min(1, max_detections), min(10, max_detections), max_detections]
    evaluation.params.max_dets = limits
    evaluation.evaluate()
    evaluation.accumulate()
    curves = evaluation.eval
    assert curves is not None
    precision: NDArray[np.float64] = curves["precision"]  # [T, R, K, A, M]
    recall: NDArray[np.float64] = curves["recall"]  # [T, K, A, M]
    return CocoScores(
        ap=_mean(precision[:, :, :, ALL, -1]),
        ap50=_mean(precision[IOU_50, :, :, ALL, -1]),
        ap75=_mean(precision[IOU_75, :, :, ALL, -1]),
        ap_small=_mean(precision[:, :, :, SMALL, -1]),
        ap_medium=_mean(precision[:, :, :, MEDIUM, -1]),
        ap_large=_mean(precision[:, :, :, LARGE, -1]),
        ar1=_mean(recall[:, :, ALL, 0]),
        ar10=_mean(recall[:, :, ALL, 1]),
        ar100=_mean(recall[:, :, ALL, 2]),
        ar_small=_mean(recall[:, :, SMALL, -1]),
        ar_medium=_mean(recall[:, :, MEDIUM, -1]),
        ar_large=_mean(recall[:, :, LARGE, -1]),
        per_class=_class_scores(precision, evaluation.params.cat_ids, pair.dataset),
    )


def _class_scores(
    precision: NDArray[np.float64], category_ids: Sequence[int], dataset: Mapping[str, Any]
) -> tuple[ClassScore, ...]:
    """Scores of each category from precision [T, R, K, A, M]."""
    names = {category["id"]: category["name"] for category in dataset["categories"]}
    num_objects = dict.fromkeys(names, 0)
    for annotation in dataset["annotations"]:
        num_objects[annotation["category_id"]] += 1 - annotation["iscrowd"]
    return tuple(
        ClassScore(
            category_id=category_id,
            name=names[category_id],
            ap=_mean(precision[:, :, index, ALL, -1]),
            ap50=_mean(precision[IOU_50, :, index, ALL, -1]),
            num_objects=num_objects[category_id],
        )
        for index, category_id in enumerate(category_ids)
    )


def _mean(values: NDArray[np.float64]) -> float:
    known = values[values > NOTHING]
    return float(known.mean()) if known.size else NOTHING


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}", remedy="check the path of the file") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is not JSON: {error}", remedy="write or download the file again") from error


def _checked_truth(truth: Mapping[str, Any], kinds: Sequence[Kind]) -> dict[str, Any]:
    """The part of an annotation file that scoring needs, with new annotation ids.

    Scores do not depend on annotation ids, but COCO tools misread files with an id of 0 or with duplicate ids.
    """
    remedy = "fix the annotation file; maskfleet data inspect lists its problems"
    keys = ("images", "categories", "annotations")
    if not isinstance(truth, Mapping) or not all(isinstance(truth.get(key), list) for key in keys):
        raise DataError("the annotations lack images, categories or annotations", remedy=remedy)
    if not all(isinstance(record, Mapping) for key in keys for record in truth[key]):
        raise DataError("an image, category or annotation is not a JSON object", remedy=remedy)
    images = [
        {"id": _whole(image, "id"), "height": _side(image, "height"), "width": _side(image, "width")}
        for image in truth["images"]
    ]
    categories = [
        {"id": _whole(category, "id"), "name": str(category.get("name", category["id"]))}
        for category in truth["categories"]
    ]
    for what, records in (("images", images), ("categories", categories)):
        if len({record["id"] for record in records}) != len(records):
            raise DataError(f"two {what} of the annotations have the same id", remedy=remedy)
    image_ids, category_ids = {image["id"] for image in images}, {category["id"] for category in categories}
    annotations = []
    for index, annotation in enumerate(truth["annotations"], start=1):
        name = f"annotation {annotation.get('id', index)}"
        if _whole(annotation, "image_id") not in image_ids or _whole(annotation, "category_id") not in category_ids:
            raise DataError(f"{name} refers to an image or category that the file does not list", remedy=remedy)
        annotations.append(_plain_annotation(index, annotation, name=name, remedy=remedy))
    dataset = {"images": images, "categories": categories, "annotations": annotations}
    if "segm" in kinds:
        _check_masks(annotations, images, name="annotation", remedy=remedy)
    return dataset


def _plain_annotation(new_id: int, annotation: Mapping[str, Any], *, name: str, remedy: str) -> dict[str, Any]:
    box = annotation.get("bbox")
    if not isinstance(box, (list, tuple)) or len(box) != 4 or not all(_is_finite(side) for side in box):
        raise DataError(f"{name} has no bbox of four numbers", remedy=remedy)
    area = annotation.get("area", box[2] * box[3])
    if not _is_finite(area):
        raise DataError(f"{name} has an area that is not a number", remedy=remedy)
    plain = {
        "id": new_id,
        "image_id": _whole(annotation, "image_id"),
        "category_id": _whole(annotation, "category_id"),
        "bbox": box,
        "area": area,
        "iscrowd": 1 if annotation.get("iscrowd") else 0,
    }
    if "segmentation" in annotation:
        plain["segmentation"] = annotation["segmentation"]
    return plain


def _checked_results(
    results: Sequence[Mapping[str, Any]], dataset: Mapping[str, Any], kinds: Sequence[Kind]
) -> list[dict[str, Any]]:
    """`results` with the fields that scoring needs and no others; an error if one of them is not valid."""
    remedy = "write the results again, with the image and category ids of this annotation file"
    if not isinstance(results, Sequence) or not all(isinstance(result, Mapping) for result in results):
        raise DataError("the results are not a list of objects", remedy=remedy)
    if not results:
        return []
    for field, listed in (("image_id", dataset["images"]), ("category_id", dataset["categories"])):
        _check_listed(field, results, {record["id"] for record in listed}, remedy=remedy)
    scores = _numbers(results, "score", (), remedy=remedy)
    _refuse(np.logical_not(np.isfinite(scores)), results, "has a score that is not a finite number", remedy=remedy)
    has_boxes = "bbox" in results[0] or "bbox" in kinds
    if has_boxes:
        boxes = _numbers(results, "bbox", (4,), remedy=remedy)
        usable = np.isfinite(boxes).all(axis=1) & (boxes[:, 2:] >= 0).all(axis=1)
        _refuse(~usable, results, "has a bbox that is not finite or has a negative side", remedy=remedy)
    if "segm" in kinds:
        _check_masks(results, dataset["images"], name="result", remedy=remedy)
    fields = ["image_id", "category_id", "score"] + ["bbox"] * has_boxes + ["segmentation"] * ("segm" in kinds)
    return [{field: result[field] for field in fields} for result in results]


def _check_listed(field: str, results: Sequence[Mapping[str, Any]], known: set[int], *, remedy: str) -> None:
    unknown = [index for index, result in enumerate(results) if _whole(result, field) not in known]
    if unknown:
        value = results[unknown[0]][field]
        raise DataError(
            f"{len(unknown)} of {len(results)} results have {field}s that the annotations do not list, first {value}",
            remedy=remedy,
        )


def _whole(record: Mapping[str, Any], field: str) -> int:
    value: Any = record.get(field)
    if isinstance(value, float) and value.is_integer():  # some tools write 3.0; the annotation store reads it too
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or not -(2**63) < int(value) < 2**63:
        raise DataError(
            f"{field} is {value!r}, not a whole number, in {_shown(record)}", remedy=f"write {field} as a whole number"
        )
    return int(value)


def _side(image: Mapping[str, Any], field: str) -> int:
    """Width or height in pixels; 0 if it is not given."""
    side = _whole(image, field) if field in image else 0
    if not 0 <= side <= MAX_SIDE_PX:
        raise DataError(f"{field} is {side} in {_shown(image)}", remedy=f"write {field} as a number of pixels")
    return side


def _numbers(
    results: Sequence[Mapping[str, Any]], field: str, shape: tuple[int, ...], *, remedy: str
) -> NDArray[np.float64]:
    """`field` of all results as one array [N, *shape]."""
    values = [result.get(field) for result in results]
    try:
        array = np.array(values)
    except ValueError:  # rows of different lengths
        array = np.array([], dtype=object)
    if array.dtype.kind not in "iuf" or array.shape != (len(results), *shape):
        raise DataError(
            f"the results do not all have a {field} of {'four numbers' if shape else 'one number'}", remedy=remedy
        )
    return array.astype(np.float64)


def _refuse(bad: Any, results: Sequence[Mapping[str, Any]], why: str, *, remedy: str) -> None:
    """Raise for the first result that `bad` [N] marks."""
    if bad.any():
        index = int(bad.argmax())
        raise DataError(
            f"result {index} of image {results[index]['image_id']} {why} ({int(bad.sum())} of {len(results)} do)",
            remedy=remedy,
        )


def _check_masks(
    records: Sequence[Mapping[str, Any]], images: Sequence[Mapping[str, Any]], *, name: str, remedy: str
) -> None:
    sizes = {image["id"]: (image["height"], image["width"]) for image in images}
    found = bad_mask([record.get("segmentation") for record in records], [sizes[r["image_id"]] for r in records])
    if found:
        index, why = found
        raise DataError(
            f"the mask of {name} {index} (image {records[index]['image_id']}) cannot be read: {why}",
            remedy=remedy if name == "annotation" else f'{remedy}, or evaluate kinds=("bbox",) alone',
        )


def _is_finite(value: Any) -> bool:
    try:
        return isinstance(value, (int, float)) and math.isfinite(value)
    except OverflowError:  # a whole number beyond all floats
        return False


def _shown(record: Mapping[str, Any]) -> str:
    text = str(dict(record))
    return text if len(text) <= 80 else text[:77] + "..."
