"""Detectron2's weights compute in our network what they compute in Detectron2's."""

from __future__ import annotations

import pickle
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
import torch
from detectron2_samples import (
    MEAN_BGR,
    STD_RGB,
    Maker,
    an_image,
    as_images,
    box_head,
    c4_state,
    expect_close,
    fpn_state,
    group,
    mask_head,
    pyramid,
    resnet,
    rpn,
    write_pkl,
)

from maskfleet.config.base import replaced
from maskfleet.config.model import ModelConfig
from maskfleet.errors import WeightsError
from maskfleet.model.build import build_mask_rcnn
from maskfleet.model.features import crop
from maskfleet.model.mask_rcnn import MaskRCNN
from maskfleet.model.weights import file_config, fit, read_file


def loaded(path: Path) -> tuple[MaskRCNN, ModelConfig]:
    """Our model with the weights and the configuration of a file."""
    file = read_file(path)
    config = file_config(file)
    assert config is not None
    fitted = fit(file, config)
    assert fitted.report.complete
    assert not fitted.report.unexpected
    model = build_mask_rcnn(config)
    model.load_state_dict(fitted.tensors)
    return model.eval(), config


@torch.no_grad()
def test_a_mask_rcnn_computes_what_detectron2_does(tmp_path: Path) -> None:
    state = fpn_state()
    model, config = loaded(write_pkl(tmp_path / "model_final.pkl", state))
    assert config.backbone.stride_1x1
    assert (config.num_categories, config.architecture, config.mask) == (3, "fpn", True)
    pixels = an_image()
    theirs = pyramid(resnet(pixels - torch.tensor(MEAN_BGR)[:, None, None], state, "backbone.bottom_up."), state)
    features = model.features(as_images(pixels))
    for ours, expected in zip(features.maps, theirs, strict=True):
        expect_close(ours, expected)
    for ours, expected in zip(model.rpn.raw_outputs(theirs[1]), rpn(theirs[1], state), strict=True):
        expect_close(ours, expected)
    crops = torch.rand(5, 16, 7, 7, generator=torch.Generator().manual_seed(2))
    scores, deltas = box_head(crops, state)
    found = model.box_heads[0](crops)
    expect_close(found.logits[:, 1:], scores[:, :-1])
    expect_close(found.logits[:, 0], scores[:, -1])
    expect_close(found.deltas[:, 1:].flatten(1), deltas)
    crops = torch.rand(3, 16, 14, 14, generator=torch.Generator().manual_seed(3))
    assert model.mask_head is not None
    labels = torch.tensor([1, 2, 3])
    expect_close(model.mask_head(crops, labels), mask_head(crops, state)[torch.arange(3), labels - 1])


@torch.no_grad()
def test_a_c4_mask_rcnn_computes_what_detectron2_does(tmp_path: Path) -> None:
    state = c4_state()
    model, config = loaded(write_pkl(tmp_path / "model_final.pkl", state))
    assert (config.architecture, config.backbone.stride_1x1) == ("c4", True)
    pixels = an_image()
    stages = resnet(pixels - torch.tensor(MEAN_BGR)[:, None, None], state, "backbone.", groups=3)
    features = model.features(as_images(pixels))
    expect_close(features.maps[0], stages[-1])
    for ours, expected in zip(model.rpn.raw_outputs(stages[-1]), rpn(stages[-1], state), strict=True):
        expect_close(ours, expected)
    boxes = torch.tensor([[[4.0, 4.0, 60.0, 60.0]]])
    valid = torch.ones(1, 1, dtype=torch.bool)
    theirs = group(crop(features, boxes, resolution=14), state, "roi_heads.res5", stride=2, stride_1x1=True)
    outputs, region_features = model.box_outputs(features, boxes, valid)
    expect_close(region_features, theirs)
    scores = torch.nn.functional.linear(
        theirs.mean(dim=(2, 3)),
        state["roi_heads.box_predictor.cls_score.weight"],
        state["roi_heads.box_predictor.cls_score.bias"],
    )
    expect_close(outputs.logits[0], scores.roll(1, dims=1))
    assert model.mask_head is not None
    expect_close(model.mask_head(theirs, torch.tensor([2])), mask_head(theirs, state, convs=0)[:, 1])


@torch.no_grad()
def test_a_cascade_has_one_set_of_deltas_for_all_classes(tmp_path: Path) -> None:
    state = fpn_state(cascade=True)
    model, config = loaded(write_pkl(tmp_path / "model_final.pkl", state))
    assert config.cascade
    crops = torch.rand(5, 16, 7, 7, generator=torch.Generator().manual_seed(2))
    for stage in range(3):
        scores, deltas = box_head(crops, state, f".{stage}")
        found = model.box_heads[stage](crops)
        expect_close(found.logits, scores.roll(1, dims=1))
        expect_close(found.deltas.flatten(1), deltas)


def test_a_faster_rcnn_has_no_mask_head(tmp_path: Path) -> None:
    _, config = loaded(write_pkl(tmp_path / "model_final.pkl", fpn_state(mask=False)))
    assert not config.mask


@pytest.mark.parametrize("origin", ["torchvision", "MSRA"])
@torch.no_grad()
def test_imagenet_resnets_of_both_origins(origin: str, tmp_path: Path) -> None:
    made = Maker()
    made.resnet("", (1, 2, 1, 1))
    made.layer("stem.fc", 10, 256)
    made.state["stem.conv1.norm.num_batches_tracked"] = torch.tensor(3)
    file = read_file(write_pkl(tmp_path / "R-50.pkl", made.state, author=origin, matching_heuristics=True))
    config = file_config(file)
    assert config is not None
    assert config.backbone.stride_1x1 == (origin == "MSRA")
    whole = replaced(config, {"num_categories": 2, "fpn.channels": 16, "box_head.fc_channels": 8, "mask": False})
    fitted = fit(file, whole, scope="backbone")
    assert fitted.report.complete
    assert fitted.report.ignored["stem.fc.weight"] == "the ImageNet classifier"
    model = build_mask_rcnn(whole).eval()
    model.load_state_dict(fitted.tensors, strict=False)
    pixels = an_image()
    if origin == "torchvision":
        normalized = (pixels.flip(1) - torch.tensor(MEAN_BGR[::-1])[:, None, None]) / torch.tensor(STD_RGB)[
            :, None, None
        ]
    else:
        normalized = pixels - torch.tensor(MEAN_BGR)[:, None, None]
    theirs = resnet(normalized, made.state, "", stride_1x1=origin == "MSRA")
    for ours, expected in zip(model.backbone(*model.prepared(as_images(pixels))), theirs, strict=True):
        expect_close(ours, expected)


@torch.no_grad()
def test_a_detector_that_says_how_it_scales_pixels(tmp_path: Path) -> None:
    """One that was trained from torchvision's ResNet, with RGB images."""
    state = fpn_state()
    scaling = {
        "pixel_mean": torch.tensor(MEAN_BGR[::-1])[:, None, None],
        "pixel_std": torch.tensor(STD_RGB)[:, None, None],
    }
    model, config = loaded(write_pkl(tmp_path / "model_final.pkl", state | scaling))
    assert not config.backbone.stride_1x1
    pixels = an_image()
    normalized = (pixels.flip(1) - scaling["pixel_mean"]) / scaling["pixel_std"]
    theirs = pyramid(resnet(normalized, state, "backbone.bottom_up.", stride_1x1=False), state)
    for ours, expected in zip(model.features(as_images(pixels)).maps, theirs, strict=True):
        expect_close(ours, expected)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_every_protocol_and_layout_gives_the_same_tensors(protocol: int, tmp_path: Path) -> None:
    state = fpn_state()
    expected = {name: tensor.numpy() for name, tensor in state.items()}
    odd = OrderedDict(expected)
    first = next(iter(odd))
    odd[first] = np.asfortranarray(odd[first]).astype(">f4")
    odd["proposal_generator.anchor_generator.cell_anchors.0"] = np.zeros((3, 4), np.float32)
    (tmp_path / "model.pkl").write_bytes(pickle.dumps({"model": odd, "__author__": "me"}, protocol=protocol))
    file = read_file(tmp_path / "model.pkl")
    assert all(torch.equal(file.tensors[name], tensor) for name, tensor in state.items())
    config = file_config(file)
    assert config is not None
    ignored = fit(file, config).report.ignored
    assert ignored["proposal_generator.anchor_generator.cell_anchors.0"] == "anchors, which our model computes"


def test_a_checkpoint_of_detectron2_is_read_by_torch(tmp_path: Path) -> None:
    torch.save({"model": fpn_state(), "iteration": 5, "optimizer": {"state": {}}}, tmp_path / "model_0000005.pth")
    model, config = loaded(tmp_path / "model_0000005.pth")
    assert config.backbone.stride_1x1
    assert isinstance(model, MaskRCNN)


def test_the_stride_is_advised_where_a_model_has_it_elsewhere(tmp_path: Path) -> None:
    file = read_file(write_pkl(tmp_path / "model.pkl", fpn_state()))
    config = file_config(file)
    assert config is not None
    notes = " ".join(fit(file, replaced(config, {"backbone.stride_1x1": False})).report.notes)
    assert "set model.backbone.stride_1x1=true" in notes
    assert "stride_1x1" not in " ".join(fit(file, config).report.notes)


def test_heads_with_norms_are_refused_and_the_backbone_is_not(tmp_path: Path) -> None:
    state = fpn_state()
    state["roi_heads.mask_head.mask_fcn1.norm.weight"] = torch.ones(40)
    del state["roi_heads.mask_head.mask_fcn1.bias"]
    file = read_file(write_pkl(tmp_path / "gn.pkl", state))
    config = file_config(file)
    assert config is not None
    with pytest.raises(WeightsError, match="heads normalize before the ReLU"):
        fit(file, config)
    assert fit(file, config, scope="backbone").report.complete


def test_a_dilated_detector_is_none_of_ours(tmp_path: Path) -> None:
    state = c4_state() | {f"roi_heads.box_head.fc1.{leaf}": torch.rand(8, 8) for leaf in ("weight", "bias")}
    assert file_config(read_file(write_pkl(tmp_path / "dc5.pkl", state))) is None


def test_caffe2_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "old.pkl").write_bytes(pickle.dumps({"blobs": {"conv1_w": np.zeros(3, np.float32)}}))
    with pytest.raises(WeightsError, match="Caffe2"):
        read_file(tmp_path / "old.pkl")
