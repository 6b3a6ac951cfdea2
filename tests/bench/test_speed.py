"""What the bench measures, and the limits it compares with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import typer
from typer.testing import CliRunner

from maskfleet.bench.noise_batch import OBJECTS, noise_batch
from maskfleet.bench.roofline import KNOWN, images_per_s, layers
from maskfleet.bench.speed import Speed, detect_speed, loader_speed, train_speed
from maskfleet.cli.bench import bench, verdict
from maskfleet.config.base import replaced
from maskfleet.config.load import write_run_file
from maskfleet.config.model import R101_BLOCKS, ModelConfig
from maskfleet.config.run import RunConfig
from maskfleet.data.store.dataset import open_stores

CPU = torch.device("cpu")
STRIDE = {"stride_1x1": True}


@pytest.mark.parametrize(
    ("changes", "teraflops"),
    [
        ({"backbone": STRIDE}, 1.549),
        ({"backbone": STRIDE, "mask": False}, 1.142),
        ({"backbone": STRIDE | {"blocks": R101_BLOCKS}}, 2.027),
        ({"backbone": STRIDE, "architecture": "c4"}, 2.902),
    ],
)
def test_work_of_a_training_step_is_that_of_the_published_counts(changes: dict, teraflops: float) -> None:
    config = ModelConfig.model_validate({"num_categories": 80, **changes})
    total = sum(layer.flops for layer in layers(config, (800, 1344))) / 1e12
    assert total == pytest.approx(teraflops, rel=0.01)


def test_bound_lies_between_the_fused_estimate_and_pure_arithmetic() -> None:
    config = ModelConfig.model_validate({"num_categories": 80, "backbone": STRIDE})
    bound = images_per_s(config, KNOWN["NVIDIA H200"], batch=12)
    assert 435 <= bound <= 788 / 1.537


def test_noise_has_its_objects_inside_the_image_and_padding_outside() -> None:
    batch = noise_batch(2, canvas=(64, 96), size=(60, 90), num_categories=3)
    boxes = batch.targets.boxes
    assert boxes.shape == (2, OBJECTS, 4)
    assert (boxes >= 0).all()
    assert (boxes <= torch.tensor([90.0, 60.0, 90.0, 60.0])).all()
    assert not batch.images.pixels[:, :, 60:].any()
    assert not batch.images.pixels[:, :, :, 90:].any()
    assert batch.images.pixels[:, :, :60, :90].float().std() > 50
    assert set(batch.targets.labels.unique().tolist()) <= {1, 2, 3}


def test_training_and_detection_are_measured_on_a_cpu(micro: RunConfig) -> None:
    for measure, what in ((train_speed, "train"), (detect_speed, "detect")):
        speed = measure(micro, CPU, batch=2, steps=1)
        assert speed.what == what
        assert not speed.compiled
        assert speed.peak_gib is None
        assert speed.share_of_roofline is None
        assert speed.images_per_s == pytest.approx(2000 / speed.step_ms)


def test_loader_speed_counts_the_images_of_whole_batches(micro: RunConfig) -> None:
    config = replaced(micro, {"data.num_workers": 0})
    assert loader_speed(config, open_stores(config.data, config.data.train), CPU, batch=2, steps=2) > 0


def line(images_per_second: float) -> Speed:
    return Speed("train", 1, images_per_second, 1.0, 1.0, None, None, compiled=False)


@pytest.mark.parametrize(
    ("loader", "words"), [(300.0, "1.5 times"), (210.0, "just fast enough"), (50.0, "back to 50.0 of 200.0")]
)
def test_verdict_names_what_limits_training(loader: float, words: str) -> None:
    assert words in verdict([line(100.0), line(200.0)], loader)


def test_command_prints_the_table_as_json(micro: RunConfig, tmp_path: Path) -> None:
    file = write_run_file(tmp_path, micro)
    app = typer.Typer()
    app.command()(bench)
    arguments = [
        "--config",
        str(file),
        "--data",
        micro.data.root,
        "--steps",
        "1",
        "--json",
        "--set",
        "data.num_workers=0",
    ]
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    table = json.loads(result.stdout)
    assert [row["what"] for row in table["speeds"]] == ["train", "detect"]
    assert table["loader_images_per_s"] > 0
