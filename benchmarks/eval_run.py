"""How long `maskfleet eval` takes end to end, and whether the fast detection finds what eager fp32 finds.

    python benchmarks/eval_run.py speed [--images 5000] [--distinct 500] [--compiled]
    python benchmarks/eval_run.py equal [--images 500] [--compiled]

`speed` generates images of COCO's sizes, lists each several times up to `--images`, and evaluates an R50-FPN Mask R-CNN
of random weights on them, with a score threshold of 0, so that every image has 100 detections: first by the command,
twice, because the first one may have to compile Triton kernels, then in this process stage by stage, then each part of
the pipeline alone. `images_per_s_steady` leaves out the first fifth of the images, when processes start and CUDA graphs
are captured. Without a trained mask head, masks fill their boxes, which gives as many runs a column as real ones.
`equal` trains the demo's model, evaluates it eagerly in fp32 image by image, then as a GPU does it by default, and
compares AP and the detections of each image. `--compiled` adds detection with torch.compile.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import torch

from eval_stages import copied_shapes
from machine import machine_facts
from maskfleet.batch import Images
from maskfleet.config.base import replaced
from maskfleet.config.recipes import recipe
from maskfleet.config.run import RunConfig
from maskfleet.data.pipeline.build import build_eval_loader
from maskfleet.data.store.dataset import open_stores
from maskfleet.data.synthetic.dataset import make_shapes
from maskfleet.data.synthetic.shapes import KINDS
from maskfleet.evaluation.evaluate import Evaluation, evaluate
from maskfleet.inference.detections import ImageDetections
from maskfleet.inference.detector import Detector
from maskfleet.inference.device import local_device
from maskfleet.inference.load import load
from maskfleet.inference.predict import PRELOAD, encoding_workers
from maskfleet.inference.recorded import RecordedDetector, detected
from maskfleet.inference.runner import detection_dtype
from maskfleet.model.weights import Labels
from maskfleet.system.workers.arrays import ArrayWorkers
from maskfleet.training.run import train
from random_weights import save_random_weights

Record = dict[str, Any]
RESULTS = Path(__file__).parent / "results"
SURE_SCORE = 0.5  # detections compared one by one; below it, order and cut-off depend on rounding
MIN_SAME_IOU = 0.9
REPEATS = 20
EAGER = {"eval.precision": "fp32", "eval.compile": False}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("speed", "equal"))
    parser.add_argument("--images", type=int)
    parser.add_argument("--distinct", type=int, default=500, help="generated images of `speed`; the others repeat them")
    parser.add_argument("--short-edge", type=int, default=800)
    parser.add_argument("--recipe", default="r50_fpn_1x", help="model of `speed`")
    parser.add_argument("--precision", default="auto", help="of the detection that `equal` compares with fp32")
    parser.add_argument("--compiled", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    record: Record = {"what": f"maskfleet eval: {options.part}", **machine_facts()}
    with tempfile.TemporaryDirectory(prefix="maskfleet-eval-") as folder:
        measure = {"speed": speed, "equal": equal}[options.part]
        measure(Path(folder), options, record)
    out = options.out or RESULTS / f"eval_run_{options.part}.json"
    out.write_text(json.dumps(record, indent=2) + "\n")


def say(record: Record, name: str, value: Any) -> None:
    record[name] = value
    print(name, json.dumps(value), flush=True)


# Speed


def speed(folder: Path, options: argparse.Namespace, record: Record) -> None:
    num_images = options.images or 5000
    cores = os.cpu_count() or 1
    generated = timed(lambda: copied_shapes(folder, num_images, min(options.distinct, num_images), workers=cores))
    say(record, "generate_s", generated[1])
    weights = random_weights(folder / "weights.safetensors", options.recipe)
    command = [sys.executable, "-m", "maskfleet", "eval", str(weights), "--data", str(folder / "data")]
    command += ["--split", "val"]
    for name in ("command", "command_again"):
        say(record, name, command_in_time(command, num_images))
    detector, load_s = timed(lambda: load(weights, local_device()))
    say(record, "load_s", load_s)
    detector = changed(detector, {"data.test_short_edge_px": options.short_edge})
    for name, compile in (("auto", "auto"), *([("compiled", True)] if options.compiled else [])):
        say(record, name, stages_in_time(changed(detector, {"eval.compile": compile}), folder / "data"))
    config = replaced(detector.run, {"data.root": str(folder / "data")})
    say(record, "alone_images_per_s", parts_alone(detector, config, options.compiled))


def random_weights(path: Path, name: str) -> Path:
    """Weights that find 100 objects in every image, whose masks fill their boxes."""
    config = replaced(recipe(name).model, {"num_categories": 6, "inference.score_threshold": 0.0})
    return save_random_weights(path, config, Labels(list(KINDS[:6])))


def command_in_time(command: list[str], num_images: int) -> Record:
    """Wall time of the whole process, what it prints about its stages, and what is left: imports, start and end."""
    ran, wall_s = timed(lambda: subprocess.run(command, check=True, capture_output=True, text=True))
    [line] = [line for line in ran.stdout.splitlines() if line.startswith("time: ")]
    seconds = {stage: float(value) for stage, value in re.findall(r"(\w+) ([\d.]+) s", line)}
    return {
        "wall_s": wall_s,
        "images_per_s": round(num_images / wall_s, 1),
        "seconds": seconds | {"other": round(wall_s - sum(seconds.values()), 1)},
    }


def stages_in_time(detector: Detector, data: Path) -> Record:
    """The stages of one evaluation, when the first image was done, and the speed after the first fifth."""
    done_at: list[float] = []
    started_at, cpu_s = time.perf_counter(), time.process_time()
    found = evaluate(
        detector, data=data, split="val", progress=lambda done, total: done_at.append(time.perf_counter() - started_at)
    )
    cpu_s = time.process_time() - cpu_s
    fifth = len(done_at) // 5
    return stages(found) | {
        "first_image_s": round(done_at[0], 2),
        "images_per_s_steady": round((len(done_at) - 1 - fifth) / (done_at[-1] - done_at[fifth]), 1),
        "main_process_cpu_ms_per_image": round(1e3 * cpu_s / found.num_images, 3),
    }


def stages(found: Evaluation) -> Record:
    seconds = {stage: round(value, 2) for stage, value in found.seconds.items()}
    rate = found.num_images / found.seconds["detect"]
    count = len(found.results) / found.num_images
    return {"seconds": seconds, "images_per_s_detect": round(rate, 1), "detections_per_image": round(count, 1)}


def parts_alone(detector: Detector, config: RunConfig, compiled: bool) -> Record:
    """Images per second of the loader, the network and the encoding, each without the others."""
    [store] = open_stores(config.data, ["val"])
    device = detector.device
    with closing(build_eval_loader(config, store, device=device)) as loader:
        batches = iter(loader)
        first = next(batches)
        rest, loader_s = timed(lambda: sum(len(batch.image_ids) for batch in batches))
    rates = {"loader": rest / loader_s}
    images = first.images.to(device)
    dtype = detection_dtype(config, device)
    rates["eager"] = rate(lambda: detected(detector.model.detect, images, dtype), len(images.sizes))
    if device.type == "cuda":
        for name in ("recorded", *(["compiled"] if compiled else [])):
            rates[name] = recorded_rate(detector, images, dtype, compiled=name == "compiled")
    [one, *_] = detector.detect([store.image(0).path])
    num_workers = encoding_workers(config, 1, device)
    with closing(ArrayWorkers(num_workers, preload=[PRELOAD])) as workers:
        calls = 50 * max(1, num_workers)
        [workers.submit(ImageDetections.columns, one, 0) for _ in range(8)][-1].result()
        submitted, encode_s = timed(lambda: [workers.submit(ImageDetections.columns, one, 0) for _ in range(calls)])
        encode_s += timed(lambda: [call.result() for call in submitted])[1]
    rates["encode"] = calls / encode_s
    return {name: round(value, 1) for name, value in rates.items()} | {"encode_workers": num_workers}


def recorded_rate(detector: Detector, images: Images, dtype: torch.dtype | None, *, compiled: bool) -> float:
    recorded = RecordedDetector(detector.model, dtype=dtype)
    _, record_s = timed(lambda: recorded.record(images, compiled=compiled))
    print("compiled" if compiled else "recorded", f"in {record_s:.1f} s", flush=True)
    return rate(lambda: recorded(images), len(images.sizes))


def rate(work: Callable[[], object], num_images: int) -> float:
    """Images per second of `work` on `num_images`, after a warm-up."""
    repeats = REPEATS if torch.cuda.is_available() else 1
    work()
    _synchronize()
    _, seconds = timed(lambda: [work() for _ in range(repeats)])
    return repeats * num_images / seconds


# Equality


def equal(folder: Path, options: argparse.Namespace, record: Record) -> None:
    num_images = options.images or 500
    sides = {"height": (192, 288), "width": (192, 288)}
    make_shapes(folder / "data", num_train=200, num_val=num_images, workers=os.cpu_count() or 1, **sides)
    fields = {"data.root": str(folder / "data"), "train.compile": False, "eval.every_epochs": 0}
    _, train_s = timed(lambda: train(replaced(recipe("demo"), fields), folder / "run"))
    say(record, "train_s", train_s)
    detector = load(folder / "run", local_device())
    reference = evaluate(changed(detector, EAGER), batch_size=1)
    say(record, "eager fp32, one image at a time", ap_of(reference) | stages(reference))
    ways: dict[str, Record] = {"default": {"eval.precision": options.precision}}
    if options.compiled:
        ways["compiled"] = {"eval.precision": options.precision, "eval.compile": True}
    for name, changes in ways.items():
        found = evaluate(changed(detector, changes))
        say(record, name, ap_of(found) | stages(found) | compared(reference.results, found.results))


def ap_of(found: Evaluation) -> Record:
    assert found.mask is not None
    return {"box_ap": round(100 * found.box.ap, 3), "mask_ap": round(100 * found.mask.ap, 3)}


def compared(expected: list[Record], found: list[Record]) -> Record:
    """Detections of at least SURE_SCORE, image by image: how many have a counterpart, and how far scores are apart."""
    by_image: dict[int, list[Record]] = {}
    for item in found:
        by_image.setdefault(item["image_id"], []).append(item)
    sure = [item for item in expected if item["score"] >= SURE_SCORE]
    differences, images_that_differ = [], set()
    for item in sure:
        of_class = [one for one in by_image.get(item["image_id"], []) if one["category_id"] == item["category_id"]]
        overlaps = [box_iou(item["bbox"], other["bbox"]) for other in of_class]
        best = int(np.argmax(overlaps)) if overlaps else -1
        if best < 0 or overlaps[best] < MIN_SAME_IOU:
            images_that_differ.add(item["image_id"])
        else:
            differences.append(abs(of_class[best]["score"] - item["score"]))
    return {
        "sure_detections": len(sure),
        "with_counterpart": len(differences),
        "images_that_differ": len(images_that_differ),
        "largest_score_difference": round(max(differences, default=0.0), 4),
        "mean_score_difference": round(float(np.mean(differences)) if differences else 0.0, 5),
    }


def box_iou(first: list[float], second: list[float]) -> float:
    """IoU of two xywh boxes."""
    sides = [
        max(0.0, min(first[axis] + first[axis + 2], second[axis] + second[axis + 2]) - max(first[axis], second[axis]))
        for axis in (0, 1)
    ]
    overlap = sides[0] * sides[1]
    return overlap / max(1e-9, first[2] * first[3] + second[2] * second[3] - overlap)


def changed(detector: Detector, fields: Record) -> Detector:
    """The same model with other settings."""
    run = replaced(detector.run, fields)
    return Detector(detector.model, run, detector.categories, detector.source, detector.device)


def timed(work: Callable[[], Any]) -> tuple[Any, float]:
    """What `work` returns, and the seconds of wall time until the device has done it."""
    started_at = time.perf_counter()
    outcome = work()
    _synchronize()
    return outcome, round(time.perf_counter() - started_at, 3)


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
