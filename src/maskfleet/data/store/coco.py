"""COCO annotation files: finds the files of a split, and reads one without keeping it as Python objects.

Shapes: I images, A annotations, P polygon parts, V numbers of all polygons (x, y, x, y, ...), R run-length masks.
"""

from __future__ import annotations

import gc
import json
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from maskfleet.data.store.malformed import integer, malformed_entries
from maskfleet.errors import DataError
from maskfleet.rle import text_from_runs

KIND_NONE, KIND_POLYGONS, KIND_RLE, KIND_BROKEN = 0, 1, 2, 3


@dataclass(slots=True)
class CocoFile:
    """The content of an annotation file, in file order, as flat arrays of numbers."""

    image_id: array[int] = field(default_factory=lambda: array("q"))  # [I]
    image_width: array[int] = field(default_factory=lambda: array("q"))
    image_height: array[int] = field(default_factory=lambda: array("q"))
    image_name: list[bytes] = field(default_factory=list)
    ann_id: array[int] = field(default_factory=lambda: array("q"))  # [A]
    ann_image_id: array[int] = field(default_factory=lambda: array("q"))
    ann_category_id: array[int] = field(default_factory=lambda: array("q"))
    ann_box_xywh: array[float] = field(default_factory=lambda: array("d"))  # [A * 4]
    ann_area: array[float] = field(default_factory=lambda: array("d"))
    ann_crowd: bytearray = field(default_factory=bytearray)
    ann_crowd_unclear: bytearray = field(default_factory=bytearray)  # iscrowd is neither 0 nor 1
    ann_ignore: bytearray = field(default_factory=bytearray)
    ann_kind: bytearray = field(default_factory=bytearray)
    ann_parts: array[int] = field(default_factory=lambda: array("q"))  # [A] polygon parts, or 1 for a run-length mask
    part_numbers: array[int] = field(default_factory=lambda: array("q"))  # [P]
    points: array[float] = field(default_factory=lambda: array("d"))  # [V]
    rle_text: list[bytes] = field(default_factory=list)  # [R]
    rle_height: array[int] = field(default_factory=lambda: array("q"))
    rle_width: array[int] = field(default_factory=lambda: array("q"))
    categories: list[tuple[int, str]] = field(default_factory=list)


_IMAGE, _ANNOTATION = object(), object()  # replace records in the parsed tree that are already stored


def read_coco(text: str, path: Path) -> CocoFile:
    """Parse annotation JSON; `path` is for error messages.

    Each record is flattened as soon as the parser closes it, so that Python objects do not accumulate: a file of
    COCO's size needs 1.2 GiB instead of 2.8 (benchmarks/results/store.json).
    """
    coco = CocoFile()
    with _gc_paused():
        tree = _parse(text, path, _record_hook(coco))
    if not isinstance(tree, dict):
        raise _not_coco(path, f"it holds a {type(tree).__name__}, not an object with images, annotations, categories")
    for key in ("images", "annotations", "categories"):
        if not isinstance(tree.get(key), list):
            what = "has no" if key not in tree else "has no list under"
            raise _not_coco(path, f"it {what} key {key!r}")
    malformed = malformed_entries(tree, {"images": _IMAGE, "annotations": _ANNOTATION})
    if malformed:
        raise _not_coco(path, f"it has malformed entries:{malformed}")
    if (len(tree["images"]), len(tree["annotations"])) != (len(coco.image_id), len(coco.ann_id)):
        raise _not_coco(path, "it holds image or annotation records outside its lists of images and annotations")
    coco.categories = [(int(category["id"]), category["name"]) for category in tree["categories"]]
    return coco


def _parse(text: str, path: Path, take: Callable[[dict[str, Any]], Any]) -> Any:
    try:
        return json.loads(text, object_hook=take)
    except json.JSONDecodeError as error:
        at_end = error.pos >= len(text.rstrip()) - 1 or error.msg.startswith("Unterminated string")
        raise DataError(
            f"{path} is not valid JSON: {error.msg} at line {error.lineno}, column {error.colno}"
            + (" (the file is truncated there)" if at_end else ""),
            remedy="copy or download the file again, and compare its size with the original",
        ) from None
    except RecursionError:
        raise _not_coco(path, "its values are nested too deeply") from None
    except ValueError as error:  # a number of more than 4,300 digits
        raise _not_coco(path, str(error)) from None


def _record_hook(coco: CocoFile) -> Callable[[dict[str, Any]], Any]:
    """An object hook for the parser that stores images and annotations in `coco` and keeps everything else."""

    def take(record: dict[str, Any]) -> Any:
        if "image_id" in record and "category_id" in record:
            return _ANNOTATION if _take_annotation(coco, record) else record
        if "file_name" in record and "id" in record:
            return _IMAGE if _take_image(coco, record) else record
        return record

    return take


def _take_image(coco: CocoFile, record: dict[str, Any]) -> bool:
    """Add an image; False, without adding it, if a key is missing or has the wrong type."""
    values = [integer(record.get(key)) for key in ("id", "width", "height")]
    name = record["file_name"]
    if None in values or not isinstance(name, str):
        return False
    coco.image_id.append(values[0])  # type: ignore[arg-type]
    coco.image_width.append(values[1])  # type: ignore[arg-type]
    coco.image_height.append(values[2])  # type: ignore[arg-type]
    coco.image_name.append(name.encode("utf-8", "surrogatepass"))
    return True


def _take_annotation(coco: CocoFile, record: dict[str, Any]) -> bool:
    """Add an annotation; False, without adding it, if an id is missing or not an integer.

    Other problems are kept for the checks to report: a box that is not four numbers becomes NaN, an invalid
    segmentation becomes KIND_BROKEN. Without "area", the area of the box is used.
    """
    annotation_id, image_id = integer(record.get("id")), integer(record["image_id"])
    category_id = integer(record["category_id"])
    if annotation_id is None or image_id is None or category_id is None:
        return False
    coco.ann_id.append(annotation_id)
    coco.ann_image_id.append(image_id)
    coco.ann_category_id.append(category_id)
    box = _numbers(record.get("bbox"), 4)
    coco.ann_box_xywh.extend(box)
    [area] = _numbers([record.get("area", box[2] * box[3])], 1)
    coco.ann_area.append(area)
    crowd = record.get("iscrowd")
    coco.ann_crowd.append(1 if crowd else 0)
    coco.ann_crowd_unclear.append(0 if crowd in (None, 0, 1) else 1)
    coco.ann_ignore.append(1 if record.get("ignore") == 1 else 0)
    kind, parts = _take_segmentation(coco, record.get("segmentation"))
    coco.ann_kind.append(kind)
    coco.ann_parts.append(parts)
    return True


def _take_segmentation(coco: CocoFile, segmentation: Any) -> tuple[int, int]:
    """Add polygons or a run-length mask -> (its kind, its number of parts)."""
    if segmentation is None or segmentation == []:
        return KIND_NONE, 0
    if isinstance(segmentation, dict):
        return _take_rle(coco, segmentation)
    if not isinstance(segmentation, list):
        return KIND_BROKEN, 0
    before = len(coco.points), len(coco.part_numbers)
    try:
        for part in segmentation:
            coco.points.extend(part)
            coco.part_numbers.append(len(part))
    except (TypeError, OverflowError):
        del coco.points[before[0] :], coco.part_numbers[before[1] :]
        return KIND_BROKEN, 0
    return KIND_POLYGONS, len(segmentation)


def _take_rle(coco: CocoFile, rle: dict[str, Any]) -> tuple[int, int]:
    size, counts = rle.get("size"), rle.get("counts")
    if not (isinstance(size, list) and len(size) == 2 and all(integer(side) is not None for side in size)):
        return KIND_BROKEN, 0
    if isinstance(counts, str) and counts.isascii():
        text = counts.encode("ascii")
    elif isinstance(counts, list) and all(integer(run) is not None for run in counts):
        text = text_from_runs(counts)
    else:
        return KIND_BROKEN, 0
    coco.rle_text.append(text)
    coco.rle_height.append(int(size[0]))
    coco.rle_width.append(int(size[1]))
    return KIND_RLE, 1


def _numbers(values: Any, count: int) -> list[float]:
    """`values` if it is a list of `count` numbers, else `count` NaNs."""
    if isinstance(values, list) and len(values) == count and all(isinstance(value, int | float) for value in values):
        with suppress(OverflowError):  # an integer of hundreds of digits
            return list(map(float, values))
    return [float("nan")] * count


def _not_coco(path: Path, why: str) -> DataError:
    return DataError(
        f"{path} is not a COCO instances file: {why}",
        remedy="give the instances_*.json of the data set; it needs the keys images (id, file_name, width, height), "
        "annotations (id, image_id, category_id, bbox, segmentation) and categories (id, name)",
    )


@contextmanager
def _gc_paused() -> Iterator[None]:
    """Disable the garbage collector: parsing creates millions of objects and no cycles."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
