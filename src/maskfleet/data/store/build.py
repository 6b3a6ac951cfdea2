"""Builds annotation stores, one per content of an annotation file, and finds existing ones."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from maskfleet.data.store.cache_folders import CACHE_FOLDER, first_writable, user_cache_dir
from maskfleet.data.store.coco import KIND_POLYGONS, KIND_RLE, CocoFile, read_coco
from maskfleet.data.store.columns import Column, DamagedFileError, map_columns, write_columns
from maskfleet.errors import DataError
from maskfleet.system.files import sha256, write_atomically
from maskfleet.system.lock import LockHeldError, NoLocksError, locked

FORMAT = "v2"
LOCK_TIMEOUT_S = 1800
MAX_COORDINATE = 1e30  # pixels: float32, in which training computes, overflows soon after


def built_store(annotations: Path, cache_dir: Path | None) -> Path:
    """Path of the store of an annotation file, built now unless one of the same content exists.

    It is in `.maskfleet/` next to the annotation file or, if that is not writable, in the user's cache folder;
    `cache_dir` replaces both. Any number of processes may call this at the same time: one builds, the others wait.
    """
    folders = [Path(cache_dir)] if cache_dir else [annotations.parent / CACHE_FOLDER, user_cache_dir()]
    digest = _known_digest(annotations, folders)
    if digest is None:
        with _readable(annotations):
            digest = sha256(annotations)
        _remember_digest(annotations, digest, folders)
    name = f"{digest[:32]}-{FORMAT}.store"
    for folder in folders:
        if _is_whole(folder / name):
            return folder / name
    folder_to_write = first_writable(folders)
    if folder_to_write is None:
        raise DataError(
            f"the annotation store cannot be written to {' or to '.join(map(str, folders))}",
            remedy="set XDG_CACHE_HOME to a folder that can be written",
        )
    path = folder_to_write / name
    with ExitStack() as stack:
        # Without the lock two processes may build the same store: that costs time, but it appears by an atomic rename.
        with suppress(LockHeldError, NoLocksError, OSError):
            stack.enter_context(locked(Path(f"{path}.lock"), f"building {path}", wait_s=LOCK_TIMEOUT_S))
        if not _is_whole(path):
            _build(annotations, path, digest)
    return path


def _build(annotations: Path, path: Path, digest: str) -> None:
    text, digest_now = _text(annotations)
    if digest_now != digest:
        raise DataError(f"{annotations} was changed while it was read", remedy="start again once it is fully written")
    coco = read_coco(text, annotations)
    del text
    write_columns(path, columns_of(coco), {"categories": coco.categories, "sha256": digest, "format": FORMAT})


def columns_of(coco: CocoFile) -> dict[str, Column]:
    """The store's columns: images by id, annotations grouped by image, their polygons and masks in the same order."""
    image_order = np.argsort(_ints(coco.image_id), kind="stable")
    image_id = _ints(coco.image_id)[image_order]
    names = [coco.image_name[index] for index in image_order.tolist()]
    owner = _index_in(image_id, _ints(coco.ann_image_id), missing=len(image_id))
    order = np.argsort(owner, kind="stable")
    counts = np.bincount(owner, minlength=len(image_id) + 1)[: len(image_id)]
    category_ids = np.unique(np.array([identity for identity, _ in coco.categories], np.int64))
    label = _index_in(category_ids, _ints(coco.ann_category_id), missing=-1) + 1
    return {
        "image_id": image_id,
        "image_width": _ints(coco.image_width)[image_order],
        "image_height": _ints(coco.image_height)[image_order],
        "image_name_start": _starts([len(name) for name in names]),
        "image_names": np.frombuffer(b"".join(names), np.uint8),
        "image_first": _starts(counts)[:-1],
        "image_annotations": counts,
        "ann_id": _ints(coco.ann_id)[order],
        "ann_image_id": _ints(coco.ann_image_id)[order],
        "ann_category_id": _ints(coco.ann_category_id)[order],
        "ann_label": label[order],
        "ann_box_xywh": _bounded(np.frombuffer(coco.ann_box_xywh, np.float64).reshape(-1, 4)[order]),
        "ann_area": np.frombuffer(coco.ann_area, np.float64)[order],
        "ann_crowd": np.frombuffer(coco.ann_crowd, np.uint8)[order].astype(bool),
        "ann_crowd_unclear": np.frombuffer(coco.ann_crowd_unclear, np.uint8)[order].astype(bool),
        "ann_ignore": np.frombuffer(coco.ann_ignore, np.uint8)[order].astype(bool),
        "ann_kind": np.frombuffer(coco.ann_kind, np.uint8)[order],
        **_outline_columns(coco, order),
    }


def _outline_columns(coco: CocoFile, order: npt.NDArray[np.intp]) -> dict[str, Column]:
    """Polygons and run-length masks, rearranged to follow the annotations' `order` [A]."""
    kind = np.frombuffer(coco.ann_kind, np.uint8)
    parts = _ints(coco.ann_parts)
    num_polygons = np.where(kind == KIND_POLYGONS, parts, 0)
    num_rles = np.where(kind == KIND_RLE, 1, 0)
    part_order = _ranges(_starts(num_polygons)[:-1][order], num_polygons[order])
    rle_order = (_starts(num_rles)[:-1][order])[num_rles[order] == 1]
    numbers = _ints(coco.part_numbers)
    points = np.frombuffer(coco.points, np.float64)
    texts = [coco.rle_text[index] for index in rle_order.tolist()]
    first = np.where(kind[order] == KIND_RLE, _starts(num_rles[order])[:-1], _starts(num_polygons[order])[:-1])
    return {
        "ann_first_part": first,
        "ann_parts": parts[order],
        "part_start": _starts(numbers[part_order]),
        "points": _bounded(points[_ranges(_starts(numbers)[:-1][part_order], numbers[part_order])]),
        "rle_start": _starts([len(text) for text in texts]),
        "rle_texts": np.frombuffer(b"".join(texts), np.uint8),
        "rle_height": _ints(coco.rle_height)[rle_order],
        "rle_width": _ints(coco.rle_width)[rle_order],
    }


def _bounded(coordinates: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """`coordinates`, in place, where those beyond MAX_COORDINATE are infinite, as 1e999 is: the checks report them."""
    coordinates[(coordinates > MAX_COORDINATE) | (coordinates < -MAX_COORDINATE)] = np.inf
    return coordinates


def _ints(values: Any) -> npt.NDArray[np.int64]:
    return np.frombuffer(values, np.int64)


def _starts(counts: Sequence[int] | npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Start of each of consecutive runs of `counts` [N], and the end of the last one -> [N + 1]."""
    return np.concatenate([[0], np.cumsum(np.asarray(counts, np.int64))]).astype(np.int64)


def _ranges(starts: npt.NDArray[np.int64], counts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """start, start + 1, ... of each of the runs, one after the other."""
    shift = starts - _starts(counts)[:-1]
    return np.repeat(shift, counts) + np.arange(int(counts.sum()))


def _index_in(
    ascending: npt.NDArray[np.int64], values: npt.NDArray[np.int64], *, missing: int
) -> npt.NDArray[np.int64]:
    """Index of the first entry of `ascending` [N] that equals each of `values` [M], or `missing` -> [M]."""
    index = np.searchsorted(ascending, values)
    found = index < len(ascending)
    found[found] = ascending[index[found]] == values[found]
    return np.where(found, index, missing)


def _is_whole(path: Path) -> bool:
    try:
        map_columns(path)
    except (OSError, DamagedFileError):
        return False
    return True


def _text(annotations: Path) -> tuple[str, str]:
    """Content of the annotation file, and its SHA-256."""
    with _readable(annotations):
        content = annotations.read_bytes()
    try:
        return content.decode("utf-8-sig"), hashlib.sha256(content).hexdigest()
    except UnicodeDecodeError as error:
        raise DataError(
            f"{annotations} is not text: byte {error.start} is not UTF-8",
            remedy="give the JSON file itself; unpack it first if it is an archive",
        ) from error


@contextmanager
def _readable(annotations: Path) -> Iterator[None]:
    """Turn an error while reading the annotation file into one for the user."""
    try:
        yield
    except OSError as error:
        raise DataError(
            f"the annotation file {annotations} cannot be read: {error.strerror}",
            remedy="check that the file exists and is readable",
        ) from error


def _digest_record(annotations: Path) -> tuple[str, dict[str, Any]]:
    """Name of the note that keeps the annotation file's SHA-256, and the state of the file it holds for."""
    path = annotations.resolve()
    with _readable(annotations):
        stat = path.stat()
    name = f"{hashlib.sha256(os.fsencode(path)).hexdigest()[:32]}.json"
    return name, {"path": os.fspath(path), "bytes": stat.st_size, "modified_ns": stat.st_mtime_ns}


def _known_digest(annotations: Path, folders: Sequence[Path]) -> str | None:
    """The saved SHA-256 of the annotation file, if the file has not changed since: hashing 448 MB takes a while."""
    name, state = _digest_record(annotations)
    for folder in folders:
        try:
            note = json.loads((folder / name).read_bytes())
        except (OSError, ValueError):
            continue
        if isinstance(note, dict) and isinstance(note.get("sha256"), str) and note.get("state") == state:
            return str(note["sha256"])
    return None


def _remember_digest(annotations: Path, digest: str, folders: Sequence[Path]) -> None:
    """Save the digest if a folder is writable; without it the next start takes longer."""
    name, state = _digest_record(annotations)
    folder = first_writable(folders)
    if folder is not None:
        write_atomically(folder / name, json.dumps({"state": state, "sha256": digest}))
