"""The inspection report of a data set: statistics, problems and chosen images, for `page.py` and as JSON."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from maskfleet import __version__
from maskfleet.data.checks.problems import Problem
from maskfleet.data.checks.together import Progress, check_data
from maskfleet.data.files.root import DataRoot, open_root
from maskfleet.data.inspect import statistics
from maskfleet.data.inspect.selection import SelectedImage, choose_problem_samples, choose_samples
from maskfleet.data.store.annotations import AnnotationStore, ImageRules, open_store
from maskfleet.data.store.splits import (
    SplitPaths,
    advised_folder,
    find_split,
    other_format,
    split_from_paths,
    split_names,
)
from maskfleet.errors import DataError

REPORT_FORMAT = 1
MIN_IMAGES_FOR_WORKERS = 500  # starting processes takes about as long as decoding this many
MAX_WORKERS = 16


@dataclass(frozen=True, slots=True)
class Resize:
    """The largest training size, which determines the canvases; in pixels."""

    short_edge_px: int
    max_px: int
    divisor: int


@dataclass(frozen=True, slots=True)
class SplitReport:
    """One split: its statistics, its problems and the images to show."""

    split: SplitPaths
    num_images: int
    num_annotations: int  # in the file
    num_objects: int  # usable for training, crowds not counted
    num_crowds: int
    num_left_out: int  # annotations that training cannot use
    num_empty_images: int  # without objects
    outlines: dict[str, int]
    classes: tuple[statistics.ClassCount, ...]
    shares: statistics.SizeShares
    box_size: statistics.Histogram
    aspect: statistics.Histogram
    objects_per_image: statistics.Histogram
    sizes: statistics.ImageSizes
    buckets: tuple[statistics.BucketUse, ...]
    problems: tuple[Problem, ...]
    samples: tuple[SelectedImage, ...]
    problem_samples: tuple[SelectedImage, ...]


@dataclass(frozen=True, slots=True)
class MissingSplit:
    """A split with an annotation file that cannot be inspected, such as one whose images are not there."""

    name: str
    what: str

    @property
    def is_error(self) -> bool:
        """Whether `maskfleet train --data` would stop: it uses all splits of such names."""
        return self.name.startswith(("train", "val"))

    def __str__(self) -> str:
        return f"{self.name} was not inspected: {self.what}"


@dataclass(frozen=True, slots=True)
class Report:
    """All inspected splits, those that could not be, and notes about the data set."""

    splits: tuple[SplitReport, ...]
    stores: tuple[AnnotationStore, ...]  # of the splits
    missing: tuple[MissingSplit, ...]
    notes: tuple[str, ...]
    resize: Resize
    decoded: bool

    @property
    def problems(self) -> list[Problem]:
        """Problems of all splits."""
        return [problem for split in self.splits for problem in split.problems]

    @property
    def num_errors(self) -> int:
        errors = sum(problem.severity == "error" for problem in self.problems)
        return errors + sum(one.is_error for one in self.missing)

    @property
    def num_warnings(self) -> int:
        return sum(problem.severity == "warning" for problem in self.problems)


def located(text: str | None) -> Path | DataRoot | None:
    """What the command line names: a path of this machine, or a data set in S3."""
    return open_root(text) if text is not None and text.startswith("s3://") else None if text is None else Path(text)


def splits_to_inspect(
    root: Path | DataRoot | None,
    names: Sequence[str] = (),
    *,
    annotations: Path | None = None,
    images: Path | None = None,
) -> tuple[list[SplitPaths], list[MissingSplit]]:
    """The splits to inspect -> (splits, those without images).

    Given is either a COCO folder, with `names` to select some of its splits, or an annotation file and its image
    folder; these two may be relative to `root`.
    """
    if isinstance(root, Path) and root.is_file() and annotations is None:
        root, annotations = None, root
    if annotations is not None or images is not None:
        return [_split_of_paths(root, names, annotations, images)], []
    if root is None:
        raise DataError("nothing to inspect", remedy="name a COCO folder, or give --annotations and --images")
    if names:
        return [find_split(root, name) for name in names], []
    found: list[SplitPaths] = []
    errors: dict[str, DataError] = {}
    for name in _names_under(root):
        try:
            found.append(find_split(root, name))
        except DataError as error:
            errors[name] = error
    if not found:
        raise next(iter(errors.values()))
    return found, [MissingSplit(name, error.what) for name, error in errors.items()]


def inspect_splits(
    splits: Sequence[SplitPaths],
    *,
    resize: Resize,
    decode: bool = True,
    workers: int | None = None,
    rules: ImageRules = ImageRules(),  # noqa: B008 - it is frozen
    num_samples: int = 24,
    missing: Sequence[MissingSplit] = (),
    notes: Sequence[str] = (),
    progress: Progress | None = None,
) -> Report:
    """Check every split and compute its statistics; raises only if an annotation file is not COCO format.

    `decode` decodes every image in addition to reading its header. `workers` files are read in parallel, 0 in this
    process; None uses one worker per core for large splits. `missing` and `notes` are added to the report.
    """
    stores = [open_store(split, rules=rules) for split in splits]

    def num_workers(store: AnnotationStore) -> int:
        return _default_workers(len(store)) if workers is None else workers

    problems = check_data(stores, decode=decode, workers=num_workers, progress=progress)
    reports = [
        _split_report(store, of_store, resize, num_samples) for store, of_store in zip(stores, problems, strict=True)
    ]
    return Report(tuple(reports), tuple(stores), tuple(missing), tuple(notes), resize, decode)


def report_json(report: Report) -> dict[str, Any]:
    """The whole report as JSON values."""
    return {
        "maskfleet": __version__,
        "format": REPORT_FORMAT,
        "errors": report.num_errors,
        "warnings": report.num_warnings,
        "decoded": report.decoded,
        "resize": dataclasses.asdict(report.resize),
        "notes": [*map(str, report.missing), *report.notes],
        "splits": json.loads(json.dumps([dataclasses.asdict(split) for split in report.splits], default=str)),
    }


def failure_json(error: DataError) -> dict[str, Any]:
    """What `report_json` would be, for data that cannot be inspected."""
    failure = {"what": error.what, "remedy": error.remedy}
    known = {"maskfleet": __version__, "format": REPORT_FORMAT, "errors": 1, "warnings": 0}
    return known | {"notes": [], "splits": [], "failure": failure}


def _split_of_paths(
    root: Path | DataRoot | None, names: Sequence[str], annotations: Path | None, images: Path | None
) -> SplitPaths:
    if annotations is None or images is None:
        missing = "--images, the image folder" if images is None else "--annotations, the annotation file"
        raise DataError("--annotations and --images belong together", remedy=f"add {missing}")
    if names:
        raise DataError(
            "--split names a split of a COCO folder, but an annotation file is given",
            remedy="leave out --split, or give the COCO folder alone",
        )
    base = open_root(root or Path()) if root is None or isinstance(root, Path) else root
    return split_from_paths(annotations, images, root=base)


def _names_under(root: Path | DataRoot) -> list[str]:
    if not root.exists():
        raise DataError(f"there is no folder {root}", remedy="check the path")
    names = split_names(root)
    if names:
        return names
    if not isinstance(root, Path):
        raise DataError(
            f"{root.name} has no annotations/instances_*.json",
            remedy="name the prefix or folder that holds annotations/",
        )
    if any(root.glob("instances_*.json")):
        raise DataError(f"{root} has no annotations/instances_*.json", remedy=advised_folder(str(root)))
    form = other_format(root)
    hint = f"; if this is {form}, run maskfleet data convert {root} NEW_FOLDER --from {form}" if form else ""
    raise DataError(
        f"{root} has no annotations/instances_*.json",
        remedy=f"name the folder that holds annotations/, or give --annotations FILE --images FOLDER{hint}",
    )


def _default_workers(num_images: int) -> int:
    if num_images < MIN_IMAGES_FOR_WORKERS:
        return 0
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, MAX_WORKERS)


def _split_report(store: AnnotationStore, problems: Sequence[Problem], resize: Resize, num_samples: int) -> SplitReport:
    table = statistics.object_table(store)
    objects = table.objects
    return SplitReport(
        split=store.split,
        num_images=len(store),
        num_annotations=store.num_annotations,
        num_objects=len(objects),
        num_crowds=len(table) - len(objects),
        num_left_out=store.num_annotations - len(table),
        num_empty_images=len(store) - len(np.unique(objects.owner)),
        outlines=statistics.outline_counts(store),
        classes=statistics.class_counts(store, table),
        shares=statistics.size_shares(objects),
        box_size=statistics.box_size_histogram(objects),
        aspect=statistics.aspect_histogram(objects),
        objects_per_image=statistics.objects_per_image(objects, len(store)),
        sizes=statistics.image_sizes(store),
        buckets=statistics.bucket_uses(store, **dataclasses.asdict(resize)),
        problems=tuple(problems),
        samples=tuple(choose_samples(store, table, problems, count=num_samples)),
        problem_samples=tuple(choose_problem_samples(store, problems, count=num_samples)),
    )
