"""Everything a report shows about the detections of one model on one data set.

Shapes: T IoU thresholds, R recall levels, K categories, B bootstrap samples, V values (AP, AP50, AP75).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from maskfleet.evaluation.analysis.bootstrap import image_draws, sampled_ap
from maskfleet.evaluation.analysis.confusion import Confusion, confusion
from maskfleet.evaluation.analysis.curves import precision_curves
from maskfleet.evaluation.analysis.error_types import ErrorType, error_types
from maskfleet.evaluation.analysis.matches import Matches, matches_of, without_crowds
from maskfleet.evaluation.coco_eval import CocoPair, CocoScores, Kind, loaded_pair, scores_of

SHOWN_SCORE = 0.5  # of detections that count in the confusion matrix and in examples


@dataclass(frozen=True, slots=True, eq=False)
class KindAnalysis:
    """The analysis of boxes or of masks."""

    scores: CocoScores
    matches: Matches
    precision: NDArray[np.float64]  # [T, R, K], -1 for classes without objects
    sampled: NDArray[np.float64]  # [B, V]
    errors: tuple[ErrorType, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Analysis:
    """The analysis of a model: of its boxes and, if it has them, of its masks."""

    by_kind: dict[Kind, KindAnalysis]
    confusion: Confusion

    @property
    def main(self) -> KindAnalysis:
        """Of masks if there are any, else of boxes."""
        return self.by_kind.get("segm") or self.by_kind["bbox"]


def analyze(
    annotations: Mapping[str, Any],
    results: Sequence[Mapping[str, Any]],
    *,
    kinds: Sequence[Kind],
    progress: Callable[[str], None] = lambda stage: None,
) -> Analysis:
    """Analyze COCO `results` against `annotations`, a COCO annotation file with the evaluated images alone.

    `progress` is called with the name of each stage before it starts.
    """
    progress("loading detections and annotations")
    pair = loaded_pair(annotations, results, kinds=kinds)
    by_kind: dict[Kind, KindAnalysis] = {kind: _of_kind(pair, kind, progress) for kind in kinds}
    progress("counting confused classes")
    main: Kind = "segm" if "segm" in by_kind else "bbox"
    objects = without_crowds(pair, by_kind[main].matches)
    return Analysis(by_kind, confusion(objects, main, min_score=SHOWN_SCORE))


def _of_kind(pair: CocoPair, kind: Kind, progress: Callable[[str], None]) -> KindAnalysis:
    word = {"bbox": "boxes", "segm": "masks"}[kind]
    progress(f"scoring {word}")
    scores = scores_of(pair, kind)
    matches = matches_of(pair, kind)
    precision = precision_curves(matches)
    progress(f"finding errors of {word}")
    errors = error_types(without_crowds(pair, matches), kind)
    progress(f"confidence intervals of {word}")
    return KindAnalysis(scores, matches, precision, sampled_ap(matches, image_draws(len(matches.image_ids))), errors)
