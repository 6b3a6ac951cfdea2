"""File names that lead out of the data folder are refused unless the configuration allows them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from coco_files import annotation, coco_tree

from maskfleet.config.run import DataConfig, SplitConfig
from maskfleet.data.checks.annotations import check_split
from maskfleet.data.convert.convert import convert
from maskfleet.data.store.annotations import ImageRules, leads_out, open_store
from maskfleet.data.store.dataset import open_stores
from maskfleet.data.store.splits import SplitPaths
from maskfleet.errors import DataError


def named(tree: dict[str, list[dict[str, object]]], *names: str) -> dict[str, list[dict[str, object]]]:
    for image, name in zip(tree["images"], names, strict=True):
        image["file_name"] = name
    return tree


@pytest.fixture
def split(write_split: Callable[..., SplitPaths], tmp_path: Path) -> SplitPaths:
    """A split of three images: one inside of its folder, one outside by `..`, one by an absolute path."""
    split = write_split(coco_tree(annotation(1), images=3))
    shutil.move(split.images / "2.jpg", tmp_path / "2.jpg")
    shutil.move(split.images / "3.jpg", tmp_path / "3.jpg")
    tree = named(coco_tree(annotation(1), images=3), "1.jpg", "../2.jpg", str(tmp_path / "3.jpg"))
    split.annotations.write_text(json.dumps(tree))
    return split


def config(split: SplitPaths, *, allow_outside: bool) -> tuple[DataConfig, list[SplitConfig]]:
    paths = SplitConfig(annotations=str(split.annotations), images=str(split.images))
    return DataConfig(train=(paths,), allow_outside=allow_outside), [paths]


def test_names_that_lead_out_are_listed_before_anything_is_read(split: SplitPaths, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"2 of the 3 images of .* are outside of the image folder") as caught:
        open_stores(*config(split, allow_outside=False))
    assert str(tmp_path / "3.jpg") in caught.value.what
    assert "image 2: " in caught.value.what
    assert "data.allow_outside=true" in caught.value.remedy


def test_the_configuration_can_allow_them(split: SplitPaths) -> None:
    [store] = open_stores(*config(split, allow_outside=True))
    assert not [problem for problem in check_split(store) if problem.severity == "error"]


def test_inspection_names_them_and_does_not_read_them(split: SplitPaths) -> None:
    found = [problem for problem in check_split(open_store(split), decode=True) if problem.image_id in (2, 3)]
    assert [problem.kind for problem in found] == ["image-outside", "image-outside"]
    allowed = open_store(split, rules=ImageRules(allow_outside=True))
    assert "image-outside" not in {problem.kind for problem in check_split(allowed)}


@pytest.mark.parametrize(
    ("name", "outside"),
    [
        ("1.jpg", False),
        ("deep/1.jpg", False),
        ("deep/../1.jpg", False),
        ("..jpg", False),
        ("a..b/1.jpg", False),
        ("../train/1.jpg", False),
        ("../1.jpg", True),
        ("deep/../../1.jpg", True),
        ("..", True),
        ("/etc/passwd", True),
        ("//etc/passwd", True),
        ("a/../../b\0.jpg", True),
        ("linked/1.jpg", False),  # a link in the folder is its owner's decision
        ("linked/../1.jpg", True),  # but `..` after it leads out
    ],
)
def test_where_a_name_leads(name: str, outside: bool, tmp_path: Path) -> None:
    folder = tmp_path / "train"
    (folder / "deep").mkdir(parents=True)
    (tmp_path / "elsewhere" / "images").mkdir(parents=True)
    (folder / "linked").symlink_to(tmp_path / "elsewhere" / "images")
    assert leads_out(name, folder) is outside


def test_a_linked_data_folder_is_the_folder(tmp_path: Path) -> None:
    (tmp_path / "real" / "train").mkdir(parents=True)
    (tmp_path / "data").symlink_to(tmp_path / "real")
    folder = tmp_path / "data" / "train"
    assert not leads_out("a/../1.jpg", folder)
    assert not leads_out(str(folder / "1.jpg"), folder)
    assert not leads_out(str(tmp_path / "real" / "train" / "1.jpg"), folder)


@pytest.mark.parametrize("absolute", [False, True])
def test_a_labelme_image_outside_of_its_folder_needs_the_option(
    absolute: bool, write_split: Callable[..., SplitPaths], tmp_path: Path
) -> None:
    split = write_split(coco_tree(images=1))
    root = tmp_path / "labelme"
    (root / "labels").mkdir(parents=True)
    (root / "images").mkdir()
    shutil.copy(split.images / "1.jpg", root / "images" / "1.jpg")
    triangle = {"label": "cat", "points": [[1, 1], [9, 1], [1, 9]], "shape_type": "polygon"}

    def write(path: str) -> None:
        document = {"imagePath": path, "imageData": None, "shapes": [triangle]}
        (root / "labels" / "a.json").write_text(json.dumps(document))

    write(str(split.images / "1.jpg") if absolute else "../../train/1.jpg")
    with pytest.raises(DataError, match="leads out of") as caught:
        convert(root, tmp_path / "coco", form="labelme")
    assert "--allow-outside" in caught.value.remedy
    convert(root, tmp_path / "coco", form="labelme", allow_outside=True)
    write("../images/1.jpg")  # LabelMe's usual layout
    assert convert(root, tmp_path / "coco2", form="labelme").num_images == 1


def test_a_labelme_file_that_says_it_is_huge_is_refused(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    document = {"imageData": "AAAA", "imageWidth": 10**9, "imageHeight": 10**9, "shapes": []}
    (tmp_path / "in" / "a.json").write_text(json.dumps(document))
    with pytest.raises(DataError, match="the limit is 179 million pixels"):
        convert(tmp_path / "in", tmp_path / "out", form="labelme")
