"""A data set in another format, before it is written as COCO, and the functions that its readers share.

Shapes: n points of a polygon, H x W a mask.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hotcoco.mask as coco_mask
import numpy as np
import numpy.typing as npt

from maskfleet.data.image_formats import ImageFileError
from maskfleet.data.image_header import read_image_header
from maskfleet.errors import DataError
from maskfleet.log import count_text

SPLITS = ("train", "val", "test")
MAX_FAULTS_LISTED = 10
MAX_POSITION_PX = 1e9  # no image is so large
IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".tif", ".tiff")

ReadProgress = Callable[[int, int], None]
Annotation = dict[str, Any]  # a COCO annotation without "id" and "image_id"


@dataclass(frozen=True, slots=True)
class SourceImage:
    """An image and its annotations; the image file is at `path`, or `content` returns its bytes."""

    path: Path
    name: str  # in the converted set: a relative path with forward slashes
    width: int
    height: int
    annotations: list[Annotation]
    content: Callable[[], bytes] | None = None


@dataclass(frozen=True, slots=True)
class SourceSet:
    """All splits of the source; category ids of its annotations count from 1 in the order of `categories`."""

    splits: dict[str, list[SourceImage]]
    categories: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def num_images(self) -> int:
        return sum(len(images) for images in self.splits.values())


class FaultError(ValueError):
    """Something in a source file that cannot be converted; the message says what."""


@contextmanager
def collected(faults: list[str], where: str = "") -> Iterator[None]:
    """Add a FaultError of the block to `faults`, after `where`, and continue."""
    try:
        yield
    except FaultError as error:
        faults.append(f"{where}{error}")


def raise_faults(faults: Sequence[str], remedy: str) -> None:
    """Raise one DataError that lists all faults, if there are any."""
    if not faults:
        return
    lines = [
        f"{count_text(len(faults), 'fault')} in the data set to convert",
        *faults[:MAX_FAULTS_LISTED],
    ]
    if len(faults) > MAX_FAULTS_LISTED:
        lines.append(f"and {len(faults) - MAX_FAULTS_LISTED} more")
    raise DataError("\n    ".join(lines), remedy=remedy)


def is_there(path: Path) -> bool:
    """Whether there is a file or folder of this name; not if no file can have it, since it is too long, say."""
    try:
        return path.exists()
    except OSError:
        return False


def are_positions(values: Iterable[float]) -> bool:
    """Whether all `values` are finite and could be pixels of an image."""
    return all(-MAX_POSITION_PX <= value <= MAX_POSITION_PX for value in values)


def image_size(path: Path) -> tuple[int, int]:
    """(width, height) of an image file; FaultError if it cannot be read."""
    try:
        header = read_image_header(path)
    except (ImageFileError, OSError) as error:
        raise FaultError(f"{path}: the image cannot be read: {error}") from None
    return header.width, header.height


def box_annotation(category_id: int, box: Sequence[float]) -> Annotation:
    """A box [x, y, width, height] without an outline."""
    x, y, width, height = (round(float(side), 3) for side in box)
    return {"category_id": category_id, "bbox": [x, y, width, height], "area": width * height, "iscrowd": 0}


def polygon_annotation(category_id: int, parts: Sequence[npt.NDArray[np.float64]], size: tuple[int, int]) -> Annotation:
    """An outline of parts [n, 2] in an image of (width, height); its area is its number of pixels, as in COCO."""
    corners = np.concatenate(parts)
    low, high = corners.min(axis=0), corners.max(axis=0)
    polygons = [np.round(part, 2).ravel().tolist() for part in parts]
    mask = coco_mask.merge(coco_mask.frPyObjects(polygons, size[1], size[0]))
    box = box_annotation(category_id, [*low, *(high - low)])
    return {**box, "area": float(coco_mask.area(mask)), "segmentation": polygons}


def mask_annotation(category_id: int, mask: npt.NDArray[np.uint8]) -> Annotation:
    """An outline as a bitmap [H, W] of the whole image."""
    rle = coco_mask.encode(np.asfortranarray(mask))
    box = box_annotation(category_id, coco_mask.toBbox(rle).tolist())
    text = rle["counts"].decode("ascii")
    segmentation = {"size": [mask.shape[0], mask.shape[1]], "counts": text}
    return {**box, "area": float(coco_mask.area(rle)), "segmentation": segmentation}


def unique_names(paths: Sequence[Path], folders: Sequence[Path]) -> list[str]:
    """A name for each file: its path in its folder, with a number if two folders have the same path."""
    chosen: dict[str, None] = {}
    for path, folder in zip(paths, folders, strict=True):
        name = path.relative_to(folder).as_posix() if path.is_relative_to(folder) else path.name
        free = (f"{number}/{name}" if number > 1 else name for number in itertools.count(1))
        chosen[next(found for found in free if found not in chosen)] = None
    return list(chosen)
