"""Inference, stage by stage, against what TensorPack computes from the same weights and image."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import golden
import numpy as np
import pytest
import torch
from torch import Tensor

from maskfleet.batch import Detections, Images
from maskfleet.config.model import ModelConfig
from maskfleet.model.canvas import Canvas
from maskfleet.model.features import Features
from maskfleet.model.mask_rcnn import MaskRCNN
from maskfleet.model.rpn import RpnOutputs

CONFIGS = {
    "fpn_mask": {},
    "c4_mask": {"architecture": "c4", "rpn": {"test_pre_nms": 2000, "test_post_nms": 150}},
    "fpn_cascade_mask": {
        "cascade": True,
        "rpn": {"test_per_level_pre_nms": 200, "test_per_level_post_nms": 200, "test_per_image": 200},
    },
    "fpn_joint": {
        "mask": False,
        "fpn": {"proposal_mode": "Joint"},
        "rpn": {"test_pre_nms": 600, "test_post_nms": 100},
    },
    "fpn_tfpad": {
        "mask": False,
        "backbone": {"tf_pad_mode": True},
        "rpn": {"test_per_level_pre_nms": 100, "test_per_level_post_nms": 100, "test_per_image": 100},
    },
}
CASES = ["fpn_mask_A", "fpn_mask_C", "c4_mask_A", "fpn_cascade_mask_A", "fpn_joint_S", "fpn_tfpad_S"]
STEPS = {"pool0": 8, "c2": 64, "c3": 32, "c4": 16, "c5": 8, "p2": 64, "p3": 16, "p4": 4, "p5": 1, "p6": 1}


@dataclass
class Case:
    """One golden and our model's run on the same image."""

    expected: dict[str, np.ndarray]
    config: ModelConfig

    @cached_property
    def model(self) -> MaskRCNN:
        return golden.golden_model(self.config)

    @cached_property
    def images(self) -> Images:
        return golden.golden_images(self.expected["image_spec"])

    @cached_property
    def prepared(self) -> tuple[Tensor, Canvas]:
        return self.model.prepared(self.images)

    @cached_property
    def features(self) -> Features:
        return self.model.features(self.images)

    @cached_property
    def detections(self) -> Detections:
        return self.model.detect(self.images)

    def tensor(self, name: str) -> Tensor:
        return torch.from_numpy(self.expected[name])[None]

    def everything_valid(self, name: str) -> Tensor:
        return torch.ones(1, len(self.expected[name]), dtype=torch.bool)


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    variant = request.param.rpartition("_")[0]
    config = ModelConfig.model_validate({"num_categories": 80, **CONFIGS[variant]})
    return Case(golden.golden(f"infer_{request.param}"), config)


@pytest.fixture(autouse=True)
def _without_gradients():
    with torch.no_grad():
        yield


def test_the_image_rule_gives_the_recorded_image(case):
    pixels = case.images.pixels[0].permute(1, 2, 0)[::16, ::16]
    np.testing.assert_array_equal(pixels.numpy(), case.expected["image_probe"])


def test_backbone_and_pyramid_features_agree(case):
    pixels, canvas = case.prepared
    stages = case.model.backbone(pixels, canvas)
    maps = {"pool0": case.model.backbone.stem(pixels, canvas)}
    maps |= {f"c{number + 2}": stage for number, stage in enumerate(stages)}
    if case.config.architecture == "fpn":
        maps |= {f"p{number + 2}": feature for number, feature in enumerate(case.features.maps)}
    assert {f"feat_{name}" for name in maps} == {name for name in case.expected if name.startswith("feat_")}
    for name, feature in maps.items():
        assert golden.worst(feature[0, :: STEPS[name]], case.expected[f"feat_{name}"]) < 1e-5, name
        statistics = torch.stack([feature[0].mean(dim=(1, 2)), feature[0].std(dim=(1, 2), correction=0)])
        assert golden.worst(statistics, case.expected[f"featstat_{name}"]) < 1e-5, name


def test_proposal_network_outputs_agree(case):
    names = ["c4"] if case.config.architecture == "c4" else [f"lvl{level}" for level in range(2, 7)]
    for name, feature in zip(names, case.features.maps, strict=True):
        scores, deltas = case.model.rpn.raw_outputs(feature)
        assert golden.worst(scores, case.expected[f"rpn_cls_{name}"]) < 1e-5, name
        assert golden.worst(deltas, case.expected[f"rpn_box_{name}"]) < 1e-5, name


def test_proposals_agree_given_the_same_network_outputs(case):
    outputs = case.model.rpn(case.features)
    names = ["c4"] if case.config.architecture == "c4" else [f"lvl{level}" for level in range(2, 7)]
    logits, deltas = [], []
    for name in names:
        logits.append(torch.from_numpy(case.expected[f"rpn_cls_{name}"]).permute(0, 2, 3, 1).reshape(1, -1))
        deltas.append(torch.from_numpy(case.expected[f"rpn_box_{name}"]).permute(0, 2, 3, 1).reshape(1, -1, 4))
    theirs = RpnOutputs(
        logits=torch.cat(logits, dim=1),
        deltas=torch.cat(deltas, dim=1),
        anchors=outputs.anchors,
        keys=outputs.keys,
        inside=outputs.inside,
        counts=outputs.counts,
    )
    proposals = case.model.proposals(theirs, case.images.sizes, training=False)
    order = np.argsort(-case.expected["proposal_scores"], kind="stable")
    count = len(order)
    assert int(proposals.valid.sum()) == count
    np.testing.assert_array_equal(proposals.scores[0, :count].numpy(), case.expected["proposal_scores"][order])
    np.testing.assert_allclose(proposals.boxes[0, :count].numpy(), case.expected["proposal_boxes"][order], atol=1e-3)


def test_box_head_agrees_given_the_same_proposals(case):
    if case.config.cascade:
        pytest.skip("the cascade has a test of its own")
    boxes, valid = case.tensor("proposal_boxes"), case.everything_valid("proposal_boxes")
    outputs, region_features = case.model.box_outputs(case.features, boxes, valid)
    hidden = case.model.box_head(0).hidden(region_features)
    assert golden.worst(outputs.logits[0], case.expected["frcnn_cls_logits"]) < 1e-5
    assert golden.worst(outputs.deltas[0].flatten(1), case.expected["frcnn_box_logits"]) < 1e-5
    if case.config.architecture == "c4":
        assert golden.worst(hidden[::10], case.expected["c5_gap_sub"]) < 1e-5
    else:
        assert golden.worst(region_features[::50, ::16], case.expected["roi_feat_sub"]) < 1e-5
        assert golden.worst(hidden[::20], case.expected["fc7_sub"]) < 1e-5


def test_cascade_stages_agree_given_the_boxes_of_the_stage_before(case):
    if not case.config.cascade:
        pytest.skip("not a cascade")
    given = "proposal_boxes"
    for stage in range(3):
        boxes, valid = case.tensor(given), case.everything_valid(given)
        outputs, _ = case.model.box_outputs(case.features, boxes, valid, stage=stage)
        refined = case.model.decoded(outputs, boxes, case.images.sizes, stage=stage)[0, :, 0]
        given = f"s{stage + 1}_boxes"
        assert golden.worst(outputs.logits[0], case.expected[f"s{stage + 1}_cls_logits"]) < 1e-5
        assert golden.worst(outputs.deltas[0, :, 0], case.expected[f"s{stage + 1}_box_logits"]) < 1e-5
        np.testing.assert_allclose(refined.numpy(), case.expected[given], atol=1e-3)


def test_masks_agree_given_the_same_detections(case):
    if not case.config.mask:
        pytest.skip("no mask head")
    boxes, labels = case.tensor("boxes"), case.tensor("labels")
    logits = case.model.mask_logits(case.features, boxes, case.everything_valid("boxes"), labels)
    np.testing.assert_allclose(logits.sigmoid()[0].numpy(), case.expected["masks"], atol=1e-5)
    if "mask_roi_feat_sub" in case.expected:
        crops = case.model.mask_head.region_features(case.features, boxes)
        assert golden.worst(crops[::10, ::32], case.expected["mask_roi_feat_sub"]) < 1e-5


def test_detections_agree_end_to_end(case):
    found, expected = case.detections, case.expected
    count = len(expected["boxes"])
    assert int(found.valid.sum()) == count
    scores = found.scores[0, :count].numpy()
    assert (np.diff(scores) <= 0).all()
    # Scores that differ in the last digit may swap places, so each detection looks for its own.
    distance = np.abs(found.boxes[0, :count, None].numpy() - expected["boxes"][None]).max(axis=-1)
    distance[found.labels[0, :count, None].numpy() != expected["labels"][None]] = np.inf
    match = distance.argmin(axis=1)
    agree = distance.min(axis=1) < 1e-3
    assert agree.sum() >= count - 2, "more than two detections differ"
    np.testing.assert_allclose(scores[agree], expected["scores"][match[agree]], atol=1e-5)
    if found.masks is None:
        assert "masks" not in expected
    else:
        masks = found.masks[0, :count].numpy()[agree]
        # A box that is 1e-4 px off moves a mask by more than the 1e-5 that holds for equal boxes.
        np.testing.assert_allclose(masks, expected["masks"][match[agree]], atol=3e-5)
