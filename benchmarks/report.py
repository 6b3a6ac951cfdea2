"""How long `maskfleet report` takes for a data set of COCO's size, stage by stage.

    python benchmarks/report.py [--images 5000] [--runs 1] [--folder FOLDER] [--out benchmarks/results/report.json]

Truth and detections are those of benchmarks/eval.py: 80 categories, 7.36 objects and about 36 detections per image,
with masks. They are written to a run directory as training leaves it, with 90,000 steps of metrics and images of noise,
and `record_of` and `write_report` do what the command does. Stages are named by the progress bar; starting Python and
importing torch are not included, and neither is the inference of a run that kept no detections.
"""

from __future__ import annotations

import argparse
import json
import resource
import tempfile
import time
from pathlib import Path
from typing import Any

import cv2
import numpy as np

from eval import made_up
from machine import machine_facts
from maskfleet.config.base import replaced
from maskfleet.config.load import write_run_file
from maskfleet.config.recipes import recipe
from maskfleet.data.store.dataset import open_stores
from maskfleet.evaluation.coco_eval import evaluate_detections
from maskfleet.evaluation.detections_file import write_detections
from maskfleet.evaluation.evaluate import stored_detections
from maskfleet.evaluation.report.page import write_report
from maskfleet.training.output.record import record_of, with_distinct_names

STEPS, LOG_EVERY, STEPS_PER_EVALUATION = 90_000, 20, 7_500


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=5000)
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--folder", type=Path, help="where to write the data; default: a temporary folder")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "report.json")
    options = parser.parse_args()
    record: dict[str, Any] = {"what": "maskfleet report, wall time by stage", "runs": options.runs, **machine_facts()}
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        runs = [made_run(Path(folder), number, options.images) for number in range(options.runs)]
        record |= runs[0][1]
        used_s = time.process_time()
        record["stages_s"], record["total_s"], path = timed_report([run for run, _ in runs])
        record["total_cpu_s"] = round(time.process_time() - used_s, 2)  # of all threads; other programs do not count
        record["report_mb"] = round(path.stat().st_size / 1e6, 2)
    record["peak_memory_mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    options.out.write_text(json.dumps(record, indent=2) + "\n")
    print(json.dumps(record, indent=2))


def timed_report(runs: list[Path]) -> tuple[dict[str, float], float, Path]:
    """Seconds of each stage and of all, and the page."""
    stages: dict[str, float] = {}
    started_at = since = time.perf_counter()
    current = "reading the run"

    def next_stage(name: str) -> None:
        nonlocal current, since
        now = time.perf_counter()
        stages[current] = round(stages.get(current, 0.0) + now - since, 2)
        current, since = name, now

    records = []
    for run in runs:
        next_stage("reading the run")
        records.append(record_of(run, progress=lambda stage, done, total: next_stage(stage)))
    next_stage("writing the page")
    path = write_report(runs[0] / "report.html", with_distinct_names(records, runs))
    next_stage("done")
    return stages, round(time.perf_counter() - started_at, 2), path


def made_run(folder: Path, number: int, num_images: int) -> tuple[Path, dict[str, Any]]:
    """A run directory with generated detections, and how many there are."""
    truth, results = made_up(num_images, np.random.default_rng(0))
    if number:
        results = noisier(results, number)
    data = folder / "data"
    if not data.exists():
        write_data(data, truth)
    config = replaced(recipe("r50_fpn_1x"), {"data.root": str(data), "data.val": ("val2017",)})
    run_dir = folder / f"run{number}"
    write_run_file(run_dir, config)
    [store] = open_stores(config.data, config.data.val)
    by_image: dict[int, list[dict[str, Any]]] = {image["id"]: [] for image in truth["images"]}
    for one in results:
        by_image[one["image_id"]].append(one)
    scores = evaluate_detections(truth, results)
    write_detections(run_dir, stored_detections(store, by_image, scores, step=STEPS))
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in metric_lines(scores["segm"].ap)))
    return run_dir, {"images": num_images, "objects": len(truth["annotations"]), "detections": len(results)}


def noisier(results: list[dict[str, Any]], number: int) -> list[dict[str, Any]]:
    """The same detections with other scores: another model."""
    rng = np.random.default_rng(number)
    return [one | {"score": float(np.clip(one["score"] + rng.normal(0, 0.1), 0.01, 1))} for one in results]


def write_data(root: Path, truth: dict[str, Any]) -> None:
    """A COCO folder; a few images are enough, since a report draws only some, but any may be among them."""
    (root / "annotations").mkdir(parents=True)
    (root / "val2017").mkdir()
    (root / "annotations" / "instances_val2017.json").write_text(json.dumps(truth))
    rng = np.random.default_rng(1)
    for size in {(image["height"], image["width"]) for image in truth["images"]}:
        noise = cv2.GaussianBlur(rng.integers(0, 255, (*size, 3), np.uint8), (0, 0), 3)
        jpeg = cv2.imencode(".jpg", noise)[1].tobytes()
        for image in truth["images"]:
            if (image["height"], image["width"]) == size:
                (root / "val2017" / image["file_name"]).write_bytes(jpeg)


def metric_lines(ap: float) -> list[dict[str, float]]:
    """metrics.jsonl of a run of 90,000 steps."""
    lines: list[dict[str, float]] = []
    terms = ("rpn_losses/label_loss", "rpn_losses/box_loss", "fastrcnn_losses/label_loss", "fastrcnn_losses/box_loss")
    for step in range(LOG_EVERY, STEPS + 1, LOG_EVERY):
        place = {"step": step, "epoch": step // STEPS_PER_EVALUATION, "time": 0.1 * step}
        loss = 0.2 + 2 / (1 + step / 500)
        host = {"learning_rate": 0.02, "images_per_s": 80.0, "data_wait_s": 0.001, "checkpoint_s": 0.0, "ranks": 8}
        lines.append(place | host | {"total_cost": loss} | dict.fromkeys(terms, loss / 4))
        if step % STEPS_PER_EVALUATION == 0:
            score = ap * (1 - 0.5 ** (step / STEPS_PER_EVALUATION))
            scores = {f"mAP({kind})/IoU=0.5:0.95": score for kind in ("bbox", "segm")}
            lines.append(place | scores | {"evaluation_s": 30.0})
    return lines


if __name__ == "__main__":
    main()
