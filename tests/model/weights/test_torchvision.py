"""torchvision's weights mean the same in our network as in torchvision's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from weight_samples import as_published, name_table, torchvision_state

from maskfleet.config.model import R101_BLOCKS, ModelConfig
from maskfleet.model.weights import fit, guess_config, read_file


@pytest.mark.parametrize(
    ("name", "blocks", "classes", "mask"),
    [
        ("resnet50", (3, 4, 6, 3), None, True),
        ("resnet101", R101_BLOCKS, None, True),
        ("maskrcnn_resnet50_fpn", (3, 4, 6, 3), 80, True),
    ],
)
def test_the_network_is_guessed_from_torchvisions_names(
    name: str, blocks: tuple[int, ...], classes: int | None, mask: bool
) -> None:
    shapes = {entry: tuple(shape) for entry, shape in name_table("torchvision")[name].items()}
    found = guess_config(shapes)
    assert found is not None
    assert (found.backbone.blocks, found.num_categories, found.mask) == (blocks, classes, mask)
    assert found.backbone.norm == "FreezeBN"


@pytest.mark.parametrize("published", [True, False], ids=["published names", "names of today"])
def test_torchvisions_detector_arrives_tensor_by_tensor(published: bool, tmp_path: Path) -> None:
    state = torchvision_state("maskrcnn_resnet50_fpn")
    torch.save(as_published(state) if published else state, tmp_path / "model.pth")
    config = ModelConfig(num_categories=90)
    fitted = fit(read_file(tmp_path / "model.pth"), config)
    assert fitted.report.complete
    assert not fitted.report.unexpected
    ours = fitted.tensors
    same = {
        "fpn.lateral_c3.weight": "backbone.fpn.inner_blocks.1.0.weight",
        "fpn.output_p5.bias": "backbone.fpn.layer_blocks.3.0.bias",
        "rpn.objectness.weight": "rpn.head.cls_logits.weight",
        "rpn.conv.bias": "rpn.head.conv.0.0.bias",
        "box_heads.0.fc6.weight": "roi_heads.box_head.fc6.weight",
        "box_heads.0.box_deltas.weight": "roi_heads.box_predictor.bbox_pred.weight",
        "mask_head.conv2.weight": "roi_heads.mask_head.2.0.weight",
        "mask_head.deconv.weight": "roi_heads.mask_predictor.conv5_mask.weight",
        "backbone.group3.1.conv2.weight": "backbone.body.layer4.1.conv2.weight",
        "backbone.group2.0.shortcut.conv.weight": "backbone.body.layer3.0.downsample.0.weight",
        "backbone.group0.2.norm3.running_mean": "backbone.body.layer1.2.bn3.running_mean",
    }
    for name, theirs in same.items():
        assert torch.equal(ours[name], state[theirs]), name
    assert torch.equal(ours["mask_head.logits.bias"], state["roi_heads.mask_predictor.mask_fcn_logits.bias"][1:])


def test_torchvisions_91_coco_rows_become_our_80(tmp_path: Path) -> None:
    state = torchvision_state("maskrcnn_resnet50_fpn")
    torch.save(state, tmp_path / "model.pth")
    ours = fit(read_file(tmp_path / "model.pth"), ModelConfig(num_categories=80)).tensors
    logits, deltas, mask = (
        ours[f"{module}.bias"] for module in ("box_heads.0.class_logits", "box_heads.0.box_deltas", "mask_head.logits")
    )
    scores = state["roi_heads.box_predictor.cls_score.bias"]
    boxes = state["roi_heads.box_predictor.bbox_pred.bias"]
    drawn = state["roi_heads.mask_predictor.mask_fcn_logits.bias"]
    # Our label -> COCO's category id on both sides of every gap: 11 is a fire hydrant, 13 a stop sign, 12 nothing.
    before_gaps = {11: 11, 24: 25, 26: 28, 40: 44, 60: 65, 61: 67, 62: 70, 73: 82}
    after_gaps = {12: 13, 25: 27, 27: 31, 41: 46, 63: 72, 74: 84}
    for label, coco_id in ({0: 0, 1: 1, 80: 90} | before_gaps | after_gaps).items():
        assert logits[label] == scores[coco_id]
        assert torch.equal(deltas[4 * label : 4 * label + 4], boxes[4 * coco_id : 4 * coco_id + 4])
        if label:
            assert mask[label - 1] == drawn[coco_id]


def test_torchvisions_colours_are_turned_round(tmp_path: Path) -> None:
    state = torchvision_state("resnet50")
    torch.save(state, tmp_path / "resnet50.pth")
    config = ModelConfig(num_categories=1)
    stem = fit(read_file(tmp_path / "resnet50.pth"), config, scope="backbone").tensors["backbone.stem.conv.weight"]
    bgr = torch.rand(1, 3, 9, 9, generator=torch.Generator().manual_seed(1)) * 255
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    theirs = F.conv2d((bgr.flip(1) / 255 - mean[:, None, None]) / std[:, None, None], state["conv1.weight"])
    ours_mean, ours_std = (torch.tensor(v[::-1])[:, None, None] for v in (config.pixel_mean_rgb, config.pixel_std_rgb))
    torch.testing.assert_close(F.conv2d((bgr - ours_mean) / ours_std, stem), theirs, rtol=1e-5, atol=1e-4)


def frozen_norm(x: Tensor, tensors: dict[str, Tensor], module: str, eps: float) -> Tensor:
    mean, var, weight, bias = (tensors[f"{module}.{p}"] for p in ("running_mean", "running_var", "weight", "bias"))
    return (x - mean) / (var + eps).sqrt() * weight + bias


def test_norms_of_the_published_detector_divide_by_the_bare_variance(tmp_path: Path) -> None:
    state = torchvision_state("maskrcnn_resnet50_fpn")
    module = "backbone.body.layer2.0.bn1"
    state[f"{module}.running_var"] = state[f"{module}.running_var"] * 1e-5
    torch.save(state, tmp_path / "model.pth")
    ours = fit(read_file(tmp_path / "model.pth"), ModelConfig(num_categories=80)).tensors
    x = torch.linspace(-1, 1, 128)
    expected = frozen_norm(x, state, module, 0.0)
    torch.testing.assert_close(frozen_norm(x, ours, "backbone.group1.0.norm1", 1e-5), expected, rtol=1e-5, atol=1e-5)


def test_a_training_checkpoint_of_torchvision_gives_its_model(tmp_path: Path) -> None:
    state = {f"module.{name}": tensor for name, tensor in torchvision_state("resnet50").items()}
    torch.save({"model": state, "epoch": 3}, tmp_path / "checkpoint.pth")
    report = fit(read_file(tmp_path / "checkpoint.pth"), ModelConfig(num_categories=1), scope="backbone").report
    assert report.complete
    assert report.ignored["epoch"] == "stands beside 'model' in a checkpoint"
    assert report.ignored["fc.weight"] == "the ImageNet classifier"
    assert sum("counter" in reason for reason in report.ignored.values()) == 53
