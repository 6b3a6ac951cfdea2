from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import cv2
import hotcoco
import numpy as np
import pytest

from maskfleet.data.checks.annotations import check_split
from maskfleet.data.convert.convert import Converted, convert
from maskfleet.data.convert.source import unique_names
from maskfleet.data.store.annotations import open_store
from maskfleet.data.store.splits import find_split
from maskfleet.data.synthetic.dataset import make_shapes
from maskfleet.errors import DataError

WIDTH, HEIGHT = 80, 40


def picture(path: Path, *, width: int = WIDTH, height: int = HEIGHT) -> bytes:
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = cv2.GaussianBlur(np.random.default_rng(0).integers(0, 255, (height, width, 3), np.uint8), (0, 0), 2)
    assert cv2.imwrite(str(path), pixels)
    return path.read_bytes()


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def tree_of(root: Path, split: str = "train") -> dict[str, Any]:
    return json.loads((root / "annotations" / f"instances_{split}.json").read_text())


def faults_of(root: Path, split: str = "train") -> list[str]:
    return [problem.kind for problem in check_split(open_store(find_split(root, split)), decode=True)]


# --- YOLO


@pytest.fixture
def yolo(tmp_path: Path) -> Path:
    root = tmp_path / "yolo"
    write(root / "data.yaml", "path: somewhere/else\ntrain: images/train\nval: images/val\nnames: {0: cat, 1: dog}\n")
    for name in ("train/a", "train/sub/b", "val/c"):
        picture(root / "images" / f"{name}.jpg")
    write(root / "labels/train/a.txt", "1 0.5 0.5 0.25 0.5\n0 0.25 0.25 0.75 0.25 0.75 0.75 0.25 0.75\n")
    write(root / "labels/train/sub/b.txt", "0 0.1 0.1 0.2 0.2\n")
    return root


def test_yolo_boxes_and_outlines_become_pixels(yolo: Path, tmp_path: Path) -> None:
    done = convert(yolo, tmp_path / "coco", form="yolo")
    tree = tree_of(tmp_path / "coco")
    assert tree["categories"] == [{"id": 1, "name": "cat"}, {"id": 2, "name": "dog"}]
    assert [image["file_name"] for image in tree["images"]] == ["a.jpg", "sub/b.jpg"]
    assert {(image["width"], image["height"]) for image in tree["images"]} == {(WIDTH, HEIGHT)}
    box, outline, other = tree["annotations"]
    assert box == {
        **{"id": 1, "image_id": 1, "category_id": 2, "iscrowd": 0},
        **{"bbox": [30, 10, 20, 20], "area": 400},
    }
    assert outline["category_id"] == 1
    assert outline["segmentation"] == [[20, 10, 60, 10, 60, 30, 20, 30]]
    assert outline["bbox"] == [20, 10, 40, 20]
    assert outline["area"] == 800
    assert (other["image_id"], other["bbox"]) == (2, [0, 0, 16, 8])
    assert done == Converted(("train", "val"), 3, 3, ("1 of 3 images have no label file: no objects",))
    assert tree_of(tmp_path / "coco", "val")["annotations"] == []
    copied = tmp_path / "coco" / "train" / "a.jpg"
    assert copied.read_bytes() == (yolo / "images/train/a.jpg").read_bytes()


def test_a_converted_set_passes_the_checks(yolo: Path, tmp_path: Path) -> None:
    convert(yolo, tmp_path / "coco", form="yolo", link=True)
    assert faults_of(tmp_path / "coco") == ["no-outline"]
    assert (tmp_path / "coco" / "train" / "a.jpg").is_symlink()


def test_yolo_boxes_come_back_as_a_peer_wrote_them(tmp_path: Path) -> None:
    make_shapes(tmp_path / "shapes", num_train=6, num_val=0, crowd_fraction=0)
    source = tmp_path / "shapes" / "annotations" / "instances_train.json"
    hotcoco.COCO(str(source)).to_yolo(str(tmp_path / "yolo" / "labels"))
    (tmp_path / "shapes" / "train").rename(tmp_path / "yolo" / "images")
    names = [category["name"] for category in json.loads(source.read_text())["categories"]]
    write(tmp_path / "yolo" / "data.yaml", f"train: images\nnames: {names}\n")
    convert(tmp_path / "yolo", tmp_path / "coco", form="yolo")
    expected, found = json.loads(source.read_text()), tree_of(tmp_path / "coco")
    assert [image["file_name"] for image in found["images"]] == [image["file_name"] for image in expected["images"]]
    assert len(found["annotations"]) == len(expected["annotations"]) > 6
    for ours, theirs in zip(found["annotations"], expected["annotations"], strict=True):
        assert ours["bbox"] == pytest.approx(theirs["bbox"], abs=0.01)
        assert names[ours["category_id"] - 1] == next(
            category["name"] for category in expected["categories"] if category["id"] == theirs["category_id"]
        )


def test_the_layout_of_roboflow_is_understood(tmp_path: Path) -> None:
    root = tmp_path / "set"
    write(root / "data.yaml", "train: ../train/images\nval: ../valid/images\nnc: 1\nnames: ['x']\n")
    picture(root / "train/images/1.jpg")
    picture(root / "valid/images/2.png")
    write(root / "valid/labels/2.txt", "0 0.5 0.5 1 1\n")
    done = convert(root, tmp_path / "coco", form="yolo")
    assert done.splits == ("train", "val")
    assert tree_of(tmp_path / "coco", "val")["annotations"][0]["bbox"] == [0, 0, WIDTH, HEIGHT]


def test_yolo_lists_of_images_are_understood(tmp_path: Path) -> None:
    root = tmp_path / "set"
    write(root / "data.yaml", "train: [train.txt, more]\nnames: [x]\n")
    write(root / "train.txt", "./images/1.jpg\n")
    picture(root / "images/1.jpg")
    picture(root / "more/1.jpg")
    write(root / "labels/1.txt", "0 0.5 0.5 1 1\n")
    write(root / "more/1.txt", "0 0.5 0.5 0.5 0.5\n")
    convert(root, tmp_path / "coco", form="yolo")
    tree = tree_of(tmp_path / "coco")
    assert [image["file_name"] for image in tree["images"]] == ["images/1.jpg", "1.jpg"]
    assert [found["area"] for found in tree["annotations"]] == [WIDTH * HEIGHT, WIDTH * HEIGHT / 4]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("2 0.5 0.5 0.1 0.1", "class 2 is not one of 0 to 1"),
        ("0.5 0.5 0.5 0.1 0.1", "class 0.5 is not one"),
        ("0 40 20 10 10", "a coordinate is not a fraction"),
        ("0 nan 0.5 0.1 0.1", "a coordinate is not a fraction"),
        ("0 0.5 0.5 0.1", "3 coordinates are neither a box"),
        ("0 0.1 0.1 0.2 0.2 0.3 0.3 0.4", "7 coordinates are neither"),
        ("cat 0.5 0.5 0.1 0.1", "not all values are numbers"),
    ],
)
def test_a_bad_yolo_line_is_named(line: str, says: str, yolo: Path, tmp_path: Path) -> None:
    label_file = yolo / "labels/train/a.txt"
    label_file.write_text(f"0 0.5 0.5 0.1 0.1\n\n{line}\n")
    with pytest.raises(DataError) as error:
        convert(yolo, tmp_path / "coco", form="yolo")
    assert f"{label_file}, line 3: {says}" in error.value.what
    assert not (tmp_path / "coco").exists()


def test_all_faults_come_together(yolo: Path, tmp_path: Path) -> None:
    (yolo / "images/train/a.jpg").write_bytes(b"")
    (yolo / "labels/train/sub/b.txt").write_text("9 9\n" * 20)
    with pytest.raises(DataError) as error:
        convert(yolo, tmp_path / "coco", form="yolo")
    assert error.value.what.startswith("21 faults")
    assert "the image cannot be read" in error.value.what
    assert "and 11 more" in error.value.what


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("train: images/train\n", "no usable `names`"),
        ("names: {0: a, 2: b}\ntrain: images/train\n", "no usable `names`"),
        ("names: [a]\n", "names no images"),
        ("names: [a]\ntrain: nowhere\n", "names nowhere"),
        (f"names: [a]\ntrain: {'9' * 400}\n", "names 999"),
        (f"names: [a]\npath: x{'9' * 400}\ntrain: nowhere\n", "names nowhere"),
        ("names: [a\n", "not YAML"),
    ],
)
def test_a_bad_data_yaml_is_explained(text: str, says: str, yolo: Path, tmp_path: Path) -> None:
    (yolo / "data.yaml").write_text(text)
    with pytest.raises(DataError, match=says):
        convert(yolo, tmp_path / "coco", form="yolo")


def test_names_of_images_never_collide() -> None:
    paths = [Path("a/1.jpg"), Path("b/1.jpg"), Path("b/2/1.jpg"), Path("c/1.jpg")]
    folders = [Path("a"), Path("b"), Path("b"), Path("c")]
    assert unique_names(paths, folders) == ["1.jpg", "2/1.jpg", "2/2/1.jpg", "3/1.jpg"]


# --- Pascal VOC

VOC_OBJECT = (
    "<object><name>{name}</name><difficult>{difficult}</difficult>"
    "<bndbox><xmin>11</xmin><ymin>6</ymin><xmax>30</xmax><ymax>25</ymax></bndbox></object>"
)


def voc_xml(name: str, *objects: str, size: bool = True) -> str:
    sides = f"<size><width>{WIDTH}</width><height>{HEIGHT}</height><depth>3</depth></size>" if size else ""
    return f"<annotation><filename>{name}</filename>{sides}{''.join(objects)}</annotation>"


@pytest.fixture
def voc(tmp_path: Path) -> Path:
    root = tmp_path / "VOC"
    for name in ("one", "two", "three"):
        picture(root / "JPEGImages" / f"{name}.jpg")
    cat, dog = VOC_OBJECT.format(name="cat", difficult=0), VOC_OBJECT.format(name="dog", difficult=1)
    write(root / "Annotations/one.xml", voc_xml("one.jpg", cat, dog))
    write(root / "Annotations/two.xml", voc_xml("two.jpg", cat, size=False))
    write(root / "Annotations/three.xml", voc_xml("three.jpg"))
    write(root / "ImageSets/Main/train.txt", "one\n")
    write(root / "ImageSets/Main/val.txt", "two\n")
    write(root / "ImageSets/Main/cat_train.txt", "one 1\n")
    return root


def test_voc_becomes_boxes_by_its_lists(voc: Path, tmp_path: Path) -> None:
    done = convert(voc, tmp_path / "coco", form="voc")
    train, val = tree_of(tmp_path / "coco"), tree_of(tmp_path / "coco", "val")
    assert [category["name"] for category in train["categories"]] == ["cat", "dog"]
    # pixels 11 to 30, counted from 1 and both inside, are 20 wide from 10
    assert [found["bbox"] for found in train["annotations"]] == [[10, 5, 20, 20]] * 2
    assert [found["iscrowd"] for found in train["annotations"]] == [0, 1]
    assert [image["file_name"] for image in val["images"]] == ["two.jpg"]
    assert (val["images"][0]["width"], val["images"][0]["height"]) == (WIDTH, HEIGHT)  # from the file itself
    assert done.notes[0] == "1 images are in no list of ImageSets/Main and were skipped"
    assert "1 objects marked difficult" in done.notes[1]
    assert faults_of(tmp_path / "coco") == ["no-outline"]


def test_voc_without_lists_is_one_split(voc: Path, tmp_path: Path) -> None:
    for path in (voc / "ImageSets/Main").iterdir():
        path.unlink()
    assert convert(voc, tmp_path / "coco", form="voc").num_images == 3


def test_truncated_voc_xml_is_named(voc: Path, tmp_path: Path) -> None:
    whole = (voc / "Annotations/one.xml").read_text()
    (voc / "Annotations/one.xml").write_text(whole[:-40])
    with pytest.raises(DataError, match=r"one\.xml: not valid XML"):
        convert(voc, tmp_path / "coco", form="voc")


def test_voc_faults_are_explained(voc: Path, tmp_path: Path) -> None:
    (voc / "JPEGImages/one.jpg").unlink()
    with pytest.raises(DataError, match=r"there is no image one\.jpg"):
        convert(voc, tmp_path / "coco", form="voc")
    write(voc / "Annotations/one.xml", voc_xml("two.jpg", "<object><name>cat</name></object>"))
    with pytest.raises(DataError, match="no <bndbox>"):
        convert(voc, tmp_path / "coco", form="voc")
    with pytest.raises(DataError, match=r"no \.xml files"):
        convert(voc / "JPEGImages", tmp_path / "coco", form="voc")


@pytest.mark.parametrize("number", ["1e999", "-1e999", "1" + "0" * 400])
def test_absurd_voc_boxes_and_names_are_faults(voc: Path, tmp_path: Path, number: str) -> None:
    path = voc / "Annotations/one.xml"
    path.write_text(path.read_text().replace("<xmin>11<", f"<xmin>{number}<"))
    with pytest.raises(DataError, match=r"one\.jpg: a corner of a box is not a position|inverted <bndbox>"):
        convert(voc, tmp_path / "coco", form="voc")
    path.write_text(voc_xml("9" * 400))
    with pytest.raises(DataError, match="there is no image 999"):
        convert(voc, tmp_path / "coco", form="voc")


# --- LabelMe


def labelme(path: Path, *shapes: dict[str, Any], **changes: Any) -> None:
    document = {"imagePath": f"{path.stem}.jpg", "imageData": None, "imageWidth": WIDTH, "imageHeight": HEIGHT}
    write(path, json.dumps({**document, "shapes": list(shapes), **changes}))


def shape(label: str, points: list[list[float]], kind: str = "polygon", **changes: Any) -> dict[str, Any]:
    return {"label": label, "points": points, "shape_type": kind, "group_id": None, **changes}


TRIANGLE = [[10.0, 10.0], [30.0, 10.0], [10.0, 30.0]]


def png_text(mask: np.ndarray) -> str:
    return base64.b64encode(cv2.imencode(".png", mask)[1].tobytes()).decode()


def test_labelme_shapes_become_objects(tmp_path: Path) -> None:
    root = tmp_path / "labelme"
    picture(root / "a.jpg")
    window = np.array([[255, 0], [255, 255], [0, 255]], np.uint8)
    labelme(
        root / "a.json",
        shape("cat", TRIANGLE),
        shape("cat", [[20, 30], [5, 10]], "rectangle"),
        shape("dog", [[40, 20], [50, 20]], "circle"),
        shape("dog", [[60, 5], [61, 7]], "mask", mask=png_text(window)),
        shape("dog", [[1, 1], [2, 2]], "line"),
        shape("__ignore__", TRIANGLE),
    )
    done = convert(root, tmp_path / "coco", form="labelme")
    tree = tree_of(tmp_path / "coco")
    assert [category["name"] for category in tree["categories"]] == ["cat", "dog"]
    polygon, rectangle, circle, mask = tree["annotations"]
    assert polygon["segmentation"] == [[10, 10, 30, 10, 10, 30]]
    assert polygon["bbox"] == [10, 10, 20, 20]
    assert rectangle["bbox"] == [5, 10, 15, 20]
    assert "segmentation" not in rectangle
    assert circle["bbox"] == pytest.approx([30, 10, 20, 20])
    assert circle["area"] == pytest.approx(np.pi * 100, rel=0.02)
    decoded = hotcoco.mask.decode(mask["segmentation"] | {"counts": mask["segmentation"]["counts"].encode()})
    assert np.array_equal(decoded[5:8, 60:62], window > 0)
    assert (decoded.sum(), mask["area"], mask["bbox"]) == (4, 4, [60, 5, 2, 3])
    assert done.notes == ("1 shapes of kind line were skipped: they have no area",)
    assert faults_of(tmp_path / "coco") == ["no-outline"]


def test_labelme_groups_are_one_object(tmp_path: Path) -> None:
    root = tmp_path / "labelme"
    picture(root / "a.jpg")
    moved = [[x + 35, y] for x, y in TRIANGLE]
    labelme(
        root / "a.json",
        shape("cat", TRIANGLE, group_id=1),
        shape("cat", moved, group_id=1),
        shape("dog", TRIANGLE, group_id=1),
        shape("cat", TRIANGLE),
    )
    convert(root, tmp_path / "coco", form="labelme")
    found = tree_of(tmp_path / "coco")["annotations"]
    assert [(each["category_id"], len(each["segmentation"])) for each in found] == [(1, 2), (2, 1), (1, 1)]
    assert found[0]["bbox"] == [10, 10, 55, 20]
    assert found[0]["area"] == pytest.approx(2 * found[2]["area"], abs=2)


def test_labelme_folders_become_splits_and_labels_keep_their_order(tmp_path: Path) -> None:
    root = tmp_path / "labelme"
    write(root / "labels.txt", "__ignore__\n_background_\nzebra\nant\n")
    for name in ("train/a", "train/deep/a", "val/b"):
        picture(root / f"{name}.jpg")
        labelme(root / f"{name}.json", shape("ant", TRIANGLE))
    done = convert(root, tmp_path / "coco", form="labelme")
    tree = tree_of(tmp_path / "coco")
    assert done.splits == ("train", "val")
    assert [image["file_name"] for image in tree["images"]] == ["a.jpg", "deep/a.jpg"]
    assert [category["name"] for category in tree["categories"]] == ["zebra", "ant"]


def test_an_image_inside_the_labelme_file_is_taken_out(tmp_path: Path) -> None:
    root = tmp_path / "labelme"
    content = picture(tmp_path / "a.jpg")
    labelme(root / "a.json", shape("cat", TRIANGLE), imageData=base64.b64encode(content).decode())
    convert(root, tmp_path / "coco", form="labelme")
    assert (tmp_path / "coco/train/a.jpg").read_bytes() == content
    assert faults_of(tmp_path / "coco") == []


def test_labelme_faults_come_together(tmp_path: Path) -> None:
    root = tmp_path / "labelme"
    for name in "abcd":
        picture(root / f"{name}.jpg")
    labelme(root / "a.json", shape("cat", TRIANGLE[:2]), shape("cat", [[float("nan"), 0]] * 3))
    labelme(root / "b.json", shape("cat", TRIANGLE, "star"), shape("cat", TRIANGLE[:2], "mask", mask="?"))
    (root / "c.json").write_text("{")
    (root / "d.json").write_text('{"images": []}')
    labelme(root / "e.json")
    with pytest.raises(DataError) as error:
        convert(root, tmp_path / "coco", form="labelme")
    for says in ("a polygon of 2 points", "not pairs of positions", "kind star are unknown", "not a PNG in base64"):
        assert says in error.value.what
    for says in ("c.json: not JSON", "d.json: no list of shapes", "e.json: there is no image e.jpg"):
        assert says in error.value.what
    assert error.value.what.startswith("7 faults")


@pytest.mark.parametrize("number", ["1e999", "-1e999", "1e308", "1" + "0" * 400, "9" * 5000, "NaN"])
@pytest.mark.parametrize("kind", ["polygon", "rectangle", "circle", "mask"])
def test_absurd_labelme_positions_are_faults(tmp_path: Path, kind: str, number: str) -> None:
    root = tmp_path / "labelme"
    picture(root / "a.jpg")
    labelme(root / "a.json", shape("cat", [*TRIANGLE[:2], [123456, 5]][-2 if kind != "polygon" else 0 :], kind))
    file = root / "a.json"
    file.write_text(file.read_text().replace("123456", number))
    with pytest.raises(DataError, match=r"not pairs of positions|not JSON: Exceeds the limit"):
        convert(root, tmp_path / "coco", form="labelme")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"imagePath": "9" * 5000}, "there is no image 999"),
        ({"imagePath": "no.jpg", "imageWidth": 10**400}, "the limit is 179 million pixels"),
        ({"imagePath": "no.jpg", "imageData": "\ud800"}, "the image embedded in .* is damaged"),
        ({"shapes": [shape("cat", TRIANGLE[:2], "mask", mask="\ud800")]}, "not a PNG in base64"),
    ],
)
def test_absurd_values_of_labelme_are_faults(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    root = tmp_path / "labelme"
    content = picture(root / "a.jpg")
    embedded = base64.b64encode(content).decode()
    labelme(root / "a.json", **{"imageData": embedded if "imageWidth" in changes else None, **changes})
    with pytest.raises(DataError, match=says):
        convert(root, tmp_path / "coco", form="labelme")


# --- all


def test_nothing_is_overwritten_and_nothing_half_made_is_left(yolo: Path, tmp_path: Path) -> None:
    (tmp_path / "coco").mkdir()
    (tmp_path / "coco" / "mine.txt").write_text("mine")
    with pytest.raises(DataError, match="already exists"):
        convert(yolo, tmp_path / "coco", form="yolo")
    with pytest.raises(DataError, match="there is no folder"):
        convert(tmp_path / "nowhere", tmp_path / "new", form="yolo")
    (yolo / "images/train/a.jpg").unlink()
    (yolo / "images/train/sub/b.jpg").unlink()
    (yolo / "images/val/c.jpg").unlink()
    with pytest.raises(DataError, match="no annotated image"):
        convert(yolo, tmp_path / "new", form="yolo")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["coco", "yolo"]


def test_a_failure_while_copying_leaves_nothing(yolo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full_disk(source: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("shutil.copyfile", full_disk)
    with pytest.raises(DataError, match="No space left"):
        convert(yolo, tmp_path / "coco", form="yolo")
    assert [path.name for path in tmp_path.iterdir()] == ["yolo"]


def test_progress_counts_every_file(yolo: Path, tmp_path: Path) -> None:
    told: list[tuple[str, int, int]] = []
    convert(yolo, tmp_path / "coco", form="yolo", progress=lambda *said: told.append(said))
    assert [(done, total) for what, done, total in told if what == "reading"] == [(1, 3), (2, 3), (3, 3)]
    assert [(done, total) for what, done, total in told if what == "copying"] == [(1, 3), (2, 3), (3, 3)]
