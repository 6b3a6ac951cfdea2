"""train, eval and predict as a user types them."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import cv2
import pytest
import torch
from safetensors.torch import load_file

from maskfleet.config.base import replaced
from maskfleet.config.load import write_run_file
from maskfleet.config.recipes import recipe
from maskfleet.data.synthetic.dataset import make_shapes
from maskfleet.model.weights import read_file
from maskfleet.model.weights.checkpoint import CheckpointFolder, weights_of

Command = Callable[..., subprocess.CompletedProcess[str]]
LONG_S = 900
SMALL = {
    "model.max_size_px": 64,
    "model.backbone.stem_channels": 8,
    "model.fpn.channels": 16,
    "model.box_head.fc_channels": 32,
    "model.mask_head.channels": 16,
    "data.train_short_edge_px": (64, 64),
    "data.test_short_edge_px": 64,
    "data.num_workers": 0,
    "train.epoch_schedule": ((1, None),),
}


def maskfleet(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Whole trainings get a process of their own."""
    argv = [sys.executable, "-m", "maskfleet", *map(str, arguments)]
    return subprocess.run(argv, capture_output=True, text=True, check=False, timeout=LONG_S)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cli") / "set"
    make_shapes(
        folder, num_train=8, num_val=4, height=(64, 64), width=(64, 64), num_categories=2, max_objects=2, seed=1
    )
    return folder


@pytest.fixture(scope="module")
def run_dir(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run") / "a run"  # with a blank, as people have them
    write_run_file(folder, replaced(recipe("demo"), {**SMALL, "data.root": str(root)}))
    done = maskfleet("train", folder)
    assert done.returncode == 0, done.stderr
    return folder


def test_training_leaves_weights_log_metrics_and_a_report(run_dir: Path) -> None:
    names = {path.name for path in run_dir.iterdir()}
    assert {
        "run.yaml",
        "checkpoints",
        "log.txt",
        "metrics.jsonl",
        "model.safetensors",
        "report.html",
        "tensorboard",
    } <= names
    page = (run_dir / "report.html").read_text()
    assert "data:image/" in page
    assert "maskfleet predict" in page


def test_eval_prints_all_twelve_values_and_every_class(run_dir: Path, command: Command) -> None:
    done = command("eval", run_dir)
    assert done.returncode == 0, done.stderr
    for name in ("ap50", "ap75", "ap_small", "ar100", "ar_large"):
        assert name in done.stdout
    scores = json.loads(command("eval", run_dir, "--json").stdout)
    assert set(scores) == {"bbox", "segm"}
    assert len(scores["bbox"]["per_class"]) == 2
    shown = dict(line.split()[:2] for line in done.stdout.splitlines() if line.startswith(("ap50", "ar100")))
    assert 0 < scores["bbox"]["ar100"] < 1  # fractions in JSON, percent for people
    assert shown["ar100"] == f"{100 * scores['bbox']['ar100']:.1f}"


def test_exported_weights_are_those_of_the_newest_checkpoint(run_dir: Path, command: Command) -> None:
    newest = CheckpointFolder(run_dir / "checkpoints").newest()
    assert newest is not None
    exported, saved = load_file(run_dir / "model.safetensors"), weights_of(newest)
    assert exported.keys() == saved.keys()
    assert all(torch.equal(exported[name], saved[name]) for name in saved)
    labels = read_file(run_dir / "model.safetensors").labels
    assert labels.ids == tuple(one["id"] for one in newest.numbers["categories"])
    assert labels.settings["data.test_short_edge_px"] == 64
    assert command("weights", "inspect", run_dir / "model.safetensors").returncode == 0


def test_eval_writes_the_results_file(run_dir: Path, tmp_path: Path, command: Command) -> None:
    done = command("eval", run_dir, "--max-images", "2", "--results", tmp_path / "results.json")
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "results.json").read_text())
    assert {"image_id", "category_id", "bbox", "score", "segmentation"} <= results[0].keys()


def test_predict_draws_and_writes_coco_json(run_dir: Path, root: Path, tmp_path: Path, command: Command) -> None:
    images = sorted((root / "val").glob("*.jpg"))[:2]
    done = command("predict", run_dir, *images, "--out", tmp_path / "out", "--score", "0.0")
    assert done.returncode == 0, done.stderr
    for image in images:
        drawn = cv2.imread(str(tmp_path / "out" / f"{image.stem}.png"))
        assert drawn.shape == (320, 320, 3)  # enlarged five times, so that labels can be read
    found = json.loads((tmp_path / "out" / "detections.json").read_text())
    assert {item["file_name"] for item in found} <= {str(image) for image in images}


@pytest.mark.slow
def test_auto_finds_the_splits_and_writes_their_names(root: Path, tmp_path: Path) -> None:
    sets = [item for key, value in SMALL.items() for item in ("--set", f"{key}={json.dumps(value)}")]
    sets += ["--set", "data.train=[auto]", "--set", "data.val=[auto]"]
    done = maskfleet("train", tmp_path / "run", "--recipe", "demo", "--data", root, *sets)
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "run" / "run.yaml").read_text()
    assert "train: [train]" in text
    assert "val: [val]" in text


@pytest.mark.slow
def test_a_launched_run_finds_its_splits_when_it_begins(root: Path, tmp_path: Path) -> None:
    """`maskfleet launch` writes the run file without looking at the data."""
    auto = {"data.train": ("auto",), "data.val": ("auto",)}
    write_run_file(tmp_path, replaced(recipe("demo"), {**SMALL, **auto, "data.root": str(root)}))
    done = maskfleet("train", tmp_path)
    assert done.returncode == 0, done.stderr
    assert "train: [train]" in (tmp_path / "run.yaml").read_text()


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (("train", "new", "--data", "nowhere"), "nowhere"),
        (("train", "new", "--recipe", "r50_fpn_1x", "--data", "."), "annotations"),
        (("eval", "nothing"), "there is no nothing"),
        (("eval", "."), "is not a run"),
        (("predict", "nothing", "https://example.org/x.jpg"), "there is no nothing"),
        (("predict", "nothing", "x.jpg"), "there is no image or video in: x.jpg"),
    ],
)
def test_mistakes_end_in_one_message(arguments: tuple[str, ...], what: str, command: Command) -> None:
    done = command(*arguments)
    assert done.returncode == 2
    assert what in done.stderr
    assert "→" in done.stderr
    assert "Traceback" not in done.stderr


def test_missing_weights_name_the_path_and_a_remedy(root: Path, tmp_path: Path, command: Command) -> None:
    done = command(
        "train",
        tmp_path / "r",
        "--recipe",
        "r50_fpn_1x",
        "--data",
        root,
        "--set",
        "data.train=[train]",
        "--set",
        "data.val=[val]",
    )
    assert done.returncode == 2
    assert "ImageNet-R50-AlignPadding.npz" in done.stderr
    assert "--recipe scratch" in done.stderr
    assert "MASKFLEET_OFFLINE is set" in done.stderr
    assert "maskfleet weights get ImageNet-R50-AlignPadding --from FILE" in done.stderr


def test_finetune_without_weights_is_rejected(root: Path, tmp_path: Path, command: Command) -> None:
    done = command("train", tmp_path / "r", "--recipe", "finetune", "--data", root)
    assert done.returncode == 2
    assert "random weights" in done.stderr
    assert "train.weights=FILE" in done.stderr


@pytest.mark.slow
def test_report_prints_the_path_of_a_page_about_one_run_or_several(
    run_dir: Path, command: Command, tmp_path: Path
) -> None:
    one = command("report", run_dir)
    assert (one.returncode, one.stdout.strip()) == (0, str(run_dir / "report.html")), one.stderr
    other = shutil.copytree(run_dir, tmp_path / "other")
    several = command("report", run_dir, other)
    assert (several.returncode, several.stdout.strip()) == (0, "comparison.html"), several.stderr
    assert "no difference beyond chance" in (tmp_path / "comparison.html").read_text()
    named = command("report", other, "--output", tmp_path / "new" / "page.html")
    assert (tmp_path / "new" / "page.html").is_file(), named.stderr
    for arguments, problem in (([run_dir, run_dir], "named twice"), ([tmp_path], "is not a run")):
        refused = command("report", *arguments)
        assert refused.returncode == 2
        assert problem in refused.stderr


@pytest.mark.slow
def test_eval_keeps_the_detections_of_the_runs_own_set_alone(run_dir: Path, command: Command, tmp_path: Path) -> None:
    other = shutil.copytree(run_dir, tmp_path / "other")
    (other / "detections.npz").unlink()
    assert command("eval", other, "--max-images", "1").returncode == 0
    assert not (other / "detections.npz").exists()
    assert command("eval", other).returncode == 0
    assert (other / "detections.npz").exists()
