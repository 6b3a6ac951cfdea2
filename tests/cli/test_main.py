"""The command as a user starts it."""

from __future__ import annotations

import errno
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
import typer.main

import maskfleet.cli.main as main_module
from maskfleet import __version__
from maskfleet.config.recipes import RECIPES, recipe
from maskfleet.system.files import write_atomically


def maskfleet(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "maskfleet", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, check=False)


def test_help_imports_nothing_heavy() -> None:
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "maskfleet", "--help"], capture_output=True, text=True, check=True
    )
    loaded = {line.rsplit("|", 1)[-1].strip().split(".")[0] for line in done.stderr.splitlines() if "|" in line}
    assert "typer" in loaded
    assert not loaded & {"torch", "boto3", "cv2", "numpy", "tensorboard"}


def test_train_starts_its_fork_server_before_it_imports_torch(tmp_path: Path) -> None:
    """Both then import torch at the same time."""
    program = """
import sys
from maskfleet.cli.main import main
from maskfleet.data.pipeline import preload

def started(num_workers):
    print(num_workers, "torch" in sys.modules)
    sys.exit()

preload.start_fork_server = started
main()
"""
    options = ["--set", "data.train=[a]", "--set", "data.val=[]", "--set", "data.num_workers=3"]
    argv = [sys.executable, "-c", program, "train", str(tmp_path / "run"), "--recipe", "scratch", *options]
    assert subprocess.run(argv, capture_output=True, text=True, check=True).stdout == "3 False\n"


def test_version() -> None:
    assert maskfleet("--version").stdout == f"maskfleet {__version__}\n"


def test_an_error_is_written_at_once_even_without_buffers() -> None:
    """A packet is what one write wrote; readers of many ranks would mix halves of lines."""
    mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with mine:
        with theirs:
            command = [sys.executable, "-m", "maskfleet", "train", "/dev/null/run", "--data", "/nowhere"]
            process = subprocess.Popen(command, stderr=theirs, env={**os.environ, "PYTHONUNBUFFERED": "1"})
        first, rest = mine.recv(1 << 20), mine.recv(1 << 20)
        assert process.wait(120) == 2
    assert first.startswith(b"error: ")
    assert first.endswith(b"\n")
    assert rest == b""


def test_completion_is_offered() -> None:
    assert "--install-completion" in maskfleet("--help").stdout


def test_show_prints_the_same_run_for_old_and_new_names() -> None:
    old = maskfleet("config", "show", "--recipe", "optimized", "--set", "TRAIN.BASE_LR=0.01")
    new = maskfleet("config", "show", "--recipe", "optimized", "--set", "train.base_lr=0.01")
    assert old.returncode == new.returncode == 0
    assert "base_lr: 0.01" in old.stdout
    assert old.stdout == new.stdout


def test_show_says_where_values_came_from(tmp_path: Path) -> None:
    (tmp_path / "my.yaml").write_text("train:\n  seed: 3\n")
    text = maskfleet("config", "show", "-c", "my.yaml", "-s", "train.momentum=0.8", cwd=tmp_path).stdout
    lines = {line.split(":")[0].strip(): line for line in text.splitlines()}
    assert lines["seed"].endswith("# my.yaml:2")
    assert lines["momentum"].endswith("# --set")
    assert "#" not in lines["weight_decay"]


def test_shown_text_is_a_run_file(tmp_path: Path) -> None:
    shown = maskfleet("config", "show", "--recipe", "r50_fpn_cascade_1x").stdout
    (tmp_path / "run.yaml").write_text(shown)
    again = maskfleet("config", "show", "-c", "run.yaml", "--no-origin", cwd=tmp_path).stdout
    assert again == maskfleet("config", "show", "--recipe", "r50_fpn_cascade_1x", "--no-origin").stdout


@pytest.mark.parametrize("name", ["train.base_lr", "model.rpn", "TRAIN.BASE_LR"])
def test_explain_gives_the_help(name: str) -> None:
    done = maskfleet("config", "explain", name)
    assert done.returncode == 0
    assert "earning rate" in done.stdout or "anchor" in done.stdout


def test_explain_names_the_old_spellings() -> None:
    assert "TRAIN.BASE_LR" in maskfleet("config", "explain", "train.base_lr").stdout


def test_schema_accepts_every_recipe_and_refuses_a_bad_key() -> None:
    schema = json.loads(maskfleet("config", "schema").stdout)
    validator = jsonschema.Draft202012Validator(schema)
    for name in RECIPES:
        document = recipe(name).model_dump(mode="json")
        assert list(validator.iter_errors(document)) == []
    assert list(validator.iter_errors({"train": {"base_rl": 1}})) != []


def test_recipes_are_listed() -> None:
    listed = {row["name"] for row in json.loads(maskfleet("config", "recipes", "--json").stdout)}
    assert listed == set(RECIPES)
    assert "r50_fpn_cascade_1x" in maskfleet("config", "recipes").stdout


@pytest.mark.parametrize(
    "arguments",
    [
        ("config", "show", "--recipe", "nope"),
        ("config", "show", "--set", "train.base_rl=1"),
        ("config", "show", "--config", "missing.yaml"),
        ("config", "explain", "train.base_rl"),
    ],
)
def test_mistakes_end_in_one_message_and_no_traceback(arguments: tuple[str, ...], tmp_path: Path) -> None:
    done = maskfleet(*arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("error: ")
    assert "→" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_full_disk_is_an_error_that_names_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "environment.json"

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    command = typer.main.get_command(main_module.app)
    command.callback = lambda **options: write_atomically(path, "x")
    monkeypatch.setattr(main_module, "get_command", lambda app: command)
    monkeypatch.setattr(os, "fsync", full)
    monkeypatch.setattr(sys, "argv", ["maskfleet", "runs", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        main_module.main()
    assert ended.value.code == 2
    message = f"error: cannot write {path}: No space left on device → free disk space, then run the same command again"
    assert "".join(capsys.readouterr().err.split()) == message.replace(" ", "")
