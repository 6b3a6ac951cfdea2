"""Reads Pascal VOC: Annotations/*.xml (with hotcoco), JPEGImages/, and the split lists in ImageSets/Main/."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import hotcoco

from maskfleet.data.convert.source import (
    IMAGE_SUFFIXES,
    SPLITS,
    FaultError,
    ReadProgress,
    SourceImage,
    SourceSet,
    are_positions,
    collected,
    image_size,
    is_there,
    raise_faults,
)
from maskfleet.errors import DataError

IMAGE_FOLDERS = ("JPEGImages", "images", ".", "Annotations")


def read_voc(root: Path, progress: ReadProgress) -> SourceSet:
    """The data set in `root`, such as VOCdevkit/VOC2012."""
    folder = root / "Annotations" if (root / "Annotations").is_dir() else root
    files = sorted(folder.glob("*.xml"))
    if not files:
        raise DataError(
            f"there are no .xml files in {folder}", remedy="name the folder that holds Annotations/ and JPEGImages/"
        )
    _expect_whole(files)
    tree = _tree(root)
    names = tuple(category["name"] for category in tree["categories"])
    order = {category["id"]: number for number, category in enumerate(tree["categories"], 1)}
    of_image: dict[int, list[dict[str, Any]]] = {record["id"]: [] for record in tree["images"]}
    for annotation in tree["annotations"]:
        kept = {key: annotation[key] for key in ("bbox", "area", "iscrowd")}
        of_image[annotation["image_id"]].append({"category_id": order[annotation["category_id"]], **kept})
    images: list[SourceImage] = []
    faults: list[str] = []
    for number, record in enumerate(tree["images"], 1):
        with collected(faults):
            images.append(_image(root, record, of_image[record["id"]]))
        progress(number, len(tree["images"]))
    raise_faults(faults, "put the images into JPEGImages/ and correct the boxes, or remove their .xml files")
    splits = _splits(root, images)
    return SourceSet(splits, names, tuple(_notes(root, tree, len(images) - sum(map(len, splits.values())))))


def _expect_whole(files: list[Path]) -> None:
    """Report every file that is not valid XML: hotcoco silently reads the first part of a truncated one."""
    faults = []
    for file in files:
        try:
            ElementTree.parse(file)  # noqa: S314 - expat has refused entity bombs since 2.4.1
        except ElementTree.ParseError as error:
            faults.append(f"{file}: not valid XML: {error}")
    raise_faults(faults, "copy those files again, or remove them")


def _tree(root: Path) -> dict[str, Any]:
    try:
        tree: dict[str, Any] = hotcoco.COCO.from_voc(str(root)).dataset
    except (ValueError, OSError) as error:
        raise DataError(
            f"{root} cannot be read as Pascal VOC: {error}", remedy="fix that file, or remove it"
        ) from error
    return tree


def _image(root: Path, record: dict[str, Any], annotations: list[dict[str, Any]]) -> SourceImage:
    path = _image_file(root, record["file_name"])
    if not all(are_positions(annotation["bbox"]) for annotation in annotations):
        raise FaultError(f"{path.name}: a corner of a box is not a position in pixels")
    width, height = record["width"], record["height"]
    if not (width and height):
        width, height = image_size(path)
    return SourceImage(path, path.name, width, height, annotations)


def _image_file(root: Path, name: str) -> Path:
    """The file of an image, whose name may lack its suffix or include a folder."""
    plain = name.replace("\\", "/").rsplit("/", 1)[-1]
    for folder in IMAGE_FOLDERS:
        for suffix in ("", *IMAGE_SUFFIXES):
            path = root / folder / f"{plain}{suffix}"
            if is_there(path) and path.is_file():
                return path
    raise FaultError(f"there is no image {name} in {root / IMAGE_FOLDERS[0]}")


def _splits(root: Path, images: list[SourceImage]) -> dict[str, list[SourceImage]]:
    """Images by the lists in ImageSets/Main; a single split, train, if there are none."""
    folder = root / "ImageSets" / "Main"
    lists = {split: folder / f"{split}.txt" for split in SPLITS if (folder / f"{split}.txt").is_file()}
    if not {"train", "val"} & lists.keys() and (folder / "trainval.txt").is_file():
        lists["train"] = folder / "trainval.txt"
    if not lists:
        return {"train": images}
    stems = {split: set(path.read_text(encoding="utf-8").split()) for split, path in lists.items()}
    splits = {split: [image for image in images if Path(image.name).stem in listed] for split, listed in stems.items()}
    return {split: found for split, found in splits.items() if found}


def _notes(root: Path, tree: dict[str, Any], num_unlisted: int) -> list[str]:
    notes = []
    if num_unlisted > 0:
        notes.append(f"{num_unlisted} images are in no list of ImageSets/Main and were skipped")
    difficult = sum(annotation["iscrowd"] for annotation in tree["annotations"])
    if difficult:
        notes.append(f"{difficult} objects marked difficult became crowd regions, which training and evaluation ignore")
    if (root / "SegmentationObject").is_dir():
        notes.append("boxes only: the masks in SegmentationObject/ are not read")
    return notes
