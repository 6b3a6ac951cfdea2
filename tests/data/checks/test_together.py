"""Several splits together: classes that differ, and images that occur more than once."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from coco_files import annotation, coco_tree

from maskfleet.data.checks.problems import Problem
from maskfleet.data.checks.similar import similar_images, thumbnail_of
from maskfleet.data.checks.together import check_data
from maskfleet.data.store.annotations import open_store
from maskfleet.data.store.splits import SplitPaths
from maskfleet.data.synthetic.dataset import make_shapes

WriteSplit = Callable[..., SplitPaths]


def picture(seed: int, height: int = 48, width: int = 64) -> np.ndarray:
    noise = np.random.default_rng(seed).integers(0, 255, (height, width, 3), np.uint8)
    return cv2.normalize(cv2.GaussianBlur(noise, (0, 0), 4), None, 0, 255, cv2.NORM_MINMAX)


@pytest.fixture
def splits(write_split: WriteSplit, tmp_path: Path) -> tuple[SplitPaths, SplitPaths]:
    """A training split of images 1 and 2, and a validation split of image 5."""
    train = write_split(coco_tree(annotation(1)))
    val = SplitPaths("val", tmp_path / "annotations" / "instances_val.json", tmp_path / "val")
    val.images.mkdir()
    write_val(val)
    for number in (1, 2):
        cv2.imwrite(str(train.images / f"{number}.jpg"), picture(number))
    cv2.imwrite(str(val.images / "5.jpg"), picture(5))
    return train, val


def write_val(val: SplitPaths, **changes: Any) -> None:
    image = {"id": 5, "file_name": "5.jpg", "width": 64, "height": 48}
    val.annotations.write_text(json.dumps(coco_tree(annotation(1, image_id=5)) | {"images": [image]} | changes))


def check(*splits: SplitPaths, decode: bool = True) -> list[list[Problem]]:
    return check_data([open_store(split) for split in splits], decode=decode)


def test_sound_splits_have_no_problems(splits: tuple[SplitPaths, SplitPaths], tmp_path: Path) -> None:
    assert check(*splits) == [[], []]
    make_shapes(tmp_path / "set", num_train=8, num_val=4, height=(96, 96), width=(96, 96))
    folder = tmp_path / "set"
    shapes = [
        SplitPaths(name, folder / f"annotations/instances_{name}.json", folder / name) for name in ("train", "val")
    ]
    found = [problem for of_split in check(*shapes) for problem in of_split]
    assert [problem for problem in found if problem.kind != "polygon-crossing"] == []


def test_other_names_under_the_same_ids_are_an_error(splits: tuple[SplitPaths, SplitPaths]) -> None:
    write_val(splits[1], categories=[{"id": 3, "name": "seven"}, {"id": 7, "name": "three"}])
    of_train, (problem,) = check(*splits, decode=False)
    assert of_train == []
    assert (problem.kind, problem.severity, problem.image_id) == ("category-mismatch", "error", None)
    assert "category 3 is 'seven' here and 'three' there; category 7 is 'three' here and 'seven' there" in problem.what
    assert str(splits[0].annotations) in problem.what


def test_the_same_picture_in_train_and_val_is_a_warning(splits: tuple[SplitPaths, SplitPaths]) -> None:
    train, val = splits
    again = cv2.imread(str(train.images / "2.jpg"))
    cv2.imwrite(str(val.images / "5.jpg"), again, [cv2.IMWRITE_JPEG_QUALITY, 60])
    assert check(*splits, decode=False) == [[], []]
    of_train, (problem,) = check(*splits)
    assert of_train == []
    assert (problem.kind, problem.severity, problem.image_id) == ("image-repeated", "warning", 5)
    assert problem.what == "5.jpg looks like 2.jpg, image 2 of train"


def test_one_file_under_two_ids_is_a_warning(write_split: WriteSplit) -> None:
    tree = coco_tree(annotation(1), annotation(2, image_id=2))
    tree["images"][1]["file_name"] = "1.jpg"
    ((problem,),) = check(write_split(tree))  # and not also as a picture that looks the same
    assert (problem.kind, problem.severity, problem.image_id) == ("file-repeated", "warning", 2)
    assert problem.what == "1.jpg is also image 1 of train"


def test_a_split_that_serves_twice_is_not_compared_with_itself(splits: tuple[SplitPaths, SplitPaths]) -> None:
    assert check(splits[0], splits[0]) == [[], []]


def test_two_classes_of_one_name_are_a_warning(splits: tuple[SplitPaths, SplitPaths]) -> None:
    names = [{"id": 3, "name": "Cat"}, {"id": 7, "name": "cat "}, {"id": 8, "name": "dog"}]
    write_val(splits[1], categories=names)
    ((problem,),) = check(splits[1])
    assert (problem.kind, problem.severity) == ("category-name", "warning")
    assert problem.what == "categories 3, 7 have the same name, 'Cat'"


def test_pictures_of_another_size_and_quality_are_similar_and_others_are_not() -> None:
    pictures = [picture(seed, 120, 160) for seed in range(60)]
    encoded = [cv2.imencode(".jpg", one, [cv2.IMWRITE_JPEG_QUALITY, 50])[1] for one in pictures[:20]]
    copies = [cv2.imdecode(one, cv2.IMREAD_COLOR) for one in encoded]
    copies += [cv2.resize(one, (96, 72), interpolation=cv2.INTER_AREA) for one in pictures[20:30]]
    thumbnails = [thumbnail_of(one) for one in (*pictures, *copies)]
    assert similar_images(thumbnails) == {60 + index: index for index in range(30)}


def test_a_group_names_its_first_image() -> None:
    one, other = thumbnail_of(picture(0)), thumbnail_of(picture(1))
    assert similar_images([other, one, None, one, other, *[one] * 200]) == {
        3: 1,
        4: 0,
        **dict.fromkeys(range(5, 205), 1),
    }


def test_plain_images_are_not_called_the_same() -> None:
    plain = thumbnail_of(np.full((48, 64, 3), 90, np.uint8))
    assert similar_images([plain, plain, None, None]) == {}
    assert similar_images([]) == {}
