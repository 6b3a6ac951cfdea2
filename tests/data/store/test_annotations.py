from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from coco_files import annotation, coco_tree, square
from pycocotools import mask as coco_mask
from pycocotools.coco import COCO

from maskfleet.data.store import build as store_build
from maskfleet.data.store.annotations import (
    AnnotationStore,
    ImageRules,
    clean_instances,
    images_with_objects,
    open_store,
)
from maskfleet.data.store.columns import DamagedFileError, map_columns, write_columns
from maskfleet.data.store.splits import SplitPaths, find_split
from maskfleet.data.synthetic.dataset import make_shapes
from maskfleet.errors import DataError

WriteSplit = Callable[..., SplitPaths]


def store_file(split: SplitPaths) -> Path:
    (path,) = (split.annotations.parent / ".maskfleet").glob("*.store")
    return path


@pytest.fixture
def split(write_split: WriteSplit) -> SplitPaths:
    """Image ids out of order; annotations of the images mixed; every kind of outline."""
    rle = coco_mask.encode(np.asfortranarray(np.eye(48, 64), np.uint8))
    tree = coco_tree(
        annotation(31, image_id=9, segmentation=[square(1, 2, 3), square(5.25, 6.5, 7)]),
        annotation(11, image_id=2, segmentation={"size": [48, 64], "counts": rle["counts"].decode()}, category_id=3),
        annotation(32, image_id=9, iscrowd=1, segmentation={"size": [48, 64], "counts": [10, 48 * 64 - 10]}),
        annotation(12, image_id=2, segmentation=[[1, 1, 2, 2], square(0.1, 0.2, 8)]),
        annotation(33, image_id=9, segmentation=None),
        images=0,
    )
    tree["images"] = [
        {"id": 9, "file_name": "neun.jpg", "width": 64, "height": 48},
        {"id": 4, "file_name": "quatre é.jpg", "width": 64, "height": 48},
        {"id": 2, "file_name": "two.jpg", "width": 64, "height": 48},
    ]
    return write_split(tree, with_images=False)


def test_images_come_by_id_with_their_own_annotations_in_file_order(split: SplitPaths) -> None:
    store = open_store(split)
    assert len(store) == 3
    assert [store.image(index).id for index in range(3)] == [2, 4, 9]
    assert store.image(1).path == split.images / "quatre é.jpg"
    assert (store.image(2).width, store.image(2).height) == (64, 48)
    assert store.num_instances.tolist() == [2, 0, 3]
    assert [store.instances(index).ids.tolist() for index in range(3)] == [[11, 12], [], [31, 32, 33]]
    assert store.index_of(9) == 2
    with pytest.raises(KeyError):
        store.index_of(3)


def test_labels_count_from_one_in_the_order_of_category_ids(split: SplitPaths) -> None:
    store = open_store(split)
    assert [(category.id, category.name, category.label) for category in store.categories] == [
        (3, "three", 1),
        (7, "seven", 2),
    ]
    assert store.instances(0).labels.tolist() == [1, 2]


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # pycocotools on numpy 2
def test_outlines_are_those_of_the_file_to_the_last_digit(split: SplitPaths) -> None:
    store = open_store(split)
    first, last = store.instances(0), store.instances(2)
    assert [part.ravel().tolist() for part in last.polygons(0)] == [square(1, 2, 3), square(5.25, 6.5, 7)]
    assert [part.ravel().tolist() for part in first.polygons(1)] == [square(0.1, 0.2, 8)]  # two points are no polygon
    rle = first.rle(0)
    assert rle is not None
    np.testing.assert_array_equal(coco_mask.decode(rle), np.eye(48, 64))
    crowd = last.rle(1)
    assert crowd is not None
    assert int(coco_mask.area(crowd)) == 48 * 64 - 10
    assert (first.polygons(0), first.rle(1), last.polygons(2), last.rle(2)) == ([], None, [], None)


def test_objects_and_crowds_are_told_apart(split: SplitPaths) -> None:
    instances = open_store(split).instances(2)
    assert instances.objects.ids.tolist() == [31, 33]
    assert instances.crowds.ids.tolist() == [32]
    assert instances.crowds.rle(0) == instances.rle(1)


def test_columns_are_read_only_views_of_the_mapped_file(split: SplitPaths) -> None:
    store = open_store(split)
    with pytest.raises(ValueError, match="read-only"):
        store.widths[0] = 1
    points = store.instances(2).polygons(0)[0]
    assert np.shares_memory(points, store.columns["points"])


def test_a_pickled_store_is_a_path_and_opens_again(split: SplitPaths) -> None:
    store = open_store(split)
    sent = pickle.dumps(store)
    assert len(sent) < 1000
    again = pickle.loads(sent)
    assert again.image(1) == store.image(1)
    assert again.instances(2).ids.tolist() == [31, 32, 33]


def test_reopening_neither_hashes_nor_builds_again(split: SplitPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    open_store(split)

    def forbidden(*_: object) -> None:
        raise AssertionError("not again")

    monkeypatch.setattr(store_build, "_build", forbidden)
    monkeypatch.setattr(store_build, "sha256", forbidden)
    assert len(open_store(split)) == 3


def test_a_changed_annotation_file_gives_another_store(split: SplitPaths) -> None:
    open_store(split)
    tree = json.loads(split.annotations.read_text())
    tree["images"].pop()
    split.annotations.write_text(json.dumps(tree))
    assert len(open_store(split)) == 2


def test_the_same_content_elsewhere_finds_the_store_in_the_cache(split: SplitPaths, tmp_path: Path) -> None:
    first = open_store(split, cache_dir=tmp_path / "cache")
    copy = tmp_path / "copy.json"
    copy.write_bytes(split.annotations.read_bytes())
    second = open_store(SplitPaths("copy", copy, split.images), cache_dir=tmp_path / "cache")
    assert second.path == first.path
    assert not (split.annotations.parent / ".maskfleet").exists()


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content[: len(content) // 2],
        lambda content: b"",
        lambda content: content + b"\0",
        lambda content: b"X" + content[1:],
        lambda content: content[:60] + bytes([content[60] ^ 1]) + content[61:],
    ],
    ids=["cut", "empty", "longer", "magic", "header"],
)
def test_a_damaged_store_is_built_again(split: SplitPaths, damage: Callable[[bytes], bytes]) -> None:
    open_store(split)
    path = store_file(split)
    whole = path.read_bytes()
    path.write_bytes(damage(whole))
    with pytest.raises(DataError, match="cannot be read"):
        AnnotationStore(path, split, ImageRules())
    assert len(open_store(split)) == 3
    assert path.read_bytes() == whole


def test_a_failed_build_leaves_nothing_behind(write_split: WriteSplit) -> None:
    split = write_split('{"images": [')
    with pytest.raises(DataError, match="truncated"):
        open_store(split)
    left = [path.suffix for path in (split.annotations.parent / ".maskfleet").iterdir()]
    assert ".store" not in left
    assert ".tmp" not in left


def test_read_only_data_is_cached_in_the_users_folder(
    split: SplitPaths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MASKFLEET_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    # a file where the folder should be refuses writers even when the tests run as root
    (split.annotations.parent / ".maskfleet").write_text("")
    store = open_store(split)
    assert store.path.parent == tmp_path / "xdg" / "maskfleet" / "stores"
    assert open_store(split).path == store.path


def test_nowhere_to_write_is_named(split: SplitPaths, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="cannot be written"):
        open_store(split, cache_dir=tmp_path / "file")


def test_an_existing_store_opens_where_nothing_can_be_written(
    split: SplitPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = open_store(split).path
    for note in built.parent.glob("*.json"):
        note.unlink()
    monkeypatch.setattr(store_build, "first_writable", lambda folders: None)
    assert open_store(split).path == built
    built.unlink()
    with pytest.raises(DataError, match="cannot be written"):
        open_store(split)


def test_a_user_without_a_home_has_a_cache_in_the_temporary_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("MASKFLEET_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    assert store_build.user_cache_dir().is_relative_to(tempfile.gettempdir())


def test_a_file_that_changes_while_it_is_read_is_named(split: SplitPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_build, "sha256", lambda path: "0" * 64)
    with pytest.raises(DataError, match="changed while it was read"):
        open_store(split)


def test_a_file_that_is_not_text_is_named(split: SplitPaths) -> None:
    split.annotations.write_bytes(b"\x1f\x8b\x08\x00\xff")
    with pytest.raises(DataError, match="byte 1 is not UTF-8"):
        open_store(split)


BUILD_AND_COUNT = """
import sys
from pathlib import Path
from maskfleet.data.store import build as store_build
from maskfleet.data.store.splits import SplitPaths, find_split
from maskfleet.data.store.annotations import open_store
built = []
build = store_build._build
store_build._build = lambda *paths: (built.append(1), build(*paths))
sys.stdin.readline()
store = open_store(SplitPaths("s", Path(sys.argv[1]), Path(sys.argv[2])))
print(len(built), len(store), store.instances(2).ids.tolist())
"""


def test_processes_that_ask_at_once_build_one_store(split: SplitPaths) -> None:
    command = [sys.executable, "-c", BUILD_AND_COUNT, str(split.annotations), str(split.images)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    runners = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
        for _ in range(4)
    ]
    answers = []
    for runner in runners:
        assert runner.stdin is not None
        runner.stdin.write("\n")
        runner.stdin.flush()
    for runner in runners:
        out, _ = runner.communicate()
        assert runner.returncode == 0
        answers.append(out.split(maxsplit=1))
    assert sum(int(built) for built, _ in answers) == 1
    assert {rest.strip() for _, rest in answers} == {"3 [31, 32, 33]"}


def assert_holds_what_pycocotools_reads(split: SplitPaths, cache_dir: Path) -> None:
    with contextlib.redirect_stdout(io.StringIO()):
        peer = COCO(str(split.annotations))
    store = open_store(split, cache_dir=cache_dir)
    assert store.image_ids.tolist() == sorted(peer.getImgIds())
    label = {category.id: category.label for category in store.categories}
    assert list(label) == sorted(peer.getCatIds())
    for index in range(len(store)):
        record, instances = store.image(index), store.instances(index)
        annotations = peer.loadAnns(peer.getAnnIds(imgIds=[record.id]))
        assert instances.ids.tolist() == [a["id"] for a in annotations]
        assert instances.labels.tolist() == [label[a["category_id"]] for a in annotations]
        assert instances.area.tolist() == [a["area"] for a in annotations]
        assert instances.crowd.tolist() == [bool(a["iscrowd"]) for a in annotations]
        assert instances.boxes.tolist() == [[x, y, x + w, y + h] for x, y, w, h in (a["bbox"] for a in annotations)]
        for number, theirs in enumerate(annotations):
            mask = instances.rle(number)
            if mask is None:
                assert [part.ravel().tolist() for part in instances.polygons(number)] == theirs["segmentation"]
            else:
                assert mask["counts"] == peer.annToRLE(theirs)["counts"]


def test_the_store_holds_what_pycocotools_reads(tmp_path: Path) -> None:
    make_shapes(tmp_path / "set", num_train=10, num_val=0, crowd_fraction=0.5)
    assert_holds_what_pycocotools_reads(find_split(tmp_path / "set", "train"), tmp_path)


@pytest.mark.parametrize("name", ["coco_val2017", "coco_train2017"])
def test_the_store_holds_what_pycocotools_reads_of_coco(name: str, tmp_path: Path) -> None:
    root = os.environ.get("MASKFLEET_COCO")
    if not root:
        pytest.skip("set MASKFLEET_COCO to a folder with annotations/, train2017/ and val2017/")
    assert_holds_what_pycocotools_reads(find_split(Path(root), name), tmp_path)


def test_a_store_of_nothing_opens(write_split: WriteSplit) -> None:
    store = open_store(write_split({"images": [], "annotations": [], "categories": []}))
    assert (len(store), store.categories, store.num_annotations) == (0, (), 0)
    assert images_with_objects(store).tolist() == []


def test_unknown_images_and_categories_do_not_stop_the_store(write_split: WriteSplit) -> None:
    store = open_store(write_split(coco_tree(annotation(1, image_id=99), annotation(2), annotation(3, category_id=5))))
    assert store.instances(0).ids.tolist() == [2, 3]
    assert store.instances(0).labels.tolist() == [2, 0]
    assert store.annotations(2, 3).ids.tolist() == [1]
    assert store.num_annotations == 3


CLEANING = {
    "sound": (annotation(1), [10, 10, 30, 30]),
    "sticks out on two sides": (annotation(2, bbox=[50, 40, 30, 30]), [50, 40, 64, 48]),
    "begins outside": (annotation(3, bbox=[-5, -6, 10, 10]), [0, 0, 5, 4]),
    "wholly outside": (annotation(4, bbox=[70, 10, 5, 5]), None),
    "no width": (annotation(5, bbox=[10, 10, 0, 5]), None),
    "negative": (annotation(6, bbox=[10, 10, -4, 5]), None),
    "area of one": (annotation(7, area=1), None),
    "ignored": (annotation(8, ignore=1), None),
    "not a number": (annotation(9, bbox=[10, 10, float("nan"), 5]), None),
    "infinite": (annotation(10, bbox=[float("inf"), 10, 5, 5]), None),
    "unknown category": (annotation(11, category_id=1), None),
    "run-length object": (annotation(12, segmentation={"size": [48, 64], "counts": [0, 3072]}), [10, 10, 30, 30]),
    "crowd": (annotation(13, iscrowd=1), [10, 10, 30, 30]),
    "no polygon": (annotation(14, segmentation=None), [10, 10, 30, 30]),
}


@pytest.mark.parametrize("case", list(CLEANING))
def test_cleaning_follows_tensorpack(case: str, write_split: WriteSplit) -> None:
    record, expected = CLEANING[case]
    store = open_store(write_split(coco_tree(record)))
    cleaned = clean_instances(store.instances(0))
    assert cleaned.boxes.tolist() == ([] if expected is None else [expected])
    assert images_with_objects(store).tolist() == ([0] if expected is not None and case != "crowd" else [])


def test_images_with_objects_do_not_depend_on_the_block_size(write_split: WriteSplit) -> None:
    records = [annotation(n, image_id=n % 7 + 1, area=n % 5, iscrowd=n % 2) for n in range(60)]
    store = open_store(write_split(coco_tree(*records, images=8), with_images=False))
    expected = [index for index in range(len(store)) if len(clean_instances(store.instances(index)).objects) > 0]
    assert images_with_objects(store, rows_per_block=7).tolist() == expected
    assert images_with_objects(store).tolist() == expected


def test_columns_come_back_as_they_were_written(tmp_path: Path) -> None:
    columns = {
        "a": np.arange(5),
        "b": np.zeros((0, 3)),
        "c": np.array([[1.5], [2.5]], np.float32),
        "d": np.array([True]),
    }
    write_columns(tmp_path / "x", columns, {"note": "ü"})
    back, meta = map_columns(tmp_path / "x")
    assert meta == {"note": "ü"}
    assert list(back) == list(columns)
    for name, column in columns.items():
        assert back[name].dtype == column.dtype
        np.testing.assert_array_equal(back[name], column)
    (tmp_path / "y").write_bytes(b"short")
    with pytest.raises(DamagedFileError):
        map_columns(tmp_path / "y")
