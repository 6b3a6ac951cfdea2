"""The try_model notebook: its run, its images, its pictures, and the whole of it executed."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
from pathlib import Path

import cv2
import numpy as np
import pytest

from maskfleet.config.base import replaced
from maskfleet.config.load import write_run_file
from maskfleet.config.run import RunConfig
from maskfleet.errors import TrainingError
from maskfleet.inference.load import load
from maskfleet.inference.notebook import newest_run, png, validation_images
from maskfleet.training.run import train
from tools import ROOT

NOTEBOOK = ROOT / "notebooks" / "try_model.ipynb"


@pytest.fixture(scope="module")
def logs(micro: RunConfig, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one trained run, and one that has saved nothing."""
    folder = tmp_path_factory.mktemp("logs")
    config = replaced(micro, {"train.epoch_schedule": ((1, None),), "eval.show_score_threshold": 0.0})
    for name in ("r50", "empty"):
        write_run_file(folder / name, config)
    train(config, folder / "r50")
    return folder


def test_the_newest_run_is_the_one_that_saved_last(tmp_path: Path) -> None:
    for name, age_s in (("a/old", 300), ("b", 200), ("c/d/e", 100), ("b2", 250), ("no-run", 0)):
        file = tmp_path / name / "checkpoints" / "step-00000900.json"
        file.parent.mkdir(parents=True)
        file.touch()
        os.utime(file, (10_000 - age_s, 10_000 - age_s))
        if name != "no-run":
            (tmp_path / name / "run.yaml").touch()
    assert newest_run(tmp_path) == tmp_path / "c/d/e"
    assert newest_run(tmp_path / "a/old") == tmp_path / "a/old"
    with pytest.raises(TrainingError, match=r"no run in .* has a checkpoint"):
        newest_run(tmp_path / "no-run")


def test_a_picture_shows_what_predict_finds(logs: Path, tmp_path: Path) -> None:
    """One way from image to model: the old notebooks handed it red and blue the wrong way round (W-C11)."""
    detector = load(newest_run(logs))
    [image] = validation_images(detector, 1, seed=1)
    command = [sys.executable, "-m", "maskfleet", "predict", logs / "r50", image, "--out", tmp_path]
    subprocess.run(command, check=True, capture_output=True, timeout=900)
    ours = cv2.imdecode(np.frombuffer(png(detector.draw(image)), np.uint8), cv2.IMREAD_COLOR)
    np.testing.assert_array_equal(ours, cv2.imread(str(tmp_path / f"{image.stem}.png")))
    bare = detector.draw(image, detector.detect(image)[:0])[..., ::-1]
    assert (ours != bare).any(), "nothing was drawn, so nothing was compared"


def test_images_are_those_of_validation_and_no_more_than_there_are(logs: Path) -> None:
    detector = load(logs / "r50")
    assert len(set(validation_images(detector, 3))) == 3
    assert len(set(validation_images(detector, 99))) == 5
    assert validation_images(detector, 3, seed=7) == validation_images(detector, 3, seed=7)


def test_cells_only_call_the_package() -> None:
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    assert all(not cell.get("outputs") and cell.get("execution_count") is None for cell in cells)
    code = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    imported = {line.split()[1].split(".")[0] for line in code.splitlines() if line.startswith(("import ", "from "))}
    assert imported == {"os", "pathlib", "IPython", "maskfleet"}
    assert "def " not in code


@pytest.mark.slow
def test_the_notebook_runs_in_jupyter(logs: Path, tmp_path: Path) -> None:
    python = ROOT / ".tools" / "notebook" / "bin" / "python"
    if not python.exists():
        pytest.skip("nbclient is not here: make test-tools installs it into .tools/notebook")
    runner = Path(__file__).with_name("run_notebook.py")
    done = subprocess.run(
        [python, runner, NOTEBOOK, sys.executable, tmp_path],
        env={**os.environ, "LOGDIR": str(logs), "HOME": str(tmp_path), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    outputs = [output for cell in json.loads(done.stdout)["cells"] for output in cell.get("outputs", [])]
    pictures = [output["data"]["image/png"] for output in outputs if "image/png" in output.get("data", {})]
    assert len(pictures) == 4
    for text in pictures:
        picture = cv2.imdecode(np.frombuffer(base64.b64decode(text), np.uint8), cv2.IMREAD_COLOR)
        assert picture.shape == (320, 320, 3)
    assert "step 6" in done.stdout
