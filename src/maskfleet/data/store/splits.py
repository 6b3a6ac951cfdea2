"""Finds the splits of a COCO data set: their annotation files and image folders."""

from __future__ import annotations

import os
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from maskfleet.data.files.root import DataRoot, FolderRoot, open_root
from maskfleet.data.files.stored import ImageFolder
from maskfleet.errors import DataError

IMAGE_DIR_OF_SPLIT = {"valminusminival2014": "val2014", "minival2014": "val2014", "val2017_100": "val2017"}


@dataclass(frozen=True, slots=True)
class SplitPaths:
    """The annotation file and the image folder of one split."""

    name: str
    annotations: Path
    images: ImageFolder


def find_split(root: DataRoot | Path, name: str) -> SplitPaths:
    """The files of split `name` under a COCO folder; TensorPack's `coco_train2017` is `train2017`."""
    root, split = _opened(root), name.removeprefix("coco_")
    _expect_folder(root)
    path = f"annotations/instances_{split}.json"
    annotations = root.file(path)
    if annotations is None:
        names = split_names(root)
        if not names:
            raise _no_annotations(root)
        known = ", ".join(names)
        raise DataError(
            f"there is no {root.name}/{path}, so no split {name!r}",
            remedy=f"choose an existing split ({known}): --set data.train=[NAME] --set data.val=[NAME] for a run, "
            "--split NAME for other commands; or give the annotation file and image folder of your own data",
        )
    image_dir = IMAGE_DIR_OF_SPLIT.get(split, split)
    for folder in (image_dir, f"images/{image_dir}"):
        images = root.folder(folder)
        if images is not None:
            return SplitPaths(split, annotations, images)
    raise DataError(
        f"the images of split {name!r} should be in {root.name}/{image_dir}, which is not a folder",
        remedy=f"put the images there, or in {root.name}/images/{image_dir}, or give the path of the image folder",
    )


def found_splits(root: DataRoot | Path) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The training and the validation split of a COCO folder, by name; the training split serves as both if alone."""
    root = _opened(root)
    _expect_folder(root)
    names = split_names(root)
    train = [name for name in names if name.startswith("train")]
    val = [name for name in names if name.startswith("val") or name == "test"]
    if len(train) == 1 and len(val) <= 1:
        return tuple(train), tuple(val) or tuple(train)
    if len(names) == 1:
        return tuple(names), tuple(names)
    if not names:
        raise _no_annotations(root)
    raise DataError(
        f"cannot tell which split of {root.name} to train on: {', '.join(names)}",
        remedy="name them: --set data.train=[NAME] --set data.val=[NAME]; or two paths each (docs/data/loading.md)",
    )


def advised_folder(name: str) -> str:
    """What to give instead of the folder `name`, which has no annotations/: the COCO folder around it, if it is one."""
    for folder in Path(name).absolute().parents[:2]:
        if any((folder / "annotations").glob("instances_*.json")):
            shown = Path(os.path.relpath(folder)) if not Path(name).is_absolute() else folder
            return f"give the folder that holds annotations/: {shown}"
    form = other_format(Path(name))
    if form is not None:
        return f"if this is {form}, run maskfleet data convert {name} NEW_FOLDER --from {form} and give NEW_FOLDER"
    return (
        "give the folder that holds annotations/, or name your own files, below data.root: "
        "--set 'data.train=[{annotations: FILE, images: FOLDER}]', and data.val in the same way"
    )


def other_format(folder: Path) -> str | None:
    """The format that `folder` seems to have, of those that `maskfleet data convert` reads."""
    if any(folder.glob("*.yaml")) or any(folder.glob("*.yml")):
        return "yolo"
    if (folder / "Annotations").is_dir():
        return "voc"
    return "labelme" if any(map(_is_labelme, islice(folder.glob("*.json"), 3))) else None


def _is_labelme(file: Path) -> bool:
    with file.open("rb") as opened:
        return b'"shapes"' in opened.read(65536)


def _no_annotations(root: DataRoot) -> DataError:
    return DataError(f"{root.name} has no annotations/instances_*.json", remedy=advised_folder(root.name))


def _expect_folder(root: DataRoot) -> None:
    if isinstance(root, FolderRoot) and Path(root.name).expanduser().is_file():
        raise DataError(f"{root.name} is a file, not a folder", remedy=advised_folder(root.name))
    if not root.exists():
        raise DataError(
            f"there is no folder {root.name}", remedy="give the folder that holds annotations/: --data, or data.root"
        )


def split_from_paths(
    annotations: Path | str, images: Path | str, *, name: str | None = None, root: DataRoot | None = None
) -> SplitPaths:
    """The split of an annotation file and an image folder, both below `root`; `name` is by default the file's."""
    root = root or FolderRoot(Path())
    file, folder = root.file(str(annotations)), root.folder(str(images))
    if file is None:
        raise DataError(
            f"there is no annotation file {_below(root, annotations)}", remedy="check the path of the annotation file"
        )
    if folder is None:
        raise DataError(f"there is no image folder {_below(root, images)}", remedy="check the path of the image folder")
    return SplitPaths(name or file.stem.removeprefix("instances_"), file, folder)


def split_names(root: DataRoot | Path) -> list[str]:
    """Names of the splits that have an annotation file under a COCO folder."""
    names = _opened(root).listed("annotations")
    return sorted(
        name.removesuffix(".json").removeprefix("instances_")
        for name in names
        if name.startswith("instances_") and name.endswith(".json")
    )


def _opened(root: DataRoot | Path) -> DataRoot:
    return open_root(root) if isinstance(root, Path) else root


def _below(root: DataRoot, path: Path | str) -> str:
    expanded = Path(path).expanduser()
    return str(expanded) if expanded.is_absolute() or root.name == "." else f"{root.name}/{path}"
