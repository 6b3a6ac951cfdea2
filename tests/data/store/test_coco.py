from __future__ import annotations

import gc
import json
from pathlib import Path

import numpy as np
import pytest
from coco_files import annotation, coco_tree
from hypothesis import given
from hypothesis import strategies as st
from pycocotools import mask as coco_mask

from maskfleet.data.store.coco import KIND_BROKEN, KIND_NONE, KIND_POLYGONS, KIND_RLE, read_coco
from maskfleet.data.store.splits import find_split, split_from_paths, split_names
from maskfleet.errors import DataError
from maskfleet.rle import RleError, check_runs, runs_from_text, text_from_runs

HERE = Path("instances.json")


def make_root(root: Path, splits: list[str], image_dirs: list[str]) -> Path:
    (root / "annotations").mkdir(parents=True)
    for split in splits:
        (root / "annotations" / f"instances_{split}.json").write_text("{}")
    for image_dir in image_dirs:
        (root / image_dir).mkdir(parents=True)
    return root


@pytest.mark.parametrize("name", ["train2017", "coco_train2017"])
def test_a_split_is_found_by_its_own_and_by_tensorpacks_name(tmp_path: Path, name: str) -> None:
    root = make_root(tmp_path, ["train2017"], ["train2017"])
    split = find_split(root, name)
    assert split.name == "train2017"
    assert split.annotations == root / "annotations" / "instances_train2017.json"
    assert split.images == root / "train2017"


@pytest.mark.parametrize(
    ("split", "image_dir"),
    [("minival2014", "val2014"), ("valminusminival2014", "val2014"), ("val2017_100", "val2017")],
)
def test_subsets_use_the_images_of_the_set_they_come_from(tmp_path: Path, split: str, image_dir: str) -> None:
    root = make_root(tmp_path, [split], [image_dir])
    assert find_split(root, f"coco_{split}").images == root / image_dir


def test_images_may_lie_in_a_folder_named_images(tmp_path: Path) -> None:
    root = make_root(tmp_path, ["val2017"], ["images/val2017"])
    assert find_split(root, "val2017").images == root / "images" / "val2017"


def test_an_unknown_split_lists_the_existing_ones(tmp_path: Path) -> None:
    root = make_root(tmp_path, ["val2017", "mine"], ["val2017"])
    with pytest.raises(DataError, match="train2017") as error:
        find_split(root, "train2017")
    assert "mine, val2017" in error.value.remedy
    assert split_names(root) == ["mine", "val2017"]


def test_a_missing_root_image_folder_or_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nowhere"):
        find_split(tmp_path / "nowhere", "train2017")
    root = make_root(tmp_path / "root", ["train2017"], [])
    with pytest.raises(DataError, match="train2017, which is not a folder"):
        find_split(root, "train2017")
    with pytest.raises(DataError, match="annotation file"):
        split_from_paths(root / "none.json", root)
    with pytest.raises(DataError, match="image folder"):
        split_from_paths(root / "annotations" / "instances_train2017.json", root / "none")


def test_a_set_given_by_two_paths_is_named_after_its_file(tmp_path: Path) -> None:
    root = make_root(tmp_path, ["cells"], ["pictures"])
    file = root / "annotations" / "instances_cells.json"
    assert split_from_paths(file, root / "pictures").name == "cells"
    assert split_from_paths(file, root / "pictures", name="mine").name == "mine"


def test_records_are_flattened_in_file_order() -> None:
    polygons = [[1, 2, 3.5, 4, 5, 6], [7, 8, 9, 10, 11, 12.25, 13, 14]]
    tree = coco_tree(
        annotation(5, segmentation=polygons),
        annotation(4, segmentation={"size": [3, 2], "counts": [1, 2, 3]}, iscrowd=1),
        annotation(3, segmentation=None, ignore=1),
        annotation(2, segmentation=[[1, "x"]]),
    )
    coco = read_coco(json.dumps(tree), HERE)
    assert list(coco.image_id) == [1, 2]
    assert coco.image_name == [b"1.jpg", b"2.jpg"]
    assert list(coco.ann_id) == [5, 4, 3, 2]
    assert list(coco.ann_kind) == [KIND_POLYGONS, KIND_RLE, KIND_NONE, KIND_BROKEN]
    assert list(coco.ann_parts) == [2, 1, 0, 0]
    assert list(coco.points) == polygons[0] + polygons[1]
    assert list(coco.part_numbers) == [6, 8]
    assert list(coco.ann_crowd) == [0, 1, 0, 0]
    assert list(coco.ann_ignore) == [0, 0, 1, 0]
    assert coco.categories == [(7, "seven"), (3, "three")]
    assert (list(coco.rle_height), list(coco.rle_width)) == ([3], [2])


def test_a_bad_box_becomes_nan_and_a_missing_area_that_of_the_box() -> None:
    tree = coco_tree(annotation(1, bbox=[1, 2, 3]), annotation(2, area=None, bbox=[0, 0, 4, 5]))
    coco = read_coco(json.dumps(tree), HERE)
    assert np.isnan(coco.ann_box_xywh[:4]).all()
    assert coco.ann_area[1] == 20


def test_truncated_json_names_line_and_column() -> None:
    text = json.dumps(coco_tree(annotation(1)), indent=1)
    cut = text[: text.index('"bbox"') + 3]
    line = cut.count("\n") + 1
    with pytest.raises(DataError, match=rf"line {line}, column \d+ \(the file is truncated there\)"):
        read_coco(cut, HERE)


def test_broken_json_names_the_position_without_calling_it_truncated() -> None:
    with pytest.raises(DataError, match=r"line 2, column 3") as error:
        read_coco('{"images": [],\n  annotations: []}' + " " * 50 + "}" * 50, HERE)
    assert "truncated" not in error.value.what


@pytest.mark.parametrize("key", ["images", "annotations", "categories"])
def test_a_missing_list_is_named(key: str) -> None:
    tree = coco_tree(annotation(1))
    del tree[key]
    with pytest.raises(DataError, match=f"no key '{key}'"):
        read_coco(json.dumps(tree), HERE)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"annotations": [{"id": 1, "image_id": 1}]}, r"entry 0 of 'annotations' \(id 1\) has no key 'category_id'"),
        ({"annotations": [annotation(1), 5]}, "entry 1 of 'annotations' is 5, not an object"),
        ({"annotations": [annotation(1, id="one")]}, "has 'id': \"one\", not an integer"),
        (
            {"images": [{"id": 1, "file_name": "a.jpg", "width": 3}]},
            r"entry 0 of 'images' \(id 1\) has no key 'height'",
        ),
        ({"images": [{"id": 1, "width": 3, "height": 3}]}, r"entry 0 of 'images' \(id 1\) has no key 'file_name'"),
        ({"categories": [{"name": "x"}]}, "entry 0 of 'categories' has no key 'id'"),
        ({"categories": [{"id": 4}]}, r"entry 0 of 'categories' \(id 4\) has no key 'name'"),
        ({"images": {}}, "no list under key 'images'"),
        ({"info": annotation(9)}, "outside its lists"),
    ],
)
def test_a_record_without_a_needed_key_is_named(change: dict[str, object], message: str) -> None:
    with pytest.raises(DataError, match=message):
        read_coco(json.dumps(coco_tree(annotation(1)) | change), HERE)


def test_all_malformed_entries_are_listed_with_key_and_value() -> None:
    tree = coco_tree(annotation(1), annotation(2, image_id="two", category_id=None), annotation(3, image_id=1.5))
    tree["images"][1] |= {"width": None, "height": "48"}
    tree["images"].append(annotation(4))
    tree["categories"].append({"id": 9, "name": ["x" * 99]})
    with pytest.raises(DataError) as error:
        read_coco(json.dumps(tree), HERE)
    first, *lines = error.value.what.splitlines()
    assert str(HERE) in first
    assert [line.strip() for line in lines] == [
        "entry 1 of 'images' (id 2) has 'width': null, not an integer",
        "entry 1 of 'images' (id 2) has 'height': \"48\", not an integer",
        "entry 2 of 'images' belongs in 'annotations'",
        "entry 1 of 'annotations' (id 2) has 'image_id': \"two\", not an integer",
        "entry 1 of 'annotations' (id 2) has no key 'category_id'",
        "entry 2 of 'annotations' (id 3) has 'image_id': 1.5, not an integer",
        f"entry 2 of 'categories' (id 9) has 'name': [\"{'x' * 38}…, not a string",
    ]


def test_very_many_malformed_entries_are_counted() -> None:
    with pytest.raises(DataError) as error:
        read_coco(json.dumps(coco_tree(*[annotation(n, category_id="x") for n in range(250)])), HERE)
    assert len(error.value.what.splitlines()) == 102
    assert error.value.what.endswith("and 150 more")


def test_a_json_list_is_not_coco() -> None:
    with pytest.raises(DataError, match="it holds a list"):
        read_coco("[1, 2]", HERE)


def test_reading_leaves_the_garbage_collector_as_it_was() -> None:
    assert gc.isenabled()
    with pytest.raises(DataError):
        read_coco("{", HERE)
    assert gc.isenabled()


@given(st.integers(1, 40), st.integers(1, 40), st.integers(0, 2**32 - 1), st.floats(0, 1))
def test_run_lengths_agree_with_pycocotools(height: int, width: int, seed: int, density: float) -> None:
    bitmap = np.random.default_rng(seed).random((height, width)) < density
    peer = coco_mask.encode(np.asfortranarray(bitmap, np.uint8))["counts"]
    runs = runs_from_text(peer)
    check_runs(runs, height, width)
    drawn = np.repeat(np.arange(len(runs)) % 2, runs).reshape(width, height).T
    np.testing.assert_array_equal(drawn, bitmap)
    assert text_from_runs(runs.tolist()) == peer


@pytest.mark.parametrize("runs", [[0], [5, 1_000_000, 3, 7, 0, 2**34 - 1 + 7, 9], [0, 3, 1, 1, 1, 1, 500]])
def test_long_and_short_runs_come_back(runs: list[int]) -> None:
    assert runs_from_text(text_from_runs(runs)).tolist() == runs


@pytest.mark.parametrize("text", [b"abc\xff", b"0 1", b"P", b"PPPPPPPPPPPPPPPPPP0"])
def test_text_that_encodes_no_runs_is_refused(text: bytes) -> None:
    with pytest.raises(RleError):
        runs_from_text(text)


def test_runs_must_cover_the_mask() -> None:
    check_runs(np.array([2, 4]), 2, 3)
    with pytest.raises(RleError, match="cover 5 pixels, but 2 x 3 has 6"):
        check_runs(np.array([2, 3]), 2, 3)
    with pytest.raises(RleError, match="negative"):
        check_runs(np.array([-1, 7]), 2, 3)
