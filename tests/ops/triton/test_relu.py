"""The kernels of ReLU's gradient against plain torch in double precision."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from maskfleet.ops.layers.relu import relu_backward


def some_inputs(
    shape: tuple[int, int, int, int], num_gradients: int, dtype: torch.dtype, device: str
) -> tuple[list[Tensor], Tensor]:
    """Gradients, and outputs of which half are 0."""
    generator = torch.Generator().manual_seed(0)
    gradients = [torch.randn(shape, generator=generator).to(dtype).to(device) for _ in range(num_gradients)]
    outputs = torch.randn(shape, generator=generator).relu().to(dtype).to(device)
    return gradients, outputs.to(memory_format=torch.channels_last)


def check(gradients: list[Tensor], outputs: Tensor) -> None:
    """Result and sums are those of plain torch, and the same bits again."""
    from maskfleet.ops.triton import relu as kernels

    expected = torch.where(outputs > 0, torch.stack(gradients).double().sum(dim=0), 0.0)
    masked, sums = kernels.relu_backward(gradients, outputs, sums=True)
    again, sums_again = kernels.relu_backward(gradients, outputs, sums=True)
    assert sums is not None
    assert torch.equal(masked, again)
    assert torch.equal(sums, sums_again)
    assert masked.dtype == outputs.dtype
    assert masked.is_contiguous(memory_format=torch.channels_last)
    # One rounding of the sum; the sums themselves are of numbers before that.
    assert (masked.double() - expected).abs().max() <= torch.finfo(masked.dtype).eps * expected.abs().max()
    assert (sums.double() - expected.sum(dim=(0, 2, 3))).norm() <= 1e-6 * expected.sum(dim=(0, 2, 3)).norm() + 1e-9
    without, none = kernels.relu_backward(gradients, outputs, sums=False)
    assert none is None
    assert torch.equal(without, masked)


@pytest.mark.parametrize("num_gradients", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(2, 8, 5, 7), (3, 21, 3, 1), (1, 1, 1, 1)])
def test_the_gradient_and_its_sums_agree_with_double_precision(
    shape: tuple[int, int, int, int],
    dtype: torch.dtype,
    num_gradients: int,
    kernel_device: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from maskfleet.ops.triton import relu as kernels

    # Several channel blocks and chunks, several tiles in a chunk and an incomplete last one.
    for name, value in {"TILE": 64, "MAX_BLOCK": 16, "PROGRAMS": 6, "_COMBINED_CHUNKS": 2}.items():
        monkeypatch.setattr(kernels, name, value)
    check(*some_inputs(shape, num_gradients, dtype, kernel_device))


def test_gradients_may_have_another_memory_layout_and_not_be_finite_where_relu_cut(kernel_device: str) -> None:
    (first, second), outputs = some_inputs((2, 6, 4, 5), 2, torch.float32, kernel_device)
    second = second.transpose(2, 3).contiguous().transpose(2, 3)
    check([first, second], outputs)
    from maskfleet.ops.triton import relu as kernels

    masked, _ = kernels.relu_backward([first.masked_fill(outputs == 0, torch.nan), second], outputs, sums=False)
    assert torch.equal(masked, kernels.relu_backward([first, second], outputs, sums=False)[0])


@pytest.mark.parametrize("shape", [(0, 8, 3, 3), (2, 8, 0, 3)])
def test_no_maps_and_no_pixels_have_zero_sums(shape: tuple[int, int, int, int], kernel_device: str) -> None:
    from maskfleet.ops.triton import relu as kernels

    masked, sums = kernels.relu_backward(*some_inputs(shape, 1, torch.float32, kernel_device), sums=True)
    assert masked.shape == shape
    assert sums is not None
    assert sums.tolist() == [0.0] * 8


@pytest.mark.parametrize("sums", [False, True])
def test_the_operator_describes_its_results_to_the_compiler(sums: bool, operators_on_cpu: None) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tests = ("test_schema", "test_faketensor")
    for shape in [(2, 8, 4, 3), (2, 8, 1, 1)]:
        gradients, outputs = some_inputs(shape, 2, torch.float32, device)
        torch.library.opcheck(relu_backward, (gradients, outputs, sums), test_utils=tests)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("num_gradients", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sizes_of_the_model_on_the_gpu_agree_with_double_precision_and_repeat(
    num_gradients: int, dtype: torch.dtype
) -> None:
    for shape in [(2, 256, 200, 336), (2, 128, 100, 168), (2, 2048, 25, 42), (64, 256, 14, 14)]:
        check(*some_inputs(shape, num_gradients, dtype, "cuda"))
