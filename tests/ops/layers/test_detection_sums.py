"""Detection whose convolutions leave bias, sum, ReLU and zeros outside to one kernel, as on a GPU without gradients."""

from __future__ import annotations

import pytest
import small
import torch
import torch.nn.functional as F

from maskfleet.batch import Detections
from maskfleet.model.backbones.resnet import pooled_with_bias_and_relu
from maskfleet.ops.layers import conv_sum

FIELDS = ("boxes", "scores", "labels", "valid", "masks")


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["fpn", "gn", "c4"])
def test_detections_and_features_are_those_of_the_operators(
    variant: str, kernel_device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    model = small.small_model(variant, inference={"max_detections": 4}).to(kernel_device).eval()
    model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    images = small.small_batch([(64, 96), (33, 40)], canvas=(64, 96)).images.to(kernel_device)
    summed: list[tuple[int, ...]] = []
    found: list[Detections] = []
    for uses_kernel in (False, True):

        def kernels(tensor: torch.Tensor, uses_kernel: bool = uses_kernel) -> bool:
            summed.extend([tuple(tensor.shape)] if uses_kernel else [])
            return uses_kernel

        monkeypatch.setattr(conv_sum, "kernels_for", kernels)
        found.append(model.detect(images))
    assert summed
    expected, actual = found
    assert expected.valid.any()
    for name in FIELDS:
        torch.testing.assert_close(getattr(actual, name), getattr(expected, name), rtol=1e-4, atol=1e-3)


def test_bias_and_relu_after_the_maximum_change_no_bit() -> None:
    generator = torch.Generator().manual_seed(0)
    features, bias = torch.randn(2, 5, 8, 12, generator=generator), torch.randn(5, generator=generator)
    for dtype in (torch.float32, torch.bfloat16):
        before = F.relu(features.to(dtype) + bias.to(dtype)[:, None, None])
        expected = F.max_pool2d(before, 3, stride=2, padding=1)
        assert torch.equal(pooled_with_bias_and_relu(features.to(dtype), bias), expected)
