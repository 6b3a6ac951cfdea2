"""CPU milliseconds per image of everything around the detector in `maskfleet eval`, and all of it together.

    python benchmarks/eval_stages.py [--images 5000] [--detections 36] [--cores 16]

A stand-in for the detector returns random detections at no cost: boxes of COCO's sizes, `--detections` per image (36:
an average model on COCO; 100: the limit), masks with the outline of blobs. The images are copies of a few generated
ones. Each stage is measured alone in CPU time, which other processes on the machine hardly disturb; then the whole
pipeline runs with its worker processes. From the milliseconds follows what `--cores` cores can do at most: half of them
load, half encode, and one process, the main one, does the rest. The checksum of the results shows whether a change of
the code changed them.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from machine import machine_facts
from maskfleet.batch import Detections, Images
from maskfleet.config.base import replaced
from maskfleet.config.recipes import recipe
from maskfleet.config.run import RunConfig
from maskfleet.data.pipeline.build import build_eval_loader
from maskfleet.data.pipeline.collate import EvalBatch
from maskfleet.data.store.annotations import AnnotationStore
from maskfleet.data.store.dataset import open_stores
from maskfleet.data.synthetic.dataset import make_shapes
from maskfleet.evaluation.evaluate import score_results
from maskfleet.inference.detections import Result, image_detections
from maskfleet.inference.predict import predict_batches
from maskfleet.inference.runner import DetectionRunner

Record = dict[str, Any]
NUM_CATEGORIES = 6
BATCH_SIZE = 16
MASK_CELLS = 28
SHORT_EDGE_PX, MAX_PX = 800, 1333
NUM_BATCHES = 8  # of different detections, repeated


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=5000)
    parser.add_argument("--distinct", type=int, default=48, help="generated images; the others are copies of them")
    parser.add_argument("--detections", type=int, default=36)
    parser.add_argument("--cores", type=int, default=16)
    parser.add_argument("--workers", type=int, default=1, help="processes that load, and as many that encode")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "eval_stages.json")
    options = parser.parse_args()
    record: Record = {"what": "stages of maskfleet eval around the detector", **vars(options), **machine_facts()}
    del record["out"]
    with tempfile.TemporaryDirectory(prefix="maskfleet-eval-stages-") as folder:
        copied_shapes(Path(folder), options.images, options.distinct)
        measure(Path(folder), options, record)
    options.out.write_text(json.dumps(record, indent=2) + "\n")


def copied_shapes(root: Path, num_images: int, num_distinct: int, *, workers: int = 1) -> None:
    """A data set `root`/data of COCO's image sizes whose `val` split lists `num_distinct` files again and again."""
    data, sides = root / "data", {"height": (400, 640), "width": (480, 640)}
    counts = {"num_train": 1, "num_val": num_distinct, "num_categories": NUM_CATEGORIES}
    make_shapes(data, quality=95, workers=workers, **counts, **sides)
    [path] = data.rglob("*val*.json")
    document = json.loads(path.read_text())
    images, annotations = [], []
    by_image: dict[int, list[Any]] = {}
    for one in document["annotations"]:
        by_image.setdefault(one["image_id"], []).append(one)
    for number in range(num_images):
        source = document["images"][number % num_distinct]
        images.append(source | {"id": number + 1})
        for one in by_image.get(source["id"], []):
            annotations.append(one | {"id": len(annotations) + 1, "image_id": number + 1})
    path.write_text(json.dumps(document | {"images": images, "annotations": annotations}))


def measure(folder: Path, options: argparse.Namespace, record: Record) -> None:
    config = replaced(
        recipe("r50_fpn_1x"),
        {"data.root": str(folder / "data"), "data.num_workers": 0, "eval.images_per_gpu": BATCH_SIZE}
        | {"model.num_categories": NUM_CATEGORIES},
    )
    [store] = open_stores(config.data, ["val"])
    stand_in = StandIn(options.detections)
    categories = [(category.id, category.name) for category in store.categories]
    few = min(options.images, 20 * BATCH_SIZE)
    milliseconds = {
        "load": load_ms(config, store, few),
        "encode": encode_ms(config, stand_in, categories, few),
    }
    say(record, "cpu_ms_per_image_alone", milliseconds)
    batches = [*SizesOnly(config, store)]

    def predict(num_workers: int) -> dict[int, list[Result]]:
        runner = cast(DetectionRunner, stand_in)
        return predict_batches(runner, batches, categories=categories, accurate_paste=True, num_workers=num_workers)

    results, main_s, wall_s = timed(lambda: predict(options.workers))
    say(record, "detect_without_loader", rates(options.images, wall_s, main_s))
    scores, score_s, score_wall_s = timed(lambda: score_results(store, results, masks=True))
    milliseconds["score"] = 1e3 * score_s / options.images
    say(record, "score", rates(options.images, score_wall_s, score_s))
    flat = [one for image_id in sorted(results) for one in results[image_id]]
    say(record, "results_sha256", hashlib.sha256(json.dumps(flat).encode()).hexdigest())
    say(record, "ap", {kind: values.ap for kind, values in scores.items()})
    with_workers = replaced(config, {"data.num_workers": options.workers})
    say(record, "overlapped", overlapped(with_workers, store, stand_in, options))
    milliseconds["main process"] = record["overlapped"]["main_process_cpu_ms_per_image"]
    say(record, "cpu_ms_per_image", {name: round(value, 3) for name, value in milliseconds.items()})
    say(record, "limits_images_per_s", limits(milliseconds, options.cores))


def limits(milliseconds: dict[str, float], cores: int) -> dict[str, float]:
    """Images per second that `cores` of this machine's cores allow; the smallest one is the limit."""
    half = max(1, min(8, cores // 2))  # what `chosen_workers` gives to loading and to encoding
    return {
        f"load, {half} processes": round(1e3 * half / milliseconds["load"]),
        f"encode, {half} processes": round(1e3 * half / milliseconds["encode"]),
        "main process": round(1e3 / milliseconds["main process"]),
        f"all together, {cores} cores": round(
            1e3 * cores / sum(milliseconds[name] for name in ("load", "encode", "main process"))
        ),
    }


def overlapped(
    config: RunConfig, store: AnnotationStore, stand_in: StandIn, options: argparse.Namespace
) -> dict[str, float]:
    """The whole pipeline with its processes, as `maskfleet eval` runs it on a GPU."""
    categories = [(category.id, category.name) for category in store.categories]
    with closing(build_eval_loader(config, store, resize_on="device")) as loader:
        decoded = (cast(EvalBatch, delivered.batch) for delivered in raw_deliveries(loader))
        run: Callable[[], Any] = lambda: predict_batches(  # noqa: E731
            cast(DetectionRunner, stand_in),
            decoded,
            categories=categories,
            accurate_paste=True,
            num_workers=options.workers,
        )
        _, main_s, wall_s = timed(run)
    return rates(options.images, wall_s, main_s)


def raw_deliveries(loader: Any) -> Any:
    """What the loader's workers send; on a GPU the main process would now resize the images there."""
    loader.pool._on_device = lambda delivery: delivery
    return iter(loader)


def load_ms(config: RunConfig, store: AnnotationStore, num_images: int) -> float:
    """Reading, decoding and collating in this process, as a loader process does for a GPU."""
    few = replaced(config, {"eval.max_images": num_images})
    with closing(build_eval_loader(few, store, resize_on="device")) as loader:
        _, cpu_s, _ = timed(lambda: sum(1 for _ in raw_deliveries(loader)))
    return 1e3 * cpu_s / num_images


def encode_ms(config: RunConfig, stand_in: StandIn, categories: Any, num_images: int) -> float:
    """Paste, RLE and rounding in this process, as an encoding process does."""
    found = [
        image_detections(
            stand_in.batches[number % NUM_BATCHES],
            number % BATCH_SIZE,
            resized_hw=(800, 1066),
            original_hw=(480, 640),
            categories=categories,
            accurate_paste=True,
        )
        for number in range(num_images)
    ]
    found[0][:3].to_coco(0)
    _, cpu_s, _ = timed(lambda: [one.to_coco(0) for one in found])
    return 1e3 * cpu_s / num_images


class StandIn:
    """Returns prepared detections in place of a `DetectionRunner`."""

    def __init__(self, num_detections: int) -> None:
        self.model = SimpleNamespace(training=False, eval=lambda: None, train=lambda mode: None)
        self.device = torch.device("cpu")
        rng = np.random.default_rng(0)
        self.batches = [random_detections(rng, num_detections) for _ in range(NUM_BATCHES)]
        self._calls = 0

    def prepare(self, expected: object) -> None:
        """Nothing to record."""

    def __call__(self, images: Images, *, expected_images: int = 0) -> Detections:
        found = self.batches[self._calls % NUM_BATCHES]
        self._calls += 1
        count = len(images.sizes)
        fields = (found.boxes, found.scores, found.labels, found.valid, found.masks)
        return Detections(*[field[:count] for field in fields if field is not None])


class SizesOnly:
    """The batches of a data set without pixels, which nothing after the detector reads."""

    def __init__(self, config: RunConfig, store: AnnotationStore) -> None:
        self._planned = build_eval_loader(config, store).planned
        self._store = store

    def __iter__(self) -> Any:
        for planned in self._planned:
            records = [self._store.image(int(index)) for index in planned.images]
            sizes = torch.tensor([(record.height, record.width) for record in records])
            scale = SHORT_EDGE_PX / sizes.min(dim=1).values
            resized = (sizes * scale[:, None]).round().clamp(max=MAX_PX).long()
            images = Images(torch.empty(len(records), 3, 1, 1, dtype=torch.uint8), resized)
            ids = torch.tensor([record.id for record in records])
            yield EvalBatch(images, image_ids=ids, original_sizes=sizes, resized_sizes=resized)


def random_detections(rng: np.random.Generator, count: int) -> Detections:
    """A batch on a canvas of 800 x 1066 pixels, padded to 100 detections per image as a model's are."""
    shape, limit = (BATCH_SIZE, 100), np.array([1066.0, 800.0])
    # Widths and heights of COCO's objects in images of 480 x 640 pixels, enlarged as the images are.
    sides = np.exp(rng.normal(np.log(60 * 800 / 480), 0.9, (*shape, 2))).clip(8, 0.95 * limit)
    corner = rng.random((*shape, 2)) * (limit - sides)
    boxes = np.concatenate([corner, corner + sides], axis=-1).astype(np.float32)
    valid = np.arange(100)[None].repeat(BATCH_SIZE, axis=0) < count
    scores = -np.sort(-rng.random(shape).astype(np.float32), axis=1) * valid
    labels = rng.integers(1, NUM_CATEGORIES + 1, shape) * valid
    masks = np.stack([blobs(rng, 100) for _ in range(BATCH_SIZE)])
    return Detections(*(torch.from_numpy(array) for array in (boxes, scores, labels, valid, masks)))


def blobs(rng: np.random.Generator, count: int) -> NDArray[np.float32]:
    """Probabilities [count, M, M] of round shapes with a wavy outline."""
    axis = np.linspace(-1, 1, MASK_CELLS)
    y, x = np.meshgrid(axis, axis, indexing="ij")
    height, width = rng.uniform(0.6, 1.3, (2, count, 1, 1))
    wave = 1 + 0.2 * np.sin(rng.integers(2, 7, (count, 1, 1)) * np.arctan2(y, x))
    distance = np.sqrt((x / width) ** 2 + (y / height) ** 2) * wave
    return np.asarray(1 / (1 + np.exp(-9 * (1 - distance))), np.float32)


def timed(work: Callable[[], Any]) -> tuple[Any, float, float]:
    """What `work` returns, the CPU seconds of this process, and the seconds of wall time."""
    cpu_s, started_at = time.process_time(), time.perf_counter()
    outcome = work()
    return outcome, time.process_time() - cpu_s, time.perf_counter() - started_at


def rates(num_images: int, wall_s: float, main_s: float) -> dict[str, float]:
    return {
        "wall_s": round(wall_s, 2),
        "images_per_s": round(num_images / wall_s, 1),
        "main_process_cpu_ms_per_image": round(1e3 * main_s / num_images, 3),
    }


def say(record: Record, name: str, value: Any) -> None:
    record[name] = value
    print(name, json.dumps(value), flush=True)


if __name__ == "__main__":
    main()
