"""`maskfleet export`: the file detects what the run detects, with the run's own category ids and test size."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch

import maskfleet
from maskfleet.config.base import replaced
from maskfleet.config.load import write_run_file
from maskfleet.config.run import RunConfig
from maskfleet.inference.export.program import exported
from maskfleet.model.build import build_mask_rcnn
from maskfleet.model.weights import read_file
from maskfleet.model.weights.checkpoint import CheckpointFolder, Snapshot
from maskfleet.training.checkpoint import write_checkpoint
from tools import ROOT

Command = Callable[..., subprocess.CompletedProcess[str]]
IDS, NAMES = (7, 9), ("disc", "ring")
RUN_WITHOUT_MASKFLEET = """
import json, sys, torch
files = {"maskfleet.json": ""}
program = torch.export.load(sys.argv[1], extra_files=files).module()
pixels, sizes = torch.load(sys.argv[2])
found = program(pixels, sizes)
assert not any(name.split(".")[0] == "maskfleet" for name in sys.modules)
torch.save(found, sys.argv[3])
print(files["maskfleet.json"])
"""


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory, micro: RunConfig) -> Path:
    """An untrained run with other weights at steps 1, 2 (the best) and 3, and fields that are not the defaults."""
    return make_run(tmp_path_factory.mktemp("runs") / "mine", micro)


def make_run(folder: Path, micro: RunConfig, **fields: object) -> Path:
    changes = {"data.test_short_edge_px": 48, "eval.accurate_paste": False, "eval.show_score_threshold": 0.25}
    changes |= {"model.inference.score_threshold": 0.0}
    config = replaced(micro, changes | {name.replace("__", "."): value for name, value in fields.items()})
    folder.mkdir(parents=True)
    write_run_file(folder, config)
    for step in (1, 2, 3):
        torch.manual_seed(step)
        model = build_mask_rcnn(replaced(config, {"model.num_categories": 2}).model)
        tensors = {f"model/{name}": tensor for name, tensor in model.state_dict().items()}
        numbers = {"categories": [{"id": i, "name": name} for i, name in zip(IDS, NAMES, strict=True)]}
        path = CheckpointFolder(folder / "checkpoints").path(step)
        write_checkpoint(path, Snapshot(step, tensors, numbers), best=step == 2)
    return folder


def photo() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 255, (60, 90, 3), np.uint8)


@pytest.mark.parametrize(
    ("form", "options", "step"),
    [("safetensors", [], 2), ("npz", ["--best"], 2), ("safetensors", ["--last"], 3), ("safetensors", ["--step", 1], 1)],
)
def test_the_file_detects_what_the_checkpoint_does(
    command: Command, run_dir: Path, tmp_path: Path, form: str, options: list[str | int], step: int
) -> None:
    done = command("export", run_dir, "--to", form, *map(str, options))
    assert done.returncode == 0, done.stderr
    assert f"step {step}" in done.stdout
    of_run = maskfleet.load(run_dir, "cpu", checkpoint=step)
    of_file = maskfleet.load(tmp_path / f"mine.{form}", "cpu")
    assert of_file.categories == of_run.categories == tuple(zip(IDS, NAMES, strict=True))
    assert of_file.run.data.test_short_edge_px == 48
    assert of_file.run.eval.show_score_threshold == 0.25
    expected = of_run.detect(photo()).to_coco(image_id=1)
    assert expected
    assert of_file.detect(photo()).to_coco(image_id=1) == expected


def test_convert_keeps_ids_and_test_size(command: Command, run_dir: Path, tmp_path: Path) -> None:
    assert command("export", run_dir).returncode == 0
    done = command("weights", "convert", "mine.safetensors", "again.npz")
    assert done.returncode == 0, done.stderr
    labels = read_file(tmp_path / "again.npz").labels
    assert (labels.names, labels.ids) == (NAMES, IDS)
    assert labels.settings["data.test_short_edge_px"] == 48


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--best", "--last"], "exclude each other"),
        (["--step", "5"], "no checkpoint of step 5"),
        (["--to", "npz", "--out", "model.pt2"], "does not end in .npz"),
    ],
)
def test_mistakes_are_explained(command: Command, run_dir: Path, options: list[str], says: str) -> None:
    done = command("export", run_dir, *options)
    assert done.returncode != 0
    assert says in done.stderr
    assert "Traceback" not in done.stderr


def test_a_file_is_not_exported_onto_itself(command: Command, run_dir: Path, tmp_path: Path) -> None:
    assert command("export", run_dir).returncode == 0
    before = (tmp_path / "mine.safetensors").read_bytes()
    done = command("export", "mine.safetensors")
    assert done.returncode != 0
    assert "is the file to export" in done.stderr
    assert (tmp_path / "mine.safetensors").read_bytes() == before


def test_settings_inside_a_file_are_checked(command: Command, run_dir: Path, tmp_path: Path) -> None:
    assert command("export", run_dir, "--to", "npz").returncode == 0
    arrays = dict(np.load(tmp_path / "mine.npz"))
    about = json.loads(str(arrays["maskfleet"]))
    about["run"]["data.test_short_edge_px"] = -4
    np.savez(tmp_path / "bad.npz", **arrays | {"maskfleet": np.array(json.dumps(about))})
    with pytest.raises(maskfleet.MaskfleetError, match="unreadable configuration"):
        maskfleet.load(tmp_path / "bad.npz", "cpu")


@pytest.mark.slow
def test_the_program_detects_the_same_without_maskfleet(command: Command, run_dir: Path, tmp_path: Path) -> None:
    done = command("export", run_dir, "--to", "torch")
    assert done.returncode == 0, done.stderr
    image = cv2.resize(photo(), (64, 43), interpolation=cv2.INTER_LINEAR)  # 60 x 90, short edge 48, at most 64
    pixels = torch.zeros(1, 3, 64, 64, dtype=torch.uint8)
    pixels[0, :, :43, :64] = torch.from_numpy(image).permute(2, 0, 1)
    torch.save((pixels, torch.tensor([[43, 64]])), tmp_path / "input.pt")
    arguments = [str(tmp_path / name) for name in ("mine.pt2", "input.pt", "output.pt")]
    ran = subprocess.run(
        [sys.executable, "-c", RUN_WITHOUT_MASKFLEET, *arguments], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    about = json.loads(ran.stdout)
    assert (about["category_ids"], about["categories"]) == (list(IDS), list(NAMES))
    assert about["resize"] == {"short_edge_px": 48, "max_px": 64}
    found = torch.load(tmp_path / "output.pt")
    expected = maskfleet.load(run_dir, "cpu").detect(photo())
    valid = found["valid"][0]
    assert int(valid.sum()) == len(expected) > 5
    torch.testing.assert_close(found["scores"][0, valid], torch.from_numpy(np.array(expected.scores)))
    scale = (60 * 90 / (43 * 64)) ** 0.5
    ids = [IDS[label - 1] for label in found["labels"][0, valid].tolist()]
    results = expected.to_coco(image_id=1)
    assert ids == [one["category_id"] for one in results]
    boxes = np.array([one["bbox"] for one in results], np.float32)
    boxes[:, 2:] += boxes[:, :2]
    inside = (found["boxes"][0, valid] * scale).minimum(torch.tensor([90, 60, 90, 60]))
    torch.testing.assert_close(inside, torch.from_numpy(boxes), atol=0.02, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize(
    "fields",
    [
        {"model__mask": False, "recipe": "faster_demo"},
        {"model__cascade": True, "model__backbone__norm": "GN"},
    ],
)
def test_other_networks_become_programs_too(tmp_path: Path, micro: RunConfig, fields: dict[str, object]) -> None:
    detector = maskfleet.load(make_run(tmp_path / "run", micro, **fields), "cpu")
    program = exported(detector).module()
    pixels = torch.randint(0, 255, (1, 3, 64, 64), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    sizes = torch.tensor([[64, 50]])
    found = program(pixels, sizes)
    expected = detector.model.detect(maskfleet.batch.Images(pixels.flip(1), sizes))
    assert bool(expected.valid.any())
    assert not any(value.requires_grad for value in found.values())
    assert torch.equal(found["valid"], expected.valid)
    assert torch.equal(found["labels"], expected.labels)
    torch.testing.assert_close(found["scores"], expected.scores)
    torch.testing.assert_close(found["boxes"], expected.boxes, atol=1e-3, rtol=1e-4)
    assert ("masks" in found) == (expected.masks is not None)


def documented_example() -> str:
    """The program of the documentation that runs an ONNX file and pastes its masks."""
    page = (ROOT / "docs/train/evaluation.md").read_text("utf-8")
    [code] = [code for code in re.findall(r"^```python\n(.*?)^```", page, re.M | re.S) if "onnxruntime" in code]
    return code


@pytest.mark.slow
def test_the_onnx_example_detects_the_same_without_maskfleet(
    command: Command, tmp_path: Path, micro: RunConfig
) -> None:
    pytest.importorskip("onnx", reason="onnx is not installed: make setup does")
    pytest.importorskip("onnxruntime", reason="onnxruntime is not installed: make setup does")
    run = make_run(tmp_path / "run" / "mine", micro, eval__accurate_paste=True)
    done = command("export", run, "--best", "--to", "onnx")
    assert done.returncode == 0, done.stderr
    assert re.search(r"(\d+) of \1 detections in 3 images are the same in onnxruntime", done.stdout)
    assert "step 2" in done.stdout
    cv2.imwrite(str(tmp_path / "photo.png"), photo())
    code = documented_example() + (
        "\nimport sys\nassert not {'torch', 'maskfleet'} & set(sys.modules)\n"
        "np.savez('found.npz', boxes=boxes, scores=scores, labels=labels, pasted=pasted)\n"
        "print(json.dumps([names, json.loads(about['category_ids']), resize, about['color_order']]))\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout) == [list(NAMES), list(IDS), {"short_edge_px": 48, "max_px": 64}, "RGB"]
    found = np.load(tmp_path / "found.npz")
    expected = maskfleet.load(run, "cpu", checkpoint=2).detect(tmp_path / "photo.png")
    assert len(expected) > 5
    assert found["labels"].tolist() == expected.labels.tolist()
    np.testing.assert_allclose(found["scores"], expected.scores, atol=1e-4)
    np.testing.assert_allclose(found["boxes"], expected.boxes, atol=1e-3)
    assert expected.masks is not None
    assert expected.masks.any()
    assert (found["pasted"] != expected.masks).mean() < 1e-3
