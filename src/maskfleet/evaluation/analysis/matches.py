"""Which detections COCO counts as right, and which objects as found, at every IoU threshold.

Shapes: I images by id, K categories by id, T IoU thresholds, D detections, G objects.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import hotcoco
import numpy as np
from numpy.typing import NDArray

from maskfleet.evaluation.coco_eval import CocoPair, Kind

IOU_THRESHOLDS = tuple(round(0.5 + 0.05 * step, 2) for step in range(10))  # T
AT_50, AT_75 = IOU_THRESHOLDS.index(0.5), IOU_THRESHOLDS.index(0.75)

Bools = NDArray[np.bool_]
Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Matches:
    """Detections by class, then by descending score; objects that are not crowds, in the order of the annotations."""

    image_ids: Ints  # [I]
    category_ids: Ints  # [K]
    place: Ints  # [D] position in the list of results
    image: Ints  # [D] index of the image
    category: Ints  # [D] index of the category
    score: Floats  # [D]
    is_right: Bools  # [D, T] it is the match of an object of its class
    is_ignored: Bools  # [D, T] it does not count: the match of a crowd, or beyond the best 100 of image and class
    object_image: Ints  # [G]
    object_category: Ints  # [G]
    object_area: Floats  # [G] in pixels
    is_found: Bools  # [G, T]

    def of_category(self, index: int) -> slice:
        """The detections of category `index`."""
        start, stop = np.searchsorted(self.category, [index, index + 1])
        return slice(int(start), int(stop))


def matches_of(pair: CocoPair, kind: Kind) -> Matches:
    """COCO's matches of boxes or masks: objects of all sizes, the best 100 detections of each image and class."""
    found, objects = pair.detections, pair.dataset["annotations"]
    image_ids = np.array(sorted(image["id"] for image in pair.dataset["images"]), np.int64)
    category_ids = np.array(sorted(category["id"] for category in pair.dataset["categories"]), np.int64)
    image = np.searchsorted(image_ids, np.array([one["image_id"] for one in found], np.int64))
    category = np.searchsorted(category_ids, np.array([one["category_id"] for one in found], np.int64))
    score = np.array([one["score"] for one in found], np.float64)
    is_right, is_ignored, is_found = _flags(pair, kind)
    order = np.lexsort((image, -score, category))  # equal scores in the order of images, as in pycocotools
    counts = np.array([one["iscrowd"] == 0 for one in objects], bool)
    return Matches(
        image_ids=image_ids,
        category_ids=category_ids,
        place=order,
        image=image[order],
        category=category[order],
        score=score[order],
        is_right=is_right[order],
        is_ignored=is_ignored[order],
        object_image=np.searchsorted(image_ids, np.array([one["image_id"] for one in objects], np.int64))[counts],
        object_category=np.searchsorted(category_ids, np.array([one["category_id"] for one in objects], np.int64))[
            counts
        ],
        object_area=np.array([one["area"] for one in objects], np.float64)[counts],
        is_found=is_found[counts],
    )


def without_crowds(pair: CocoPair, matches: Matches) -> CocoPair:
    """`pair` without crowds and without the detections that COCO ignores at IoU 0.5 because of them.

    hotcoco's error types and confusion matrix would take a crowd for one large object.
    """
    if not any(one["iscrowd"] for one in pair.dataset["annotations"]):
        return pair
    kept = [pair.detections[place] for place in np.sort(matches.place[~matches.is_ignored[:, AT_50]]).tolist()]
    objects = [one for one in pair.dataset["annotations"] if not one["iscrowd"]]
    truth = hotcoco.COCO({**pair.dataset, "annotations": objects})
    return CocoPair(truth, truth.load_res(cast("list[dict[str, Any]]", kept)), pair.dataset, kept)


def _flags(pair: CocoPair, kind: Kind) -> tuple[Bools, Bools, Bools]:
    """is_right [D, T], is_ignored [D, T] and is_found [G, T], in the order of results and annotations."""
    num_found, num_objects = len(pair.detections), len(pair.dataset["annotations"])
    is_right, is_ignored = np.zeros((2, num_found, len(IOU_THRESHOLDS)), bool)
    is_found = np.zeros((num_objects, len(IOU_THRESHOLDS)), bool)
    evaluation = hotcoco.COCOeval(pair.truth, pair.results, kind)
    evaluation.params.area_rng, evaluation.params.area_rng_lbl = [[0.0, 1e10]], ["all"]
    evaluation.params.iou_thrs = list(IOU_THRESHOLDS)
    evaluation.evaluate()
    for t, threshold in enumerate(IOU_THRESHOLDS):
        told = evaluation.image_diagnostics(iou_thr=threshold, score_thr=1.0)
        is_ignored[:, t] = ~_marked(told["dt_status"], ("tp", "fp"), num_found)  # no word of those that do not count
        is_right[:, t] = _marked(told["dt_status"], ("tp",), num_found)
        is_found[:, t] = _marked(told["gt_status"], ("matched",), num_objects)
    return is_right, is_ignored, is_found


def _marked(status: Mapping[int, str], words: tuple[str, ...], count: int) -> Bools:
    """Which of the ids 1 to `count` have one of `words` as their status -> [count]."""
    flags = np.zeros(count + 1, bool)
    flags[[identity for identity, word in status.items() if word in words]] = True
    return flags[1:]
