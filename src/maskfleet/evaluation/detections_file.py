"""RUN_DIR/detections.npz: what a run's model detected in its validation set, kept for `maskfleet report`.

A NumPy archive of plain columns, written atomically, and a JSON text about where the detections come from.

Shapes: I images, D detections, grouped by image, C characters of all masks.
"""

from __future__ import annotations

import json
import struct
import tokenize
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from maskfleet.errors import DataError
from maskfleet.evaluation.coco_eval import CocoScores, scores_from
from maskfleet.inference.detections import Result
from maskfleet.system.files import replacing

FILE = "detections.npz"
VERSION = 1
# What zipfile, numpy and json raise for a damaged archive.
DAMAGE = (
    *(OSError, EOFError, ValueError, LookupError, TypeError, AttributeError, RuntimeError, MemoryError, SyntaxError),
    *(zipfile.BadZipFile, zlib.error, struct.error, tokenize.TokenError),
)


@dataclass(frozen=True, slots=True)
class DetectionsOrigin:
    """Which model detected, and in which images."""

    step: int | None  # of the checkpoint; None if it is not known
    split: str  # name of the data set
    annotations: str  # path of the annotation file
    annotations_sha256: str


@dataclass(frozen=True, slots=True, eq=False)
class StoredDetections:
    """The detections of an evaluation and its scores."""

    origin: DetectionsOrigin
    results: list[Result]  # COCO results
    image_ids: list[int]  # of all evaluated images, ascending
    scores: dict[str, CocoScores]  # by kind: bbox, segm


def write_detections(run_dir: Path, stored: StoredDetections) -> Path:
    """Write RUN_DIR/detections.npz and return its path; raises OSError."""
    path = run_dir / FILE
    about: dict[str, Any] = {
        "version": VERSION,
        "origin": asdict(stored.origin),
        "scores": {kind: asdict(scores) for kind, scores in stored.scores.items()},
    }
    columns: dict[str, Any] = {"about": np.frombuffer(json.dumps(about).encode(), np.uint8), **_columns(stored)}
    # numpy's own writer compresses at level 6: that takes three times as long for files a quarter smaller
    with replacing(path) as file, zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for name, column in columns.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as entry:
                np.lib.format.write_array(entry, column, allow_pickle=False)
    return path


def read_detections(run_dir: Path) -> StoredDetections | None:
    """What `write_detections` wrote; None if there is no such file."""
    path = run_dir / FILE
    if not path.exists():
        return None
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as columns:
            about = json.loads(columns["about"].tobytes())
            if about["version"] != VERSION:
                raise ValueError(f"version {about['version']} instead of {VERSION}")
            return StoredDetections(
                origin=DetectionsOrigin(**about["origin"]),
                results=_results(columns),
                image_ids=columns["image_ids"].tolist(),
                scores={kind: scores_from(fields) for kind, fields in about["scores"].items()},
            )
    except DAMAGE as error:
        raise DataError(
            f"the detections in {path} cannot be read: {error}",
            remedy="delete the file: maskfleet report then detects again",
        ) from error


def _columns(stored: StoredDetections) -> dict[str, NDArray[Any]]:
    results = stored.results
    image_ids = np.array(sorted(stored.image_ids), np.int64)
    columns: dict[str, NDArray[Any]] = {
        "image_ids": image_ids,  # [I]
        "image_id": np.array([one["image_id"] for one in results], np.int64),  # [D]
        "category_id": np.array([one["category_id"] for one in results], np.int64),  # [D]
        "box_xywh": np.array([one["bbox"] for one in results], np.float64).reshape(-1, 4),  # [D, 4]
        "score": np.array([one["score"] for one in results], np.float64),  # [D]
    }
    if results and "segmentation" in results[0]:
        texts = [one["segmentation"]["counts"].encode("ascii") for one in results]
        columns["mask_size"] = np.array([one["segmentation"]["size"] for one in results], np.int32)  # [D, 2]
        columns["mask_length"] = np.array([len(text) for text in texts], np.int64)  # [D]
        columns["mask_text"] = np.frombuffer(b"".join(texts), np.uint8)  # [C]
    return columns


def _results(columns: Mapping[str, NDArray[Any]]) -> list[Result]:
    names = ("image_id", "category_id", "box_xywh", "score")
    rows = zip(*(columns[name].tolist() for name in names), strict=True)
    results: list[Result] = [
        {"image_id": image_id, "category_id": category_id, "bbox": box, "score": score}
        for image_id, category_id, box, score in rows
    ]
    if "mask_text" in columns:
        masks = _masks(columns["mask_text"].tobytes().decode("ascii"), columns["mask_length"], columns["mask_size"])
        for result, mask in zip(results, masks, strict=True):
            result["segmentation"] = mask
    return results


def _masks(text: str, lengths: NDArray[Any], sizes: NDArray[Any]) -> Sequence[dict[str, Any]]:
    ends = np.cumsum(lengths)
    if len(text) != (int(ends[-1]) if len(ends) else 0):
        raise ValueError("the masks are incomplete")
    bounds = zip((ends - lengths).tolist(), ends.tolist(), sizes.tolist(), strict=True)
    return [{"size": size, "counts": text[start:stop]} for start, stop, size in bounds]
