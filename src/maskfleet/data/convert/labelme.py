"""Reads LabelMe data sets: a JSON file with shapes for each image. No maintained library does.

Shapes: n points of a polygon.
"""

from __future__ import annotations

import base64
import io
import json
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import numpy.typing as npt

from maskfleet.data.convert.source import (
    IMAGE_SUFFIXES,
    SPLITS,
    Annotation,
    FaultError,
    ReadProgress,
    SourceImage,
    SourceSet,
    are_positions,
    box_annotation,
    collected,
    image_size,
    is_there,
    mask_annotation,
    polygon_annotation,
    raise_faults,
)
from maskfleet.data.image_formats import ImageFileError
from maskfleet.data.image_header import MAX_IMAGE_MPX, image_header
from maskfleet.data.pipeline.decode import decoded
from maskfleet.data.store.annotations import leads_out
from maskfleet.errors import DataError

NOT_OBJECTS = {"__ignore__", "_background_"}
CIRCLE_POINTS = 64
SKIPPED_KINDS = {"line", "linestrip", "point", "points"}


@dataclass(frozen=True, slots=True)
class _Document:
    """A JSON file of LabelMe with its shapes not yet converted."""

    file: Path
    image: Path
    content: Callable[[], bytes] | None
    size: tuple[int, int]
    shapes: list[dict[str, Any]]


def read_labelme(root: Path, progress: ReadProgress, *, allow_outside: bool = False) -> SourceSet:
    """The data set of all JSON files in `root`; folders train, val and test become splits.

    An `imagePath` that leads out of `root` is a fault unless `allow_outside`.
    """
    files = sorted(root.rglob("*.json"))
    faults: list[str] = []
    documents: list[_Document] = []
    for number, file in enumerate(files, 1):
        with collected(faults, f"{file}: "):
            documents.append(_document(file, None if allow_outside else root))
        progress(number, len(files))
    categories = _categories(root, documents)
    skipped: Counter[str] = Counter()
    splits: dict[str, list[SourceImage]] = {}
    for document in documents:
        annotations = _annotations(document, categories, skipped, faults)
        top = document.file.relative_to(root).parts[0]
        split = top if top in SPLITS and document.file.parent != root else "train"
        base = root / split if document.file.is_relative_to(root / split) else root
        name = document.file.relative_to(base).with_suffix(document.image.suffix).as_posix()
        splits.setdefault(split, []).append(
            SourceImage(document.image, name, *document.size, annotations, document.content)
        )
    raise_faults(faults, _remedy(faults))
    notes = tuple(f"{count} shapes of kind {kind} were skipped: they have no area" for kind, count in skipped.items())
    return SourceSet(splits, categories, notes)


def _document(file: Path, inside: Path | None) -> _Document:
    """The document in `file`, with an image in the folder `inside`, or anywhere if that is None."""
    tree = _tree(file)
    shapes = tree.get("shapes")
    if not isinstance(shapes, list) or not all(isinstance(shape, dict) for shape in shapes):
        raise FaultError("no list of shapes: not a LabelMe file")
    name = str(tree.get("imagePath") or "").replace("\\", "/")
    image = file.parent / name
    if inside is not None and leads_out(name, inside, base=file.parent):
        raise FaultError(f"imagePath {name} leads out of {inside}")
    if name and is_there(image) and image.is_file():
        return _Document(file, image, None, image_size(image), shapes)
    if isinstance(tree.get("imageData"), str):
        width, height = tree.get("imageWidth"), tree.get("imageHeight")
        if not (isinstance(width, int) and isinstance(height, int) and min(width, height) > 0):
            raise FaultError("no imageWidth and imageHeight")
        if width * height > MAX_IMAGE_MPX * 1e6:
            raise FaultError(f"an image of {width} x {height}; the limit is {MAX_IMAGE_MPX:g} million pixels")
        known = name if Path(name).suffix.lower() in IMAGE_SUFFIXES else "image.png"
        return _Document(file, Path(known), partial(_embedded, file), (width, height), shapes)
    raise FaultError(f"there is no image {name or '(no imagePath)'}, and the file does not contain it")


def _remedy(faults: Sequence[str]) -> str:
    outside = any("leads out of" in fault for fault in faults)
    return "fix those files in LabelMe, or remove them" + (
        "; --allow-outside reads images outside of the folder" if outside else ""
    )


def _tree(file: Path) -> dict[str, Any]:
    try:
        tree = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise FaultError(f"not JSON: {error}") from None
    if not isinstance(tree, dict):
        raise FaultError("not a LabelMe file")
    return tree


def _embedded(file: Path) -> bytes:
    """The image that is embedded in a LabelMe file."""
    try:
        return base64.b64decode(_tree(file)["imageData"], validate=True)
    except ValueError:  # binascii.Error is one
        raise DataError(f"the image embedded in {file} is damaged", remedy="put the image file next to it") from None


def _categories(root: Path, documents: list[_Document]) -> tuple[str, ...]:
    """Labels in the order of labels.txt, if it exists, then the others by name."""
    listed = (root / "labels.txt").read_text(encoding="utf-8").split("\n") if (root / "labels.txt").is_file() else []
    used = {str(shape.get("label")) for document in documents for shape in document.shapes}
    names = [*(line.strip() for line in listed if line.strip()), *sorted(used)]
    return tuple(name for name in dict.fromkeys(names) if name not in NOT_OBJECTS)


def _annotations(
    document: _Document, categories: tuple[str, ...], skipped: Counter[str], faults: list[str]
) -> list[Annotation]:
    """Objects of a file; polygons of one label and group are parts of one object."""
    numbers = {name: number for number, name in enumerate(categories, 1)}
    found: dict[Any, Annotation | list[npt.NDArray[np.float64]]] = {}
    for index, shape in enumerate(document.shapes):
        label, kind = str(shape.get("label")), str(shape.get("shape_type") or "polygon")
        if label in NOT_OBJECTS:
            continue
        if kind in SKIPPED_KINDS:
            skipped[kind] += 1
            continue
        group = shape.get("group_id")
        key = (label, index, None) if group is None else (label, None, str(group))
        with collected(faults, f"{document.file}: shape {index}, {label}: "):
            object_, parts = _object(shape, kind, numbers[label], document.size), found.get(key)
            if isinstance(object_, dict) or not isinstance(parts, list):
                found[key if key not in found else (label, index, str(group))] = object_
            else:
                parts += object_
    return [
        polygon_annotation(numbers[key[0]], object_, document.size) if isinstance(object_, list) else object_
        for key, object_ in found.items()
    ]


def _object(
    shape: dict[str, Any], kind: str, category_id: int, size: tuple[int, int]
) -> Annotation | list[npt.NDArray[np.float64]]:
    """A finished annotation, or the parts [n, 2] of an outline."""
    points = _points(shape.get("points"))
    match kind:
        case "polygon" if len(points) >= 3:
            return [points]
        case "rectangle" if len(points) >= 2:
            low, high = points.min(axis=0), points.max(axis=0)
            return box_annotation(category_id, [*low, *(high - low)])
        case "circle" if len(points) == 2:
            angles = np.arange(CIRCLE_POINTS) * (2 * math.pi / CIRCLE_POINTS)
            return [points[0] + math.dist(*points) * np.stack([np.cos(angles), np.sin(angles)], axis=1)]
        case "mask" if len(points) == 2:
            return mask_annotation(category_id, _mask(shape.get("mask"), points, size))
        case "polygon" | "rectangle" | "circle" | "mask":
            raise FaultError(f"a {kind} of {len(points)} points")
    raise FaultError(f"shapes of kind {kind} are unknown")


def _points(value: Any) -> npt.NDArray[np.float64]:
    try:
        points = np.asarray(value, np.float64)
    except (TypeError, ValueError, OverflowError):
        points = np.zeros(0)
    if points.ndim != 2 or points.shape[1] != 2 or not are_positions(points.ravel()):
        raise FaultError("its points are not pairs of positions in pixels")
    return points


def _mask(text: Any, corners: npt.NDArray[np.float64], size: tuple[int, int]) -> npt.NDArray[np.uint8]:
    """The bitmap of the whole image from a PNG of the part between two corners, both inside."""
    try:
        data = base64.b64decode(text, validate=True)
        header = image_header(io.BytesIO(data))
    except (TypeError, ValueError, ImageFileError):
        raise FaultError("its mask is not a PNG in base64") from None
    if header.width > size[0] or header.height > size[1]:
        raise FaultError("its mask reaches outside the image")
    window = decoded(np.frombuffer(data, np.uint8), cv2.IMREAD_GRAYSCALE)
    if window is None:
        raise FaultError("its mask is not a PNG in base64")
    x, y = np.rint(corners[0]).astype(int).tolist()
    canvas = np.zeros((size[1], size[0]), np.uint8)
    if x < 0 or y < 0 or y + window.shape[0] > size[1] or x + window.shape[1] > size[0]:
        raise FaultError("its mask reaches outside the image")
    canvas[y : y + window.shape[0], x : x + window.shape[1]] = window > 0
    return canvas
