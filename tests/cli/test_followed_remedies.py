"""Mistakes of a first hour, and the advice that the error gives: followed to the letter, it works."""

from __future__ import annotations

import importlib.util
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from maskfleet.config.base import replaced
from maskfleet.config.load import write_run_file
from maskfleet.config.recipes import recipe
from maskfleet.data.synthetic.dataset import make_shapes
from micro_run import MICRO

Command = Callable[..., subprocess.CompletedProcess[str]]
# Enough for one step of a small network, whatever the recipe.
SMALL = [f"{name}={value}".replace("(", "[").replace(")", "]") for name, value in MICRO.items()]
SMALL = [one.replace("None", "null").replace(",]", "]") for one in SMALL if "schedule" not in one]
QUICK = [part for one in (*SMALL, "train.steps=1", "eval.every_epochs=0") for part in ("--set", one)]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data") / "set"
    make_shapes(folder, num_train=4, num_val=2, height=(64, 64), width=(64, 64), num_categories=2, seed=1)
    return folder


def refused(done: subprocess.CompletedProcess[str]) -> str:
    """The remedy of the error that `done` ended with."""
    assert done.returncode == 2, done.stdout
    assert "Traceback" not in done.stderr
    return " ".join(done.stderr.rpartition("→")[2].split())


def advised(pattern: str, remedy: str) -> str:
    found = re.search(pattern, remedy)
    assert found is not None, remedy
    return found[1]


def succeeded(done: subprocess.CompletedProcess[str]) -> None:
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("inside", ["annotations", "train"])
def test_a_folder_inside_of_the_data(inside: str, root: Path, command: Command) -> None:
    remedy = refused(command("train", "run", "--recipe", "demo", "--data", root / inside, *QUICK))
    folder = advised(r"holds annotations/: (\S+)", remedy)
    succeeded(command("train", "run", "--recipe", "demo", "--data", folder, *QUICK))
    remedy = refused(command("data", "inspect", root / "annotations", "--json"))
    succeeded(command("data", "inspect", advised(r"holds annotations/: (\S+)", remedy), "--json"))


@pytest.mark.slow
def test_an_unknown_recipe(root: Path, command: Command) -> None:
    remedy = refused(command("train", "run", "--recipe", "dmo", "--data", root, *QUICK))
    succeeded(command("train", "run", "--recipe", advised(r"did you mean (\w+)\?", remedy), "--data", root, *QUICK))
    succeeded(command(*advised(r"`maskfleet ([a-z ]+)`", remedy).split()))


@pytest.mark.parametrize(
    "given", ["batch_size=2", "lr=0.01", "epochs=1", "workers=0", "imgsz=64", "train.epoch=2", "img_size=64", "seed=4"]
)
def test_a_field_of_another_trainer(given: str, root: Path, command: Command) -> None:
    name, _, value = given.partition("=")
    remedy = refused(command("config", "show", "--recipe", "demo", "--data", root, "--set", given))
    field = advised(r"did you mean ([\w.]+)\?", remedy)
    assert field != name
    succeeded(command("config", "show", "--recipe", "demo", "--data", root, "--set", f"{field}={value}"))


@pytest.mark.slow
def test_the_device_as_a_field(root: Path, command: Command) -> None:
    remedy = refused(command("train", "run", "--recipe", "demo", "--data", root, "--set", "device=cpu"))
    option = advised(r"such as (--device cpu)", remedy).split()
    succeeded(command("train", "run", "--recipe", "demo", "--data", root, *QUICK, *option))


@pytest.mark.slow
def test_splits_of_other_names(root: Path, command: Command) -> None:
    options = ("--data", root, "--set", "model.backbone.weights=null", "--set", "model.backbone.norm=GN", *QUICK)
    options = (*options, "--set", "model.backbone.freeze_at=0")
    remedy = refused(command("train", "run", "--recipe", "r50_fpn_1x", *options))
    assert "(train, val)" in remedy
    train, val = re.findall(r"--set (\S+)", remedy)
    chosen = ("--set", train.replace("NAME", "train"), "--set", val.replace("NAME", "val"))
    assert chosen == ("--set", "data.train=[train]", "--set", "data.val=[val]")
    succeeded(command("train", "run", "--recipe", "r50_fpn_1x", *options, *chosen))
    remedy = refused(command("eval", "run", "--split", "test"))
    option = advised(r"(--split) NAME", remedy)
    succeeded(command("eval", "run", option, "val"))


@pytest.mark.slow
def test_the_directory_of_another_run_that_is_finished(root: Path, command: Command) -> None:
    succeeded(command("train", "run", "--recipe", "demo", "--data", root, *QUICK))
    remedy = refused(command("train", "run", "--recipe", "demo", "--data", root))
    path = advised(r"continue that run with --config (\S+)", remedy)
    done = command("train", "run", "--config", path)
    succeeded(done)
    field = advised(r"train longer with .* --set (train.steps)=N", " ".join(done.stderr.split()))
    done = command("train", "run", "--config", path, "--set", f"{field}=2")
    succeeded(done)
    assert "after 2 steps" in done.stderr
    remedy = refused(command("predict", "run", root / "val", "--step", "77"))
    step = advised(r"of steps .*?(\d+)$", remedy)
    succeeded(command("predict", "run", root / "val", "--step", step))
    remedy = refused(command("export", "nowhere"))
    listed = command(*advised(r"`maskfleet (runs) FOLDER`", remedy).split(), ".")
    succeeded(listed)
    assert "run" in listed.stdout


@pytest.mark.slow
@pytest.mark.parametrize("weights", [(), ("--set", "train.weights=none.npz")], ids=["none", "missing"])
def test_weights_that_are_not_there(weights: tuple[str, ...], root: Path, command: Command) -> None:
    options = ("--data", root, *QUICK)
    remedy = refused(command("train", "run", "--recipe", "finetune", *options, *weights))
    name = advised(r"train from random weights with --recipe (\w+)", remedy)
    succeeded(command("train", "run", "--recipe", name, *options))


@pytest.mark.slow
def test_a_wrong_number_of_classes(root: Path, command: Command) -> None:
    options = ("--recipe", "demo", "--data", root, *QUICK)
    remedy = refused(command("train", "run", *options, "--set", "model.num_categories=7"))
    assert "leave out model.num_categories" in remedy
    succeeded(command("train", "run", *options))


@pytest.mark.slow
def test_a_mask_recipe_without_masks(root: Path, command: Command) -> None:
    succeeded(command("train", "run", "--recipe", "demo", "--data", root, *QUICK, "--set", "model.mask=false"))
    succeeded(command("eval", "run"))


@pytest.mark.skipif(importlib.util.find_spec("wandb") is not None, reason="wandb is installed")
def test_a_tracker_that_is_not_installed(root: Path, tmp_path: Path, command: Command) -> None:
    values = {"data.root": str(root), "log.wandb": "mine"}
    write_run_file(tmp_path / "run", replaced(recipe("demo"), values))
    remedy = refused(command("train", "run"))
    off = advised(r"turn it off: --set (\S+)", remedy)
    shown = command("config", "show", "--config", tmp_path / "run" / "run.yaml", "--set", off)
    succeeded(shown)
