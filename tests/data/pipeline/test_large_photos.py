"""Photos far above the canvas are decoded smaller; pixels and ground truth stay where they were."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from coco_files import annotation, coco_tree

from maskfleet.data.pipeline import collate, decode
from maskfleet.data.pipeline.augment import Flip, ResizeShortEdge
from maskfleet.data.pipeline.decode import read_image, reduction
from maskfleet.data.pipeline.device_resize import resize_on_device
from maskfleet.data.pipeline.samples import Preparation, Sample, evaluation_sample, train_sample
from maskfleet.data.store.annotations import AnnotationStore, open_store
from maskfleet.data.store.splits import SplitPaths
from maskfleet.errors import DataError

HEIGHT, WIDTH = 1202, 1601  # odd, so that a half is rounded up
SHORT, LONGEST = 300, 500


def photo() -> np.ndarray:
    """A smooth picture with a white square whose corners are annotated."""
    rows, columns = np.mgrid[:HEIGHT, :WIDTH]
    picture = np.stack([rows / 8, columns / 9, (rows + columns) / 16], axis=-1) % 200
    picture[400:800, 600:1200] = 255
    return picture.astype(np.uint8)


@pytest.fixture(params=[".jpg", ".png"])
def store(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AnnotationStore:
    monkeypatch.setattr(decode, "REDUCED_ABOVE_PX", 1_000_000)  # the rule of large photos, for a smaller one
    corners = [600, 400, 1200, 400, 1200, 800, 600, 800]
    tree = coco_tree(annotation(1, segmentation=[corners], bbox=[600, 400, 600, 400], area=240_000))
    tree["images"] = [{"id": 1, "file_name": f"a{request.param}", "height": HEIGHT, "width": WIDTH}]
    return written(tmp_path, tree, photo())


def written(folder: Path, tree: dict[str, Any], picture: np.ndarray) -> AnnotationStore:
    (folder / "images").mkdir(exist_ok=True)
    (folder / "a.json").write_text(json.dumps(tree))
    cv2.imwrite(str(folder / "images" / tree["images"][0]["file_name"]), picture)
    return open_store(SplitPaths("train", folder / "a.json", folder / "images"))


def sample(store: AnnotationStore, *, largest_px: tuple[int, int] | None, flip: float = 0.0) -> Sample:
    augmentations = (ResizeShortEdge((SHORT, SHORT), LONGEST), Flip(flip))
    preparation = Preparation(augmentations, masks=True, crowds=False, largest_px=largest_px)
    return train_sample(store, 0, preparation=preparation, canvas=(SHORT, LONGEST), seed=5)


@pytest.mark.parametrize(
    ("source", "resized", "factor"),
    [
        ((3000, 4000), (800, 1067), 2),  # a quarter would be 750 high
        ((4000, 6000), (800, 1200), 4),
        ((12000, 16000), (800, 1067), 8),
        ((2000, 2000), (800, 800), 1),  # not above 4 million pixels
        ((2001, 2000), (800, 800), 2),
        ((480, 640), (800, 1067), 1),
        ((1000, 9000), (800, 1333), 1),  # a half would be 500 high
    ],
)
def test_the_factor_never_falls_below_the_resized_size(
    source: tuple[int, int], resized: tuple[int, int], factor: int
) -> None:
    assert reduction(source, resized) == factor


def test_a_large_photo_is_decoded_smaller_and_shows_the_same(store: AnnotationStore) -> None:
    full, small = sample(store, largest_px=None), sample(store, largest_px=(SHORT, LONGEST))
    assert full.image.shape == (HEIGHT, WIDTH, 3)
    assert small.image.shape == (301, 401, 3)  # a quarter, rounded up; an eighth would be smaller than the canvas
    assert small.geometry == full.geometry
    np.testing.assert_array_equal(small.boxes, full.boxes)
    near, far = (collate.images_on_canvas([one], (SHORT, LONGEST)).pixels[0].float() for one in (small, full))
    assert float((near - far).abs().mean()) < 3
    left, top, right, bottom = small.boxes[0].round().astype(int)
    assert float(near[:, top + 2 : bottom - 2, left + 2 : right - 2].min()) > 245, "the square is where its box is"
    assert float(near[:, top - 4, left - 4].max()) < 215


@pytest.mark.parametrize("flip", [0.0, 1.0])
def test_the_gpu_resizes_the_smaller_pixels_to_the_same_place(store: AnnotationStore, flip: float) -> None:
    small = sample(store, largest_px=(SHORT, LONGEST), flip=flip)
    on_worker = collate.images_on_canvas([small], (SHORT, LONGEST))
    decoded, geometry = collate.images_as_decoded([small], (SHORT, LONGEST))
    assert max(decoded.pixels.shape[-2:]) <= 448
    on_device = resize_on_device(decoded.pixels, decoded.sizes, geometry)
    assert int((on_device.int() - on_worker.pixels.int()).abs().max()) <= 1


def test_evaluation_reads_large_photos_smaller_as_well(store: AnnotationStore) -> None:
    found = evaluation_sample(store, 0, short_edge_px=SHORT, max_px=LONGEST)
    assert found.image.shape == (301, 401, 3)
    assert found.geometry.source == (HEIGHT, WIDTH)


def test_a_size_that_differs_from_the_annotations_is_still_an_error(tmp_path: Path) -> None:
    path = tmp_path / "a.jpg"
    cv2.imwrite(str(path), photo())
    with pytest.raises(DataError, match=r"about 1204 x 1604 .* say 1202 x 2000"):
        read_image(path, size=(HEIGHT, 2000), reduced=4)
