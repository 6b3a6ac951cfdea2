"""The images that a run uses, from one or several splits.

Shapes: N images, numbered 0 .. N - 1 over all splits.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from maskfleet.config.base import replaced
from maskfleet.config.run import DataConfig, RunConfig, SplitConfig
from maskfleet.data.files.root import open_root
from maskfleet.data.files.stored import StoredFolder
from maskfleet.data.store.annotations import AnnotationStore, ImageRules, images_with_objects, open_store
from maskfleet.data.store.coco import KIND_NONE
from maskfleet.data.store.splits import find_split, found_splits, split_from_paths
from maskfleet.errors import DataError

Ints = npt.NDArray[np.int64]
MAX_LISTED = 10  # file names in an error message


class ImageSet:
    """Images of several stores with one numbering; unlike ids, these numbers do not collide between stores."""

    def __init__(self, stores: Sequence[AnnotationStore], used: Sequence[Ints]) -> None:
        self.stores = tuple(stores)
        self.store_of = np.repeat(np.arange(len(stores), dtype=np.int16), [len(images) for images in used])  # [N]
        self.index_of = np.concatenate([np.zeros(0, np.int32), *used]).astype(np.int32)  # [N] inside its store
        self.buckets: Ints = np.zeros(len(self.index_of), np.int64)  # [N] set once their canvases are known

    def __len__(self) -> int:
        return len(self.index_of)

    def place(self, image: int) -> tuple[int, int]:
        """(number of the store, index inside it) of an image."""
        return int(self.store_of[image]), int(self.index_of[image])

    def sizes(self) -> tuple[Ints, Ints]:
        """Source heights and widths of the images -> two [N]."""
        used = [(store, self.index_of[self.store_of == number]) for number, store in enumerate(self.stores)]
        heights = np.concatenate([store.heights[index] for store, index in used])
        return heights, np.concatenate([store.widths[index] for store, index in used])

    @property
    def reads_ahead(self) -> bool:
        """Whether some images are in S3, so that it pays to start reading them before they are needed."""
        folders = [store.split.images for store in self.stores]
        return any(isinstance(folder, StoredFolder) and folder.root.is_remote for folder in folders)

    def read_ahead(self, images: Iterable[int]) -> None:
        """Start to read `images` if they are in S3."""
        for number, store in enumerate(self.stores):
            folder = store.split.images
            if isinstance(folder, StoredFolder):
                own = [index for index in map(self.place, images) if index[0] == number]
                folder.read_ahead(store.image_name(index) for _, index in own)

    def substitute(self, image: int, seed: int) -> int:
        """Another image of the same bucket, chosen by `seed`; the image itself if there is no other."""
        members = np.flatnonzero(self.buckets == self.buckets[image])
        own = int(np.searchsorted(members, image))
        return int(members[(own + 1 + seed % max(len(members) - 1, 1)) % len(members)])


def with_found_splits(config: RunConfig) -> RunConfig:
    """`config` with `auto` in its splits replaced by the splits in `data.root`."""
    if "auto" not in (*config.data.train, *config.data.val):
        return config
    train, val = found_splits(open_root(config.data.root, config.data))
    return replaced(
        config, {"data.train": _filled(config.data.train, train), "data.val": _filled(config.data.val, val)}
    )


def open_stores(data: DataConfig, splits: Sequence[str | SplitConfig]) -> list[AnnotationStore]:
    """The annotation stores of `splits`, with the paths of `data`; built if they do not exist yet."""
    root, cache_dir = open_root(data.root, data), Path(data.cache_dir).expanduser() if data.cache_dir else None
    paths = [
        find_split(root, split)
        if isinstance(split, str)
        else split_from_paths(split.annotations, split.images, root=root)
        for split in splits
    ]
    rules = ImageRules(data.max_image_mpx, data.allow_outside)
    stores = [open_store(path, cache_dir=cache_dir, rules=rules) for path in paths]
    for store in stores:
        _expect_inside(store)
    return stores


def _filled(splits: tuple[str | SplitConfig, ...], found: tuple[str, ...]) -> tuple[str | SplitConfig, ...]:
    """`splits` with auto replaced by `found`."""
    return tuple(name for split in splits for name in (found if split == "auto" else (split,)))


def training_images(
    stores: Sequence[AnnotationStore], *, filter_empty: bool, masks: bool, skip: Sequence[Collection[int]] = ()
) -> ImageSet:
    """The images to train on: with `filter_empty` only those with objects; without the ids in `skip` for each store."""
    _expect_same_categories(stores)
    if masks:
        _expect_outlines(stores)
    used = []
    for number, store in enumerate(stores):
        index = images_with_objects(store) if filter_empty else np.arange(len(store))
        skipped = np.array(sorted(skip[number]) if number < len(skip) else [], np.int64)
        used.append(index[~np.isin(store.image_ids[index], skipped)])
    images = ImageSet(stores, used)
    if not len(images):
        names = ", ".join(str(store.split.annotations) for store in stores)
        raise DataError(
            f"no image of {names} has an object to train on",
            remedy="check it with maskfleet data inspect; data.filter_empty=false trains on images without objects too",
        )
    return images


def evaluation_images(store: AnnotationStore, *, max_images: int | None, skip: Collection[int] = ()) -> ImageSet:
    """The images of `store` in order, without the ids in `skip`, at most the first `max_images`."""
    index = np.flatnonzero(~np.isin(store.image_ids, np.array(sorted(skip), np.int64)))
    return ImageSet([store], [index[:max_images]])


def _expect_same_categories(stores: Sequence[AnnotationStore]) -> None:
    first = stores[0]
    for store in stores[1:]:
        if store.categories != first.categories:
            difference = sorted({(c.id, c.name) for c in store.categories} ^ {(c.id, c.name) for c in first.categories})
            raise DataError(
                f"{store.split.annotations} and {first.split.annotations} have different categories: {difference[:5]}",
                remedy="splits that are trained together need the same category ids and names; change one of the files",
            )


def _expect_inside(store: AnnotationStore) -> None:
    """DataError that lists the images whose file names lead out of the image folder."""
    outside = list(store.outside())
    if not outside:
        return
    names = "".join(f"\n    image {record.id}: {record.path}" for record in outside[:MAX_LISTED])
    more = f"\n    and {len(outside) - MAX_LISTED} more" if len(outside) > MAX_LISTED else ""
    raise DataError(
        f"{len(outside)} of the {len(store)} images of {store.split.annotations} are outside of the image folder "
        f"{store.split.images}:{names}{more}",
        remedy="write file_name relative to the image folder; if you trust the file, set data.allow_outside=true",
    )


def _expect_outlines(stores: Sequence[AnnotationStore]) -> None:
    for store in stores:
        kinds = store.columns["ann_kind"]
        missing = int((kinds == KIND_NONE).sum())
        if missing * 2 > len(kinds):
            raise DataError(
                f"{missing} of {len(kinds)} annotations in {store.split.annotations} have no segmentation",
                remedy="set model.mask=false to train boxes only, or add segmentations",
            )
