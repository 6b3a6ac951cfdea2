"""What a report is made of: the record of a run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from maskfleet.config.run import RunConfig
from maskfleet.evaluation.analysis.analyze import Analysis
from maskfleet.evaluation.coco_eval import CocoScores, Kind
from maskfleet.evaluation.detections_file import DetectionsOrigin

KINDS: dict[Kind, str] = {"bbox": "box", "segm": "mask"}
IMAGES_PER_GPU = "images per GPU"  # the fact that has the number, also of runs for which it was chosen
Picture = tuple[str, NDArray[np.uint8]]  # caption and [H, W, 3] BGR


@dataclass(frozen=True, slots=True, eq=False)
class ReportedRun:
    """A run as far as its report knows it; what is empty has no section."""

    name: str
    config: RunConfig
    metrics: Sequence[Mapping[str, float]] = ()  # lines of metrics.jsonl
    facts: Mapping[str, str] = field(default_factory=dict)  # the machine and versions it ran on
    scores: Mapping[str, CocoScores] = field(default_factory=dict)  # by kind
    origin: DetectionsOrigin | None = None  # of the detections that the scores and the analysis are of
    analysis: Analysis | None = None
    best: Sequence[Picture] = ()  # annotated on the left, detected on the right
    worst: Sequence[Picture] = ()
    pictures: Sequence[Picture] = ()  # of a model that was not evaluated
    notes: Sequence[str] = ()  # what is missing, and why

    @property
    def training(self) -> list[Mapping[str, float]]:
        """The lines of training steps, without those of evaluations."""
        return [line for line in self.metrics if "learning_rate" in line]

    @property
    def images_per_gpu(self) -> int | None:
        """Images of one rank in one step; None if the run chose it and did not record it."""
        configured = self.config.train.images_per_gpu
        recorded = self.facts.get(IMAGES_PER_GPU, "")
        if configured != "auto":
            return configured
        return int(recorded) if recorded.isdecimal() else None

    @property
    def kinds(self) -> list[Kind]:
        """The kinds that have scores."""
        return [kind for kind in KINDS if kind in self.scores]


def are_comparable(runs: Sequence[ReportedRun]) -> bool:
    """Whether all runs were evaluated on the same images with the same annotations."""
    first = runs[0]
    return all(
        run.origin is not None
        and first.origin is not None
        and run.analysis is not None
        and first.analysis is not None
        and run.origin.annotations_sha256 == first.origin.annotations_sha256
        and np.array_equal(run.analysis.main.matches.image_ids, first.analysis.main.matches.image_ids)
        for run in runs
    )


def score_text(score: float) -> str:
    """A score of 0..1 as a percentage; a dash if it could not be measured."""
    return f"{100 * score:.1f}" if math.isfinite(score) and score >= 0 else "–"
