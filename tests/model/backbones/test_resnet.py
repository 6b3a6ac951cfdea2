"""The backbone against TensorPack's layers written out: explicit zero padding, then convolutions that pad nothing."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from small import small_model
from torch import Tensor

from maskfleet.batch import Images
from maskfleet.model import norm
from maskfleet.model.backbones import resnet
from maskfleet.model.mask_rcnn import MaskRCNN
from maskfleet.model.norm import Conv


class Written:
    """One image through the backbone, as upstream's graph has it."""

    def __init__(self, model: MaskRCNN) -> None:
        self.state = model.state_dict()
        self.tf_pad = model.config.backbone.tf_pad_mode
        self.stride_1x1 = model.config.backbone.stride_1x1
        self.is_fpn = model.config.architecture == "fpn"
        self.blocks = model.config.backbone.blocks

    def pads(self, first: int, last: int) -> tuple[int, int, int, int]:
        """Left and top `first`, right and bottom `last`; TF_PAD_MODE swaps them."""
        first, last = (last, first) if self.tf_pad else (first, last)
        return first, last, first, last

    def conv(self, x: Tensor, conv: str, norm: str, *, stride: int = 1, padding: int = 0) -> Tensor:
        x = F.conv2d(x, self.state[f"{conv}.weight"], stride=stride, padding=padding)
        parts = [self.state[f"{norm}.{part}"] for part in ("running_mean", "running_var", "weight", "bias")]
        return F.batch_norm(x, *parts, eps=1e-5)

    def block(self, x: Tensor, name: str, *, stride: int) -> Tensor:
        if self.stride_1x1:
            inner = x[:, :, :-1, :-1] if stride == 2 else x
            inner = self.conv(inner, f"{name}.conv1", f"{name}.norm1", stride=stride).relu()
            inner = self.conv(inner, f"{name}.conv2", f"{name}.norm2", padding=1).relu()
        else:
            inner = self.conv(x, f"{name}.conv1", f"{name}.norm1").relu()
            if stride == 2:
                inner = F.pad(inner, self.pads(1, 0))
                inner = self.conv(inner, f"{name}.conv2", f"{name}.norm2", stride=2).relu()
            else:
                inner = self.conv(inner, f"{name}.conv2", f"{name}.norm2", padding=1).relu()
        inner = self.conv(inner, f"{name}.conv3", f"{name}.norm3")
        if f"{name}.shortcut.conv.weight" in self.state:
            x = x[:, :, :-1, :-1] if stride == 2 and not self.is_fpn else x
            x = self.conv(x, f"{name}.shortcut.conv", f"{name}.shortcut.norm", stride=stride)
        return (inner + x).relu()

    def stages(self, pixels: Tensor) -> list[Tensor]:
        x = F.pad(pixels, self.pads(3, 2))
        x = self.conv(x, "backbone.stem.conv", "backbone.stem.norm", stride=2).relu()
        x = F.max_pool2d(F.pad(x, self.pads(1, 0)), 3, stride=2)
        stages = [x]
        for group in range(4 if self.is_fpn else 3):
            for block in range(self.blocks[group]):
                stride = 2 if group > 0 and block == 0 else 1
                x = self.block(x, f"backbone.group{group}.{block}", stride=stride)
            stages.append(x)
        return stages


@pytest.mark.parametrize("size", [(96, 128), (93, 118), (107, 161), (64, 65)])
@pytest.mark.parametrize("variant", ["fpn", "tf_pad", "stride_1x1", "c4", "c4_tf_pad", "c4_stride_1x1"])
@torch.no_grad()
def test_features_of_any_size_are_those_of_the_layers_written_out(variant, size):
    torch.manual_seed(4)
    model = small_model(variant)
    images = Images(torch.rand(1, 3, *size) * 255, torch.tensor([size]))
    pixels, canvas = model.prepared(images)
    written = Written(model).stages(pixels)
    ours = [model.backbone.stem(pixels, canvas), *model.backbone(pixels, canvas)]
    for one, other in zip(ours, written, strict=True):
        assert one.shape == other.shape
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_odd_sides_are_halved_downwards_without_a_pyramid():
    model = small_model("c4")
    pixels, canvas = model.prepared(Images(torch.zeros(1, 3, 213, 331), torch.tensor([[213, 331]])))
    assert pixels.shape[2:] == (213, 331)
    stages = model.backbone(pixels, canvas)
    assert [tuple(stage.shape[2:]) for stage in stages] == [(53, 82), (26, 41), (13, 20)]
    assert canvas.extents[16].tolist() == [[13, 20]]


@torch.no_grad()
def test_the_pyramid_pads_images_to_a_multiple_of_32():
    model = small_model("fpn")
    features = model.features(Images(torch.zeros(1, 3, 213, 331), torch.tensor([[213, 331]])))
    assert [tuple(one.shape[2:]) for one in features.maps] == [(56, 88), (28, 44), (14, 22), (7, 11), (4, 6)]
    assert [extent.tolist() for extent in features.extents] == [[[56, 88]], [[28, 44]], [[14, 22]], [[7, 11]], [[4, 6]]]


def test_pixels_are_normalised_as_bgr_and_padding_is_zero_afterwards():
    model = small_model("fpn")
    pixels = torch.tensor([103.53, 116.28 + 57.12, 123.675 - 2 * 58.395]).view(1, 3, 1, 1).repeat(1, 1, 40, 40)
    ours, _ = model.prepared(Images(pixels, torch.tensor([[30, 20]])))
    assert ours.shape == (1, 3, 64, 64)
    torch.testing.assert_close(ours[0, :, 29, 19], torch.tensor([0.0, 1.0, -2.0]), rtol=0, atol=1e-5)
    assert not ours[:, :, 30:].any()
    assert not ours[:, :, :, 20:].any()


@pytest.mark.parametrize("variant", ["fpn", "tf_pad", "stride_1x1", "c4", "gn"])
@torch.no_grad()
def test_fused_layers_compute_the_same_features(variant, monkeypatch):
    """The branches that half precision takes on a GPU, here in float32."""
    model = small_model(variant)
    images = Images(torch.rand(2, 3, 93, 118) * 255, torch.tensor([[93, 118], [64, 70]]))
    plain = model.features(images).maps
    for module in (norm, resnet):
        monkeypatch.setattr(module, "fuses", lambda features: True)
    for one, other in zip(model.features(images).maps, plain, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("kernel", "stride", "tf_pad"), [(3, 1, False), (3, 2, False), (3, 2, True), (7, 2, False)])
def test_a_convolution_knows_whether_it_reads_beyond_an_image(kernel, stride, tf_pad):
    conv = Conv(1, 1, kernel, stride=stride, tf_pad=tf_pad)
    torch.nn.init.ones_(conv.weight)
    alone = torch.zeros(1, 1, 8, 8)
    beside = torch.zeros(1, 1, 16, 16)
    beside[:, :, 8:] = 1
    beside[:, :, :, 8:] = 1
    size = 8 // stride
    depends = not torch.equal(
        conv.with_kernel(alone, conv.weight, None), conv.with_kernel(beside, conv.weight, None)[:, :, :size, :size]
    )
    assert conv.reads_outside == depends
