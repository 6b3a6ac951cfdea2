"""ONNX files detect what the network detects, for every kind of network, with onnxruntime on the CPU."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import small
import torch

from maskfleet.batch import Images
from maskfleet.cli import export as export_command
from maskfleet.config.base import replaced
from maskfleet.config.recipes import recipe
from maskfleet.errors import ConfigError, WeightsError
from maskfleet.inference.detector import Detector
from maskfleet.model.mask_rcnn import MaskRCNN

SIZES = [(128, 160), (97, 131), (201, 150), (64, 300), (7, 9)]
NAMES = ["cat", "dog", "cow", "hen", "owl"]

needs_onnx = pytest.mark.skipif(
    not (importlib.util.find_spec("onnx") and importlib.util.find_spec("onnxruntime")),
    reason="onnx and onnxruntime are not installed: make setup does",
)


def detector_of(model: MaskRCNN) -> Detector:
    run = replaced(recipe("demo"), {"data.test_short_edge_px": 96}).model_copy(update={"model": model.config})
    categories = [(3 * label + 2, name) for label, name in enumerate(NAMES[: model.config.num_categories])]
    return Detector(model.eval(), run, categories, "a test", torch.device("cpu"))


def session_of(detector: Detector) -> Any:
    import onnxruntime

    from maskfleet.inference.export.onnx.detector import onnx_model

    model = onnx_model(detector).SerializeToString()
    return onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])


def found_by(session: Any, image: np.ndarray) -> dict[str, np.ndarray]:
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, {"image": image}), strict=True))


def assert_same(session: Any, model: MaskRCNN, height: int, width: int) -> int:
    """Compare the detections in one image, in their order; how many there are."""
    image = np.random.default_rng(height).integers(0, 255, (height // 4 + 1, width // 4 + 1, 3), np.uint8)
    image = cv2.resize(image, (width, height))
    pixels = torch.from_numpy(image[..., ::-1].copy()).permute(2, 0, 1)[None]
    expected = model.detect(Images(pixels, torch.tensor([[height, width]])))
    found = found_by(session, image)
    valid = expected.valid[0]
    assert found["labels"].tolist() == expected.labels[0, valid].tolist()
    np.testing.assert_allclose(found["scores"], expected.scores[0, valid].numpy(), rtol=0, atol=1e-4)
    np.testing.assert_allclose(found["boxes"], expected.boxes[0, valid].numpy(), rtol=1e-6, atol=5e-4)  # pixels
    assert ("masks" in found) == (expected.masks is not None)
    if expected.masks is not None:
        np.testing.assert_allclose(found["masks"], expected.masks[0, valid].numpy(), rtol=0, atol=1e-4)
    return len(found["labels"])


@needs_onnx
@pytest.mark.slow
@pytest.mark.parametrize("variant", small.VARIANTS)
def test_every_network_detects_the_same_in_images_of_any_size(variant: str) -> None:
    model = small.small_model(variant).eval()
    session = session_of(detector_of(model))
    counts = [assert_same(session, model, height, width) for height, width in SIZES]
    assert min(counts) > 0
    assert max(counts) > 15


@needs_onnx
@pytest.mark.slow
@pytest.mark.parametrize("variant", ["fpn", "c4", "cascade", "faster"])
@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"inference": {"score_threshold": 0.9999}}, id="no_detections"),
        pytest.param({"rpn": {"min_size": 5000.0}}, id="no_proposals"),
    ],
)
def test_images_without_detections(variant: str, changes: dict[str, Any]) -> None:
    model = small.small_model(variant, **changes).eval()
    session = session_of(detector_of(model))
    assert assert_same(session, model, 96, 120) == 0
    found = found_by(session, np.zeros((50, 40, 3), np.uint8))
    assert found["boxes"].shape == (0, 4)
    if "masks" in found:
        assert found["masks"].shape[0] == 0


@needs_onnx
@pytest.mark.slow
@pytest.mark.parametrize("variant", ["fpn", "c4", "cascade"])
def test_one_class(variant: str) -> None:
    model = small.small_model(variant, num_categories=1).eval()
    session = session_of(detector_of(model))
    assert assert_same(session, model, 97, 131) > 3


@needs_onnx
@pytest.mark.slow
def test_colors_are_not_swapped() -> None:
    model = small.small_model().eval()
    session = session_of(detector_of(model))
    red = np.zeros((64, 64, 3), np.uint8)
    red[..., 0] = 255
    expected = detector_of(model).model.detect(
        Images(torch.from_numpy(red[..., ::-1].copy()).permute(2, 0, 1)[None], torch.tensor([[64, 64]]))
    )
    valid = expected.valid[0]
    np.testing.assert_allclose(found_by(session, red)["scores"], expected.scores[0, valid].numpy(), atol=1e-4)
    blue = np.ascontiguousarray(red[..., ::-1])
    assert not np.allclose(found_by(session, blue)["scores"][:3], expected.scores[0, valid].numpy()[:3], atol=1e-4)


@needs_onnx
@pytest.mark.slow
def test_a_file_that_computes_something_else_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import onnx

    from maskfleet.inference.export.onnx import detector as module

    right = module.onnx_model

    def wrong(detector: Detector) -> Any:
        model = right(detector)
        [bias] = [one for one in model.graph.initializer if one.name == "box_heads.0.class_logits.bias"]
        values = onnx.numpy_helper.to_array(bias) + np.arange(6, dtype=np.float32) / 10
        bias.CopyFrom(onnx.numpy_helper.from_array(values, bias.name))
        return model

    detector = detector_of(small.small_model())
    comparison = module.save_onnx(tmp_path / "right.onnx", detector)
    assert comparison is not None
    assert comparison.found == comparison.detections > 50
    assert max(comparison.differences.values()) < 1e-3
    monkeypatch.setattr(module, "onnx_model", wrong)
    with pytest.raises(WeightsError, match="something else than the network"):
        module.save_onnx(tmp_path / "wrong.onnx", detector)
    assert [path.name for path in tmp_path.iterdir()] == ["right.onnx"]


def test_a_missing_package_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "onnx" else known(name, *rest))
    with pytest.raises(ConfigError, match="needs the Python package onnx") as caught:
        export_command.export(tmp_path / "run", to="onnx")
    assert caught.value.remedy == "pip install 'maskfleet[onnx]'"
