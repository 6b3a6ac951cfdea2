"""Time and memory for annotations of COCO's size: as a memory-mapped store, and as the objects of pycocotools.

    python benchmarks/store.py [--images 118287] [--annotations 860001] [--out benchmarks/results/store.json]

The annotation file is synthetic, as large as COCO's training file and with as many polygon points. Every figure comes
from a separate process, which has done its imports before the clock starts. Peak memory is the kernel's VmHWM.
Private memory is what no other process shares (Private_Clean + Private_Dirty of smaps_rollup); the workers run two at
a time, because pages that one process alone maps would count as private. pycocotools is a package of the `dev` extra.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import multiprocessing
import tempfile
import time
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import numpy as np

from machine import machine_facts
from maskfleet.data.checks.annotations import check_annotations
from maskfleet.data.store.annotations import AnnotationStore, images_with_objects, open_store
from maskfleet.data.store.splits import SplitPaths

MIB = 1024.0
NUM_WORKERS = 2
NUM_EPOCHS = 3
CATEGORY_IDS = [i for i in range(1, 91) if i not in (12, 26, 29, 30, 45, 66, 68, 69, 71, 83)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=118_287)
    parser.add_argument("--annotations", type=int, default=860_001)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "store.json")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="maskfleet-store-") as folder:
        path = Path(folder) / "instances_made.json"
        num_points = write_annotations(path, options.images, options.annotations, np.random.default_rng(options.seed))
        split = SplitPaths("made", path, Path(folder))
        record: dict[str, Any] = {
            "what": "annotations of COCO's size: a mapped store beside pycocotools' COCO()",
            "images": options.images,
            "annotations": options.annotations,
            "points": num_points,
            "json_mib": round(path.stat().st_size / MIB**2, 1),
            **machine_facts(),
        }
        for name, measure in (
            ("build", measure_build),
            ("reopen", measure_reopen),
            ("whole_set", measure_whole_set),
            ("pycocotools", measure_pycocotools),
        ):
            record[name] = in_own_process(measure, split)
            print(name, record[name], flush=True)
        record["worker"] = measure_workers(split)
        print("worker", record["worker"], flush=True)
    options.out.parent.mkdir(exist_ok=True)
    options.out.write_text(json.dumps(record, indent=2) + "\n")


def write_annotations(path: Path, num_images: int, num_annotations: int, rng: np.random.Generator) -> int:
    """Write a COCO file in pieces; returns how many points its polygons have."""
    total = 0
    with path.open("w") as file:
        images = [
            {"license": 3, "file_name": f"{n:012d}.jpg", "height": 480, "width": 640, "id": n}
            | {"coco_url": f"http://images.example.org/train2017/{n:012d}.jpg", "date_captured": "2013-11-14 11:18:45"}
            for n in range(1, num_images + 1)
        ]
        categories = [{"supercategory": "thing", "id": n, "name": f"thing {n}"} for n in CATEGORY_IDS]
        file.write(json.dumps({"info": {}, "images": images, "categories": categories})[:-1] + ', "annotations": [')
        for first in range(0, num_annotations, 10_000):
            count = min(10_000, num_annotations - first)
            block, points = annotation_block(first + 1, count, num_images, rng)
            file.write((", " if first else "") + ", ".join(block))
            total += points
        file.write("]}")
    return total


def annotation_block(first: int, count: int, num_images: int, rng: np.random.Generator) -> tuple[list[str], int]:
    """Annotations as JSON text: 1 % are crowds, a tenth of the others have two parts, points have two decimals."""
    texts, total = [], 0
    image_ids = rng.integers(1, num_images + 1, count)
    category_ids = rng.choice(CATEGORY_IDS, count)
    sizes = np.clip(rng.lognormal(np.log(19), 0.7, count), 4, 300).astype(int)
    for n in range(count):
        is_crowd = rng.random() < 0.01
        centre, radius = rng.uniform(60, 420, 2), np.exp(rng.uniform(1.5, 4.0))
        if is_crowd:
            runs = rng.multinomial(640 * 480, np.full(201, 1 / 201)).tolist()
            segmentation = json.dumps({"counts": runs, "size": [480, 640]})
        else:
            angle = np.sort(rng.uniform(0, 2 * np.pi, sizes[n]))
            points = centre + radius * np.stack([np.cos(angle), np.sin(angle)], axis=1)
            parts = np.array_split(points, 2) if sizes[n] >= 8 and rng.random() < 0.1 else [points]
            segmentation = json.dumps([np.round(part, 2).ravel().tolist() for part in parts])
            total += len(points)
        box = json.dumps([round(float(side), 2) for side in (*(centre - radius), 2 * radius, 2 * radius)])
        texts.append(
            f'{{"segmentation": {segmentation}, "area": {radius * radius * 3.14:.4f}, "iscrowd": {int(is_crowd)}, '
            f'"image_id": {image_ids[n]}, "bbox": {box}, "category_id": {category_ids[n]}, "id": {first + n}}}'
        )
    return texts, total


def in_own_process(measure: Any, split: SplitPaths) -> dict[str, Any]:
    context = multiprocessing.get_context("spawn")
    answers: Queue[dict[str, Any]] = context.Queue()
    process = context.Process(target=_answer, args=(measure, split, answers))
    process.start()
    answer = answers.get()
    process.join()
    return answer


def _answer(measure: Any, split: SplitPaths, answers: Queue[dict[str, Any]]) -> None:
    answers.put(measure(split))


def measure_build(split: SplitPaths) -> dict[str, Any]:
    before = time.perf_counter()
    store = open_store(split)
    seconds = time.perf_counter() - before
    size = store.path.stat().st_size / MIB**2
    return {"seconds": round(seconds, 2), "peak_mib": peak_mib(), "store_mib": round(size, 1)}


def measure_reopen(split: SplitPaths) -> dict[str, Any]:
    before, private = time.perf_counter(), private_mib()
    store = open_store(split)
    store.image(len(store) // 2)
    store.instances(len(store) // 2)
    seconds = time.perf_counter() - before
    return {"seconds": round(seconds, 4), "private_mib": private_mib(), "private_before_mib": private}


def measure_whole_set(split: SplitPaths) -> dict[str, Any]:
    """What rank 0 of a run does once with all annotations."""
    store = open_store(split)
    before = time.perf_counter()
    num_images = len(images_with_objects(store))
    found_at = time.perf_counter()
    num_problems = len(check_annotations(store))
    checked_at = time.perf_counter()
    return {
        "images_with_objects_seconds": round(found_at - before, 3),
        "images_with_objects": num_images,
        "check_annotations_seconds": round(checked_at - found_at, 2),
        "problems": num_problems,
        "peak_mib": peak_mib(),
    }


def measure_pycocotools(split: SplitPaths) -> dict[str, Any]:
    from pycocotools.coco import COCO

    private = private_mib()
    before = time.perf_counter()
    with contextlib.redirect_stdout(io.StringIO()):
        coco = COCO(str(split.annotations))
    seconds = time.perf_counter() - before
    return {
        "seconds": round(seconds, 2),
        "peak_mib": peak_mib(),
        "private_mib": private_mib(),
        "private_before_mib": private,
        "annotations": len(coco.anns),
    }


def measure_workers(split: SplitPaths) -> dict[str, Any]:
    """Two workers, each with the store, read every outline of every image in random order, three times."""
    context = multiprocessing.get_context("spawn")
    answers: Queue[dict[str, Any]] = context.Queue()
    barrier = context.Barrier(NUM_WORKERS)
    store = open_store(split)
    workers = [context.Process(target=_read_all, args=(store, seed, barrier, answers)) for seed in range(NUM_WORKERS)]
    for worker in workers:
        worker.start()
    results = [answers.get() for _ in workers]
    for worker in workers:
        worker.join()
    return max(results, key=lambda result: max(result["private_mib_after_epoch"]))


def _read_all(store: AnnotationStore, seed: int, barrier: Barrier, answers: Queue[dict[str, Any]]) -> None:
    private, resident, seconds, num_points = [], [], [], 0
    order = np.random.default_rng(seed)
    for _ in range(NUM_EPOCHS):
        before = time.perf_counter()
        for index in order.permutation(len(store)):
            instances = store.instances(int(index))
            for number in range(len(instances)):
                num_points += sum(len(part) for part in instances.polygons(number) if part[0, 0] < np.inf)
        seconds.append(round(time.perf_counter() - before, 2))
        barrier.wait()  # the other still maps the pages while this one is measured
        private.append(private_mib())
        resident.append(_kib("/proc/self/smaps_rollup", "Rss:"))
        barrier.wait()
    answers.put(
        {
            "workers_at_once": NUM_WORKERS,
            "epoch_seconds": seconds,
            "private_mib_after_epoch": private,
            "rss_mib_after_epoch": resident,
            "points_read": num_points,
        }
    )


def private_mib() -> float:
    clean, dirty = (_kib("/proc/self/smaps_rollup", f"Private_{state}:") for state in ("Clean", "Dirty"))
    return round(clean + dirty, 1)


def peak_mib() -> float:
    return _kib("/proc/self/status", "VmHWM:")


def _kib(path: str, key: str) -> float:
    """The value of a line such as `Rss:  1234 kB` in a /proc file, in MiB."""
    lines = [line for line in Path(path).read_text().splitlines() if line.startswith(key)]
    return round(int(lines[0].split()[1]) / MIB, 1)


if __name__ == "__main__":
    main()
