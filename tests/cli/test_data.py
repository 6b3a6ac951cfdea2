"""`maskfleet data` as a user starts it."""

from __future__ import annotations

import json
from pathlib import Path

import cv2
import numpy as np
import pytest
from typer.testing import CliRunner, Result

from maskfleet.cli.data import app
from maskfleet.errors import ConfigError, DataError, MaskfleetError


def data(*arguments: object) -> Result:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if isinstance(result.exception, MaskfleetError):
        raise result.exception
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


@pytest.fixture
def shapes(tmp_path: Path) -> Path:
    assert (
        data("make-shapes", tmp_path / "set", "--train", 4, "--val", 2, "--height", 64, "--width", "64-96").exit_code
        == 0
    )
    return tmp_path / "set"


def test_shapes_have_the_requested_number_and_size(shapes: Path) -> None:
    assert len(list((shapes / "train").glob("*.jpg"))) == 4
    assert len(list((shapes / "val").glob("*.jpg"))) == 2
    images = json.loads((shapes / "annotations" / "instances_train.json").read_text())["images"]
    assert {image["height"] for image in images} == {64}
    assert all(64 <= image["width"] <= 96 for image in images)


def test_shapes_are_replaced_only_by_force(shapes: Path) -> None:
    with pytest.raises(DataError, match="already holds shapes generated with other values"):
        data("make-shapes", shapes, "--train", 3, "--val", 1)
    assert len(list((shapes / "train").glob("*.jpg"))) == 4
    assert data("make-shapes", shapes, "--train", 3, "--val", 1, "--force").exit_code == 0
    assert len(list((shapes / "train").glob("*.jpg"))) == 3
    assert [path.name for path in shapes.parent.iterdir()] == ["set"]


def test_force_never_touches_what_it_did_not_make(shapes: Path, tmp_path: Path) -> None:
    assert data("inspect", shapes, "--json").exit_code == 0  # leaves its cache beside the annotations
    (shapes / "train" / "holiday.jpg").write_bytes(b"mine")
    with pytest.raises(DataError, match=r"such as .*holiday\.jpg"):
        data("make-shapes", shapes, "--train", 3, "--force")
    assert (shapes / "train" / "holiday.jpg").read_bytes() == b"mine"
    assert len(list((shapes / "train").glob("0*.jpg"))) == 4
    (shapes / "train" / "holiday.jpg").unlink()
    assert data("make-shapes", shapes, "--train", 1, "--val", 0, "--force").exit_code == 0
    other = tmp_path / "other"
    other.mkdir()
    (other / "shapes.json").write_text('{"mine": true}')
    with pytest.raises(DataError, match="does not contain generated shapes"):
        data("make-shapes", other, "--force")
    assert (other / "shapes.json").exists()


def test_an_old_set_comes_back_when_making_the_new_one_fails(shapes: Path) -> None:
    with pytest.raises(ConfigError, match="num_categories"):
        data("make-shapes", shapes, "--classes", 99, "--force")
    assert len(list((shapes / "train").glob("*.jpg"))) == 4
    assert [path.name for path in shapes.parent.iterdir()] == ["set"]


@pytest.mark.parametrize("text", ["tall", "10-", "-5", "64-x"])
def test_a_bad_range_of_pixels_is_explained(text: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="neither a number of pixels nor a range"):
        data("make-shapes", tmp_path / "set", f"--height={text}")


def test_a_valid_data_set_is_summarised_and_has_a_page(
    shapes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = data("inspect", shapes)
    assert result.exit_code == 0
    rows = [line.split() for line in result.stdout.splitlines()]
    assert rows[0][:4] == ["split", "images", "objects", "classes"]
    assert rows[1][:2] == ["train", "4"]
    assert rows[2][:2] == ["val", "2"]
    assert "Padding by data.buckets, short side 800 px, long side up to 1344 px:" in result.stdout
    padding = {tuple(row[:2]): row[2:] for row in rows if len(row) > 4 and row[1] in ("orientation", "tight", "none")}
    assert list(padding) == [(split, mode) for split in ("train", "val") for mode in ("orientation", "tight", "none")]
    report = json.loads(data("inspect", shapes, "--json").stdout)
    uses = {use["mode"]: use for use in report["splits"][0]["buckets"]}
    tight = uses["tight"]
    shown = [str(len(tight["canvases"])), f"{100 * tight['padding']:.1f}", "%", f"{100 * tight['saved']:.1f}", "%"]
    assert padding["train", "tight"] == shown
    assert padding["train", "orientation"][-1] == "–"
    page = (tmp_path / "inspect.html").read_text()
    assert ("fewer pixels than orientation" in page) == any(
        use["saved"] > 0 for split in report["splits"] for use in split["buckets"] if use["mode"] == "tight"
    )
    assert "no problems found" in result.stdout
    assert "Page written: inspect.html" in result.stderr
    assert (tmp_path / "inspect.html").read_text().count("data:image/jpeg;base64,") == 6


def test_errors_give_exit_code_1_and_every_detail_as_json(shapes: Path, tmp_path: Path) -> None:
    first = sorted((shapes / "train").glob("*.jpg"))[0]
    first.unlink()
    result = data("inspect", shapes, "--split", "train", "--json", "--out", tmp_path / "page.html", "--samples", 2)
    assert result.exit_code == 1
    report = json.loads(result.stdout)
    assert (report["errors"], report["warnings"], len(report["splits"])) == (1, 0, 1)
    problem = report["splits"][0]["problems"][0]
    assert (problem["kind"], problem["path"], problem["image_id"]) == ("image-missing", str(first), int(first.stem))
    assert len(report["splits"][0]["samples"]) == 2
    assert "image-missing" in (tmp_path / "page.html").read_text()


def test_remedies_are_printed_whole(shapes: Path, tmp_path: Path) -> None:
    path = shapes / "annotations" / "instances_train.json"
    tree = json.loads(path.read_text())
    tree["annotations"][0]["bbox"][2] = -4
    path.write_text(json.dumps(tree))
    result = data("inspect", shapes, "--out", tmp_path / "p.html", "--samples", 0, "--no-decode")
    assert result.exit_code == 1
    assert "1 error, 0 warnings" in result.stdout
    assert "[x, y, width," in result.stdout  # square brackets are not taken for markup


def test_json_alone_writes_no_page(shapes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    data("inspect", shapes / "annotations" / "instances_val.json", "--images", shapes / "val", "--json")
    assert [path.name for path in tmp_path.iterdir()] == ["set"]


def test_a_page_in_the_way_is_found_before_the_work(shapes: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.html").write_text("<html>mine</html>")
    with pytest.raises(DataError, match=r"mine\.html already exists"):
        data("inspect", tmp_path / "nowhere", "--out", tmp_path / "mine.html")


def test_conversion_ends_with_a_check(tmp_path: Path) -> None:
    source = tmp_path / "yolo"
    (source / "images").mkdir(parents=True)
    (source / "labels").mkdir()
    (source / "data.yaml").write_text("train: images\nnames: [thing]\n")
    assert cv2.imwrite(str(source / "images" / "1.jpg"), np.zeros((40, 60, 3), np.uint8))
    (source / "labels" / "1.txt").write_text("0 0.1 0.1 0.9 0.1 0.9 0.9 0.1 0.9\n")
    result = data("convert", source, tmp_path / "coco", "--from", "yolo")
    assert result.exit_code == 0
    assert "no problems found" in result.stdout
    assert f"maskfleet data inspect {tmp_path / 'coco'}" in result.stdout
    (source / "labels" / "1.txt").write_text("\n")
    again = data("convert", source, tmp_path / "again", "--from", "yolo")
    assert again.exit_code == 1
    assert "no-annotations" in again.stdout


def test_an_unknown_form_lists_the_known_ones(tmp_path: Path) -> None:
    result = data("convert", tmp_path, tmp_path / "coco", "--from", "kitti")
    assert result.exit_code == 2
    for form in ("yolo", "voc", "labelme"):
        assert form in result.output
