"""AP on the validation sets, computed by all ranks together."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch

from maskfleet.config.run import RunConfig
from maskfleet.data.pipeline.build import build_eval_loader
from maskfleet.data.store.annotations import AnnotationStore
from maskfleet.evaluation.coco_eval import CocoScores, metric_names
from maskfleet.evaluation.evaluate import score_results
from maskfleet.inference.predict import predict_batches
from maskfleet.model.mask_rcnn import MaskRCNN
from maskfleet.training.distributed import Ranks
from maskfleet.training.step.ema import Ema

Scores = dict[str, CocoScores]  # by kind: bbox, segm


@dataclass(frozen=True, slots=True)
class Validator:
    """Evaluates a model on every validation set of a run."""

    config: RunConfig
    stores: Sequence[AnnotationStore]
    skip: Sequence[Collection[int]]  # ids of broken images, by store
    ranks: Ranks
    device: torch.device

    def scores(self, model: MaskRCNN, ema: Ema | None) -> list[Scores]:
        """Scores of each set, the same on every rank."""
        with ema.used_by(model) if ema is not None else nullcontext():
            return [self._of_set(model, index) for index in range(len(self.stores))]

    def named(self, scores: Sequence[Scores]) -> dict[str, float]:
        """`scores` by the metric names of TensorPack; the names of further sets are prefixed with the set's name."""
        values: dict[str, float] = {}
        for index, (store, of_set) in enumerate(zip(self.stores, scores, strict=True)):
            prefix = f"{store.split.name}-" if index else ""
            values |= {prefix + name: value for name, value in metric_names(of_set).items()}
        return values

    def _of_set(self, model: MaskRCNN, index: int) -> Scores:
        store, worker = self.stores[index], self.ranks.worker
        loader = build_eval_loader(
            self.config,
            store,
            rank=worker.rank,
            world_size=worker.world_size,
            device=self.device,
            skip=self.skip[index],
        )
        try:
            own_results = predict_batches(
                model,
                loader,
                device=self.device,
                categories=[(category.id, category.name) for category in store.categories],
                accurate_paste=self.config.eval.accurate_paste,
            )
        finally:
            loader.close()
        gathered = self.ranks.gather(own_results)
        scores: Scores | None = None
        if gathered is not None:
            results = {image_id: detections for part in gathered for image_id, detections in part.items()}
            scores = score_results(
                store,
                results,
                masks=self.config.model.mask,
                max_detections=self.config.model.inference.max_detections,
            )
        answer: Scores = self.ranks.broadcast(scores)
        return answer
