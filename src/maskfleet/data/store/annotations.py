"""The annotations of a split as flat columns in one memory-mapped file, shared by all ranks and workers.

Shapes: I images by ascending id, A annotations grouped by image, N annotations of one image, P polygon parts,
V numbers of all polygons, R run-length masks. Polygon numbers and boxes are float64 as in the JSON: rounding to
float32 moves points on pixel borders, and the masks would differ.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from maskfleet.data.files.stored import ImageFolder, ImagePath, StoredFolder, leads_out_of
from maskfleet.data.image_header import MAX_IMAGE_MPX
from maskfleet.data.store.build import built_store
from maskfleet.data.store.coco import KIND_POLYGONS, KIND_RLE
from maskfleet.data.store.columns import DamagedFileError, map_columns
from maskfleet.data.store.splits import SplitPaths
from maskfleet.errors import DataError

Bools = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

MIN_POLYGON_NUMBERS = 6


@dataclass(frozen=True, slots=True)
class Category:
    """A category of the annotation file; labels count from 1 in the order of the ids."""

    id: int
    name: str
    label: int


@dataclass(frozen=True, slots=True)
class ImageRules:
    """Which image files may be read: up to how many million pixels, and whether outside the image folder."""

    max_mpx: float = MAX_IMAGE_MPX
    allow_outside: bool = False


@dataclass(frozen=True, slots=True)
class ImageRecord:
    """An image as the annotation file describes it."""

    id: int
    path: ImagePath
    width: int
    height: int
    max_mpx: float = MAX_IMAGE_MPX
    is_outside: bool = False  # its name leads out of the image folder, and that is not allowed


@dataclass(frozen=True, slots=True, eq=False)
class InstanceArrays:
    """Annotations of one image; polygons and run-length masks are read from the store on demand."""

    ids: Ints  # [N]
    owner: Ints  # [N] index of the image; the number of images for an image that the file does not list
    boxes: Floats  # [N, 4] xyxy, as in the file, not clipped
    labels: Ints  # [N] 1..num_categories; 0 for a category that the file does not define
    area: Floats  # [N]
    crowd: Bools  # [N]
    ignore: Bools  # [N]
    kind: npt.NDArray[np.uint8]  # [N] coco.KIND_*
    rows: Ints  # [N] rows of the store
    store: AnnotationStore

    def __len__(self) -> int:
        return len(self.ids)

    def polygons(self, index: int) -> list[Floats]:
        """Outline of instance `index` as parts [n, 2], (x, y) views; parts with fewer than three points are skipped."""
        return self.store.polygons(int(self.rows[index])) if self.kind[index] == KIND_POLYGONS else []

    def rle(self, index: int) -> dict[str, Any] | None:
        """Mask of instance `index` as pycocotools writes it, {"size": [h, w], "counts": bytes}; None if it has none."""
        return self.store.rle(int(self.rows[index])) if self.kind[index] == KIND_RLE else None

    def select(self, which: npt.NDArray[Any]) -> InstanceArrays:
        """The instances selected by `which`, a mask or indices."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return InstanceArrays(**{name: value if name == "store" else value[which] for name, value in fields.items()})

    @property
    def objects(self) -> InstanceArrays:
        """The instances that are not crowd regions."""
        return self.select(~self.crowd)

    @property
    def crowds(self) -> InstanceArrays:
        """The instances that are crowd regions."""
        return self.select(self.crowd)


def open_store(
    split: SplitPaths,
    *,
    cache_dir: Path | None = None,
    rules: ImageRules = ImageRules(),  # noqa: B008 - it is frozen
) -> AnnotationStore:
    """The annotation store of `split`, built on first use.

    It is stored next to the annotation file or, if that folder is not writable, in the user's cache folder;
    `cache_dir` replaces both.
    """
    return AnnotationStore(built_store(split.annotations, cache_dir), split, rules)


class AnnotationStore:
    """A split's images and annotations, memory-mapped; pickling sends only the path. Use `open_store`."""

    def __init__(self, path: Path, split: SplitPaths, rules: ImageRules) -> None:
        self.path = path
        self.split = split
        self.rules = rules
        try:
            self.columns, meta = map_columns(path)
        except (OSError, DamagedFileError) as error:
            raise DataError(
                f"the annotation store {path} cannot be read: {error}", remedy="delete it; it will be built again"
            ) from error
        self.source_categories: tuple[tuple[int, str], ...] = tuple((int(i), n) for i, n in meta["categories"])
        self.source_sha256: str = meta["sha256"]
        self.image_ids: Ints = self.columns["image_id"]  # [I] ascending
        self.widths: Ints = self.columns["image_width"]  # [I] in pixels
        self.heights: Ints = self.columns["image_height"]  # [I] in pixels
        self.num_instances: Ints = self.columns["image_annotations"]  # [I] including crowds and invalid ones
        self.num_annotations = len(self.columns["ann_id"])  # of the file, including those of unknown images
        self._image_ends = np.cumsum(self.num_instances)  # [I] row after the last annotation of each image

    def __reduce__(self) -> tuple[type[AnnotationStore], tuple[Path, SplitPaths, ImageRules]]:
        return AnnotationStore, (self.path, self.split, self.rules)

    def __len__(self) -> int:
        return len(self.columns["image_id"])

    @cached_property
    def categories(self) -> tuple[Category, ...]:
        """The file's categories by ascending id; the first one is used if an id is defined twice."""
        names: dict[int, str] = {}
        for identity, name in self.source_categories:
            names.setdefault(identity, name)
        return tuple(Category(identity, names[identity], label) for label, identity in enumerate(sorted(names), 1))

    def index_of(self, image_id: int) -> int:
        """Index of the image with this id; KeyError if there is none."""
        index = int(np.searchsorted(self.image_ids, image_id))
        if index == len(self) or self.image_ids[index] != image_id:
            raise KeyError(image_id)
        return index

    def image(self, index: int) -> ImageRecord:
        """Image `index` of 0..len - 1."""
        name = self.image_name(index)
        size, rules = (int(self.widths[index]), int(self.heights[index])), self.rules
        is_outside = not rules.allow_outside and leads_out(name, self.split.images)
        return ImageRecord(int(self.image_ids[index]), self.split.images / name, *size, rules.max_mpx, is_outside)

    def image_name(self, index: int) -> str:
        """The name of image `index`, relative to the image folder."""
        start, stop = self.columns["image_name_start"][index : index + 2].tolist()
        return self.columns["image_names"][start:stop].tobytes().decode("utf-8", "surrogatepass")

    def outside(self) -> Iterator[ImageRecord]:
        """The images whose names lead out of the image folder, unless that is allowed."""
        names = self.columns["image_names"].tobytes()
        if b".." not in names and b"/" not in names:  # as in COCO: no need to look at each one
            return
        yield from (record for record in map(self.image, range(len(self))) if record.is_outside)

    def owner(self, rows: npt.ArrayLike) -> Ints:
        """Index of the image of each annotation in `rows`; len(self) for an image that the file does not list."""
        return np.searchsorted(self._image_ends, rows, side="right")

    def instances(self, index: int) -> InstanceArrays:
        """All annotations of image `index`, in file order, as the file has them."""
        start = int(self.columns["image_first"][index])
        return self.annotations(start, start + int(self.num_instances[index]))

    def annotations(self, start: int, stop: int) -> InstanceArrays:
        """Rows `start` to `stop` of the annotations; those after the last image's belong to unknown images."""
        rows = np.arange(start, stop)
        names = ("id", "label", "area", "crowd", "ignore", "kind")
        ids, labels, area, crowd, ignore, kind = (self.columns[f"ann_{name}"][start:stop] for name in names)
        corner, size = np.hsplit(self.columns["ann_box_xywh"][start:stop], 2)
        boxes = np.hstack([corner, corner + size])
        return InstanceArrays(ids, self.owner(rows), boxes, labels, area, crowd, ignore, kind, rows, store=self)

    def polygons(self, row: int) -> list[Floats]:
        """Polygon parts [n, 2] of the annotation in `row`, of three points or more."""
        first, count = int(self.columns["ann_first_part"][row]), int(self.columns["ann_parts"][row])
        starts = self.columns["part_start"][first : first + count + 1].tolist()
        points = self.columns["points"]
        return [
            points[start:stop].reshape(-1, 2)
            for start, stop in itertools.pairwise(starts)
            if stop - start >= MIN_POLYGON_NUMBERS and (stop - start) % 2 == 0
        ]

    def rle(self, row: int) -> dict[str, Any]:
        """Run-length mask of the annotation in `row`, in the form of pycocotools."""
        index = int(self.columns["ann_first_part"][row])
        start, stop = self.columns["rle_start"][index : index + 2].tolist()
        height, width = self.columns["rle_height"][index], self.columns["rle_width"][index]
        return {"size": [int(height), int(width)], "counts": self.columns["rle_texts"][start:stop].tobytes()}


def leads_out(name: str, folder: ImageFolder, *, base: Path | None = None) -> bool:
    """Whether the file `name`, relative to `base` or else to `folder`, leads out of `folder`: by `/` or by `..`.

    Symbolic links in the folder may lead anywhere: only its owner can create them, and clusters use them.
    """
    if isinstance(folder, StoredFolder):
        return leads_out_of(name)
    parts = name.split("/")
    if not name.startswith("/") and ".." not in parts:
        return False
    if parts[-1] == "..":
        return True
    try:
        return not ((base or folder) / name).parent.resolve().is_relative_to(folder.resolve())
    except (OSError, ValueError, RuntimeError):  # a NUL, a name too long, a loop of links: no file of the folder
        return True


def clean_instances(instances: InstanceArrays) -> InstanceArrays:
    """The instances that training uses, by TensorPack's rules: boxes clipped to the image, unusable ones removed.

    Removed are annotations marked `ignore`, with an area of 1 or less, with a box that is not finite or empty inside
    the image, or of an unknown category. Unlike TensorPack, run-length masks of objects are allowed.
    """
    store, owner = instances.store, instances.owner
    boxes = np.clip(instances.boxes, 0, np.stack([store.widths[owner], store.heights[owner]] * 2, axis=1))
    keep = (boxes[:, 2:] > boxes[:, :2]).all(axis=1)
    keep &= (instances.area > 1) & ~instances.ignore & (instances.labels > 0)
    return dataclasses.replace(instances, boxes=boxes).select(keep)


def images_with_objects(store: AnnotationStore, *, rows_per_block: int = 1 << 16) -> Ints:
    """Indices, ascending, of images with an object to train on: `clean_instances` keeps one that is not a crowd."""
    has_object = np.zeros(len(store), bool)
    num_rows = int(store.num_instances.sum())
    for start in range(0, num_rows, rows_per_block):
        block = store.annotations(start, min(start + rows_per_block, num_rows))
        has_object[clean_instances(block).objects.owner] = True
    return np.flatnonzero(has_object)
