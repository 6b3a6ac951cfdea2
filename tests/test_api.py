"""The Python API: what `import maskfleet` offers, and that it gives what the commands give."""

from __future__ import annotations

import ast
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

import maskfleet
from maskfleet import Detector, ImageDetections, MaskfleetError
from maskfleet.cli.main import app
from maskfleet.config.base import replaced
from maskfleet.config.run import RunConfig
from maskfleet.data.synthetic.dataset import make_shapes
from maskfleet.training.output.metrics import read_metrics
from tools import ROOT

PAGE = ROOT / "docs" / "reference" / "python-api.md"


@pytest.fixture(scope="module")
def config(micro: RunConfig) -> RunConfig:
    changes = {"train.epoch_schedule": ((1, None),), "eval.every_epochs": 1, "model.inference.score_threshold": 0.0}
    return replaced(micro, changes)


@pytest.fixture(scope="module")
def trained(config: RunConfig, tmp_path_factory: pytest.TempPathFactory) -> maskfleet.TrainingResult:
    return maskfleet.train(config, tmp_path_factory.mktemp("api") / "run")


@pytest.fixture(scope="module")
def detector(trained: maskfleet.TrainingResult) -> Detector:
    return maskfleet.load(trained.run_dir, device="cpu")  # a GPU rounds its products differently


@pytest.fixture(scope="module")
def images(shapes_root: Path) -> list[Path]:
    return sorted((shapes_root / "val").glob("*.jpg"))


def command(*arguments: str | Path) -> str:
    """What `maskfleet …` prints."""
    done = CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def assert_equal(one: ImageDetections, other: ImageDetections, tolerance: float = 0) -> None:
    assert len(one) == len(other) > 0
    assert one.labels.tolist() == other.labels.tolist()
    np.testing.assert_allclose(one.boxes, other.boxes, rtol=tolerance, atol=64 * tolerance)  # 64 pixels a side
    np.testing.assert_allclose(one.scores, other.scores, rtol=tolerance, atol=tolerance)
    assert one.mask_probabilities is not None
    assert other.mask_probabilities is not None
    np.testing.assert_allclose(one.mask_probabilities, other.mask_probabilities, rtol=tolerance, atol=tolerance)


# What is imported, and when.


def test_importing_maskfleet_imports_nothing_heavy() -> None:
    code = (
        "import sys, maskfleet; dir(maskfleet); maskfleet.recipe('demo'); maskfleet.MaskfleetError; print(*sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = {name.split(".")[0] for name in done.stdout.split()}
    assert "maskfleet" in loaded
    assert not loaded & {"torch", "numpy", "cv2", "hotcoco"}


def test_every_name_can_be_used_and_is_listed() -> None:
    for name in maskfleet.__all__:
        assert getattr(maskfleet, name) is not None
        assert name in dir(maskfleet)
    with pytest.raises(AttributeError, match="no attribute 'detect_all'"):
        _ = maskfleet.detect_all  # type: ignore[attr-defined]


def test_type_checkers_see_what_is_imported_at_run_time() -> None:
    tree = ast.parse(Path(maskfleet.__file__).read_text(encoding="utf-8"))
    block = next(node for node in tree.body if isinstance(node, ast.If))
    seen = {
        alias.asname or alias.name: (node.module, alias.name)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert seen == maskfleet._DEFINED_IN  # type: ignore[attr-defined]
    assert {*seen, "__version__"} == set(maskfleet.__all__)


# recipe


def test_a_recipe_takes_dotted_changes_as_set_does() -> None:
    config = maskfleet.recipe("r50_fpn_1x", {"data.root": Path("/data"), "train.epoch_schedule": ((3, None),)})
    assert config.data.root == "/data"
    assert config.train.epoch_schedule == ((3, None),)
    assert config.train.step_schedule is None  # the recipe's schedule in the other unit


@pytest.mark.parametrize(
    ("name", "changes", "what", "remedy"),
    [
        ("r50_fpn_1y", {}, "no recipe 'r50_fpn_1y'", "did you mean r50_fpn_1x"),
        ("demo", {"train.base_rl": 1}, "no field train.base_rl", "did you mean train.base_lr"),
        ("demo", {"train.base_lr": -1}, "train.base_lr = -1", "config explain train.base_lr"),
        ("demo", {"train": 3}, "train is a section", "such as train."),
    ],
)
def test_a_wrong_recipe_says_so(name: str, changes: dict[str, Any], what: str, remedy: str) -> None:
    with pytest.raises(MaskfleetError) as caught:
        maskfleet.recipe(name, changes)
    assert what in caught.value.what
    assert remedy in caught.value.remedy


# train


def test_training_returns_the_best_ap_and_the_last_metrics(trained: maskfleet.TrainingResult) -> None:
    records = read_metrics(trained.run_dir)
    assert trained.metrics["step"] == 6
    assert trained.best_ap == max(record.get("mAP(segm)/IoU=0.5:0.95", -1.0) for record in records)
    assert trained.metrics["mAP(bbox)/IoU=0.5"] == records[-1]["mAP(bbox)/IoU=0.5"]
    assert (trained.run_dir / "report.html").is_file()


@pytest.mark.parametrize("own", [True, False])
def test_training_again_resumes_and_has_nothing_left_to_do(
    trained: maskfleet.TrainingResult, config: RunConfig, own: bool
) -> None:
    before = (trained.run_dir / "metrics.jsonl").read_bytes()
    again = maskfleet.train(None if own else config, str(trained.run_dir))
    assert again == trained
    assert (trained.run_dir / "metrics.jsonl").read_bytes() == before


def test_auto_finds_the_splits(config: RunConfig, tmp_path: Path) -> None:
    auto = {"data.train": ("auto",), "data.val": ("auto",), "train.epoch_schedule": ((1, None),)}
    maskfleet.train(replaced(config, auto), tmp_path)
    assert "train: [train]" in (tmp_path / "run.yaml").read_text()


@pytest.mark.parametrize(("config", "what"), [(None, "holds no run to resume"), ("demo", "config is a str")])
def test_training_needs_a_configuration(config: Any, what: str, tmp_path: Path) -> None:
    with pytest.raises(MaskfleetError, match=what) as caught:
        maskfleet.train(config, tmp_path)
    assert "maskfleet.recipe(" in caught.value.remedy


# load and detect


def test_every_kind_of_image_gives_the_same_detections(detector: Detector, images: list[Path]) -> None:
    rgb = cv2.imread(str(images[0]))[..., ::-1]
    expected = detector.detect(images[0])
    assert expected.boxes.dtype == expected.scores.dtype == np.float32
    assert np.all(np.diff(expected.scores) <= 0)
    for image in (str(images[0]), rgb, np.ascontiguousarray(rgb), Image.fromarray(np.ascontiguousarray(rgb))):
        assert_equal(detector.detect(image), expected)
    # Alpha is dropped and a palette is looked up, as in files.
    assert_equal(detector.detect(Image.fromarray(np.ascontiguousarray(rgb)).convert("RGBA")), expected)
    bgr = detector.detect(rgb[..., ::-1])
    assert not np.array_equal(bgr.scores, expected.scores), "the colour order makes no difference: nothing was tested"


def test_grey_images_need_a_conversion_that_pil_images_get(detector: Detector, images: list[Path]) -> None:
    grey = cv2.imread(str(images[0]), cv2.IMREAD_GRAYSCALE)
    assert_equal(detector.detect(Image.fromarray(grey)), detector.detect(np.stack([grey] * 3, axis=-1)))


def test_a_list_gives_a_list(detector: Detector, images: list[Path]) -> None:
    assert detector.detect([]) == []
    for many in (images, tuple(images)):
        found = detector.detect(many)
        assert isinstance(found, list)
        for one, image in zip(found, images, strict=True):
            assert_equal(one, detector.detect(image))


@pytest.mark.parametrize("batch_size", [2, 3, 8])
def test_batched_detections_are_those_of_single_images(detector: Detector, images: list[Path], batch_size: int) -> None:
    wide = [cv2.resize(cv2.imread(str(path))[..., ::-1], (96, 64)) for path in images[:2]]
    mixed = [images[0], wide[0], images[1], wide[1], images[2]]
    found = detector.detect(mixed, batch_size=batch_size)
    for one, image in zip(found, mixed, strict=True):
        assert_equal(one, detector.detect(image), tolerance=1e-5)
    assert [one.image_size for one in found] == [(64, 64), (64, 96), (64, 64), (64, 96), (64, 64)]


def test_a_score_keeps_what_is_above_it(detector: Detector, images: list[Path]) -> None:
    every = detector.detect(images[0])
    middle = float(every.scores[len(every) // 2])
    kept = detector.detect(images[0], score=middle)
    assert 0 < len(kept) < len(every)
    assert kept.scores.tolist() == every.scores[every.scores > middle].tolist()


def test_detections_are_those_of_predict(
    trained: maskfleet.TrainingResult, detector: Detector, images: list[Path], tmp_path: Path
) -> None:
    command("predict", trained.run_dir, *images, "--out", tmp_path)
    written = json.loads((tmp_path / "detections.json").read_text())
    ours = [
        {"file_name": str(path), "category": name, **result}
        for image_id, path in enumerate(images, 1)
        for found in [detector.detect(path)]
        for name, result in zip(found.class_names, found.to_coco(image_id), strict=True)
    ]
    assert ours == written


def test_detections_are_those_of_eval(
    trained: maskfleet.TrainingResult, detector: Detector, images: list[Path], tmp_path: Path
) -> None:
    command("eval", trained.run_dir, "--results", tmp_path / "results.json")
    written = json.loads((tmp_path / "results.json").read_text())
    listed = json.loads((images[0].parent.parent / "annotations" / "instances_val.json").read_text())["images"]
    for record in listed:
        expected = [result for result in written if result["image_id"] == record["id"]]
        found = detector.detect(images[0].parent / record["file_name"]).to_coco(record["id"])
        assert found == expected  # exactly: these images fill their canvas
        assert len(found) > 0


def test_a_weights_file_gives_the_detections_of_its_run(
    trained: maskfleet.TrainingResult, detector: Detector, images: list[Path]
) -> None:
    from_file = maskfleet.load(trained.run_dir / "model.safetensors", device="cpu")
    assert from_file.class_names == detector.class_names
    settings = {"data.test_short_edge_px": 64}  # a weights file does not know the size of its training images
    from_file = Detector(
        from_file.model, replaced(from_file.run, settings), from_file.categories, "file", torch.device("cpu")
    )
    assert_equal(from_file.detect(images[0]), detector.detect(images[0]))
    assert "2 classes" in repr(detector)
    assert "step 6" in repr(detector)


@pytest.mark.parametrize(
    ("image", "what"),
    [
        ("missing.jpg", "there is no image missing.jpg"),
        (ROOT / "README.md", "not a complete image"),
        (ROOT, "there is no image"),
        (np.zeros((8, 8), np.uint8), r"\[height, width, 3\], but this ndarray is \[8, 8\]"),
        (np.zeros((2, 8, 8, 3), np.uint8), r"is \[2, 8, 8, 3\]"),
        (np.zeros((3, 8, 8), np.uint8), r"is \[3, 8, 8\]"),
        (np.zeros((0, 8, 3), np.uint8), r"is \[0, 8, 3\]"),
        (np.zeros((8, 8, 3), np.float32), "uint8, 0 to 255, but this ndarray is float32"),
        (torch.zeros(8, 8, 3), "this Tensor is float32"),
        (None, r"this NoneType is \[\]"),
        (7, r"this int is \[\]"),
    ],
)
def test_what_is_no_image_says_so(detector: Detector, image: Any, what: str) -> None:
    with pytest.raises(MaskfleetError, match=what) as caught:
        detector.detect(image)
    assert caught.value.remedy
    assert "on_bad" not in caught.value.remedy  # a setting of training


def test_what_cannot_be_loaded_says_so(trained: maskfleet.TrainingResult, tmp_path: Path) -> None:
    with pytest.raises(MaskfleetError, match="there is no nothing"):
        maskfleet.load("nothing")
    with pytest.raises(MaskfleetError, match="is not a run"):
        maskfleet.load(tmp_path)
    with pytest.raises(MaskfleetError, match="no device 'gpu'"):
        maskfleet.load(trained.run_dir, device="gpu")
    if not torch.cuda.is_available():
        with pytest.raises(MaskfleetError, match="no device 'cuda'"):
            maskfleet.load(trained.run_dir, device="cuda")
    with pytest.raises(MaskfleetError, match="batch_size is 0"):
        maskfleet.load(trained.run_dir).detect([], batch_size=0)


# draw


def test_a_drawing_is_rgb_and_is_saved_as_it_is_returned(
    detector: Detector, images: list[Path], tmp_path: Path
) -> None:
    large = cv2.resize(cv2.imread(str(images[0])), (400, 360))[..., ::-1]
    found = detector.detect(large)
    np.testing.assert_array_equal(detector.draw(large, found[:0]), large)
    drawn = detector.draw(large, found, path=tmp_path / "drawn.png")
    assert not np.array_equal(drawn, large)
    np.testing.assert_array_equal(drawn, cv2.imread(str(tmp_path / "drawn.png"))[..., ::-1])
    assert detector.draw(images[0]).shape == (320, 320, 3)  # small images are enlarged


def test_a_drawing_that_cannot_be_made_says_so(detector: Detector, images: list[Path], tmp_path: Path) -> None:
    found = detector.detect(images[0])
    for path in (tmp_path / "drawn.unknown", tmp_path / "no folder" / "drawn.png"):
        with pytest.raises(MaskfleetError, match="could not be saved"):
            detector.draw(images[0], found, path=path)
    with pytest.raises(MaskfleetError, match="of an image of 64 x 64 pixels, but this one has 10 x 12"):
        detector.draw(np.zeros((10, 12, 3), np.uint8), found)


# evaluate


def test_an_evaluation_is_what_eval_prints(trained: maskfleet.TrainingResult, detector: Detector) -> None:
    printed = json.loads(command("eval", trained.run_dir, "--json"))
    calls: list[tuple[int, int]] = []
    scores = maskfleet.evaluate(detector, progress=lambda done, total: calls.append((done, total)))
    assert scores.mask is not None
    for kind, ours in (("bbox", scores.box), ("segm", scores.mask)):
        values = {name: value for name, value in printed[kind].items() if name != "per_class"}
        assert len(values) == 12
        assert {name: getattr(ours, name) for name in values} == values
        assert [row.name for row in ours.per_class] == detector.class_names
    assert scores.num_images == 5
    assert calls == [(number, 5) for number in range(1, 6)]
    assert scores.box.ap == pytest.approx(trained.metrics["mAP(bbox)/IoU=0.5:0.95"])


def test_an_evaluation_takes_other_data(detector: Detector, shapes_root: Path) -> None:
    annotations = shapes_root / "annotations" / "instances_train.json"
    by_name = maskfleet.evaluate(detector, data=shapes_root, split="train", max_images=3, batch_size=2)
    by_path = maskfleet.evaluate(detector, split=(annotations, str(shapes_root / "train")), max_images=3)
    assert by_name.num_images == by_path.num_images == 3
    assert by_name.annotations == by_path.annotations == annotations
    assert by_name.box.ap == pytest.approx(by_path.box.ap, abs=1e-4)
    assert {result["image_id"] for result in by_name.results} == {result["image_id"] for result in by_path.results}


def test_an_evaluation_that_makes_no_sense_says_so(detector: Detector, tmp_path: Path) -> None:
    with pytest.raises(MaskfleetError, match="batch_size=0 is not valid"):
        maskfleet.evaluate(detector, batch_size=0)
    with pytest.raises(MaskfleetError, match="annotation"):
        maskfleet.evaluate(detector, data=tmp_path)
    make_shapes(tmp_path / "set", num_train=1, num_val=1, height=(64, 64), width=(64, 64), num_categories=3)
    with pytest.raises(MaskfleetError, match=r"has 2 categories, but .* has 3"):
        maskfleet.evaluate(detector, data=tmp_path / "set")


def test_a_script_needs_no_guard_around_its_calls(trained: maskfleet.TrainingResult, tmp_path: Path) -> None:
    """Loader processes are not forked, and multiprocessing would run the whole script again in each of them."""
    shutil.copytree(trained.run_dir, tmp_path / "run")
    text = (tmp_path / "run" / "run.yaml").read_text()
    assert "num_workers: 0" in text
    (tmp_path / "run" / "run.yaml").write_text(text.replace("num_workers: 0", "num_workers: 1"))
    script = tmp_path / "script.py"
    script.write_text('import maskfleet\nprint("started")\nprint(maskfleet.evaluate("run").num_images)\n')
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["started", "5"]


# The documentation


def test_the_page_runs_from_top_to_bottom(
    trained: maskfleet.TrainingResult,
    config: RunConfig,
    images: list[Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """With a run that is already trained, whose configuration stands in for the recipe's."""
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert len(blocks) == 8
    monkeypatch.chdir(tmp_path)
    Path("runs").mkdir()
    Path("runs/mine").symlink_to(trained.run_dir)
    Path("data").symlink_to(config.data.root)
    Path("photo.jpg").symlink_to(images[0])
    real = maskfleet.recipe

    def small_recipe(name: str, changes: dict[str, Any]) -> RunConfig:
        real(name, changes)
        return config

    monkeypatch.setattr(maskfleet, "recipe", small_recipe)
    names: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), names)
    assert Path("drawn.png").is_file()
    assert Path("pictures/total-loss.svg").is_file()
    assert len(json.loads(Path("results.json").read_text())) == len(names["first"]) > 0
    assert "there is no image missing.jpg check the path" in capsys.readouterr().out
