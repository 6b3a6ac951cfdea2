"""A generated data set with COCO's sizes: folders, image sizes, bytes per file, objects per image, 80 categories.

    python benchmarks/coco_like.py FOLDER [--images 30000] [--val-images 5000] [--distinct 1500]

Draws `--distinct` images, a fifth of them for validation, and hard-links each under several names, so the files of a
real set of this size would not fit the page cache as these do. Image sizes are those of 160 images of COCO 2017 (80 of
train2017, 80 of val2017). COCO has 7.3 objects per training image with a median of 4, so the number of objects is
uniform up to a maximum that differs from image to image. Prints what it made as JSON.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from maskfleet.data.synthetic.dataset import make_shapes

Record = dict[str, Any]
NUM_CATEGORIES = 80
KINDS = 4  # circle, square, triangle, star: polygons; the others have holes
MAX_OBJECTS = (3, 4, 6, 9, 16, 50)  # equally frequent; the smallest of these images cannot hold 50
IMAGES_PER_TASK = 5
QUALITY = 99  # gives about as many bytes per file as train2017 has: 163 KB on average
# width, height: images
SIZES = {
    (640, 480): 34, (640, 427): 21, (480, 640): 17, (640, 426): 10, (500, 375): 6, (640, 428): 6, (500, 333): 4,
    (640, 424): 3, (426, 640): 3, (427, 640): 2, (500, 374): 2, (640, 425): 2, (640, 429): 2, (640, 449): 2,
    (428, 640): 2, (425, 640): 2, (640, 433): 1, (640, 512): 1, (500, 346): 1, (640, 421): 1, (640, 498): 1,
    (640, 483): 1, (640, 383): 1, (359, 640): 1, (640, 409): 1, (640, 484): 1, (640, 359): 1, (449, 640): 1,
    (213, 140): 1, (640, 420): 1, (333, 500): 1, (640, 489): 1, (389, 500): 1, (448, 336): 1, (400, 302): 1,
    (450, 600): 1, (600, 593): 1, (640, 482): 1, (640, 418): 1, (640, 478): 1, (469, 469): 1, (640, 457): 1,
    (500, 486): 1, (500, 332): 1, (358, 640): 1, (640, 368): 1, (500, 357): 1, (640, 444): 1, (478, 640): 1,
    (640, 320): 1, (500, 334): 1, (640, 464): 1, (460, 640): 1, (640, 479): 1, (320, 240): 1, (500, 370): 1,
    (375, 500): 1, (614, 461): 1,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Task:
    """A few images of one size."""

    folder: Path
    num_images: int
    size: tuple[int, int]  # width, height
    max_objects: int
    seed: int


@dataclass(frozen=True, slots=True)
class Drawn:
    """An image on the disk, and the JSON text of its annotations, each without the brace and the ids it begins with."""

    path: Path
    size: tuple[int, int]
    annotations: tuple[str, ...]


def make_coco_like(root: Path, *, num_train: int, num_val: int, distinct: int, processes: int) -> Record:
    """Write train2017, val2017 and their annotations under `root`; returns what they are like."""
    distinct_val = min(num_val, max(1, distinct // 5))
    distinct_train = min(num_train, max(1, distinct - distinct_val))
    started_at = time.monotonic()
    (root / "annotations").mkdir(parents=True)
    with tempfile.TemporaryDirectory(dir=root) as folder:
        drawn = _all_drawn(_tasks(Path(folder), distinct_train + distinct_val), processes)
        facts = {
            "train": _write_split(root, "train2017", drawn[:distinct_train], num_train),
            "val": _write_split(root, "val2017", drawn[distinct_train:], num_val),
        }
    return {"seconds": round(time.monotonic() - started_at, 1), **facts}


def _tasks(folder: Path, num_images: int) -> Iterator[Task]:
    rng = random.Random(0)
    sizes, weights = [*SIZES], [*SIZES.values()]
    for number, start in enumerate(range(0, num_images, IMAGES_PER_TASK)):
        [size] = rng.choices(sizes, weights)
        count = min(IMAGES_PER_TASK, num_images - start)
        yield Task(folder / str(number), count, size, MAX_OBJECTS[number % len(MAX_OBJECTS)], number)


def _all_drawn(tasks: Iterator[Task], processes: int) -> list[Drawn]:
    """The images of all tasks, in random order."""
    with ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        drawn = [image for images in pool.map(_drawn, tasks) for image in images]
    random.Random(0).shuffle(drawn)
    return drawn


def _drawn(task: Task) -> list[Drawn]:
    """Draw the images of `task`."""
    width, height = task.size
    make_shapes(
        task.folder, num_train=task.num_images, num_val=0, height=height, width=width, seed=task.seed,
        num_categories=KINDS, max_objects=task.max_objects, crowd_fraction=0.01, quality=QUALITY,
    )  # fmt: skip
    document = json.loads((task.folder / "annotations" / "instances_train.json").read_text())
    rng = random.Random(task.seed)
    texts: dict[int, list[str]] = {image["id"]: [] for image in document["images"]}
    for one in document["annotations"]:
        if isinstance(one["segmentation"], list) or one["iscrowd"]:  # COCO has run-length masks for crowds only
            del one["id"]
            rest = one | {"category_id": rng.randint(1, NUM_CATEGORIES)}
            texts[rest.pop("image_id")].append(json.dumps(rest, separators=(",", ":"))[1:])
    return [
        Drawn(task.folder / "train" / image["file_name"], task.size, tuple(texts[image["id"]]))
        for image in document["images"]
    ]


def _write_split(root: Path, split: str, drawn: Sequence[Drawn], num_images: int) -> Record:
    """List the images of `drawn` again and again, up to `num_images`; returns what the split is like."""
    (root / split).mkdir()
    images: list[Record] = []
    annotations: list[str] = []
    for number in range(1, num_images + 1):
        one, name = drawn[(number - 1) % len(drawn)], f"{number:012d}.jpg"
        os.link(one.path, root / split / name)
        images.append({"id": number, "file_name": name, "width": one.size[0], "height": one.size[1]})
        annotations += [
            f'{{"id":{len(annotations) + index},"image_id":{number},{text}'
            for index, text in enumerate(one.annotations, start=1)
        ]
    categories = [{"id": number, "name": f"kind {number}"} for number in range(1, NUM_CATEGORIES + 1)]
    # Assembled as text: encoding the polygons of each copy again would take longer than drawing them.
    document = (
        f'{{"info":{{}},"categories":{json.dumps(categories)},"images":{json.dumps(images)},'
        f'"annotations":[{",".join(annotations)}]}}'
    )
    (root / "annotations" / f"instances_{split}.json").write_text(document)
    counts = sorted(len(one.annotations) for one in drawn)
    return {
        "images": num_images,
        "distinct_images": len(drawn),
        "objects_per_image": round(len(annotations) / num_images, 2),
        "objects_per_image_median": statistics.median(counts),
        "objects_per_image_most": counts[-1],
        "portrait": round(statistics.mean(one.size[0] < one.size[1] for one in drawn), 3),
        "kb_per_file": round(statistics.mean((root / split / one["file_name"]).stat().st_size for one in images) / 1e3),
        "annotation_mb": round(len(document) / 1e6, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--images", type=int, default=30_000)
    parser.add_argument("--val-images", type=int, default=5_000)
    parser.add_argument("--distinct", type=int, default=1_500)
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    given = parser.parse_args()
    facts = make_coco_like(
        given.folder,
        num_train=given.images,
        num_val=given.val_images,
        distinct=given.distinct,
        processes=given.processes,
    )
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
