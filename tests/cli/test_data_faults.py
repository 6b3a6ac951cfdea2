"""Faults of data sets: training and inspection agree on what stops a run."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from maskfleet.config.base import replaced
from maskfleet.config.load import write_run_file
from maskfleet.config.recipes import recipe
from maskfleet.config.run import RunConfig
from maskfleet.data.synthetic.dataset import make_shapes
from maskfleet.model.build import build_mask_rcnn
from maskfleet.model.weights import labels_of, read_file, save_weights

Command = Callable[..., subprocess.CompletedProcess[str]]
Tree = dict[str, Any]


def swapped_names(tree: Tree) -> None:
    first, second = tree["categories"]
    first["name"], second["name"] = second["name"], first["name"]


def normalised(tree: Tree) -> None:
    for record in tree["annotations"]:
        record["bbox"] = [value / 64 for value in record["bbox"]]


def as_corners(tree: Tree) -> None:
    for record in tree["annotations"]:
        x, y, width, height = record["bbox"]
        record["bbox"] = [x, y, x + width, y + height]


FAULTS = {"category-mismatch": swapped_names, "box-normalised": normalised, "box-corners": as_corners}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "set"
    make_shapes(folder, num_train=6, num_val=3, height=(64, 64), width=(64, 64), num_categories=2, seed=1)
    return folder


def change(root: Path, split: str, fault: Callable[[Tree], None]) -> None:
    path = root / "annotations" / f"instances_{split}.json"
    tree = json.loads(path.read_text())
    fault(tree)
    path.write_text(json.dumps(tree))


@pytest.mark.parametrize("kind", list(FAULTS))
def test_what_inspection_calls_an_error_stops_training(kind: str, root: Path, tmp_path: Path, command: Command) -> None:
    change(root, "val", FAULTS[kind])
    inspected = command("data", "inspect", root, "--json", "--no-decode")
    assert inspected.returncode == 1
    problems = json.loads(inspected.stdout)["splits"][1]["problems"]
    assert [one["kind"] for one in problems if one["severity"] == "error"] == [kind]
    values = {"data.root": str(root), "data.num_workers": 0, "data.on_bad": "skip"}  # not the images are at fault
    write_run_file(tmp_path / "run", replaced(recipe("demo"), values))
    trained = command("train", tmp_path / "run")
    assert trained.returncode == 2, trained.stderr
    assert trained.stderr.count(f"error: {kind}") == 1
    assert (tmp_path / "run" / "log.txt").read_text().count(f"error: {kind}") == 1
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_the_terminal_lists_ids_of_each_kind(root: Path, command: Command) -> None:
    def spoil(tree: Tree) -> None:
        for identity, record in enumerate(tree["annotations"][:7], 501):
            record["id"], record["category_id"] = identity, 99

    change(root, "train", spoil)
    done = command("data", "inspect", root, "--no-decode", "--samples", "0")
    assert done.returncode == 1
    assert "train: annotations 501," in " ".join(done.stdout.split())
    assert [str(identity) in done.stdout for identity in range(501, 508)] == [True] * 5 + [False] * 2

    change(root, "val", swapped_names)
    text = " ".join(command("data", "inspect", root, "--no-decode", "--samples", "0").stdout.split())
    assert "category-mismatch in val: " in text
    assert "val: whole split" in text


def without_keys(tree: Tree) -> None:
    del tree["annotations"][1]["image_id"]
    tree["images"][0]["width"] = "64"


@pytest.mark.parametrize("given", ["malformed", "not JSON", "missing"])
def test_json_output_is_json_for_data_that_cannot_be_inspected(given: str, root: Path, command: Command) -> None:
    if given == "malformed":
        change(root, "val", without_keys)
    elif given == "not JSON":
        (root / "annotations" / "instances_val.json").write_text("{")
    done = command("data", "inspect", root if given != "missing" else "nowhere", "--json")
    assert done.returncode == 2
    report = json.loads(done.stdout)
    assert (report["format"], report["errors"], report["splits"]) == (1, 1, [])
    assert "error:" in done.stderr
    if given == "malformed":
        assert "entry 1 of 'annotations' (id 2) has no key 'image_id'" in report["failure"]["what"]
        assert "entry 0 of 'images'" in report["failure"]["what"]
    assert report["failure"]["remedy"]


@pytest.fixture
def weights(root: Path, tmp_path: Path, micro: RunConfig) -> Path:
    """An untrained model with the class names of `root`."""
    config = replaced(micro, {"model.num_categories": 2})
    tree = json.loads((root / "annotations" / "instances_train.json").read_text())
    categories = [(record["id"], record["name"]) for record in tree["categories"]]
    labels = labels_of(config, categories)
    save_weights(tmp_path / "mine.safetensors", build_mask_rcnn(config.model).state_dict(), config.model, labels)
    return tmp_path / "mine.safetensors"


def test_evaluation_refuses_data_with_other_class_names(root: Path, command: Command, weights: Path) -> None:
    change(root, "val", swapped_names)
    done = command("eval", weights, "--data", root, "--split", "val")
    assert done.returncode == 2, done.stdout
    said = " ".join(done.stderr.split())
    assert "instances_val.json has other classes than the model" in said
    assert re.search(r"class 1 is '(square|circle)' there and '(?!\1)(square|circle)' in the model", said), said


@pytest.mark.slow
def test_evaluation_takes_other_ids_with_the_same_names(root: Path, command: Command, weights: Path) -> None:
    def renumbered(tree: Tree) -> None:
        for record in tree["categories"]:
            record["id"] += 10
        for record in tree["annotations"]:
            record["category_id"] += 10

    change(root, "val", renumbered)
    done = command("eval", weights, "--data", root, "--split", "val")
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_evaluation_takes_weights_without_class_names(root: Path, command: Command, weights: Path) -> None:
    file = read_file(weights)
    assert file.config is not None
    save_weights(weights, file.tensors, file.config)
    done = command("eval", weights, "--data", root, "--split", "val")
    assert done.returncode == 0, done.stderr
