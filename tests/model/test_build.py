"""What a new model holds: names and shapes, starting values, what is frozen; and what it refuses."""

from __future__ import annotations

import golden
import pytest
import torch
from small import VARIANTS, small_batch, small_config, small_model

from maskfleet.batch import Images
from maskfleet.config.model import R101_BLOCKS, ModelConfig
from maskfleet.errors import ConfigError, DataError
from maskfleet.model.build import build_mask_rcnn, mask_rcnn_with
from maskfleet.model.mask_rcnn import MaskRCNN

GN = {"backbone": {"norm": "GN"}, "fpn": {"norm": "GN"}}
GN_HEADS = {"box_head": {"kind": "4conv1fc_gn"}, "mask_head": {"kind": "up4conv_gn"}}
TABLES = {
    "fpn_mask": {},
    "c4_mask": {"architecture": "c4"},
    "fpn_cascade_mask": {"cascade": True},
    "fpn_gn_cascade_mask": {"cascade": True, **GN, **GN_HEADS},
    "fpn_joint": {"mask": False, "fpn": {"proposal_mode": "Joint"}},
    "fpn_stride1x1": {"mask": False, "backbone": {"stride_1x1": True}},
    "fpn_tfpad": {"mask": False, "backbone": {"tf_pad_mode": True}},
    "r101_c4_mask": {"architecture": "c4", "backbone": {"blocks": R101_BLOCKS}},
    "r101_fpn_mask": {"backbone": {"blocks": R101_BLOCKS}},
    "r101_fpn_gn_cascade_mask": {
        "cascade": True,
        "backbone": {"norm": "GN", "blocks": R101_BLOCKS},
        "fpn": {"norm": "GN"},
        **GN_HEADS,
    },
    "r50_fpn_4conv1fc": {"mask": False, "box_head": {"kind": "4conv1fc"}},
    "r50_fpn_gn_mask": {**GN, **GN_HEADS},
    "r50_fpn_nonorm_mask": {"backbone": {"norm": "None"}},
    "r50_fpn_syncbn_mask": {"backbone": {"norm": "SyncBN"}},
}


def model_of(changes: dict) -> MaskRCNN:
    return build_mask_rcnn(ModelConfig.model_validate({"num_categories": 80, **changes}))


@pytest.mark.parametrize("table", TABLES)
def test_the_model_has_their_variables_and_no_others(table, monkeypatch):
    # The values do not matter here, and drawing them is most of the time.
    monkeypatch.setattr(torch.Tensor, "normal_", lambda tensor, *_, **__: tensor.fill_(0.5))
    model = model_of(TABLES[table])
    shapes = {
        golden.tensorpack_name(name, model.config): list(golden.npz_shape(name, tensor))
        for name, tensor in model.state_dict().items()
    }
    assert shapes == golden.golden_json(f"vars_{table}")


@pytest.mark.parametrize("table", ["fpn_mask", "c4_mask", "fpn_cascade_mask", "fpn_gn_cascade_mask"])
def test_their_trainable_variables_are_ours(table, monkeypatch):
    monkeypatch.setattr(torch.Tensor, "normal_", lambda tensor, *_, **__: tensor.fill_(0.5))
    model = model_of(TABLES[table])
    ours = {golden.tensorpack_name(n, model.config) for n, p in model.named_parameters() if p.requires_grad}
    assert ours == set(golden.golden_json(f"trainable_{table}"))


@pytest.mark.parametrize("variant", ["fpn", "c4"])
@pytest.mark.parametrize(
    ("freeze_at", "frozen"), [(0, ()), (1, ("backbone.stem.",)), (2, ("backbone.stem.", "backbone.group0."))]
)
def test_freeze_at_freezes_that_many_stages(variant, freeze_at, frozen):
    model = small_model(variant, backbone={"freeze_at": freeze_at})
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad != name.startswith(frozen or ("nothing",)), name


@pytest.mark.parametrize("variant", ["fpn", "c4"])
def test_freeze_affine_freezes_every_scale_and_offset_of_the_backbone(variant):
    model = small_model(variant, backbone={"freeze_at": 0, "freeze_affine": True})
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad == ("norm" not in name), name


def test_kernels_start_with_tensorpacks_spread():
    torch.manual_seed(3)
    model = model_of({"cascade": True, **GN_HEADS})
    spread = {
        "backbone.group2.0.conv2.weight": (2 / (9 * 256)) ** 0.5,
        "fpn.lateral_c5.weight": (1 / 2048) ** 0.5,
        "fpn.output_p3.weight": (1 / (9 * 256)) ** 0.5,
        "rpn.conv.weight": 0.01,
        "rpn.box.weight": 0.01,
        "box_heads.1.conv2.weight": (2 / (9 * 256)) ** 0.5,
        "box_heads.2.fc.weight": (1 / 12544) ** 0.5,
        "box_heads.0.class_logits.weight": 0.01,
        "box_heads.0.box_deltas.weight": 0.001,
        "mask_head.conv1.weight": (2 / (9 * 256)) ** 0.5,
        "mask_head.deconv.weight": (2 / (4 * 256)) ** 0.5,
        "mask_head.logits.weight": 0.001,
    }
    state = model.state_dict()
    for name, std in spread.items():
        assert state[name].std().item() == pytest.approx(std, rel=0.05), name
        assert abs(state[name].mean().item()) < 0.05 * std, name
    cut = state["fpn.output_p3.weight"].abs().max() / spread["fpn.output_p3.weight"]
    assert cut.item() == pytest.approx(2 / 0.8796, rel=1e-2), "a normal cut at two deviations has no tail"


def test_blocks_start_as_their_shortcuts_and_other_scales_at_one():
    for variant, zeros in [("fpn", "norm3.weight"), ("gn", "norm3.weight"), ("no_norm", "conv3.weight")]:
        model = build_mask_rcnn(small_config(variant))
        for name, parameter in model.named_parameters():
            if name.endswith(zeros) and name.startswith("backbone"):
                assert not parameter.any(), name
            elif "norm" in name and name.endswith("weight"):
                assert bool((parameter == 1).all()), name
            elif name.endswith("bias"):
                assert not parameter.any(), name
            else:
                assert parameter.any(), name


def test_the_same_seed_gives_the_same_model():
    models = []
    for _ in range(2):
        torch.manual_seed(11)
        models.append(build_mask_rcnn(small_config()).state_dict())
    assert all(torch.equal(tensor, models[1][name]) for name, tensor in models[0].items())
    torch.manual_seed(12)
    other = build_mask_rcnn(small_config()).state_dict()
    assert not torch.equal(other["rpn.conv.weight"], models[0]["rpn.conv.weight"])


@pytest.mark.parametrize("variant", ["fpn", "c4", "gn"])
def test_a_model_with_given_weights_is_that_model_and_draws_nothing(variant):
    model = small_model(variant)
    before = torch.get_rng_state()
    same = mask_rcnn_with(model.config, model.state_dict())
    assert torch.equal(torch.get_rng_state(), before)
    for found, expected in ((same.parameters(), model.parameters()), (same.buffers(), model.buffers())):
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(one, other)
    frozen = [parameter.requires_grad for parameter in model.parameters()]
    assert [parameter.requires_grad for parameter in same.parameters()] == frozen


def test_a_state_dict_that_lacks_a_tensor_is_refused():
    model = small_model()
    tensors = model.state_dict()
    del tensors["rpn.conv.weight"]
    with pytest.raises(RuntimeError, match=r"rpn\.conv\.weight"):
        mask_rcnn_with(model.config, tensors)


def test_a_model_without_a_number_of_categories_is_refused():
    with pytest.raises(ConfigError, match="how many categories") as error:
        build_mask_rcnn(ModelConfig())
    assert "model.num_categories" in error.value.remedy


def test_a_pyramid_of_another_height_is_refused():
    config = small_config(fpn={"anchor_strides": (4, 8)}, rpn={"anchor_sizes": (32.0, 64.0)})
    with pytest.raises(ConfigError, match="2 levels"):
        build_mask_rcnn(config)


@pytest.mark.parametrize(
    ("shape", "complaint"),
    [
        ((1, 1, 32, 32), "BGR"),
        ((1, 4, 32, 32), "BGR"),
        ((3, 32, 32), "BGR"),
        ((1, 3, 0, 32), "0 x 32"),
        ((0, 3, 8, 8), "batch of 0"),
    ],
)
def test_images_that_cannot_be_read_are_refused(shape, complaint):
    images = Images(torch.zeros(shape), torch.ones(shape[0], 2, dtype=torch.int64))
    with pytest.raises(DataError, match=complaint) as error:
        small_model().detect(images)
    assert error.value.remedy


def test_sizes_that_do_not_fit_the_images_are_refused():
    with pytest.raises(DataError, match="sizes"):
        small_model().detect(Images(torch.zeros(2, 3, 32, 32), torch.tensor([[32, 32]])))


def test_masks_cannot_be_trained_without_outlines():
    batch = small_batch([(64, 64)])
    targets = type(batch.targets)(
        batch.targets.boxes,
        batch.targets.labels,
        batch.targets.valid,
        batch.targets.crowd_boxes,
        batch.targets.crowd_valid,
        outlines=None,
    )
    without = type(batch)(batch.images, targets, batch.seed, batch.image_ids)
    with pytest.raises(DataError, match="outlines"):
        small_model().losses(without)
    assert small_model("faster").losses(without)


def test_every_variant_has_a_head_for_each_stage():
    for variant in VARIANTS:
        model = build_mask_rcnn(small_config(variant))
        assert len(model.box_heads) == (3 if model.config.cascade else 1)
        assert (model.mask_head is None) == (not model.config.mask)
