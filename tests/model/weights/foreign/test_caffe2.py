"""MSRA's ResNets under Caffe2's names, as `R-50.pkl` of Detectron2's zoo has them."""

from __future__ import annotations

import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from detectron2_samples import MEAN_BGR, STD_RGB, Maker, State, an_image, as_images, expect_close, resnet

from maskfleet.config.base import replaced
from maskfleet.errors import WeightsError
from maskfleet.model.build import build_mask_rcnn
from maskfleet.model.weights import read_file
from maskfleet.model.weights.content import file_config
from maskfleet.model.weights.load import fit

BRANCHES = {"conv1": "branch2a", "conv2": "branch2b", "conv3": "branch2c", "shortcut": "branch1"}


def folded_resnet() -> State:
    """A small ResNet whose norms only scale and shift, under Detectron2's names."""
    made = Maker()
    made.resnet("", (1, 2, 1, 1))
    for name in made.state:
        if name.endswith(".running_mean"):
            made.state[name].zero_()
        elif name.endswith(".running_var"):
            made.state[name].fill_(1 - 1e-5)
    return made.state


def in_caffe2(state: State) -> dict[str, Any]:
    """The arrays of `state` under Caffe2's names, without statistics, and what else such a file has."""
    found: dict[str, Any] = {}
    for name, tensor in state.items():
        if "running" in name:
            continue
        name = re.sub(r"norm\.weight$", "bn_s", re.sub(r"norm\.bias$", "bn_b", name))
        name = re.sub(r"\.weight$", "_w", name.replace("stem.conv1.bn", "res_conv1_bn").replace("stem.conv1", "conv1"))
        name = re.sub(r"\.(conv\d|shortcut)", lambda match: f"_{BRANCHES[match[1]]}", name).replace(".", "_")
        found[name] = tensor.numpy()
    found |= {"conv1_b": torch.zeros(8).numpy(), "conv1_w_momentum": found["conv1_w"], "weight_order": "NCHW"}
    return found | {"fc1000_w": torch.zeros(10, 256).numpy(), "fc1000_b": torch.zeros(10).numpy()}


def test_the_names_are_those_of_the_zoo() -> None:
    names = set(in_caffe2(folded_resnet()))
    assert {"conv1_w", "res_conv1_bn_s", "res2_0_branch2a_w", "res2_0_branch2a_bn_b", "res3_1_branch2c_w"} <= names
    assert {"res2_0_branch1_w", "res5_0_branch1_bn_s"} <= names


@pytest.mark.parametrize("form", ["bare", "blobs", "model"])
@torch.no_grad()
def test_msras_resnet_computes_what_detectron2_does(form: str, tmp_path: Path) -> None:
    state = folded_resnet()
    values = in_caffe2(state)
    about = {"__author__": "Caffe2", "matching_heuristics": True}
    content = {"bare": values, "blobs": {"blobs": values}, "model": {"model": values, **about}}[form]
    (tmp_path / "R-50.pkl").write_bytes(pickle.dumps(content, protocol=2))
    file = read_file(tmp_path / "R-50.pkl")
    config = file_config(file)
    assert config is not None
    assert (config.num_categories, config.backbone.blocks, config.backbone.norm) == (None, (1, 2, 1, 1), "FreezeBN")
    assert config.backbone.stride_1x1
    whole = replaced(config, {"num_categories": 2, "fpn.channels": 16, "box_head.fc_channels": 8, "mask": False})
    fitted = fit(file, whole, scope="backbone")
    assert fitted.report.complete
    assert fitted.report.unexpected == ()
    assert fitted.report.ignored["conv1_b"] == "a bias that the norm behind the convolution replaces"
    assert fitted.report.ignored["stem.fc.weight"] == "the ImageNet classifier"
    model = build_mask_rcnn(whole).eval()
    model.load_state_dict(fitted.tensors, strict=False)
    pixels = an_image()
    theirs = resnet(pixels - torch.tensor(MEAN_BGR)[:, None, None], state, "", stride_1x1=True)
    for ours, expected in zip(model.backbone(*model.prepared(as_images(pixels))), theirs, strict=True):
        expect_close(ours, expected)


def test_the_stem_reads_blue_first_and_is_scaled_by_each_colours_deviation(tmp_path: Path) -> None:
    values = in_caffe2(folded_resnet())
    values["conv1_w"][:] = torch.tensor([1.0, 2.0, 4.0])[:, None, None].numpy()  # blue, green, red
    values["res_conv1_bn_s"][:] = 3.0
    (tmp_path / "R-50.pkl").write_bytes(pickle.dumps(values, protocol=2))
    file = read_file(tmp_path / "R-50.pkl")
    config = file_config(file)
    assert config is not None
    tensors = fit(file, config, scope="backbone").tensors
    red, green, blue = STD_RGB
    assert tensors["backbone.stem.conv.weight"][0, :, 0, 0].tolist() == pytest.approx([blue, 2 * green, 4 * red])
    assert tensors["backbone.stem.norm.weight"].tolist() == [3.0] * 8
    assert tensors["backbone.stem.norm.running_mean"].tolist() == [0.0] * 8
    scale = (tensors["backbone.stem.norm.running_var"] + 1e-5).rsqrt()
    assert scale.tolist() == pytest.approx([1.0] * 8, abs=1e-6)


def test_a_detector_of_detectron_is_refused(tmp_path: Path) -> None:
    values = in_caffe2(folded_resnet()) | {"cls_score_w": torch.zeros(4, 8).numpy()}
    (tmp_path / "model_final.pkl").write_bytes(pickle.dumps({"blobs": values}, protocol=2))
    with pytest.raises(WeightsError, match="is from Detectron, which used Caffe2"):
        read_file(tmp_path / "model_final.pkl")
