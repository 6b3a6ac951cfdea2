"""A small COCO on disk, made of shapes: for the demo, the tests and the benchmarks."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import cv2
import hotcoco.mask as coco_mask
import numpy as np
import numpy.typing as npt

from maskfleet.data.synthetic.shapes import FINE, KINDS, Scene, draw_scene, visible_cells, visible_pixels
from maskfleet.errors import ConfigError, DataError
from maskfleet.rle import window_runs
from maskfleet.system.files import building_folder, set_aside

SPLITS = ("train", "val")
CATEGORY_IDS = (1, 2, 4, 7, 8, 11, 13, 17, 18, 21)  # gaps, as COCO's own ids have
SPEC_FILE = "shapes.json"
RECIPE_VERSION = 1  # increase it when the same seed would give other images
SIMPLIFY_CELLS = 1.2  # largest distance, in quarter pixels, between a polygon and the outline
MIN_PART_CELLS = 4 * FINE * FINE  # smaller parts and holes are not annotated
OUR_FILES = re.compile(
    rf"(\.maskfleet|annotations|{'|'.join(SPLITS)}|{re.escape(SPEC_FILE)}"
    rf"|annotations/instances_({'|'.join(SPLITS)})\.json|annotations/\.maskfleet(/.*)?"
    rf"|({'|'.join(SPLITS)})/\d{{12}}\.jpg)"
)

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class ShapesSpec:
    """Everything that determines the images; equal specs give equal bytes."""

    num_train: int
    num_val: int
    height: tuple[int, int]  # pixels, inclusive range
    width: tuple[int, int]
    seed: int
    num_categories: int
    max_objects: int
    crowd_fraction: float
    quality: int


def make_shapes(
    root: Path,
    *,
    num_train: int = 200,
    num_val: int = 50,
    height: int | tuple[int, int] = (192, 288),
    width: int | tuple[int, int] = (192, 288),
    seed: int = 0,
    num_categories: int = 6,
    max_objects: int = 8,
    crowd_fraction: float = 0.05,
    quality: int = 90,
    workers: int = 1,
    progress: Progress | None = None,
) -> None:
    """Write splits `train` and `val` of generated images under `root`, in COCO's layout.

    Sides are in pixels, one value or an inclusive range. `crowd_fraction` of the images also have a crowd region. The
    folder is written completely or not at all; one with the same values is kept as it is.
    `progress` is called with (images done, images in total).
    """
    heights, widths = (side if isinstance(side, tuple) else (side, side) for side in (height, width))
    spec = ShapesSpec(num_train, num_val, heights, widths, seed, num_categories, max_objects, crowd_fraction, quality)
    _check(spec)
    root = Path(root)
    if _is_made(root, spec):
        return
    with building_folder(root) as building:
        _write_splits(building, spec, workers, progress or (lambda done, total: None))
        (building / SPEC_FILE).write_text(_described(spec))


@contextmanager
def replacing_shapes(root: Path) -> Iterator[None]:
    """Set an old folder of shapes aside while a new one is made; it comes back if that fails.

    DataError if the folder is no such set, or holds a file that making shapes did not write.
    """
    if _is_new(root):
        yield
        return
    _expect_ours(root)
    with set_aside(root):
        yield


def _check(spec: ShapesSpec) -> None:
    limits = {
        "num_train": (spec.num_train, 0, 10_000_000),
        "num_val": (spec.num_val, 0, 10_000_000),
        "height": (spec.height[0], 32, 8192),
        "largest height": (spec.height[1], spec.height[0], 8192),
        "width": (spec.width[0], 32, 8192),
        "largest width": (spec.width[1], spec.width[0], 8192),
        "seed": (spec.seed, 0, 2**63),
        "num_categories": (spec.num_categories, 1, len(KINDS)),
        "max_objects": (spec.max_objects, 1, 1000),
        "crowd_fraction": (spec.crowd_fraction, 0, 1),
        "quality": (spec.quality, 1, 100),
    }
    for name, (value, low, high) in limits.items():
        if not low <= value <= high:
            raise ConfigError(f"{name} of the shapes is {value}", remedy=f"give a value from {low} to {high}")


def _described(spec: ShapesSpec) -> str:
    return json.dumps({"recipe": RECIPE_VERSION, **dataclasses.asdict(spec)}, indent=2) + "\n"


def _is_new(root: Path) -> bool:
    return not root.exists() or (root.is_dir() and not any(root.iterdir()))


def _is_made(root: Path, spec: ShapesSpec) -> bool:
    """Whether `root` already holds this data set; DataError if it holds anything else."""
    if _is_new(root):
        return False
    made = root / SPEC_FILE
    if made.is_file() and made.read_text() == _described(spec):
        return True
    what = "shapes generated with other values" if made.is_file() else "something else"
    raise DataError(f"{root} already holds {what}", remedy="choose a new folder, or delete that one first")


def _expect_ours(root: Path) -> None:
    if not _is_shapes_spec(root / SPEC_FILE):
        raise DataError(
            f"{root} does not contain generated shapes, and --force replaces nothing else",
            remedy="choose a new folder",
        )
    unknown = [path for path in sorted(root.rglob("*")) if not OUR_FILES.fullmatch(path.relative_to(root).as_posix())]
    if unknown:
        raise DataError(
            f"{root} contains files that were not generated, such as {unknown[0]}",
            remedy="move them elsewhere, or choose a new folder: --force deletes nothing but generated shapes",
        )


def _is_shapes_spec(path: Path) -> bool:
    """Whether the file is the spec that `make_shapes` writes."""
    try:
        spec = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return False
    return isinstance(spec, dict) and {"recipe", "seed", "num_train", "num_val"} <= spec.keys()


def _write_splits(root: Path, spec: ShapesSpec, workers: int, progress: Progress) -> None:
    (root / "annotations").mkdir()
    total, done = spec.num_train + spec.num_val, 0
    kinds = KINDS[: spec.num_categories]
    categories = [
        {"id": identity, "name": kind, "supercategory": "shape"}
        for identity, kind in zip(CATEGORY_IDS, kinds, strict=False)
    ]
    for split, count in zip(SPLITS, (spec.num_train, spec.num_val), strict=True):
        (root / split).mkdir()
        images: list[dict[str, Any]] = []
        annotations: list[dict[str, Any]] = []
        for image, of_image in _generated_images(partial(_make_image, root, spec, split), count, workers):
            images.append(image)
            annotations += [{"id": len(annotations) + n, **record} for n, record in enumerate(of_image, 1)]
            done += 1
            progress(done, total)
        info = {"description": f"maskfleet shapes, seed {spec.seed}, {split}"}
        tree = {"info": info, "images": images, "annotations": annotations, "categories": categories}
        path = root / "annotations" / f"instances_{split}.json"
        path.write_text(json.dumps(tree, separators=(",", ":")))


Drawn = tuple[dict[str, Any], list[dict[str, Any]]]


def _generated_images(make: Callable[[int], Drawn], count: int, workers: int) -> Iterator[Drawn]:
    if workers <= 1 or count < 2:
        yield from map(make, range(count))
        return
    # spawn: a forked child of a process with torch or OpenCV threads can deadlock
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(workers, count), mp_context=context) as pool:
        yield from pool.map(make, range(count), chunksize=max(1, min(32, count // workers)))


def _make_image(root: Path, spec: ShapesSpec, split: str, index: int) -> Drawn:
    """Draw image `index` of a split and write it -> (image record, annotation records without ids)."""
    rng = np.random.default_rng([spec.seed, SPLITS.index(split), index])
    height = int(rng.integers(spec.height[0], spec.height[1] + 1))
    width = int(rng.integers(spec.width[0], spec.width[1] + 1))
    kinds = KINDS[: spec.num_categories]
    scene = draw_scene(rng, (height, width), kinds, max_objects=spec.max_objects, crowd_fraction=spec.crowd_fraction)
    identity = SPLITS.index(split) * 10_000_000 + index + 1
    name = f"{identity:012d}.jpg"
    pixels = np.round(scene.pixels * 255).astype(np.uint8)
    if not cv2.imwrite(str(root / split / name), pixels, [cv2.IMWRITE_JPEG_QUALITY, spec.quality]):
        raise DataError(f"{root / split / name} cannot be written", remedy="check the free disk space")
    image = {"id": identity, "file_name": name, "width": width, "height": height}
    numbers = range(1, len(scene.objects) + 1)
    return image, [_annotation(scene, number) | {"image_id": identity} for number in numbers]


def _annotation(scene: Scene, number: int) -> dict[str, Any]:
    """Category, outline, area and box of the visible part of object `number`."""
    drawn = scene.objects[number - 1]
    height, width = scene.pixels.shape[:2]
    polygons = None if drawn.is_crowd else _polygons(visible_cells(scene, number))
    if polygons is None:
        pixels = visible_pixels(scene, number)
        mask = coco_mask.encode(np.asfortranarray(pixels, np.uint8))
        # not compressed, as COCO's own file has it for crowds
        segmentation: Any = {"size": [height, width], "counts": window_runs(0, 0, pixels, height, width).tolist()}
        box = [float(side) for side in coco_mask.toBbox(mask)]
    else:
        mask = coco_mask.merge(coco_mask.frPyObjects(polygons, height, width))
        segmentation = polygons
        corners = np.concatenate([np.reshape(polygon, (-1, 2)) for polygon in polygons])
        low, high = corners.min(axis=0), corners.max(axis=0)
        box = [round(float(side), 2) for side in (*low, *(high - low))]
    return {
        "category_id": CATEGORY_IDS[KINDS.index(drawn.kind)],
        "segmentation": segmentation,
        "area": float(coco_mask.area(mask)),
        "bbox": box,
        "iscrowd": int(drawn.is_crowd),
    }


def _polygons(cells: npt.NDArray[np.uint8]) -> list[list[float]] | None:
    """Outlines of fine cells [4H, 4W] as flat numbers in pixels; None if a hole needs a run-length mask."""
    contours, tree = cv2.findContours(cells, cv2.RETR_CCOMP, cv2.CHAIN_APPROX_NONE)
    polygons: list[list[float]] = []
    largest = max(cv2.contourArea(contour) for contour in contours)
    for contour, (_, _, _, parent) in zip(contours, tree[0], strict=True):
        area = cv2.contourArea(contour)
        if area < min(MIN_PART_CELLS, largest):
            continue
        if parent >= 0:
            return None
        corners = np.asarray(cv2.approxPolyDP(contour, SIMPLIFY_CELLS, True)[:, 0], np.int64)
        points = np.round(_grown(corners, cells.shape) / FINE, 2).ravel()
        polygons.append([float(number) for number in points])
    return polygons


def _grown(corners: npt.NDArray[np.int64], shape: tuple[int, ...]) -> npt.NDArray[np.float64]:
    """Corners [n, 2], given as cells (x, y), as points: the centre of the cell, or the image border next to it."""
    last = np.array([shape[1], shape[0]]) - 1
    inset = np.where(corners == 0, 0.0, np.where(corners == last, 1.0, 0.5))
    return corners.astype(np.float64) + inset
