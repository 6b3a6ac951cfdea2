from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from coco_files import annotation, coco_tree, square

from maskfleet.data.checks.annotations import check_annotations, check_split
from maskfleet.data.checks.problems import KINDS, Problem, bad_images, raise_for, summarise
from maskfleet.data.checks.self_intersection import MAX_TESTED_POINTS, self_crossing_parts
from maskfleet.data.image_header import read_image_header
from maskfleet.data.store.annotations import AnnotationStore, clean_instances, open_store
from maskfleet.data.store.splits import SplitPaths
from maskfleet.data.synthetic.dataset import make_shapes
from maskfleet.errors import DataError

WriteSplit = Callable[..., SplitPaths]
WHOLE = {"size": [48, 64], "counts": [0, 48 * 64]}


def check(split: SplitPaths, *, decode: bool = True) -> list[Problem]:
    return check_split(open_store(split), decode=decode)


def the_only(problems: list[Problem]) -> Problem:
    assert len(problems) == 1, summarise(problems)
    return problems[0]


BIG = "1" + "0" * 400
OUTLINE = f"[[10, 10, {BIG}, 10, 30, 30]]"
FAR = "[[10, 10, -1e308, 10, 30, 30]]"


@pytest.mark.parametrize(
    ("key", "value", "kind"),
    [
        *[
            ("bbox", f"[10, 10, {number}, 20]", "box-not-finite")
            for number in (BIG, f"-{BIG}", "1e999", "1e308", "NaN")
        ],
        *[("area", number, None) for number in (BIG, f"-{BIG}", "1e999", "NaN")],
        ("segmentation", OUTLINE, "segmentation-broken"),
        ("segmentation", FAR, "polygon-broken"),
    ],
)
def test_absurd_numbers_are_problems_and_leave_training_possible(
    write_split: WriteSplit, key: str, value: str, kind: str | None
) -> None:
    text = json.dumps(coco_tree(annotation(1, **{key: "@"}), annotation(2, image_id=2)))
    split = write_split(coco_tree(annotation(2, image_id=2)))
    split.annotations.write_text(text.replace('"@"', value))
    store = open_store(split)
    found = check_split(store)
    kinds = {problem.kind for problem in found if problem.severity == "error"}
    assert kind is None or kind in kinds
    assert all(problem.image_id == 1 for problem in found if problem.severity == "error")
    for index in range(len(store)):
        clean_instances(store.instances(index))


@pytest.mark.parametrize("key", ["id", "image_id", "category_id"])
@pytest.mark.parametrize("number", [BIG, "1e999", "NaN", "9" * 5000])
def test_absurd_ids_are_errors(write_split: WriteSplit, key: str, number: str) -> None:
    split = write_split(json.dumps(coco_tree(annotation(1, **{key: "@"}))).replace('"@"', number))
    with pytest.raises(DataError, match=r"not an integer|Exceeds the limit"):
        open_store(split)


def pixels() -> np.ndarray:
    noise = np.random.default_rng(0).integers(0, 255, (48, 64, 3), np.uint8)
    return cv2.GaussianBlur(noise, (0, 0), 2)


def jpeg() -> bytes:
    return cv2.imencode(".jpg", pixels())[1].tobytes()


def jpeg_with_a_gap() -> bytes:
    """A JPEG that begins and ends well, but has lost a stretch of its pixels."""
    content = jpeg()
    return content[: len(content) - 300] + content[-100:]


def with_exif(content: bytes, orientation: int, *, order: str = ">") -> bytes:
    """A JPEG with an EXIF segment whose only tag is the orientation."""
    mark = b"MM" if order == ">" else b"II"
    tag = struct.pack(f"{order}HHIHH", 0x0112, 3, 1, orientation, 0)
    tiff = mark + struct.pack(f"{order}HIH", 42, 8, 1) + tag + bytes(4)
    segment = b"Exif\0\0" + tiff
    return content[:2] + b"\xff\xe1" + struct.pack(">H", len(segment) + 2) + segment + content[2:]


def cmyk_jpeg() -> bytes:
    """A 4-channel JPEG made from a grey one: OpenCV cannot write CMYK, so its header is changed to say four."""
    grey = cv2.imencode(".jpg", pixels()[:, :, 0])[1].tobytes()
    frame = grey.index(b"\xff\xc0")
    length = struct.unpack(">H", grey[frame + 2 : frame + 4])[0]
    components = b"".join(bytes([n, 0x11, 0]) for n in range(1, 5))
    head = grey[frame + 4 : frame + 9]
    new = b"\xff\xc0" + struct.pack(">H", 8 + len(components)) + head + b"\x04" + components
    return grey[:frame] + new + grey[frame + 2 + length :]


@pytest.fixture
def split(write_split: WriteSplit) -> SplitPaths:
    return write_split(coco_tree(annotation(1), annotation(2, image_id=2)))


def test_a_valid_data_set_has_no_problems(split: SplitPaths) -> None:
    assert check(split) == []
    assert summarise([]) == "no problems found"


def test_generated_shapes_have_no_problems(tmp_path: Path) -> None:
    make_shapes(tmp_path / "set", num_train=12, num_val=0, num_categories=10, crowd_fraction=0.5)
    root = tmp_path / "set"
    split = SplitPaths("train", root / "annotations" / "instances_train.json", root / "train")
    assert [problem for problem in check(split) if problem.kind != "polygon-crossing"] == []


IMAGE_FAULTS: dict[str, tuple[str, Callable[[], bytes | None]]] = {
    "missing": ("image-missing", lambda: None),
    "zero bytes": ("image-empty", lambda: b""),
    "text": ("image-corrupt", lambda: b"<html>404 not found</html>"),
    "cut in the pixels": ("image-truncated", lambda: jpeg()[: len(jpeg()) * 2 // 3]),
    "cut in the header": ("image-corrupt", lambda: jpeg()[:30]),
    "cut, then filled with zeros": ("image-truncated", lambda: jpeg()[:800] + bytes(500)),
    "a PNG that is cut": ("image-truncated", lambda: cv2.imencode(".png", pixels())[1].tobytes()[:2000]),
    "other size": ("image-size", lambda: cv2.imencode(".jpg", pixels()[:40])[1].tobytes()),
    "grey": ("image-grey", lambda: cv2.imencode(".jpg", pixels()[:, :, 0])[1].tobytes()),
    "alpha": ("image-alpha", lambda: cv2.imencode(".png", np.dstack([pixels(), pixels()[:, :, 0]]))[1].tobytes()),
    "16 bits": ("image-16bit", lambda: cv2.imencode(".png", pixels().astype(np.uint16) * 257)[1].tobytes()),
    "16 bits in a TIFF": ("image-16bit", lambda: cv2.imencode(".tiff", pixels().astype(np.uint16) * 257)[1].tobytes()),
    "rotated": ("image-rotated", lambda: with_exif(jpeg(), 6)),
}


@pytest.mark.parametrize("fault", list(IMAGE_FAULTS))
@pytest.mark.parametrize("decode", [False, True], ids=["header", "decode"])
def test_a_bad_image_file_is_named(fault: str, decode: bool, split: SplitPaths) -> None:
    kind, content = IMAGE_FAULTS[fault]
    path, data = split.images / "2.jpg", content()
    path.unlink()
    if data is not None:
        path.write_bytes(data)
    problem = the_only(check(split, decode=decode))
    assert (problem.kind, problem.image_id, problem.annotation_id, problem.path) == (kind, 2, None, path)
    assert "2.jpg" in problem.what
    assert problem.remedy
    assert bad_images([problem]) == ({2} if KINDS[kind][0] == "error" else set())


def test_cmyk_is_named_from_the_header(split: SplitPaths) -> None:
    (split.images / "1.jpg").write_bytes(cmyk_jpeg())
    problem = the_only(check(split, decode=False))
    assert (problem.kind, problem.severity) == ("image-cmyk", "warning")


def test_damage_inside_a_jpeg_is_found_by_decoding_only(split: SplitPaths) -> None:
    (split.images / "1.jpg").write_bytes(jpeg_with_a_gap())
    assert check(split, decode=False) == []
    problem = the_only(check(split))
    assert (problem.kind, problem.image_id) == ("image-corrupt", 1)
    assert "the decoder says" in problem.what


def test_damage_inside_a_png_is_found_by_decoding(split: SplitPaths) -> None:
    content = bytearray(cv2.imencode(".png", pixels())[1].tobytes())
    content[len(content) // 2] ^= 0xFF
    (split.images / "1.jpg").write_bytes(content)
    assert the_only(check(split)).kind == "image-corrupt"


def test_a_folder_in_place_of_an_image_is_named(split: SplitPaths) -> None:
    (split.images / "1.jpg").unlink()
    (split.images / "1.jpg").mkdir()
    assert the_only(check(split)).kind == "image-missing"


def test_a_size_turned_by_exif_is_explained(split: SplitPaths) -> None:
    turned = cv2.imencode(".jpg", cv2.rotate(pixels(), cv2.ROTATE_90_CLOCKWISE))[1].tobytes()
    (split.images / "1.jpg").write_bytes(with_exif(turned, 8))
    size, rotated = check(split)
    assert (size.kind, rotated.kind) == ("image-size", "image-rotated")
    assert "annotations seem to be for the rotated image" in size.what


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("orientation", [1, 3, 8, 9])
def test_exif_orientation_is_read_in_both_byte_orders(tmp_path: Path, order: str, orientation: int) -> None:
    (tmp_path / "a.jpg").write_bytes(with_exif(jpeg(), orientation, order=order))
    header = read_image_header(tmp_path / "a.jpg")
    assert header.orientation == (orientation if orientation <= 8 else 1)
    assert (header.width, header.height, header.bits, header.colour) == (64, 48, 8, "colour")


def test_bytes_after_the_end_of_a_jpeg_do_no_harm(split: SplitPaths) -> None:
    (split.images / "1.jpg").write_bytes(jpeg() + bytes(1000))
    assert check(split) == []


def test_workers_find_what_one_thread_finds_in_the_same_order(write_split: WriteSplit) -> None:
    split = write_split(coco_tree(annotation(1), images=9))
    (split.images / "3.jpg").write_bytes(b"")
    (split.images / "8.jpg").unlink()
    (split.images / "5.jpg").write_bytes(jpeg_with_a_gap())
    store = open_store(split)
    seen: list[tuple[int, int]] = []
    alone = check_split(store, decode=True, progress=lambda done, total: seen.append((done, total)))
    assert [(problem.kind, problem.image_id) for problem in alone] == [
        ("image-empty", 3),
        ("image-corrupt", 5),
        ("image-missing", 8),
    ]
    assert seen == [(n, 9) for n in range(1, 10)]
    assert check_split(store, decode=True, workers=2) == alone
    assert [problem.image_id for problem in check_split(store, decode=False, workers=3)] == [3, 8]


ANNOTATION_FAULTS: dict[str, tuple[str, dict[str, Any]]] = {
    "no width": ("box-empty", {"bbox": [10, 10, 0, 20]}),
    "two corners the wrong way": ("box-negative", {"bbox": [30, 30, -20, -20]}),
    "not a number": ("box-not-finite", {"bbox": [10, float("nan"), 20, 20]}),
    "infinite": ("box-not-finite", {"bbox": [10, 10, float("inf"), 20]}),
    "three numbers": ("box-not-finite", {"bbox": [10, 10, 20]}),
    "no box": ("box-not-finite", {"bbox": None}),
    "right of the image": ("box-outside", {"bbox": [64, 10, 20, 20]}),
    "above the image": ("box-outside", {"bbox": [10, -30, 20, 20]}),
    "sticks out": ("box-overhang", {"bbox": [50, 10, 20, 20]}),
    "two points beside a sound part": ("polygon-short", {"segmentation": [[1, 1, 2, 2], square(10, 10, 20)]}),
    "odd count beside a sound part": ("polygon-broken", {"segmentation": [[1, 1, 2, 2, 3, 3, 4], square(10, 10, 20)]}),
    "polygon not finite": (
        "polygon-broken",
        {"segmentation": [[1, 1, 2, float("nan"), 3, 3], square(10, 10, 20)]},
    ),
    "bow tie": ("polygon-crossing", {"segmentation": [[10, 10, 30, 30, 30, 10, 10, 30]]}),
    "words for polygons": ("segmentation-broken", {"segmentation": [["a", "b"]]}),
    "flat list of numbers": ("segmentation-broken", {"segmentation": square(10, 10, 20)}),
    "runs too few": ("rle-broken", {"segmentation": {"size": [48, 64], "counts": [5, 6]}}),
    "runs of another size": ("rle-broken", {"segmentation": {"size": [64, 48], "counts": [0, 48 * 64]}}),
    "undecodable text": ("rle-broken", {"segmentation": {"size": [48, 64], "counts": "!!"}}),
    "text that ends early": ("rle-broken", {"segmentation": {"size": [48, 64], "counts": "PPP"}}),
    "no size": ("segmentation-broken", {"segmentation": {"counts": [0, 48 * 64]}}),
    "crowd as text": ("crowd-value", {"iscrowd": "0"}),
    "crowd as a count": ("crowd-value", {"iscrowd": 2}),
    "crowd as an empty list": ("crowd-value", {"iscrowd": []}),
    "unknown image": ("unknown-image", {"image_id": 77}),
    "unknown category": ("unknown-category", {"category_id": 8}),
    "id used twice": ("duplicate-annotation", {"id": 1}),
}


@pytest.mark.parametrize("fault", list(ANNOTATION_FAULTS))
def test_a_bad_annotation_is_named_and_the_others_are_not(fault: str, write_split: WriteSplit) -> None:
    kind, change = ANNOTATION_FAULTS[fault]
    bad = annotation(5, **{"image_id": 2, **change})
    split = write_split(coco_tree(annotation(1), bad, annotation(9, segmentation=WHOLE, iscrowd=1)))
    problem = the_only(check(split))
    assert problem.kind == kind
    assert problem.severity == KINDS[kind][0]
    assert problem.annotation_id == bad["id"]
    assert problem.image_id == bad["image_id"]
    assert problem.what
    assert problem.remedy


def test_true_and_false_are_crowd_values(write_split: WriteSplit) -> None:
    assert check(write_split(coco_tree(annotation(1, iscrowd=False), annotation(2, iscrowd=True)))) == []


def test_a_box_outside_by_a_rounding_error_is_accepted(write_split: WriteSplit) -> None:
    split = write_split(coco_tree(annotation(1, bbox=[-0.4, 10, 64.9, 20])))
    assert check(split) == []


def test_an_outline_of_short_parts_alone_is_an_error(write_split: WriteSplit) -> None:
    split = write_split(coco_tree(annotation(1, segmentation=[[1, 1, 2, 2]])))
    assert [problem.kind for problem in check(split)] == ["polygon-short", "polygon-none"]
    assert bad_images(check(split)) == {1}


def test_an_image_id_used_twice_is_named(write_split: WriteSplit) -> None:
    tree = coco_tree(annotation(1))
    tree["images"][1]["id"] = 1
    problem = the_only(check(write_split(tree)))
    assert (problem.kind, problem.image_id) == ("duplicate-image", 1)
    assert problem.path is not None
    assert problem.path.name == "2.jpg"


def test_a_category_id_used_twice_is_named(write_split: WriteSplit) -> None:
    categories = [{"id": 7, "name": "cat"}, {"id": 7, "name": "dog"}]
    problem = the_only(check(write_split(coco_tree(annotation(1), categories=categories))))
    assert problem.kind == "duplicate-category"
    assert "'cat'" in problem.what
    assert "'dog'" in problem.what


@pytest.mark.parametrize(
    ("change", "kinds"),
    [
        ({"annotations": []}, ["no-annotations"]),
        ({"annotations": [], "categories": []}, ["no-annotations", "no-categories"]),
        ({"images": [], "annotations": []}, ["no-images", "no-annotations"]),
    ],
)
def test_an_empty_list_is_an_error_of_the_whole_split(
    change: dict[str, Any], kinds: list[str], write_split: WriteSplit
) -> None:
    problems = check(write_split(coco_tree() | change))
    assert [problem.kind for problem in problems] == kinds
    for on_bad in ("error", "skip"):
        with pytest.raises(DataError, match=kinds[0]):
            raise_for(problems, on_bad)


def test_boxes_without_outlines_are_one_warning(write_split: WriteSplit) -> None:
    split = write_split(coco_tree(annotation(1, segmentation=None), annotation(2, segmentation=None), annotation(3)))
    problem = the_only(check(split))
    assert (problem.kind, problem.severity) == ("no-outline", "warning")
    assert "2 of 3" in problem.what


def test_all_problems_come_together(write_split: WriteSplit) -> None:
    records = []
    for number, (_, change) in enumerate(ANNOTATION_FAULTS.values(), 10):
        records.append(annotation(number, **{"image_id": 2, **change}))
    split = write_split(coco_tree(annotation(1), *records))
    (split.images / "1.jpg").unlink()
    kinds = {problem.kind for problem in check(split)}
    assert kinds == {kind for kind, _ in ANNOTATION_FAULTS.values()} | {"image-missing"}


def test_errors_stop_a_run_unless_they_are_skipped(split: SplitPaths) -> None:
    (split.images / "1.jpg").unlink()
    problems = check(split)
    with pytest.raises(DataError, match="1 error and 0 warnings") as error:
        raise_for(problems, "error")
    assert "image 1: " in error.value.what
    assert "data.on_bad=skip" in error.value.remedy
    raise_for(problems, "skip")
    assert bad_images(problems) == {1}


def test_warnings_never_stop_a_run(split: SplitPaths) -> None:
    (split.images / "1.jpg").write_bytes(with_exif(jpeg(), 3))
    problems = check(split)
    assert [problem.severity for problem in problems] == ["warning"]
    raise_for(problems, "error")
    assert bad_images(problems) == set()


def test_a_summary_counts_all_and_shows_a_few(write_split: WriteSplit) -> None:
    split = write_split(coco_tree(annotation(1, bbox=[1, 1, 0, 5]), images=9), with_images=False)
    text = summarise(check(split), limit=2)
    assert text.splitlines() == [
        "9 errors and 1 warning in the data",
        "error: image-missing, 9 found",
        f"    image 1: there is no file {split.images / '1.jpg'}",
        f"    image 2: there is no file {split.images / '2.jpg'}",
        "    and 7 more",
        "warning: box-empty, 1 found",
        "    image 1, annotation 1: box [1, 1, 0, 5] has no area (image size 64 x 48)",
    ]


def crosses_slowly(points: np.ndarray) -> bool:
    """By solving for the meeting point of every two sides that share no corner."""
    n = len(points)
    for i in range(n):
        for j in range(i + 2, n):
            if i == 0 and j == n - 1:
                continue
            p, r = points[i], points[(i + 1) % n] - points[i]
            q, s = points[j], points[(j + 1) % n] - points[j]
            det = r[0] * -s[1] + s[0] * r[1]
            if abs(det) < 1e-12:
                continue
            t, u = np.linalg.solve(np.stack([r, -s], axis=1), q - p)
            if 0 < t < 1 and 0 < u < 1:
                return True
    return False


def test_self_crossing_agrees_with_solving_for_the_crossing_point() -> None:
    rng = np.random.default_rng(2)
    polygons = []
    for n in [4, 5, 6, 7, 9, 12] * 12:
        angle = np.sort(rng.uniform(0, 2 * np.pi, n)) + rng.normal(0, rng.choice([0, 0.4]), n)
        polygons.append(np.stack([np.cos(angle), np.sin(angle)], axis=1) * rng.uniform(0.5, 1, (n, 1)))
    numbers = np.concatenate([polygon.ravel() for polygon in polygons])
    start = np.concatenate([[0], np.cumsum([polygon.size for polygon in polygons])])
    expected = [index for index, polygon in enumerate(polygons) if crosses_slowly(polygon)]
    assert 10 < len(expected) < 60
    assert self_crossing_parts(numbers, start, np.arange(len(polygons))).tolist() == expected


def test_touching_sides_and_very_long_polygons_are_not_called_crossing() -> None:
    keyhole = np.array([0, 0, 4, 0, 4, 2, 3, 2, 3, 1, 1, 1, 1, 3, 3, 3, 3, 2, 4, 2, 4, 4, 0, 4], float)
    long = np.random.default_rng(0).random(2 * (MAX_TESTED_POINTS + 1))
    numbers, start = np.concatenate([keyhole, long]), np.array([0, len(keyhole), len(keyhole) + len(long)])
    assert self_crossing_parts(numbers, start, np.array([0, 1])).tolist() == []


def test_what_is_wrong_with_boxes_is_just_what_cleaning_leaves_out(write_split: WriteSplit) -> None:
    rng = np.random.default_rng(3)
    records = [annotation(n, bbox=rng.integers(-40, 90, 4).tolist()) for n in range(300)]
    store = open_store(write_split(coco_tree(*records)))
    unusable = {"box-empty", "box-negative", "box-outside", "box-not-finite"}
    named = {problem.annotation_id for problem in check_annotations(store) if problem.kind in unusable}
    kept = set(clean_instances(store.instances(0)).ids.tolist())
    assert named == set(range(300)) - kept
    assert 50 < len(named) < 290


def test_checks_work_on_a_reopened_store(split: SplitPaths) -> None:
    tree = json.loads(split.annotations.read_text())
    tree["annotations"][0]["category_id"] = 99
    split.annotations.write_text(json.dumps(tree))
    store = open_store(split)
    assert check_annotations(AnnotationStore(store.path, split, store.rules)) == check_annotations(store)
