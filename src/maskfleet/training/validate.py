"""AP on the validation sets, computed by all ranks together."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from maskfleet.config.run import RunConfig
from maskfleet.data.pipeline.build import build_eval_loader
from maskfleet.data.pipeline.collate import EvalBatch
from maskfleet.data.pipeline.loader import EvalLoader
from maskfleet.data.store.annotations import AnnotationStore
from maskfleet.evaluation.coco_eval import CocoScores, metric_names, scores_from
from maskfleet.evaluation.evaluate import keep_detections, score_results, stored_detections
from maskfleet.inference.predict import encoding_workers, garbage_collection_paused, predict_batches
from maskfleet.inference.runner import DetectionRunner
from maskfleet.model.mask_rcnn import MaskRCNN
from maskfleet.training.distributed import Ranks
from maskfleet.training.output.names import DETECT_S, SCORE_S
from maskfleet.training.step.ema import Ema

Scores = dict[str, CocoScores]  # by kind: bbox, segm


class EvaluationStoppedError(Exception):
    """The evaluation was abandoned, on all ranks, because the run is to stop."""


@dataclass(frozen=True, slots=True)
class Validator:
    """Evaluates a model on every validation set of a run."""

    config: RunConfig
    stores: Sequence[AnnotationStore]
    skip: Sequence[Collection[int]]  # ids of broken images, by store
    ranks: Ranks
    runner: DetectionRunner  # kept for the whole run, so that it records and compiles once
    repeats: int = 1  # how many evaluations the run will make; compiling pays only for many
    run_dir: Path | None = None  # where the detections in the first set are kept; None keeps none
    seconds: dict[str, float] = field(default_factory=dict)  # of the newest evaluation on this rank, by metric name

    def scores(
        self, model: MaskRCNN, ema: Ema | None, *, step: int, stop_requested: Callable[[], bool]
    ) -> list[Scores]:
        """Scores of each set after `step`, the same on every rank.

        All ranks call `stop_requested` together before every batch, and get the same answer; if it is yes,
        EvaluationStoppedError is raised.
        """
        assert model is self.runner.model
        self.seconds.update({DETECT_S: 0.0, SCORE_S: 0.0})
        # The averages are copied into the model's own parameters, which a recorded detection reads.
        with ema.used_by(model) if ema is not None else nullcontext():
            return [self._of_set(index, step, stop_requested) for index in range(len(self.stores))]

    def named(self, scores: Sequence[Scores]) -> dict[str, float]:
        """`scores` by the metric names of TensorPack; the names of further sets are prefixed with the set's name."""
        values: dict[str, float] = {}
        for index, (store, of_set) in enumerate(zip(self.stores, scores, strict=True)):
            prefix = f"{store.split.name}-" if index else ""
            values |= {prefix + name: value for name, value in metric_names(of_set).items()}
        return values

    def _of_set(self, index: int, step: int, stop_requested: Callable[[], bool]) -> Scores:
        store, worker = self.stores[index], self.ranks.worker
        started_at = time.monotonic()
        loader = build_eval_loader(
            self.config,
            store,
            rank=worker.rank,
            world_size=worker.world_size,
            device=self.runner.device,
            skip=self.skip[index],
        )
        try:
            own_results = predict_batches(
                self.runner,
                self._until_stopped(loader, stop_requested),
                categories=[(category.id, category.name) for category in store.categories],
                accurate_paste=self.config.eval.accurate_paste,
                num_workers=encoding_workers(self.config, worker.world_size, self.runner.device),
                expected={
                    canvas: replace(images, count=images.count * self.repeats)
                    for canvas, images in loader.expected_images().items()
                },
            )
        finally:
            loader.close()
        with garbage_collection_paused():
            gathered = self.ranks.gather(own_results)
        detected_at = time.monotonic()
        self.seconds[DETECT_S] += detected_at - started_at
        scores: Scores = {}
        if gathered is not None:  # the keys of a JSON object are text
            results = {int(image_id): detections for part in gathered for image_id, detections in part.items()}
            scores = score_results(store, results, masks=self.config.model.mask)
            self.seconds[SCORE_S] += time.monotonic() - detected_at
            if index == 0 and self.run_dir is not None:
                keep_detections(self.run_dir, stored_detections(store, results, scores, step=step))
        answer = self.ranks.broadcast({kind: asdict(score) for kind, score in scores.items()})
        return {kind: scores_from(score) for kind, score in answer.items()}

    def _until_stopped(self, loader: EvalLoader, stop_requested: Callable[[], bool]) -> Iterator[EvalBatch]:
        """The batches of `loader`; a rank with fewer batches asks as often as the one with the most."""
        turns = max(self.ranks.broadcast(self.ranks.gather(len(loader))))
        batches = iter(loader)
        for _ in range(turns):
            if stop_requested():
                raise EvaluationStoppedError
            batch = next(batches, None)
            if batch is not None:
                yield batch
