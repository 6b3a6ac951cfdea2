"""Reads YOLO data sets in the layout of Ultralytics: data.yaml, images, and labels with one line per object.

A line is `class cx cy width height` or, with an outline, `class x y x y x y ...`, as fractions of the image's sides.
hotcoco reads only the first kind and drops the suffixes of the images, so it is not used here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from maskfleet.config.yaml import plain, read_mapping
from maskfleet.data.convert.source import (
    IMAGE_SUFFIXES,
    SPLITS,
    Annotation,
    FaultError,
    ReadProgress,
    SourceImage,
    SourceSet,
    box_annotation,
    collected,
    image_size,
    is_there,
    polygon_annotation,
    raise_faults,
    unique_names,
)
from maskfleet.errors import ConfigError, DataError

OVERSHOOT = 0.01  # labels are rounded; values further outside 0..1 have another unit


def read_yolo(root: Path, progress: ReadProgress) -> SourceSet:
    """The data set whose data.yaml is in `root`."""
    settings, where = _settings(root)
    categories = _category_names(settings.get("names"), where)
    path = settings.get("path")  # what the paths in data.yaml are relative to, if that exists
    base = root / path if isinstance(path, str) and is_there(root / path) and (root / path).is_dir() else root
    listed = {split: list(_images_of(base, settings[split], where)) for split in SPLITS if settings.get(split)}
    if not listed:
        raise DataError(
            f"{where} names no images", remedy="add lines such as `train: images/train` and `val: images/val`"
        )
    faults: list[str] = []
    splits: dict[str, list[SourceImage]] = {}
    done, total, unlabelled = 0, sum(len(found) for found in listed.values()), 0
    for split, found in listed.items():
        names = unique_names([path for path, _ in found], [folder for _, folder in found])
        splits[split] = []
        for (path, _), name in zip(found, names, strict=True):
            label_file = _label_file(path)
            unlabelled += not label_file.is_file()
            with collected(faults):
                size = image_size(path)
                annotations = _annotations(label_file, len(categories), size, faults)
                splits[split].append(SourceImage(path, name, *size, annotations))
            done += 1
            progress(done, total)
    raise_faults(faults, "fix those files, or remove them; coordinates are fractions of the image's sides, 0 to 1")
    notes = (f"{unlabelled} of {total} images have no label file: no objects",) if unlabelled else ()
    return SourceSet(splits, categories, notes)


def _settings(root: Path) -> tuple[dict[str, Any], Path]:
    candidates = sorted([*root.glob("*.yaml"), *root.glob("*.yml")])
    named = [path for path in candidates if path.stem == "data"] or candidates
    if len(named) != 1:
        found = ", ".join(path.name for path in named) or "none"
        raise DataError(
            f"{root} should contain one data.yaml with the class names; YAML files found: {found}",
            remedy="write data.yaml with `names: [...]`, `train: images/train` and `val: images/val`",
        )
    try:
        return plain(read_mapping(named[0])), named[0]
    except ConfigError as error:
        raise DataError(error.what, remedy="fix that file: it needs names, train and val") from error


def _category_names(names: Any, where: Path) -> tuple[str, ...]:
    """Names by class number, from a list or a mapping of numbers to names."""
    if isinstance(names, dict) and all(str(key).isdecimal() for key in names):
        numbers = {int(key): name for key, name in names.items()}
        names = [numbers.get(number) for number in range(len(numbers))]
    if isinstance(names, list) and names and all(isinstance(name, str | int) for name in names):
        return tuple(str(name) for name in names)
    raise DataError(
        f"{where} has no usable `names`", remedy="list all class names in order, such as `names: [person, car]`"
    )


def _images_of(base: Path, value: Any, where: Path) -> Iterator[tuple[Path, Path]]:
    """(image, folder that it was found in) for a split's folder, list file, or a list of those."""
    for entry in value if isinstance(value, list) else [value]:
        # exports of Roboflow contain ../train/images instead of train/images
        named = [base / str(entry), base / str(entry).removeprefix("../")]
        path = next(filter(is_there, named), None)
        if path is None:
            raise DataError(f"{where} names {entry}, which is not under {base}", remedy="correct that path")
        if path.is_dir():
            files = sorted(file for file in path.rglob("*") if file.suffix.lower() in IMAGE_SUFFIXES)
            yield from ((file, path) for file in files)
        else:
            try:
                lines = path.read_text(encoding="utf-8").split("\n")
            except UnicodeDecodeError:
                raise DataError(
                    f"{where} names {entry}, which is neither a folder nor a list of images",
                    remedy="name a folder of images",
                ) from None
            yield from ((path.parent / line.strip(), path.parent) for line in lines if line.strip())


def _label_file(image: Path) -> Path:
    """The label file of an image: in labels/ instead of the last images/ of its path, else next to the image."""
    parts = list(image.parts)
    for index in range(len(parts) - 2, -1, -1):
        if parts[index] == "images":
            return Path(*parts[:index], "labels", *parts[index + 1 :]).with_suffix(".txt")
    return image.with_suffix(".txt")


def _annotations(path: Path, num_classes: int, size: tuple[int, int], faults: list[str]) -> list[Annotation]:
    if not path.is_file():
        return []
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise FaultError(f"{path}: the labels cannot be read: {error}") from None
    annotations = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            with collected(faults, f"{path}, line {number}: "):
                annotations.append(_annotation(line.split(), num_classes, size))
    return annotations


def _annotation(words: list[str], num_classes: int, size: tuple[int, int]) -> Annotation:
    try:
        values = [float(word) for word in words]
    except ValueError:
        raise FaultError("not all values are numbers") from None
    label = values[0]
    if not label.is_integer() or not 0 <= label < num_classes:
        raise FaultError(f"class {words[0]} is not one of 0 to {num_classes - 1}")
    coordinates = values[1:]
    if not all(math.isfinite(value) and -OVERSHOOT <= value <= 1 + OVERSHOOT for value in coordinates):
        raise FaultError("a coordinate is not a fraction of the image's side, 0 to 1")
    width, height = size
    if len(coordinates) == 4:
        cx, cy, w, h = coordinates
        return box_annotation(int(label) + 1, [(cx - w / 2) * width, (cy - h / 2) * height, w * width, h * height])
    if len(coordinates) < 6 or len(coordinates) % 2:
        raise FaultError(f"{len(coordinates)} coordinates are neither a box (4) nor an outline (6 or more, in pairs)")
    points = np.clip(np.reshape(coordinates, (-1, 2)), 0, 1) * [width, height]
    return polygon_annotation(int(label) + 1, [points], size)
