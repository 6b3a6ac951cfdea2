"""Detections as COCO results: TensorPack's numbers and rounding, one shard a rank, merged and checked.

Shapes: D detections of one image, h x w the window of a mask. Boxes are xyxy pixels of the original image.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import TextIOWrapper
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from maskfleet.errors import DataError
from maskfleet.evaluation.rle import encode_window as encode_window

Result = dict[str, Any]  # image_id, category_id, bbox (xywh), score and, with masks, segmentation (an Rle)


class Window(NamedTuple):
    """A mask that is False outside the window [h, w] whose top left pixel is (y0, x0)."""

    y0: int
    x0: int
    pixels: NDArray[np.bool_]


def unscale_boxes(
    boxes: NDArray[np.float32], *, resized_hw: tuple[int, int], original_hw: tuple[int, int]
) -> NDArray[np.float32]:
    """Boxes [D, 4] of the resized image in pixels of the original one, clipped to it.

    One scale serves both axes, as in TensorPack, although rounding makes the two differ by a little.
    """
    scale = float(np.sqrt(resized_hw[0] / original_hw[0] * resized_hw[1] / original_hw[1]))
    height, width = original_hw
    limit = np.array([width, height, width, height], dtype=np.float32)
    unscaled: NDArray[np.float32] = np.asarray(boxes, dtype=np.float32) / scale
    return np.minimum(np.maximum(unscaled, np.float32(0)), limit)


def coco_results(
    image_id: int,
    boxes: NDArray[np.float32],
    scores: NDArray[np.float32],
    labels: NDArray[np.int64],
    *,
    category_ids: Sequence[int],
    original_hw: tuple[int, int],
    masks: Sequence[tuple[int, int, NDArray[np.bool_]] | Mapping[str, Any]] | None = None,
) -> list[Result]:
    """The results of one image: boxes [D, 4], scores [D], labels [D] and D masks, as windows or as RLEs.

    Label k stands for `category_ids[k - 1]`. Boxes are rounded to 4 decimals and, as xywh, to 3; scores to 4.
    """
    results = []
    for index, (box, score, label) in enumerate(zip(boxes.tolist(), scores.tolist(), labels.tolist(), strict=True)):
        assert 1 <= label <= len(category_ids), f"label {label} is padding or beyond the {len(category_ids)} categories"
        result: Result = {
            "image_id": int(image_id),
            "category_id": int(category_ids[label - 1]),
            "bbox": _rounded_xywh(box),
            "score": round(score, 4),
        }
        if masks is not None:
            result["segmentation"] = _rle(masks[index], original_hw)
        results.append(result)
    return results


class ResultsWriter:
    """Writes one rank's results to its shard, a JSON line an image, so that no rank holds them all.

    Used as a context: leaving it without an error writes the last line, by which `merge_results` knows a whole shard.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._num_images = 0
        self._file: TextIOWrapper | None = None

    def __enter__(self) -> ResultsWriter:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self.path.open("w", encoding="utf-8")
        return self

    def add(self, image_id: int, results: Sequence[Result]) -> None:
        """Append the results, which may be none, of one image."""
        try:
            line = json.dumps({"image_id": int(image_id), "results": list(results)}, allow_nan=False)
        except ValueError as error:
            raise DataError(
                f"the model gave image {image_id} a box or score that is not a number",
                remedy="these weights have diverged: evaluate an earlier checkpoint, or train with a lower base_lr",
            ) from error
        self._write(line)
        self._num_images += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self._write(json.dumps({"num_images": self._num_images}))
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, line: str) -> None:
        assert self._file is not None, "ResultsWriter is a context: use it in a with statement"
        self._file.write(line + "\n")


def merge_results(shards: Sequence[Path], *, image_ids: Sequence[int]) -> list[Result]:
    """The results of all `image_ids`, in their order, from the shards of ranks 0, 1, ...

    An image that several ranks predicted, as padding makes them do, counts once: the lowest rank's results.
    """
    read = [_read_shard(path) for path in shards]
    merged: dict[int, list[Result]] = {}
    for shard in read:
        for image_id, results in shard.by_image.items():
            merged.setdefault(image_id, results)
    missing = [image_id for image_id in image_ids if image_id not in merged]
    broken = [f"rank {rank} {shard.fault}" for rank, shard in enumerate(read) if shard.fault]
    if missing or broken:
        shown = ", ".join(str(image_id) for image_id in missing[:5]) + (", ..." if len(missing) > 5 else "")
        raise DataError(
            f"predictions of {len(missing)} of {len(image_ids)} images are missing"
            + (f" (image ids {shown})" if missing else "")
            + f": {'; '.join(broken) or 'every rank finished, but none was given them'}",
            remedy="read the log of the rank that is named, then evaluate again",
        )
    unknown = set(merged) - set(image_ids)
    if unknown:
        raise DataError(
            f"predictions of {len(unknown)} images, first {min(unknown)}, are not of the images to evaluate",
            remedy="delete the old shards and evaluate again, with the same data on every rank",
        )
    return [result for image_id in image_ids for result in merged[image_id]]


@dataclass(frozen=True, slots=True)
class _Shard:
    by_image: dict[int, list[Result]]
    fault: str  # what a rank did instead of finishing; "" if it finished


def _read_shard(path: Path) -> _Shard:
    """What a rank wrote; a file cut short in the middle of a line keeps the lines before it."""
    by_image: dict[int, list[Result]] = {}
    num_lines = 0
    if not path.exists():
        return _Shard({}, f"wrote no {path.name}")
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            try:
                record = json.loads(line)
            except ValueError:
                break
            if "num_images" in record:
                fault = "" if record["num_images"] == num_lines else f"lost lines of {path.name}"
                return _Shard(by_image, fault)
            by_image.setdefault(record["image_id"], record["results"])
            num_lines += 1
    return _Shard(by_image, f"stopped after {num_lines} images ({path.name})")


def _rounded_xywh(box: Sequence[float]) -> list[float]:
    """The xyxy `box` as TensorPack writes it: rounded, made xywh, rounded again."""
    x1, y1, x2, y2 = (round(value, 4) for value in box)
    return [round(value, 3) for value in (x1, y1, x2 - x1, y2 - y1)]


def _rle(
    mask: tuple[int, int, NDArray[np.bool_]] | Mapping[str, Any], original_hw: tuple[int, int]
) -> Mapping[str, Any]:
    if not isinstance(mask, Mapping):
        return encode_window(*mask, *original_hw)
    counts = mask["counts"]
    return {"size": list(mask["size"]), "counts": counts.decode("ascii") if isinstance(counts, bytes) else counts}
