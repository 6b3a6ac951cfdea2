"""Adding an augmentation takes a class, a config field and a line in the list: done here, in the test."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from pydantic import Field

from maskfleet.batch import Batch
from maskfleet.config.base import replaced
from maskfleet.config.run import DataConfig, RunConfig
from maskfleet.data.pipeline import build
from maskfleet.data.pipeline.augment import Augmentation, AugmentedImage, Draws
from maskfleet.data.store.dataset import open_stores
from maskfleet.training.output.metrics import read_metrics
from maskfleet.training.run import train


@dataclass(frozen=True, slots=True)
class Grayscale:
    """Remove the colours; a photometric augmentation."""

    probability: float

    def draw(self, rng: np.random.Generator) -> Draws:
        return rng.random(1)

    def apply(self, image: AugmentedImage, draws: Draws) -> AugmentedImage:
        if draws[0] >= self.probability:
            return image
        gray = cv2.cvtColor(image.pixels, cv2.COLOR_BGR2GRAY)
        return replace(image, pixels=np.asarray(cv2.cvtColor(gray, cv2.COLOR_GRAY2BGR), np.uint8))


@dataclass(frozen=True, slots=True)
class Shrink:
    """Halve the image; a geometric augmentation, which ground truth follows by itself."""

    probability: float

    def draw(self, rng: np.random.Generator) -> Draws:
        return rng.random(1)

    def apply(self, image: AugmentedImage, draws: Draws) -> AugmentedImage:
        if draws[0] >= self.probability:
            return image
        height, width = (side // 2 for side in image.geometry.resized)
        return replace(image, geometry=replace(image.geometry, resized=(height, width), size=(height, width)))


class MoreData(DataConfig):
    grayscale: float = Field(default=0.0, ge=0, le=1)
    shrink: float = Field(default=0.0, ge=0, le=1)


class MoreConfig(RunConfig):
    data: MoreData = MoreData()


@pytest.fixture
def more(micro: RunConfig, monkeypatch: pytest.MonkeyPatch) -> MoreConfig:
    shipped = build.augmentations

    def augmentations(config: RunConfig) -> tuple[Augmentation, ...]:
        assert isinstance(config, MoreConfig)
        return (*shipped(config), Grayscale(config.data.grayscale), Shrink(config.data.shrink))

    monkeypatch.setattr(build, "augmentations", augmentations)
    config = MoreConfig.model_validate(micro.model_dump())
    return replaced(config, {"model.num_categories": 2, "data.color_jitter": 0.3})


def batches(config: RunConfig) -> list[Batch]:
    loader = build.build_train_loader(config, open_stores(config.data, config.data.train))
    return list(loader.batches(0, 6))


def test_an_added_augmentation_that_is_off_changes_no_bit(more: MoreConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    with_more = batches(more)
    monkeypatch.undo()
    for one, other in zip(with_more, batches(more), strict=True):
        assert torch.equal(one.images.pixels, other.images.pixels)
        assert torch.equal(one.targets.boxes, other.targets.boxes)


def test_an_added_color_augmentation_changes_pixels_and_nothing_else(more: MoreConfig) -> None:
    for plain, gray in zip(batches(more), batches(replaced(more, {"data.grayscale": 1.0})), strict=True):
        assert torch.equal(gray.images.pixels, gray.images.pixels[:, :1].expand(-1, 3, -1, -1))
        assert not torch.equal(plain.images.pixels, gray.images.pixels)
        assert torch.equal(plain.targets.boxes, gray.targets.boxes)


def test_an_added_geometric_augmentation_moves_pixels_and_ground_truth(more: MoreConfig) -> None:
    for plain, half in zip(batches(more), batches(replaced(more, {"data.shrink": 1.0})), strict=True):
        assert half.images.sizes.tolist() == (plain.images.sizes // 2).tolist()
        torch.testing.assert_close(half.targets.boxes, plain.targets.boxes / 2)
        assert half.images.pixels[:, :, 32:].max() == 0


def test_a_run_trains_with_added_augmentations(more: MoreConfig, tmp_path: Path) -> None:
    train(replaced(more, {"data.grayscale": 0.5, "model.num_categories": None}), tmp_path / "more")
    train(replaced(more, {"model.num_categories": None}), tmp_path / "off")
    with_more, off = (read_metrics(tmp_path / name) for name in ("more", "off"))
    assert len(with_more) == len(off) > 0
    assert [record["total_cost"] for record in with_more if "total_cost" in record] != [
        record["total_cost"] for record in off if "total_cost" in record
    ]
    assert "grayscale: 0.5" in (tmp_path / "more" / "run.yaml").read_text()
