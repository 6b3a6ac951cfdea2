"""AP of a trained model on a data set."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from maskfleet.config.base import replaced
from maskfleet.config.run import RunConfig, SplitConfig
from maskfleet.data.pipeline.build import build_eval_loader
from maskfleet.data.store.annotations import AnnotationStore
from maskfleet.data.store.dataset import open_stores
from maskfleet.errors import ConfigError, DataError
from maskfleet.evaluation.coco_eval import CocoScores, Kind, evaluate_detections
from maskfleet.inference.detections import Result
from maskfleet.inference.detector import Detector
from maskfleet.inference.load import load
from maskfleet.inference.predict import predict_batches


@dataclass(frozen=True, slots=True)
class Evaluation:
    """COCO's twelve values for boxes and masks, AP per class, and the detections they were computed from."""

    box: CocoScores
    mask: CocoScores | None  # None if the model has no mask head
    results: list[Result]  # COCO results of all images
    num_images: int
    annotations: Path  # what the results were compared with
    source: str  # the checkpoint or file of the model


def evaluate(
    source: str | Path | Detector,
    *,
    data: str | Path | None = None,
    split: str | tuple[str | Path, str | Path] | None = None,
    max_images: int | None = None,
    batch_size: int = 1,
    progress: Callable[[int, int], None] | None = None,
) -> Evaluation:
    """Evaluate a run directory, a weights file or a loaded detector.

    `data` is the root of a data set (default: the run's own), `split` the name of a split in it (default: the run's
    first validation set) or the paths of an annotation file and an image folder. `progress` is called with the number
    of images done and of all images.

        scores = maskfleet.evaluate("runs/mine", data="/data/coco")
        print(scores.box.ap, scores.mask.ap50, scores.box.per_class)
    """
    detector = source if isinstance(source, Detector) else load(source)
    changes: dict[str, object] = {"eval.max_images": max_images, "eval.images_per_gpu": batch_size}
    if data is not None:
        changes["data.root"] = str(data)
    try:
        config = replaced(detector.run, changes)
    except ValueError as error:
        raise ConfigError(
            f"max_images={max_images} or batch_size={batch_size} is not valid", remedy="give integers of at least 1"
        ) from error
    [store] = open_stores(config.data, [_chosen_split(config, split)])
    _check_categories(detector, store)
    results = _results(detector, config, store, progress)
    scores = score_results(
        store, results, masks=config.model.mask, max_detections=config.model.inference.max_detections
    )
    return Evaluation(
        box=scores["bbox"],
        mask=scores.get("segm"),
        results=_flat(results),
        num_images=len(results),
        annotations=store.split.annotations,
        source=detector.source,
    )


def score_results(
    store: AnnotationStore, results: dict[int, list[Result]], *, masks: bool, max_detections: int
) -> dict[str, CocoScores]:
    """AP of `results`, by image id, against the annotations of those images alone."""
    document = json.loads(store.split.annotations.read_text(encoding="utf-8"))
    document["images"] = [image for image in document["images"] if image["id"] in results]
    document["annotations"] = [item for item in document["annotations"] if item["image_id"] in results]
    kinds: tuple[Kind, ...] = ("bbox", "segm") if masks else ("bbox",)
    return evaluate_detections(document, _flat(results), kinds=kinds, max_detections=max_detections)


def _chosen_split(config: RunConfig, split: str | tuple[str | Path, str | Path] | None) -> str | SplitConfig:
    if isinstance(split, tuple):
        annotations, images = (str(Path(path).expanduser().resolve()) for path in split)
        return SplitConfig(annotations=annotations, images=images)
    if split is None and not config.data.val:
        raise DataError("the run has no validation set", remedy="name a split: --split, or split=… in Python")
    return split or config.data.val[0]


def _check_categories(detector: Detector, store: AnnotationStore) -> None:
    if len(store.categories) != len(detector.categories):
        raise DataError(
            f"the model has {len(detector.categories)} categories, but {store.split.annotations} has "
            f"{len(store.categories)}",
            remedy="evaluate on data with the categories the model was trained on",
        )


def _results(
    detector: Detector, config: RunConfig, store: AnnotationStore, progress: Callable[[int, int], None] | None
) -> dict[int, list[Result]]:
    done = count(1)
    with closing(build_eval_loader(config, store, device=detector.device)) as loader:
        total = loader.num_images

        def advance(_: int) -> None:
            if progress is not None:
                progress(next(done), total)

        return predict_batches(
            detector.model,
            loader,
            device=detector.device,
            categories=[(category.id, category.name) for category in store.categories],
            accurate_paste=config.eval.accurate_paste,
            on_image=advance,
        )


def _flat(results: dict[int, list[Result]]) -> list[Result]:
    return [result for image_id in sorted(results) for result in results[image_id]]
