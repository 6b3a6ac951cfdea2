"""Which classes a model takes for which, counted by hotcoco.

Shapes: K categories by id; the last row and column of [K + 1, K + 1] are the background.
"""

from __future__ import annotations

from dataclasses import dataclass

import hotcoco
import numpy as np
from numpy.typing import NDArray

from maskfleet.evaluation.coco_eval import CocoPair, Kind

MATCH_IOU = 0.5


@dataclass(frozen=True, slots=True, eq=False)
class Confusion:
    """Objects (rows) by the class of their detection (columns), without crowds.

    The last column counts objects that were not found, the last row detections that are on no object.
    """

    names: tuple[str, ...]  # [K]
    counts: NDArray[np.int64]  # [K + 1, K + 1]

    def most_frequent(self, limit: int) -> list[tuple[str, str, int, float]]:
        """Pairs of classes that are confused most often: object, detected as, count, share of the class's objects."""
        own = self.counts[:-1, :-1].copy()
        np.fill_diagonal(own, 0)
        objects = self.counts[:-1].sum(axis=1)
        order = np.argsort(-own, axis=None, kind="stable")[:limit]
        pairs = zip(*np.unravel_index(order, own.shape), strict=True) if own.size else ()
        return [
            (self.names[row], self.names[column], int(own[row, column]), float(own[row, column] / objects[row]))
            for row, column in pairs
            if own[row, column]
        ]


def confusion(pair: CocoPair, kind: Kind, *, min_score: float) -> Confusion:
    """The confusion matrix at IoU 0.5 of the detections that score `min_score` or more.

    Detections of all classes compete for the objects of an image, the highest scores first, each for the object with
    the largest IoU that is still free. `pair` has no crowds.
    """
    evaluation = hotcoco.COCOeval(pair.truth, pair.results, kind)
    told = evaluation.confusion_matrix(iou_thr=MATCH_IOU, min_score=min_score)
    return Confusion(tuple(told["cat_names"]), np.asarray(told["matrix"]).astype(np.int64))
