from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Sequence
from fractions import Fraction
from itertools import combinations
from pathlib import Path

import cv2
import numpy as np
import pytest
from coco_files import annotation, coco_tree, square
from parsed_page import Page
from typer.testing import CliRunner

from maskfleet.cli.main import app
from maskfleet.data.checks.problems import KINDS
from maskfleet.data.inspect.draw import draw_problem_sample, draw_sample
from maskfleet.data.inspect.page import render_page, write_page
from maskfleet.data.inspect.report import MissingSplit, Report, Resize, inspect_splits, report_json, splits_to_inspect
from maskfleet.data.inspect.statistics import (
    aspect_histogram,
    box_size_histogram,
    bucket_uses,
    image_sizes,
    object_table,
    objects_per_image,
    size_shares,
)
from maskfleet.data.store.annotations import clean_instances, open_store
from maskfleet.data.store.splits import SplitPaths
from maskfleet.data.synthetic.dataset import make_shapes
from maskfleet.errors import DataError

WriteSplit = Callable[..., SplitPaths]
RESIZE = Resize(short_edge_px=800, max_px=1344, divisor=32)


def inspected(*splits: SplitPaths, num_samples: int = 24, missing: Sequence[MissingSplit] = ()) -> Report:
    return inspect_splits(splits, resize=RESIZE, workers=0, num_samples=num_samples, missing=missing)


def box_annotation(identity: int, box: list[float], **changes: object) -> dict[str, object]:
    return annotation(identity, bbox=box, area=box[2] * box[3], segmentation=None, **changes)


# --- what is counted


def test_objects_crowds_and_what_is_left_out_are_counted_apart(write_split: WriteSplit) -> None:
    crowd = {"size": [48, 64], "counts": [0, 48 * 64]}
    tree = coco_tree(
        annotation(1),
        annotation(2, category_id=3),
        annotation(3, iscrowd=1, segmentation=crowd),
        annotation(4, bbox=[5, 5, 0, 9]),
        annotation(5, category_id=99),
        annotation(6, image_id=77),
        images=3,
    )
    (split,) = inspected(write_split(tree)).splits
    assert (split.num_images, split.num_annotations, split.num_objects) == (3, 6, 2)
    assert (split.num_crowds, split.num_left_out, split.num_empty_images) == (1, 3, 2)
    counted = [(c.id, c.name, c.label, c.objects, c.crowds, c.images) for c in split.classes]
    assert counted == [(3, "three", 1, 1, 0, 1), (7, "seven", 2, 1, 1, 1)]
    assert split.outlines == {"polygons": 5, "rle": 1, "none": 0, "broken": 0}


def test_the_counted_objects_are_those_that_training_uses(write_split: WriteSplit) -> None:
    rng = np.random.default_rng(4)
    records = [
        annotation(n, image_id=int(rng.integers(1, 6)), bbox=rng.integers(-30, 80, 4).tolist()) for n in range(200)
    ]
    store = open_store(write_split(coco_tree(*records, images=5)))
    table = object_table(store)
    expected = [clean_instances(store.instances(index)) for index in range(len(store))]
    assert table.rows.tolist() == [row for clean in expected for row in clean.rows.tolist()]
    assert np.array_equal(table.boxes, np.concatenate([clean.boxes for clean in expected]))
    assert 20 < len(table.rows) < 150


def test_sizes_and_shapes_of_boxes_fall_into_bins_worked_by_hand(write_split: WriteSplit) -> None:
    boxes = [[0, 0, 4, 4], [0, 0, 32, 8], [0, 0, 8, 32], [0, 0, 60, 40]]  # roots 4, 16, 16, 49; aspects 1, 4, 1/4, 1.5
    store = open_store(write_split(coco_tree(*(box_annotation(n, box) for n, box in enumerate(boxes, 1)))))
    table = object_table(store)
    sizes = box_size_histogram(table)
    assert sizes.edges == pytest.approx([4, 5.66, 8, 11.3, 16, 22.6, 32, 45.3, 64], rel=1e-2)
    assert sizes.counts == (1, 0, 0, 0, 2, 0, 0, 1)
    assert sizes.median == 16
    aspect = aspect_histogram(table)
    assert aspect.edges[0] == pytest.approx(2 ** (-2 - 1 / 6))
    assert aspect.edges[-1] == pytest.approx(2 ** (2 + 1 / 6))
    assert {index: count for index, count in enumerate(aspect.counts) if count} == {0: 1, 6: 1, 8: 1, 12: 1}


def test_small_medium_and_large_meet_where_coco_says(write_split: WriteSplit) -> None:
    areas = [1023.9, 1024, 9216, 9216.1]
    records = [annotation(n, area=area) for n, area in enumerate(areas, 1)]
    shares = size_shares(object_table(open_store(write_split(coco_tree(*records)))))
    assert (shares.small, shares.medium, shares.large) == (1, 2, 1)


def test_images_are_counted_by_their_number_of_objects(write_split: WriteSplit) -> None:
    records = [annotation(n, image_id=1) for n in range(3)] + [annotation(9, image_id=2)]
    store = open_store(write_split(coco_tree(*records, images=4)))
    found = objects_per_image(object_table(store), len(store))
    assert found.edges == (0, 1, 2, 3, 4)
    assert found.counts == (2, 1, 0, 1)
    crowded = open_store(write_split(coco_tree(*(annotation(n) for n in range(95)), images=4)))
    found = objects_per_image(object_table(crowded), 4)
    assert len(found.counts) <= 30
    assert sum(found.counts) == 4
    assert found.edges[-2] <= 95 < found.edges[-1]


def test_padding_of_each_bucket_mode_is_as_worked_by_hand(write_split: WriteSplit) -> None:
    store = open_store(write_split(coco_tree(annotation(1), images=2)))  # 64 x 48: 800 x 1067 on a short side of 800
    uses = {use.mode: use for use in bucket_uses(store, short_edge_px=800, max_px=1344, divisor=32)}
    assert uses["orientation"].padding == pytest.approx(1 - 1067 / 1344)
    assert [(c.height, c.width, c.images) for c in uses["orientation"].canvases] == [(800, 1344, 2), (1344, 800, 0)]
    assert [(c.height, c.width, c.images) for c in uses["tight"].canvases] == [(800, 1088, 2)]
    assert uses["tight"].padding == pytest.approx(1 - 1067 / 1088)
    assert uses["none"].padding == pytest.approx(1 - 1067 / 1088)
    assert [(c.height, c.images) for c in uses["none"].canvases] == [(None, 2), (None, 0)]


def slow_resized(height: int, width: int) -> tuple[int, int]:
    """TensorPack's rule for one image, to a short side of 800 and a long side of at most 1344."""
    scale = Fraction(800, min(height, width))
    if max(height, width) * scale > 1344:
        scale = Fraction(1344, max(height, width))
    return max(1, int(height * scale + Fraction(1, 2))), max(1, int(width * scale + Fraction(1, 2)))


def slow_tight(lengths: list[int]) -> list[int]:
    """The canvas length of each image, by trying all choices of lengths; one more must save 3 % of the pixels."""
    needed = [min(max(-(-length // 32) * 32, 800), 1344) for length in lengths]
    best: list[int] = []
    for number in (1, 2, 3):
        tried = []
        for chosen in combinations(sorted({*needed}), number):
            if chosen[-1] == max(needed):
                tried.append([min(one for one in chosen if one >= length) for length in needed])
        if not tried or (best and sum(best) - min(map(sum, tried)) < 0.03 * sum(best)):
            break
        best = min(tried, key=sum)
    return best


def test_padding_is_that_of_a_slow_reference(write_split: WriteSplit) -> None:
    random = np.random.default_rng(5)
    tree = coco_tree(annotation(1), images=60)
    ratios = random.choice([0.5, 0.67, 0.75, 1.0, 1.33, 1.5, 2.4], size=60) * random.normal(1, 0.01, size=60)
    for image, ratio in zip(tree["images"], ratios, strict=True):
        image |= {"height": 480, "width": round(480 * ratio)}
    store = open_store(write_split(tree))
    sizes = [slow_resized(image["height"], image["width"]) for image in tree["images"]]
    filled = sum(height * width for height, width in sizes)
    landscape = [width for height, width in sizes if height <= width]
    portrait = [height for height, width in sizes if height > width]
    pixels = {
        "orientation": 800 * 1344 * 60,
        "tight": 800 * sum(slow_tight(landscape) + slow_tight(portrait)),
        "none": sum(-(-height // 32) * 32 * (-(-width // 32) * 32) for height, width in sizes),
    }
    uses = bucket_uses(store, short_edge_px=800, max_px=1344, divisor=32)
    assert [use.mode for use in uses] == list(pixels)
    for use in uses:
        assert use.padding == pytest.approx(1 - filled / pixels[use.mode], abs=1e-12)
        assert use.saved == pytest.approx(1 - pixels[use.mode] / pixels["orientation"], abs=1e-12)
    assert uses[1].saved > 0.05


def test_many_image_sizes_are_laid_on_a_grid(write_split: WriteSplit) -> None:
    tree = coco_tree(annotation(1), images=900)
    for index, image in enumerate(tree["images"]):
        image["width"], image["height"] = 100 + index % 30 * 10, 100 + index // 30 * 10
    sizes = image_sizes(open_store(write_split(tree, with_images=False)))
    assert (sizes.distinct, sizes.step_px) == (900, 32)
    assert sum(size.images for size in sizes.sizes) == 900
    assert len(sizes.sizes) <= 400


# --- which images are shown


def test_samples_hold_the_extremes_and_every_class(tmp_path: Path) -> None:
    make_shapes(tmp_path / "set", num_train=40, num_val=0, num_categories=10, crowd_fraction=0.2)
    (split,) = inspected(*splits_to_inspect(tmp_path / "set", ["train"])[0], num_samples=20).splits
    store = open_store(split.split)
    assert len({sample.index for sample in split.samples}) == 20
    counts = [int((~store.instances(index).crowd).sum()) for index in range(len(store))]
    assert counts[split.samples[0].index] == max(counts)
    assert split.samples[0].why == f"most objects: {max(counts)}"
    shown = {label for sample in split.samples for label in store.instances(sample.index).objects.labels.tolist()}
    assert shown == set(range(1, 11))
    assert any(sample.why.startswith("crowd regions") for sample in split.samples)


def test_images_with_errors_are_shown_as_problems_only(write_split: WriteSplit) -> None:
    split = write_split(coco_tree(annotation(1), annotation(2, image_id=2), annotation(3, image_id=3), images=3))
    (split.images / "2.jpg").unlink()
    report = inspected(split).splits[0]
    assert sorted(sample.image_id for sample in report.samples) == [1, 3]
    assert [sample.image_id for sample in report.problem_samples] == [2]


def test_each_kind_of_problem_is_shown_before_any_second_time(write_split: WriteSplit) -> None:
    records = [annotation(n, image_id=n, bbox=[1, 1, -5, 5]) for n in range(1, 6)]
    records.append(annotation(9, image_id=6, bbox=[1, 1, 5, 0]))
    split = write_split(coco_tree(*records, images=6))
    chosen = inspected(split, num_samples=3).splits[0].problem_samples
    assert [(sample.image_id, sample.why) for sample in chosen] == [
        (1, "box-negative"),
        (6, "box-empty"),
        (2, "box-negative"),
    ]


# --- how they are drawn


def black(split: SplitPaths, name: str, height: int, width: int) -> None:
    assert cv2.imwrite(str(split.images / name), np.zeros((height, width, 3), np.uint8))


def test_masks_lie_where_the_outline_is(write_split: WriteSplit) -> None:
    tree = coco_tree(annotation(1, segmentation=[square(100, 50, 40)], bbox=[100, 50, 40, 40], area=1600), images=1)
    tree["images"][0] |= {"width": 320, "height": 240}
    split = write_split(tree, with_images=False)
    black(split, "1.jpg", 240, 320)
    shown = draw_sample(open_store(split), 0)  # twice as large
    assert shown is not None
    assert shown.shape == (480, 640, 3)
    tinted = shown.max(axis=2) > 60
    assert tinted[105:175, 205:275].all()  # the square from (200, 100) to (280, 180)
    tinted[80:184, 196:284] = False  # its outline, and the tag above it
    assert not tinted.any()


def test_a_run_length_mask_lies_where_its_runs_are(write_split: WriteSplit) -> None:
    mask = np.zeros((240, 320), bool)
    mask[60:120, 200:300] = True
    flat = mask.T.ravel()
    borders = np.flatnonzero(np.diff(flat)) + 1
    runs = np.diff([0, *borders.tolist(), flat.size]).tolist()
    rle = {"size": [240, 320], "counts": runs}
    tree = coco_tree(annotation(1, segmentation=rle, bbox=[200, 60, 100, 60], area=6000), images=1)
    tree["images"][0] |= {"width": 320, "height": 240}
    split = write_split(tree, with_images=False)
    black(split, "1.jpg", 240, 320)
    shown = draw_sample(open_store(split), 0)
    assert shown is not None
    tinted = shown.max(axis=2) > 60
    assert tinted[125:235, 405:595].all()
    assert not tinted[:, :380].any()
    assert not tinted[260:].any()


def red_pixels(image: np.ndarray) -> np.ndarray:
    blue, green, red = (image[..., channel].astype(int) for channel in range(3))
    return (red > 190) & (green < 100) & (blue < 100)


def test_a_box_outside_the_image_is_followed_there(write_split: WriteSplit) -> None:
    split = write_split(coco_tree(annotation(1, bbox=[70, 10, 12, 12]), images=1), with_images=False)
    black(split, "1.jpg", 48, 64)
    report = inspected(split).splits[0]
    assert [problem.kind for problem in report.problems] == ["box-outside"]
    shown = draw_problem_sample(open_store(split), 0, report.problems)
    assert shown is not None
    assert shown.shape[1] / shown.shape[0] > 64 / 48 * 1.2  # widened to the right
    scale = shown.shape[0] / 48
    found = red_pixels(shown)
    assert found[:, round(69 * scale) :].sum() > 100
    assert not found[:, : round(30 * scale)].any()


@pytest.mark.parametrize("change", [{"bbox": [1e12, 1e12, 5, 5]}, {"segmentation": [[1e300, 0, 5, 1e300, 7, 7]]}])
def test_absurd_numbers_can_be_drawn(change: dict[str, object], write_split: WriteSplit) -> None:
    split = write_split(coco_tree(annotation(1, **change)))
    report = inspected(split)
    assert draw_problem_sample(open_store(split), 0, report.problems) is not None
    assert draw_sample(open_store(split), 0) is not None


def test_a_truncated_jpeg_shows_what_is_left(write_split: WriteSplit, capfd: pytest.CaptureFixture[str]) -> None:
    split = write_split(coco_tree(annotation(1), images=1))
    path = split.images / "1.jpg"
    path.write_bytes(path.read_bytes()[:1500])
    report = inspected(split).splits[0]
    assert report.problems[0].kind == "image-truncated"
    assert draw_problem_sample(open_store(split), 0, report.problems) is not None
    assert capfd.readouterr().err == ""


# --- the page


def test_the_page_asks_nothing_of_the_network(write_split: WriteSplit) -> None:
    page = Page(render_page(inspected(write_split(coco_tree(annotation(1), annotation(2, bbox=[9, 9, 0, 3]))))))
    assert not {"link", "iframe", "object", "embed", "base"} & {tag for tag, _ in page.tags}
    for _, attributes in page.tags:
        for name in ("src", "href", "action", "srcset", "poster"):
            assert attributes.get(name, "data:").startswith("data:")
    policies = [meta["content"] for meta in page.all("meta") if meta.get("http-equiv") == "Content-Security-Policy"]
    assert len(policies) == 1
    assert "default-src 'none'; img-src data:" in policies[0]


def test_every_image_and_chart_says_what_it_shows(write_split: WriteSplit) -> None:
    page = Page(render_page(inspected(write_split(coco_tree(annotation(1), annotation(2, bbox=[9, 9, 0, 3]))))))
    pictures = [image for image in page.all("img") if image.get("src")]
    assert len(pictures) == 3  # one problem, two samples
    assert all(image["alt"] for image in pictures)
    assert all(chart["role"] == "img" and chart["aria-label"] for chart in page.all("svg"))
    assert len(page.all("svg")) >= 6


def test_the_table_names_each_problem_with_its_remedy(write_split: WriteSplit) -> None:
    split = write_split(coco_tree(annotation(41, bbox=[1, 1, -5, 5]), annotation(42, image_id=2, category_id=99)))
    (split.images / "2.jpg").unlink()
    text = render_page(inspected(split))
    rows = re.findall(r'<tr data-kind="([^"]*)">(.*?)</tr>', text)
    assert sorted(kind for kind, _ in rows) == ["box-negative", "image-missing", "unknown-category"]
    cells = {kind: re.sub("<[^>]*>", "|", row) for kind, row in rows}
    assert "|1.jpg|" in cells["box-negative"]
    assert "|41|" in cells["box-negative"]
    assert "two corners are a common mistake" in cells["box-negative"]
    assert "|2.jpg|" in cells["image-missing"]
    chips = re.findall(r'data-kind="([^"]+)" aria-pressed', text)
    assert chips == ["box-negative", "image-missing", "unknown-category"]
    assert set(chips) <= set(KINDS)


def test_problems_of_an_image_that_say_the_same_are_counted(write_split: WriteSplit) -> None:
    records = [annotation(n, category_id=99) for n in range(3)] + [annotation(9, bbox=[1, 1, 0, 5])]
    text = render_page(inspected(write_split(coco_tree(*records))))
    (figure,) = re.findall(r'<figure data-kinds="([^"]*)">(.*?)</figure>', text, re.DOTALL)
    assert figure[0] == "unknown-category box-empty"
    assert figure[1].count("no category has the id 99") == 2  # caption and alternative text
    assert "<b>× 3</b>" in figure[1]


def test_the_documented_kinds_are_those_that_are_checked() -> None:
    text = (Path(__file__).parents[3] / "docs" / "data" / "inspect.md").read_text()
    rows = re.findall(r"^\| (`.*?`) \| (error|warning) \|", text, re.MULTILINE)
    documented = {kind: severity for kinds, severity in rows for kind in re.findall("`([^`]+)`", kinds)}
    assert documented == {kind: severity for kind, (severity, _) in KINDS.items()}


def test_hostile_names_are_only_text(write_split: WriteSplit) -> None:
    name = '"><script>alert(1)</script>'
    tree = coco_tree(annotation(1), annotation(2, bbox=[1, 1, 0, 1]), categories=[{"id": 7, "name": name}])
    page = Page(render_page(inspected(write_split(tree))))
    assert len(page.all("script")) == 1  # our own


def test_an_empty_set_has_a_page_too(write_split: WriteSplit) -> None:
    report = inspected(write_split(coco_tree(images=0, categories=[])))
    assert report.num_errors == 3
    Page(render_page(report))
    json.dumps(report_json(report), allow_nan=False)


def test_the_page_replaces_only_its_own_kind(write_split: WriteSplit, tmp_path: Path) -> None:
    report = inspected(write_split(coco_tree(annotation(1))))
    page = tmp_path / "page.html"
    page.write_text("my diary")
    with pytest.raises(DataError, match=r"page\.html already exists"):
        write_page(report, page)
    assert page.read_text() == "my diary"
    page.unlink()
    write_page(report, page)
    first = page.read_bytes()
    write_page(report, page)
    assert page.read_bytes() == first
    with pytest.raises(DataError, match="no folder"):
        write_page(report, tmp_path / "nowhere" / "page.html")


def test_the_machine_readable_report_holds_every_problem(write_split: WriteSplit) -> None:
    records = [annotation(n, bbox=[1, 1, -5, 5]) for n in range(300)]
    report = inspected(write_split(coco_tree(*records)))
    tree = json.loads(json.dumps(report_json(report), allow_nan=False))
    assert (tree["errors"], tree["warnings"]) == (300, 0)
    problems = tree["splits"][0]["problems"]
    assert [problem["annotation_id"] for problem in problems] == list(range(300))
    assert problems[0]["path"].endswith("1.jpg")
    assert render_page(report).count('<tr data-kind="box-negative">') == 200


# --- what is meant by a path


def test_all_splits_of_a_folder_are_found_and_those_without_images_noted(write_split: WriteSplit) -> None:
    split = write_split(coco_tree(annotation(1)))
    root = split.annotations.parents[1]
    (root / "annotations" / "instances_val.json").write_text(split.annotations.read_text())
    (root / "annotations" / "instances_more.json").write_text(split.annotations.read_text())
    found, missing = splits_to_inspect(root)
    assert [each.name for each in found] == ["train"]
    assert [one.name for one in missing] == ["more", "val"]
    assert str(missing[1]).startswith("val was not inspected: ")
    with pytest.raises(DataError, match="images of split 'val'"):
        splits_to_inspect(root, ["val"])


def test_a_split_without_images_is_an_error_if_training_would_use_it(write_split: WriteSplit) -> None:
    split = write_split(coco_tree(annotation(1)))
    root = split.annotations.parents[1]
    (root / "annotations" / "instances_more.json").write_text(split.annotations.read_text())
    found, missing = splits_to_inspect(root)
    report = inspected(*found, missing=missing)
    assert (report.num_errors, report.num_warnings) == (0, 0)
    (root / "annotations" / "instances_val.json").write_text(split.annotations.read_text())
    report = inspected(*found, missing=splits_to_inspect(root)[1])
    assert (report.num_errors, report.num_warnings) == (1, 0)
    assert "training stops" in render_page(report)
    done = CliRunner().invoke(app, ["data", "inspect", str(root), "--out", str(root / "page.html")])
    assert done.exit_code == 1
    assert "error: val was not inspected" in done.stdout
    assert "no problems found" not in done.stdout
    assert "note: more was not inspected" in done.stdout


def test_an_annotation_file_and_its_images_are_a_set(write_split: WriteSplit) -> None:
    split = write_split(coco_tree(annotation(1)))
    root = split.annotations.parents[1]
    expected = [SplitPaths("train", split.annotations, split.images)]
    assert splits_to_inspect(split.annotations, images=split.images)[0] == expected
    assert splits_to_inspect(None, annotations=split.annotations, images=split.images)[0] == expected
    relative = splits_to_inspect(root, annotations=Path("annotations/instances_train.json"), images=Path("train"))
    assert relative[0] == expected
    with pytest.raises(DataError) as error:
        splits_to_inspect(split.annotations)
    assert "--images" in error.value.remedy


def test_another_format_is_recognised(tmp_path: Path) -> None:
    (tmp_path / "data.yaml").write_text("names: [a]\n")
    with pytest.raises(DataError) as error:
        splits_to_inspect(tmp_path)
    assert f"maskfleet data convert {tmp_path} NEW_FOLDER --from yolo" in error.value.remedy


def test_splits_of_different_classes_are_an_error(write_split: WriteSplit, tmp_path: Path) -> None:
    split = write_split(coco_tree(annotation(1)))
    other = tmp_path / "other.json"
    other.write_text(json.dumps(coco_tree(annotation(1), categories=[{"id": 7, "name": "eight"}])))
    report = inspected(split, SplitPaths("other", other, split.images))
    errors = [problem for problem in report.splits[1].problems if problem.severity == "error"]
    assert [(problem.kind, problem.image_id) for problem in errors] == [("category-mismatch", None)]
    assert "category 3 is missing here and 'three' there" in errors[0].what
    assert "category 7 is 'eight' here and 'seven' there" in errors[0].what


@pytest.mark.skipif("MASKFLEET_COCO" not in os.environ, reason="MASKFLEET_COCO names no COCO folder")
def test_real_coco_is_counted_as_pycocotools_counts(tmp_path: Path) -> None:
    from pycocotools.coco import COCO

    splits, _ = splits_to_inspect(Path(os.environ["MASKFLEET_COCO"]), ["val2017"])
    report = inspect_splits(splits, resize=RESIZE)
    peer = COCO(str(splits[0].annotations))
    found = report.splits[0]
    assert report.num_errors == 0
    assert (found.num_images, found.num_annotations) == (len(peer.imgs), len(peer.anns))
    single = [a for a in peer.anns.values() if not a["iscrowd"] and a["area"] > 1]
    assert found.num_objects == len(single)
    for counted in found.classes:
        of_class = [a for a in single if a["category_id"] == counted.id]
        assert (counted.objects, counted.images) == (len(of_class), len({a["image_id"] for a in of_class}))
    Page(render_page(report))
