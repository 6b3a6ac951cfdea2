from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from pycocotools import mask as coco_mask

from maskfleet.data.store.annotations import images_with_objects, open_store
from maskfleet.data.store.splits import find_split
from maskfleet.data.synthetic.dataset import SPLITS, ShapesSpec, _annotation, make_shapes
from maskfleet.data.synthetic.shapes import KINDS, Scene, draw_scene, outline, visible_pixels
from maskfleet.errors import ConfigError, DataError

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # pycocotools on numpy 2

SMALL: dict[str, Any] = {"num_train": 6, "num_val": 3, "height": (64, 96), "width": (80, 128)}


def digests(root: Path) -> dict[str, str]:
    files = [path for path in sorted(root.rglob("*")) if path.is_file()]
    return {str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def bitmap(segmentation: Any, height: int, width: int) -> np.ndarray:
    rles = coco_mask.frPyObjects(segmentation, height, width)
    rle = coco_mask.merge(rles) if isinstance(rles, list) else rles
    return coco_mask.decode(rle).astype(bool)


def iou(a: np.ndarray, b: np.ndarray) -> float:
    return float((a & b).sum() / (a | b).sum())


@pytest.fixture(scope="module")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("shapes") / "set"
    make_shapes(root, num_train=40, num_val=10, num_categories=10, crowd_fraction=0.3)
    return root


@pytest.fixture(scope="module")
def tree(shapes: Path) -> dict[str, Any]:
    return json.loads((shapes / "annotations" / "instances_train.json").read_text())


def test_the_set_is_found_and_stored_like_any_coco_folder(shapes: Path, tmp_path: Path) -> None:
    for split, count in (("train", 40), ("val", 10)):
        store = open_store(find_split(shapes, split), cache_dir=tmp_path)
        assert len(store) == count
        assert len(images_with_objects(store)) == count
        assert [category.name for category in store.categories] == list(KINDS)
        for index in range(count):
            record = store.image(index)
            assert cv2.imread(str(record.path)).shape == (record.height, record.width, 3)


def test_category_ids_have_gaps_and_all_categories_occur(tree: dict[str, Any]) -> None:
    identities = [category["id"] for category in tree["categories"]]
    assert identities != list(range(1, len(identities) + 1))
    assert {record["category_id"] for record in tree["annotations"]} == set(identities)


def test_objects_run_from_small_to_large_and_include_crowds(tree: dict[str, Any]) -> None:
    areas = np.array([record["area"] for record in tree["annotations"] if not record["iscrowd"]])
    assert (areas < 32**2).mean() > 0.2
    assert (areas > 64**2).mean() > 0.1
    crowds = [record for record in tree["annotations"] if record["iscrowd"]]
    assert 0.1 < len(crowds) / len(tree["images"]) < 0.5
    assert all(isinstance(record["segmentation"]["counts"], list) for record in crowds)


def scenes(count: int) -> list[Scene]:
    return [
        draw_scene(np.random.default_rng([7, n]), (200, 240), KINDS, max_objects=9, crowd_fraction=0.3)
        for n in range(count)
    ]


def test_annotations_cover_what_can_be_seen() -> None:
    """IoU of the rasterised annotation with the pixels that show the object, and its area and box beside them."""
    large, small, box_errors = [], [], []
    for scene in scenes(30):
        for number in range(1, len(scene.objects) + 1):
            seen = visible_pixels(scene, number)
            record = _annotation(scene, number)
            annotated = bitmap(record["segmentation"], *seen.shape)
            assert record["area"] == annotated.sum()
            rows, columns = np.flatnonzero(annotated.any(axis=1)), np.flatnonzero(annotated.any(axis=0))
            tight = [columns[0], rows[0], columns[-1] + 1, rows[-1] + 1]
            x, y, w, h = record["bbox"]
            box_errors.append(np.abs(np.subtract([x, y, x + w, y + h], tight)).max())
            (large if seen.sum() > 32**2 else small).append(iou(seen, annotated))
    assert len(large) > 30
    assert min(large) > 0.95
    assert np.mean(small) > 0.9
    assert np.median(box_errors) < 0.7
    assert max(box_errors) < 3  # a sharp tip covers no whole pixel


def test_no_pixel_belongs_to_two_objects_and_occluded_ones_stay_visible() -> None:
    overlapped = 0
    for scene in scenes(20):
        owners = np.stack([visible_pixels(scene, n) for n in range(1, len(scene.objects) + 1)]).sum(axis=0)
        assert owners.max() <= 2  # a pixel halved exactly by two
        assert (owners == 2).mean() < 0.002
        left = [np.count_nonzero(scene.owner == n) for n in range(1, len(scene.objects) + 1)]
        shares = np.array(left) / np.array(scene.num_cells)
        assert shares.min() >= 0.4
        overlapped += int((shares < 0.97).sum())
    assert overlapped > 5


def test_objects_stand_out_from_the_background() -> None:
    saturation: dict[bool, list[float]] = {True: [], False: []}
    for scene in scenes(10):
        hsv = cv2.cvtColor(scene.pixels, cv2.COLOR_BGR2HSV)[:, :, 1]
        painted = np.any([visible_pixels(scene, n) for n in range(1, len(scene.objects) + 1)], axis=0)
        saturation[True].append(float(hsv[painted].mean()))
        saturation[False].append(float(hsv[~painted].mean()))
    assert np.mean(saturation[True]) > 2 * np.mean(saturation[False])


@pytest.mark.parametrize("kind", KINDS)
def test_each_outline_fills_the_unit_circle_and_no_more(kind: str) -> None:
    points = np.concatenate(outline(kind, np.random.default_rng(1)))
    reach = np.hypot(points[:, 0], points[:, 1])
    assert 0.9 < reach.max() < 1.0001


def test_the_same_seed_gives_the_same_bytes_whatever_the_workers(tmp_path: Path) -> None:
    make_shapes(tmp_path / "one", **SMALL, seed=5)
    make_shapes(tmp_path / "two", **SMALL, seed=5, workers=2)
    make_shapes(tmp_path / "other", **SMALL, seed=6)
    one, other = digests(tmp_path / "one"), digests(tmp_path / "other")
    assert len(one) == 6 + 3 + 2 + 1
    assert one == digests(tmp_path / "two")
    assert not set(one.values()) & set(other.values())


def test_more_images_begin_with_the_same_ones(tmp_path: Path) -> None:
    make_shapes(tmp_path / "few", **SMALL)
    make_shapes(tmp_path / "more", **SMALL | {"num_train": 9})
    few, more = digests(tmp_path / "few" / "train"), digests(tmp_path / "more" / "train")
    assert few.items() < more.items()


def test_making_the_same_set_again_leaves_it_alone(tmp_path: Path) -> None:
    root = tmp_path / "set"
    make_shapes(root, **SMALL)
    image = next((root / "train").iterdir())
    before = image.stat().st_mtime_ns
    make_shapes(root, **SMALL)
    assert image.stat().st_mtime_ns == before


def test_a_folder_with_something_else_is_not_touched(tmp_path: Path) -> None:
    make_shapes(tmp_path / "set", **SMALL)
    with pytest.raises(DataError, match="other values"):
        make_shapes(tmp_path / "set", **SMALL, seed=9)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("words")
    with pytest.raises(DataError, match="something else"):
        make_shapes(tmp_path / "mine", **SMALL)
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["thesis.txt"]


def test_an_interrupted_set_leaves_nothing(tmp_path: Path) -> None:
    def stop(done: int, total: int) -> None:
        if done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make_shapes(tmp_path / "set", **SMALL, progress=stop)
    assert list(tmp_path.iterdir()) == []


def test_progress_counts_every_image(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    make_shapes(tmp_path / "set", **SMALL, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(n, 9) for n in range(1, 10)]


@pytest.mark.parametrize(
    "change", [{"num_categories": 11}, {"quality": 0}, {"crowd_fraction": 1.5}, {"height": 8}, {"width": (90, 80)}]
)
def test_values_out_of_range_are_named(tmp_path: Path, change: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(change))):
        make_shapes(tmp_path / "set", **SMALL | change)
    assert not (tmp_path / "set").exists()


def test_image_ids_of_the_splits_never_meet(tmp_path: Path) -> None:
    make_shapes(tmp_path / "set", **SMALL)
    ids = []
    for split in SPLITS:
        tree = json.loads((tmp_path / "set" / "annotations" / f"instances_{split}.json").read_text())
        ids += [image["id"] for image in tree["images"]]
        assert [record["id"] for record in tree["annotations"]] == list(range(1, len(tree["annotations"]) + 1))
    assert len(ids) == len(set(ids)) == 9


def test_the_specification_is_written_beside_the_data(tmp_path: Path) -> None:
    make_shapes(tmp_path / "set", **SMALL, seed=4)
    said = json.loads((tmp_path / "set" / "shapes.json").read_text())
    assert set(ShapesSpec.__dataclass_fields__) < set(said)
    assert (said["seed"], said["num_train"], said["height"]) == (4, 6, [64, 96])
