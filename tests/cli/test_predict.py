"""`maskfleet predict` on what users have: folders, rotated photos, videos, broken files."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch

from maskfleet.config.base import replaced
from maskfleet.config.load import write_run_file
from maskfleet.config.run import RunConfig
from maskfleet.inference.sources import VideoOutput
from maskfleet.model.build import build_mask_rcnn
from maskfleet.model.weights.checkpoint import CheckpointFolder, Snapshot
from maskfleet.training.checkpoint import write_checkpoint

Command = Callable[..., subprocess.CompletedProcess[str]]
EXIF_ROTATED = bytes.fromhex("ffe1 0022 457869660000 4d4d002a00000008 0001 0112 0003 00000001 00060000 00000000")


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory, micro: RunConfig) -> Path:
    """An untrained run with checkpoints of steps 1, 2 (the best) and 3."""
    folder = tmp_path_factory.mktemp("run")
    write_run_file(folder, replaced(micro, {"model.inference.score_threshold": 0.0}))
    torch.manual_seed(0)
    model = build_mask_rcnn(replaced(micro, {"model.num_categories": 2}).model)
    tensors = {f"model/{name}": tensor for name, tensor in model.state_dict().items()}
    for step in (1, 2, 3):
        numbers = {"categories": [{"id": 7, "name": "disc"}, {"id": 9, "name": "ring"}]}
        path = CheckpointFolder(folder / "checkpoints").path(step)
        write_checkpoint(path, Snapshot(step, tensors, numbers), best=step == 2)
    return folder


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """A landscape photo, the same with an EXIF orientation that makes it portrait, and a broken file."""
    folder = tmp_path / "photos"
    (folder / "more").mkdir(parents=True)
    image = np.random.default_rng(0).integers(0, 255, (40, 64, 3), np.uint8)
    data = cv2.imencode(".jpg", image)[1].tobytes()
    (folder / "a.jpg").write_bytes(data)
    (folder / "more" / "a.jpg").write_bytes(data[:2] + EXIF_ROTATED + data[2:])
    (folder / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    with VideoOutput(folder / "clip.mp4") as video:
        for _ in range(3):
            video.add(np.ascontiguousarray(image[..., ::-1]), 5.0)
    return folder


def test_a_folder_is_done_although_one_file_is_broken(
    command: Command, run_dir: Path, photos: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    done = command("predict", str(run_dir), str(photos), "--out", str(out))
    assert done.returncode != 0
    assert "1 of 4 files" in done.stderr
    assert {path.relative_to(out).as_posix() for path in out.rglob("*") if path.is_file()} == {
        "a.png",
        "more/a.png",
        "clip.mp4",
        "detections.json",
    }
    upright, portrait = (cv2.imread(str(out / name)).shape[:2] for name in ("a.png", "more/a.png"))
    assert portrait == upright[::-1], "the EXIF orientation turns the photo"
    found = json.loads((out / "detections.json").read_text())
    assert {one["file_name"] for one in found} == {"a.jpg", "more/a.jpg", "clip.mp4"}
    assert {one["category"] for one in found} <= {"disc", "ring"}
    assert {(one["category"], one["category_id"]) for one in found} <= {("disc", 7), ("ring", 9)}
    assert {one["frame"] for one in found if one["file_name"] == "clip.mp4"} == {0, 1, 2}
    assert max(one["bbox"][1] + one["bbox"][3] for one in found if one["file_name"] == "more/a.jpg") > 40


@pytest.mark.parametrize(
    ("option", "source"),
    [([], "best"), (["--best"], "best"), (["--last"], "newest"), (["--step", "1"], "chosen")],
)
def test_the_checkpoint_can_be_chosen(
    command: Command,
    run_dir: Path,
    photos: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    option: list[str],
    source: str,
) -> None:
    from maskfleet.inference import load as module

    loaded = []
    real = module.load
    monkeypatch.setattr(module, "load", lambda *args, **options: loaded.append(real(*args, **options)) or loaded[-1])
    done = command("predict", run_dir, photos / "a.jpg", *option)
    assert done.returncode == 0, done.stderr
    assert loaded[0].source.startswith(f"{source} checkpoint of {run_dir}, step ")


@pytest.mark.parametrize(
    ("options", "says"), [(["--step", "5"], "no checkpoint of step 5"), (["--best", "--last"], "exclude each other")]
)
def test_a_checkpoint_that_is_not_there_is_an_error(
    command: Command, run_dir: Path, photos: Path, options: list[str], says: str
) -> None:
    done = command("predict", str(run_dir), str(photos / "a.jpg"), *options)
    assert done.returncode != 0
    assert says in done.stderr


def test_without_detections_the_file_is_an_empty_list(
    command: Command, run_dir: Path, photos: Path, tmp_path: Path, micro: RunConfig
) -> None:
    (run_dir / "run.yaml").unlink()
    write_run_file(run_dir, replaced(micro, {"model.inference.score_threshold": 0.999}))
    done = command("predict", str(run_dir), str(photos / "a.jpg"), "--out", str(tmp_path / "out"))
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "out" / "detections.json").read_text()) == []
