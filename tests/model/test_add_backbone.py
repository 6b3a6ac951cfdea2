"""A backbone is added with a module, a line in `build.BACKBONES`, a value of `model.backbone.kind` and a test."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, cast

import pytest
import torch
from small import SMALL, small_batch
from torch import Tensor, nn

from maskfleet.config.model import BackboneConfig, ModelConfig
from maskfleet.model.build import BACKBONES, build_mask_rcnn
from maskfleet.model.canvas import Area, Canvas
from maskfleet.model.weights import describe, load_weights, read_file, save_weights

STRIDES = (4, 8, 16, 32)
WIDTH = 8


class TinyStage(nn.Module):
    """One strided convolution."""

    def __init__(self, inputs: int, outputs: int, *, stride: int) -> None:
        super().__init__()
        self.channels = outputs
        self.conv = nn.Conv2d(inputs, outputs, stride, stride=stride)

    def forward(self, features: Tensor, before: Area, after: Area) -> Tensor:
        return after.cut(self.conv(features).relu())


class TinyBackbone(nn.Module):
    """One convolution per stage."""

    def __init__(self, config: BackboneConfig, *, num_stages: int) -> None:
        super().__init__()
        self.strides = STRIDES[:num_stages]
        self.channels = tuple(WIDTH << stage for stage in range(num_stages))
        self.stages = nn.ModuleList(
            TinyStage(3 if stage == 0 else WIDTH << stage - 1, WIDTH << stage, stride=4 if stage == 0 else 2)
            for stage in range(num_stages)
        )

    @property
    def last_stage(self) -> TinyStage:
        return cast(TinyStage, self.stages[-1])

    def forward(self, pixels: Tensor, canvas: Canvas) -> list[Tensor]:
        maps = self.early_maps(pixels, canvas)
        return [*maps, self.last_stage(maps[-1], *(canvas.areas[stride] for stride in self.strides[-2:]))]

    def early_maps(self, pixels: Tensor, canvas: Canvas) -> list[Tensor]:
        maps, features, before = [], pixels, canvas.areas[1]
        for stage, stride in zip(self.stages[:-1], self.strides[:-1], strict=True):
            features = stage(features, before, canvas.areas[stride])
            maps.append(features)
            before = canvas.areas[stride]
        return maps

    def region_stage(self) -> TinyStage:
        return TinyStage(self.channels[-1], 2 * self.channels[-1], stride=2)


class TinyBackboneConfig(BackboneConfig):
    kind: Literal["resnet", "tiny"] = "tiny"  # type: ignore[assignment]


class TinyModelConfig(ModelConfig):
    backbone: TinyBackboneConfig = TinyBackboneConfig()


@pytest.fixture(autouse=True)
def tiny_backbone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The two changes to existing files: a line in the table, and a value of the literal."""
    monkeypatch.setitem(BACKBONES, "tiny", TinyBackbone)
    monkeypatch.setattr("maskfleet.model.weights.files.ModelConfig", TinyModelConfig)


def tiny_config(architecture: str) -> ModelConfig:
    return TinyModelConfig.model_validate(SMALL | {"architecture": architecture, "backbone": {"kind": "tiny"}})


@pytest.mark.parametrize("architecture", ["fpn", "c4"])
def test_a_new_backbone_trains_a_step(architecture: str) -> None:
    torch.manual_seed(0)
    model = build_mask_rcnn(tiny_config(architecture)).train()
    batch = small_batch([(64, 96), (96, 64)])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    before = sum(model.losses(batch).values())
    before.backward()
    gradients = [parameter.grad for parameter in model.backbone.parameters()]
    assert all(gradient is not None and gradient.any() for gradient in gradients)
    optimizer.step()
    assert sum(model.losses(batch).values()) < before
    assert model.eval().detect(batch.images).boxes.isfinite().all()


@pytest.mark.parametrize("architecture", ["fpn", "c4"])
def test_weights_of_a_new_backbone_survive_safetensors(architecture: str, tmp_path: Path) -> None:
    config = tiny_config(architecture)
    torch.manual_seed(0)
    model = build_mask_rcnn(config)
    path = tmp_path / "tiny.safetensors"
    save_weights(path, model.state_dict(), config)
    file = read_file(path)
    assert file.config == config
    assert "tiny" in describe(config)
    torch.manual_seed(1)
    other = build_mask_rcnn(config)
    report = load_weights(other, config, path)
    assert report.complete
    assert not report.unexpected
    assert all(torch.equal(tensor, other.state_dict()[name]) for name, tensor in model.state_dict().items())
