"""Converts YOLO, Pascal VOC and LabelMe data sets to COCO."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from maskfleet.data.convert.labelme import read_labelme
from maskfleet.data.convert.source import ReadProgress, SourceImage, SourceSet
from maskfleet.data.convert.voc import read_voc
from maskfleet.data.convert.yolo import read_yolo
from maskfleet.errors import DataError
from maskfleet.system.files import building_folder

Form = Literal["yolo", "voc", "labelme"]
Progress = Callable[[str, int, int], None]  # current step, files done, files in total

READERS: dict[Form, Callable[[Path, ReadProgress], SourceSet]] = {
    "yolo": read_yolo,
    "voc": read_voc,
    "labelme": read_labelme,
}


@dataclass(frozen=True, slots=True)
class Converted:
    """What was written, and notes for the user."""

    splits: tuple[str, ...]
    num_images: int
    num_annotations: int
    notes: tuple[str, ...]


def convert(
    source: Path,
    target: Path,
    *,
    form: Form,
    link: bool = False,
    allow_outside: bool = False,
    progress: Progress | None = None,
) -> Converted:
    """Write the data set in `source` as a COCO folder at `target`, which must be new or empty; all of it or nothing.

    Images are copied, or symlinked with `link`. One DataError lists all problems of the source. With `allow_outside`,
    LabelMe files may name images outside of `source`.
    """
    source, target = Path(source), Path(target)
    tell = progress or (lambda what, done, total: None)
    if not source.is_dir():
        raise DataError(f"there is no folder {source}", remedy="check the path of the data set to convert")
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise DataError(f"{target} already exists", remedy="choose a new folder; nothing is overwritten")
    read = partial(read_labelme, allow_outside=True) if allow_outside and form == "labelme" else READERS[form]
    found = read(source, lambda done, total: tell("reading", done, total))
    if not found.num_images:
        raise DataError(
            f"no annotated image was found under {source}",
            remedy=f"check that this is a {form} data set",
        )
    with building_folder(target) as building:
        num_annotations = _write(building, found, link=link, tell=tell)
    return Converted(tuple(found.splits), found.num_images, num_annotations, found.notes)


def _write(root: Path, found: SourceSet, *, link: bool, tell: Progress) -> int:
    """Write all splits under `root` -> number of annotations."""
    (root / "annotations").mkdir()
    categories = [{"id": number, "name": name} for number, name in enumerate(found.categories, 1)]
    done = image_id = annotation_id = 0
    for split, images in found.splits.items():
        (root / split).mkdir()
        records: list[dict[str, Any]] = []
        annotations: list[dict[str, Any]] = []
        for image in images:
            image_id += 1
            _write_image(image, root / split / image.name, link=link)
            records.append({"id": image_id, "file_name": image.name, "width": image.width, "height": image.height})
            for annotation in image.annotations:
                annotation_id += 1
                annotations.append({"id": annotation_id, "image_id": image_id, **annotation})
            done += 1
            tell("linking" if link else "copying", done, found.num_images)
        tree = {"images": records, "annotations": annotations, "categories": categories}
        path = root / "annotations" / f"instances_{split}.json"
        path.write_text(json.dumps(tree, separators=(",", ":")))
    return annotation_id


def _write_image(image: SourceImage, path: Path, *, link: bool) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        if image.content is not None:
            path.write_bytes(image.content())
        elif link:
            path.symlink_to(image.path.resolve())
        else:
            shutil.copyfile(image.path, path)
    except OSError as error:
        raise DataError(
            f"{image.path} cannot be copied to {path}: {error.strerror}",
            remedy="check that it can be read and that the disk has free space; --link needs none",
        ) from error
