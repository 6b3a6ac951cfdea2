"""Stumbling blocks of a first hour: options, help and advice that leads on."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from maskfleet.config.base import replaced
from maskfleet.config.load import write_run_file
from maskfleet.config.recipes import recipe
from maskfleet.data.synthetic.dataset import make_shapes
from maskfleet.log import count_text

Command = Callable[..., subprocess.CompletedProcess[str]]
ROOT = Path(__file__).parents[2]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "set"
    make_shapes(folder, num_train=3, num_val=2, height=(64, 64), width=(64, 64), num_categories=2, seed=1)
    return folder


@pytest.mark.parametrize("recipe_options", [(), ("--recipe", "r50_fpn_1x")], ids=["auto", "named splits"])
def test_data_that_does_not_exist_is_called_missing(recipe_options: tuple[str, ...], command: Command) -> None:
    done = command("train", "new", *recipe_options, "--data", "nowhere")
    assert done.returncode == 2
    assert "there is no folder nowhere" in done.stderr
    assert "--data" in done.stderr


def test_flags_have_no_type_in_the_help(command: Command) -> None:
    for name in (("train",), ("data", "inspect"), ("config", "show")):
        text = command(*name, "--help").stdout
        assert "<bool>" not in text
        assert re.search(r"--help +-h ", text)


def test_every_command_is_under_a_heading_of_the_help(command: Command) -> None:
    text = command("--help").stdout
    assert "Train and evaluate" in text
    assert "Commands" not in text, "the heading of commands that have none of their own"


def test_make_help_lists_every_target() -> None:
    text = (ROOT / "Makefile").read_text()
    targets = re.findall(r"^([a-z][a-z0-9-]*):", text, re.MULTILINE)
    listed = re.findall(r'@echo "make ([a-z0-9-]+) ', text)
    assert sorted(listed) == sorted(set(targets))
    (phony,) = re.findall(r"^\.PHONY: (.*)$", text, re.MULTILINE)
    assert sorted(phony.split()) == sorted(set(targets))


def test_config_show_and_launch_take_the_data_as_train_does(root: Path, tmp_path: Path, command: Command) -> None:
    shown = command("config", "show", "--recipe", "demo", "--data", root, "--json")
    assert json.loads(shown.stdout)["data"]["root"] == str(root)
    rendered = command("launch", "--on", "local", "--recipe", "demo", "-d", root, "--dry-run")
    assert rendered.returncode == 0, rendered.stderr
    assert f"root: {root}" in rendered.stdout


def test_the_advice_to_train_without_masks_can_be_followed(root: Path, tmp_path: Path, command: Command) -> None:
    for path in (root / "annotations").glob("*.json"):
        tree = json.loads(path.read_text())
        for record in tree["annotations"]:
            del record["segmentation"]
        path.write_text(json.dumps(tree))
    options = ("--recipe", "demo", "--data", root, "--set", "data.num_workers=0")
    first = command("train", tmp_path / "run", *options)
    assert first.returncode == 2
    assert "set model.mask=false" in first.stderr
    shown = command("config", "show", *options, "--set", "model.mask=false", "--json")
    assert shown.returncode == 0, shown.stderr
    assert json.loads(shown.stdout)["recipe"] == "faster_demo"
    again = command("train", tmp_path / "run", *options, "--set", "model.mask=false", "--device", "cuda:99")
    assert "there is no device 'cuda:99'" in again.stderr  # and nothing about the recipe or another run


@pytest.mark.parametrize("name", ["train", "eval", "predict"])
def test_a_device_that_does_not_exist_lists_those_that_do(
    name: str, root: Path, tmp_path: Path, command: Command
) -> None:
    run = tmp_path / "run"
    write_run_file(run, replaced(recipe("demo"), {"data.root": str(root)}))
    images = [root / "val"] if name == "predict" else []
    done = command(name, run, *images, "--device", "cuda:99")
    assert done.returncode == 2
    assert "there is no device 'cuda:99' on this machine, which has cpu" in done.stderr


def test_devices_and_numbers_of_gpus_exclude_each_other(root: Path, command: Command) -> None:
    done = command("train", "run", "--recipe", "demo", "--data", root, "--device", "cpu", "--gpus", "1")
    assert done.returncode == 2
    assert "--gpus and --device exclude each other" in done.stderr


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 warnings"), (1, "1 warning"), (2, "2 warnings"), (1200, "1,200 warnings")]
)
def test_one_is_singular(count: int, text: str) -> None:
    assert count_text(count, "warning") == text
    assert count_text(2, "class", "classes") == "2 classes"


def test_the_demo_says_how_the_shell_finds_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from maskfleet.cli.demo import next_steps

    bin_ = tmp_path / "my env" / "bin"
    bin_.mkdir(parents=True)
    program = bin_ / "maskfleet"
    program.write_text("#!/bin/sh\necho found\n")
    program.chmod(0o755)
    (bin_ / "activate").write_text(f"PATH='{bin_}':$PATH\n")
    monkeypatch.setattr(sys, "prefix", str(bin_.parent))
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.chdir(tmp_path)
    first = next(iter(next_steps(Path("demo/run"), Path("demo/shapes"))))
    assert first == ". 'my env/bin/activate'"
    shell = subprocess.run(["sh", "-c", f"{first}\nmaskfleet"], stdout=subprocess.PIPE, text=True, check=True)
    assert shell.stdout == "found\n"
    monkeypatch.setenv("PATH", f"{bin_}:/usr/bin:/bin")
    assert next(iter(next_steps(Path("demo/run"), Path("demo/shapes")))).startswith("maskfleet predict")


@pytest.mark.parametrize(
    ("given", "advised"),
    [
        (["--batch-size", "8"], "--set train.images_per_gpu=8"),
        (["--epochs=3"], "--set train.epochs=3"),
        (["--imgsz", "640", "--workers", "2"], "--set data.train_short_edge_px=640"),
        (["--weights", "model.npz"], "--set train.weights=model.npz"),
        (["--train.steps"], "--set train.steps=VALUE"),
        (["lr=0.01", "epochs=3"], "--set train.base_lr=0.01 --set train.epochs=3"),
        (["device=0"], "--device cuda:0"),
        (["data=photos"], "--data photos"),
    ],
)
def test_options_as_other_trainers_take_them_are_answered_with_ours(
    given: list[str], advised: str, command: Command
) -> None:
    done = command("train", "run", *given)
    assert done.returncode == 2
    assert f"Write {advised}" in " ".join(done.stderr.replace("│", " ").split())
    assert "Possible" not in done.stderr


def test_an_option_that_means_nothing_gets_no_advice(command: Command) -> None:
    for arguments in (["train", "run", "--projct", "x"], ["train", "run", "other=3"], ["predict", "run", "--lr", "3"]):
        done = command(*arguments)
        assert done.returncode == 2
        assert "Write" not in done.stderr


def test_an_annotation_file_as_the_data_is_answered_with_its_folder(root: Path, command: Command) -> None:
    done = command("train", "run", "--data", root / "annotations" / "instances_train.json")
    assert "instances_train.json is a file, not a folder" in done.stderr
    assert f"holds annotations/: {root}\n" in done.stderr


def test_data_of_another_format_is_answered_with_how_to_convert_it(tmp_path: Path, command: Command) -> None:
    (tmp_path / "yolo").mkdir()
    (tmp_path / "yolo" / "data.yaml").write_text("names: [a]")
    (tmp_path / "voc" / "Annotations").mkdir(parents=True)
    (tmp_path / "labelme").mkdir()
    (tmp_path / "labelme" / "1.json").write_text('{"version": "5.0", "shapes": []}')
    for form in ("yolo", "voc", "labelme"):
        for done in (command("train", "run", "--data", form), command("data", "inspect", form)):
            assert done.returncode == 2
            assert f"maskfleet data convert {form} NEW_FOLDER --from {form}" in done.stderr


def test_coco_files_of_other_names_are_given_by_their_paths(root: Path, tmp_path: Path, command: Command) -> None:
    (tmp_path / "mine").mkdir()
    shutil.copy(root / "annotations" / "instances_train.json", tmp_path / "mine" / "_annotations.coco.json")
    shutil.copytree(root / "train", tmp_path / "mine" / "train")
    done = command("train", "run", "--data", "mine")
    assert "labelme" not in done.stderr
    (pattern,) = re.findall(r"--set '(data.train=[^']*)'", done.stderr)
    paths = pattern.replace("FILE", "_annotations.coco.json").replace("FOLDER", "train")
    options = ("--set", paths, "--set", paths.replace("data.train", "data.val"), "--set", "data.num_workers=0")
    options = (*options, "--set", "model.num_categories=7")
    assert (
        "num_categories is 7, but the training data has 2" in command("train", "run", "--data", "mine", *options).stderr
    )


def test_predict_tells_when_the_run_is_not_the_first_argument(root: Path, tmp_path: Path, command: Command) -> None:
    write_run_file(tmp_path / "run", recipe("demo"))
    for model in ("run", "model.safetensors"):
        done = command("predict", root / "val", model)
        assert done.returncode == 2
        assert "the run or the weights file comes first" in done.stderr
