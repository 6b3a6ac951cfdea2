"""How much faster hotcoco scores a data set of COCO's size than pycocotools, and whether the numbers are the same.

    python benchmarks/eval.py [--images 5000] [--out benchmarks/results/eval.json]

The data set is made up: 80 categories, 7.36 objects an image as in val2017, polygons and crowd RLEs, about 4.9
detections an object with the noise of a fair model. Our time is that of `evaluate_detections`, which checks its input;
pycocotools' is that of loading, evaluating, accumulating and summarizing. Neither counts the reading of JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import io
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cv2
import numpy as np

from machine import machine_facts
from maskfleet.evaluation.coco_eval import evaluate_detections
from maskfleet.rle import encode_window

OBJECTS_PER_IMAGE = 36781 / 5000
DETECTIONS_PER_IMAGE = 36
CATEGORY_IDS = [i for i in range(1, 91) if i not in (12, 26, 29, 30, 45, 66, 68, 69, 71, 83)]
FIELDS = (
    *("ap", "ap50", "ap75", "ap_small", "ap_medium", "ap_large"),
    *("ar1", "ar10", "ar100", "ar_small", "ar_medium", "ar_large"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "eval.json")
    options = parser.parse_args()
    truth, results = made_up(options.images, np.random.default_rng(options.seed))
    record: dict[str, Any] = {
        "what": "COCO AP, bbox + segm, one run each",
        "images": len(truth["images"]),
        "objects": len(truth["annotations"]),
        "detections": len(results),
        **machine_facts(),
    }
    print(json.dumps(record), flush=True)
    ours, record["maskfleet"] = timed(lambda: evaluate_detections(truth, results))
    print("maskfleet", record["maskfleet"], flush=True)
    own = copy.deepcopy(results)  # pycocotools writes into what it is given
    theirs, record["pycocotools"] = timed(lambda: oracle(truth, own))
    print("pycocotools", record["pycocotools"], flush=True)
    for clock in ("cpu_s", "wall_s"):
        record[f"ratio_{clock}"] = round(record["pycocotools"][clock] / record["maskfleet"][clock], 1)
    values = {kind: [getattr(score, field) for field in FIELDS] for kind, score in ours.items()}
    record["max_difference"] = max(float(np.abs(np.subtract(values[kind], theirs[kind])).max()) for kind in values)
    record["ap"] = {kind: {"maskfleet": values[kind][0], "pycocotools": theirs[kind][0]} for kind in values}
    options.out.write_text(json.dumps(record, indent=2) + "\n")
    print(json.dumps(record, indent=2))


def timed(work: Callable[[], Any]) -> tuple[Any, dict[str, float]]:
    """What `work` returns, and the seconds it took: of the wall, and of all threads of this process."""
    wall, cpu = time.perf_counter(), time.process_time()
    outcome = work()
    return outcome, {
        "wall_s": round(time.perf_counter() - wall, 3),
        "cpu_s": round(time.process_time() - cpu, 3),
    }


def oracle(truth: dict[str, Any], results: list[dict[str, Any]]) -> dict[str, list[float]]:
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    stats = {}
    with contextlib.redirect_stdout(io.StringIO()):
        coco = COCO()
        coco.dataset = truth
        coco.createIndex()
        found = coco.loadRes(results)
        for kind in ("bbox", "segm"):
            evaluation = COCOeval(coco, found, kind)
            evaluation.evaluate()
            evaluation.accumulate()
            evaluation.summarize()
            stats[kind] = evaluation.stats.tolist()
    return stats


def made_up(num_images: int, rng: np.random.Generator) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """A COCO annotation file and a list of results."""
    images: list[dict[str, Any]] = []
    annotations: list[dict[str, Any]] = []
    results: list[dict[str, Any]] = []
    popularity = 1 / np.arange(1, 81) ** 0.8
    popularity /= popularity.sum()
    for image_id in np.sort(rng.choice(600_000, num_images, replace=False)).tolist():
        height, width = (480, 640) if rng.random() < 0.7 else (640, 480)
        images.append({"id": image_id, "file_name": f"{image_id:012d}.jpg", "height": height, "width": width})
        boxes, categories = [], rng.choice(CATEGORY_IDS, int(rng.poisson(OBJECTS_PER_IMAGE)), p=popularity)
        for category_id in categories.tolist():
            box = random_box(rng, height, width)
            boxes.append(box)
            crowd = int(rng.random() < 0.012)
            annotations.append(
                {
                    **{"id": len(annotations) + 1, "image_id": image_id, "category_id": category_id},
                    **{"bbox": box, "iscrowd": crowd, "area": box[2] * box[3] * 0.7},
                    "segmentation": mask(box, height, width) if crowd else [outline(rng, box)],
                }
            )
        results += detections(rng, image_id, boxes, categories.tolist(), height, width)
    categories_listed = [{"id": i, "name": f"category {i}"} for i in CATEGORY_IDS]
    return {"images": images, "annotations": annotations, "categories": categories_listed}, results


def detections(
    rng: np.random.Generator, image_id: int, boxes: list[list[float]], categories: list[int], height: int, width: int
) -> list[dict[str, Any]]:
    """Two or so near hits of each object, of falling quality, and false hits up to the usual number."""
    found = []
    for box, category_id in zip(boxes, categories, strict=True):
        for noise in (0.06, 0.15, 0.3)[: rng.integers(1, 4)]:
            score = float(np.clip(rng.beta(4, 2) - noise, 0.01, 1))
            found.append((jittered(rng, box, noise, height, width), category_id, score))
    for _ in range(int(rng.poisson(DETECTIONS_PER_IMAGE)) - len(found)):
        found.append((random_box(rng, height, width), int(rng.choice(CATEGORY_IDS)), float(rng.beta(1, 6))))
    return [
        {
            **{"image_id": image_id, "category_id": category_id, "bbox": box, "score": round(score, 4)},
            "segmentation": mask(box, height, width),
        }
        for box, category_id, score in found
    ]


def random_box(rng: np.random.Generator, height: int, width: int) -> list[float]:
    side = np.exp(rng.uniform(np.log(8), np.log(400)))
    aspect = np.exp(rng.normal(0, 0.4))
    w, h = min(side * aspect, width - 2.0), min(side / aspect, height - 2.0)
    return [round(float(v), 2) for v in (rng.uniform(0, width - w), rng.uniform(0, height - h), w, h)]


def jittered(rng: np.random.Generator, box: list[float], noise: float, height: int, width: int) -> list[float]:
    x, y, w, h = np.array(box) + rng.normal(0, noise / 2, 4) * np.array(box[2:] * 2)
    x, y = float(np.clip(x, 0, width - 3)), float(np.clip(y, 0, height - 3))
    return [round(v, 3) for v in (x, y, float(np.clip(w, 2, width - x)), float(np.clip(h, 2, height - y)))]


def mask(box: list[float], height: int, width: int) -> Any:
    """The RLE of the ellipse in an xywh box."""
    x0, y0 = int(box[0]), int(box[1])
    window = np.zeros((int(box[3]) + 1, int(box[2]) + 1), np.uint8)
    centre = (window.shape[1] // 2, window.shape[0] // 2)
    cv2.ellipse(window, centre, centre, 0, 0, 360, 1, -1)
    return encode_window(y0, x0, window.astype(bool), height, width)


def outline(rng: np.random.Generator, box: list[float]) -> list[float]:
    """A wobbling polygon of about 25 points in an xywh box."""
    x, y, w, h = box
    angle = np.linspace(0, 2 * np.pi, int(rng.integers(12, 40)), endpoint=False)
    radius = rng.uniform(0.85, 1.0, len(angle))
    points = np.stack([x + w / 2 * (1 + radius * np.cos(angle)), y + h / 2 * (1 + radius * np.sin(angle))], axis=1)
    return points.ravel().round(2).tolist()


if __name__ == "__main__":
    main()
