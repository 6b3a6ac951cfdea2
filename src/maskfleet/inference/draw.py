"""Results and ground truth drawn on their images, which are BGR here as everywhere below the Python API."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import cv2
import numpy as np
from numpy.typing import NDArray

from maskfleet import viz
from maskfleet.data.pipeline.decode import read_image
from maskfleet.data.store.annotations import AnnotationStore, clean_instances
from maskfleet.errors import DataError
from maskfleet.inference.detections import Categories
from maskfleet.rle import RleError, rle_pixels

Picture = NDArray[np.uint8]
Scalar = TypeVar("Scalar", np.uint8, np.bool_)
MIN_DRAWN_PX = 320  # longer side of a drawn picture


def drawn_detections(picture: Picture, results: Sequence[dict[str, Any]], categories: Categories) -> Picture:
    """`picture` with COCO `results` drawn on it; small images are enlarged."""
    factor = _enlargement(picture)
    label_of = {identity: label for label, (identity, _) in enumerate(categories, 1)}
    boxes = np.array([result["bbox"] for result in results], np.float64).reshape(-1, 4)
    boxes[:, 2:] += boxes[:, :2]
    masks = None
    if results and "segmentation" in results[0]:
        masks = [_enlarged(rle_pixels(result["segmentation"]), factor) for result in results]
    return viz.draw(
        _enlarged(picture, factor),
        factor * boxes,
        [label_of.get(result["category_id"], result["category_id"]) for result in results],
        [result["score"] for result in results],
        masks=masks,
        names=[name for _, name in categories],
    )


def drawn_truth(store: AnnotationStore, index: int) -> Picture:
    """Image `index` of `store` with its annotations drawn on it; small images are enlarged."""
    record = store.image(index)
    picture = read_image(record.path, image_id=record.id, max_mpx=record.max_mpx)
    factor = _enlargement(picture)
    objects = clean_instances(store.instances(index)).objects
    masks = []
    for number in range(len(objects)):
        rle = objects.rle(number)
        if rle is None:
            mask = _filled(objects.polygons(number), picture.shape[:2])
        else:
            mask = _decoded(rle, picture.shape[:2], f"annotation {objects.ids[number]} of image {record.id}")
        masks.append(_enlarged(mask, factor))
    names = [category.name for category in store.categories]
    return viz.draw(_enlarged(picture, factor), factor * objects.boxes, objects.labels, masks=masks, names=names)


def _decoded(rle: Mapping[str, Any], hw: tuple[int, ...], named: str) -> NDArray[np.bool_]:
    """The pixels of a mask of an image of size `hw`."""
    try:
        if tuple(rle["size"]) != hw:
            raise RleError(f"its size is {rle['size']}, that of the image {list(hw)}")
        return rle_pixels(rle)
    except RleError as error:
        raise DataError(
            f"the mask of {named} is broken: {error}", remedy="fix the annotation; maskfleet data inspect lists all"
        ) from None


def _enlargement(picture: Picture) -> int:
    """The factor by which a small image is enlarged, so that its labels are legible."""
    longer: int = max(picture.shape[:2])
    return max(1, -(-MIN_DRAWN_PX // longer))


def _enlarged(pixels: NDArray[Scalar], factor: int) -> NDArray[Scalar]:
    return pixels.repeat(factor, axis=0).repeat(factor, axis=1)


def _filled(polygons: Sequence[NDArray[np.float64]], hw: tuple[int, ...]) -> NDArray[np.bool_]:
    """Polygons as pixels, to the nearest pixel."""
    canvas = np.zeros(hw, np.uint8)
    for polygon in polygons:
        cv2.fillPoly(canvas, [np.round(polygon).astype(np.int32)], 1)
    return canvas.astype(bool)
