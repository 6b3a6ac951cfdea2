"""AP of a trained model on a data set."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from maskfleet.config.base import replaced
from maskfleet.config.run import RunConfig, SplitConfig
from maskfleet.data.pipeline.build import build_eval_loader
from maskfleet.data.store.annotations import AnnotationStore
from maskfleet.data.store.dataset import open_stores
from maskfleet.errors import ConfigError, DataError
from maskfleet.evaluation.coco_eval import CocoScores, CocoTruth, Kind, evaluate_detections, loaded_truth
from maskfleet.evaluation.detections_file import FILE, DetectionsOrigin, StoredDetections, write_detections
from maskfleet.inference.detections import Result
from maskfleet.inference.detector import Detector
from maskfleet.inference.load import load
from maskfleet.inference.predict import encoding_workers, garbage_collection_paused, predict_batches, prepare_workers
from maskfleet.log import logger

MAX_LISTED = 5


@dataclass(frozen=True, slots=True)
class Evaluation:
    """COCO's twelve values for boxes and masks, AP per class, and the detections they were computed from."""

    box: CocoScores
    mask: CocoScores | None  # None if the model has no mask head
    results: list[Result]  # COCO results of all images
    num_images: int
    annotations: Path  # what the results were compared with
    source: str  # the checkpoint or file of the model
    detections: StoredDetections  # the results with what `maskfleet report` needs to know about them
    seconds: dict[str, float]  # wall time of "load" (model and annotations), "detect" and "score"


def evaluate(
    source: str | Path | Detector,
    *,
    data: str | Path | None = None,
    split: str | tuple[str | Path, str | Path] | None = None,
    max_images: int | None = None,
    batch_size: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Evaluation:
    """Evaluate a run directory, a weights file or a loaded detector.

    `data` is the root of a data set (default: the run's own), `split` the name of a split in it (default: the run's
    first validation set) or the paths of an annotation file and an image folder. `batch_size` None is one image on the
    CPU, on a GPU up to 16. `progress` is called with the number of images done and of all images.

        scores = maskfleet.evaluate("runs/mine", data="/data/coco")
        print(scores.box.ap, scores.mask.ap50, scores.box.per_class)
    """
    started_at = time.monotonic()
    prepare_workers()
    detector = source if isinstance(source, Detector) else load(source)
    images_per_gpu = "auto" if batch_size is None else batch_size
    changes: dict[str, object] = {"eval.max_images": max_images, "eval.images_per_gpu": images_per_gpu}
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
    loaded_at = time.monotonic()
    with ThreadPoolExecutor(1) as background:
        # While detection is recorded and the first images are loaded.
        image_ids = frozenset(store.image_ids[:max_images].tolist())
        truth = background.submit(_truth, store, image_ids, masks=config.model.mask)
        results = _results(detector, config, store, progress)
    detected_at = time.monotonic()
    known = truth.result() if results.keys() == image_ids else None  # else some images could not be read
    scores = score_results(store, results, masks=config.model.mask, truth=known)
    detections = stored_detections(store, results, scores, step=detector.step)
    return Evaluation(
        box=scores["bbox"],
        mask=scores.get("segm"),
        results=detections.results,
        num_images=len(results),
        annotations=store.split.annotations,
        source=detector.source,
        detections=detections,
        seconds={
            "load": loaded_at - started_at,
            "detect": detected_at - loaded_at,
            "score": time.monotonic() - detected_at,
        },
    )


@garbage_collection_paused()
def score_results(
    store: AnnotationStore, results: dict[int, list[Result]], *, masks: bool, truth: CocoTruth | None = None
) -> dict[str, CocoScores]:
    """AP of `results`, by image id, against the annotations of those images alone, or `truth` if they are loaded.

    As in pycocotools, the best 100 detections of an image and class count, even if the model gives more.
    """
    truth = truth or _truth(store, results.keys(), masks=masks)
    return evaluate_detections(truth, _flat(results), kinds=_kinds(masks), check_results=False)


def _truth(store: AnnotationStore, image_ids: Collection[int], *, masks: bool) -> CocoTruth:
    return loaded_truth(annotations_of(store, image_ids), kinds=_kinds(masks))


def _kinds(masks: bool) -> tuple[Kind, ...]:
    return ("bbox", "segm") if masks else ("bbox",)


def annotations_of(store: AnnotationStore, image_ids: Collection[int]) -> dict[str, Any]:
    """The annotation file of `store` with the given images alone."""
    document: dict[str, Any] = json.loads(store.split.annotations.read_text(encoding="utf-8-sig"))
    document["images"] = [image for image in document["images"] if image["id"] in image_ids]
    document["annotations"] = [item for item in document["annotations"] if item["image_id"] in image_ids]
    return document


def stored_detections(
    store: AnnotationStore, results: Mapping[int, list[Result]], scores: Mapping[str, CocoScores], *, step: int | None
) -> StoredDetections:
    """`results`, by image id, as a run keeps them."""
    origin = DetectionsOrigin(step, store.split.name, str(store.split.annotations), store.source_sha256)
    return StoredDetections(origin, _flat(results), sorted(results), dict(scores))


def keep_detections(run_dir: Path, detections: StoredDetections) -> None:
    """Write them to the run directory; without them `maskfleet report` detects again, so failing is no error."""
    try:
        write_detections(run_dir, detections)
    except OSError as error:
        logger.warning("the detections were not written to %s: %s", run_dir / FILE, error.strerror)


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
    names = [name for _, name in detector.categories]
    if names == [str(label) for label in range(1, len(names) + 1)]:
        return  # weights without names
    # Labels are given by the order of ids, so that other ids with the same names are the same classes.
    differences = [
        f"class {label} is {category.name!r} there and {name!r} in the model"
        for label, (category, name) in enumerate(zip(store.categories, names, strict=True), 1)
        if category.name != name
    ]
    if differences:
        more = f"; and {len(differences) - MAX_LISTED} more" if len(differences) > MAX_LISTED else ""
        listed = "; ".join(differences[:MAX_LISTED]) + more
        raise DataError(
            f"{store.split.annotations} has other classes than the model: {listed}",
            remedy="evaluate on data with the classes the model was trained on, in the same order of ids; if only a "
            "name has changed, change it in the annotation file",
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
            detector.runner,
            loader,
            categories=[(category.id, category.name) for category in store.categories],
            accurate_paste=config.eval.accurate_paste,
            expected=loader.expected_images(),
            num_workers=encoding_workers(config, 1, detector.device),
            on_image=advance,
        )


def _flat(results: Mapping[int, list[Result]]) -> list[Result]:
    return [result for image_id in sorted(results) for result in results[image_id]]
