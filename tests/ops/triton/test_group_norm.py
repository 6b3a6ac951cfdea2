"""The kernels of group normalisation against plain torch in double precision, forward and gradient."""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from maskfleet.ops.layers import group_norm as layer

Result = tuple[Tensor, list[Tensor]]  # outputs, and gradients of features, weight, bias and residual


@dataclass(frozen=True, slots=True)
class Case:
    """Shapes and options; image areas differ, that of the second map has a gap, and that of the third is empty."""

    shape: tuple[int, int, int, int]
    num_groups: int
    has_mask: bool = False
    has_residual: bool = False
    relu: bool = False
    dtype: torch.dtype = torch.float32
    readers: int = 1  # each gets a different share of the gradient

    def inputs(self) -> tuple[list[Tensor], Tensor | None, Tensor]:
        """Features, weight, bias and residual; the mask; and the gradient of the outputs."""
        maps, channels, height, width = self.shape
        generator = torch.Generator().manual_seed(0)
        features = (torch.randn(self.shape, generator=generator) * 2 + 5).to(self.dtype)
        values = [features, *torch.randn(2, channels, generator=generator)]
        if self.has_residual:
            values.append(torch.randn(self.shape, generator=generator).to(self.dtype))
        mask = None
        if self.has_mask:
            mask = torch.zeros(maps, 1, height, width)
            for image in range(maps):
                mask[image, :, : max(1, height - 1 - image), : max(1, width - 2 * image)] = 1
            mask[1:2, :, 0, :1] = 0
            mask[2:3] = 0
        return values, mask, torch.randn(self.shape, generator=generator).to(self.dtype)

    def expected(self) -> Result:
        """Plain torch in double precision; what is outside of an image gets no gradient."""
        values, mask, gradient = self.inputs()
        return run([value.double() for value in values], mask, gradient.double(), self)


def run(values: list[Tensor], mask: Tensor | None, gradient: Tensor, case: Case) -> Result:
    """The public function and its gradients."""
    values = [value.requires_grad_() for value in values]
    residual = values[3] if case.has_residual else None
    if case.readers == 1:
        outputs = layer.group_norm(*values[:3], case.num_groups, mask=mask, residual=residual, relu=case.relu)
        return outputs.detach(), list(torch.autograd.grad(outputs, values, gradient))
    options = {"mask": mask, "residual": residual, "relu": case.relu, "readers": case.readers}
    shared = layer.shared_group_norm(*values[:3], case.num_groups, **options)
    shares = [gradient / 2**number for number in range(1, case.readers)]
    shares.append(shares[-1])
    return shared[0].detach(), list(torch.autograd.grad(shared, values, shares))


def check(actual: Result, expected: Result, dtype: torch.dtype, *, at_zero: float = 0.0) -> None:
    """`at_zero`: share of the gradient at sums that round to the other side of ReLU's 0."""
    tolerance = at_zero + (1e-6 if dtype == torch.float32 else 5e-3)
    for one, other in zip([actual[0], *actual[1]], [expected[0], *expected[1]], strict=True):
        assert one.shape == other.shape
        assert (one.double().cpu() - other).norm() <= tolerance * other.norm()


@pytest.fixture
def kernels_on(kernel_device: str, monkeypatch: pytest.MonkeyPatch) -> Callable[[Case], Result]:
    """Runs a case by the kernels: on a GPU, or on the CPU in Triton's interpreter."""
    _interpret_on_cpu()
    monkeypatch.setattr(layer, "kernels_for", lambda _: True)

    def run_case(case: Case) -> Result:
        values, mask, gradient = case.inputs()
        values = [value.to(kernel_device) for value in values]
        return run(values, None if mask is None else mask.to(kernel_device), gradient.to(kernel_device), case)

    return run_case


@functools.cache
def _interpret_on_cpu() -> None:
    """Give the operators, which exist for CUDA only, a version for the CPU."""
    from maskfleet.ops.triton import group_norm as kernels

    @layer._group_norm.register_kernel("cpu")
    def _(*inputs):
        *tensors, relu = inputs
        return kernels.group_norm(*tensors, layer.EPSILON, relu)

    @layer._group_norm_backward.register_kernel("cpu")
    def _(*inputs):
        to_features, to_parameters, to_sum = kernels.group_norm_backward(*inputs)
        return to_features, to_parameters, torch.empty(0, dtype=to_features.dtype) if to_sum is None else to_sum


@pytest.fixture
def chunked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small tiles, so that small maps have several chunks, several tiles in a chunk and an incomplete last one."""
    from maskfleet.ops.triton import group_norm, group_norm_small

    monkeypatch.setattr(group_norm_small, "MAX_PIXELS", 0)
    monkeypatch.setattr(group_norm, "TILE", 64)
    monkeypatch.setattr(group_norm, "MAX_BLOCK", 8)
    monkeypatch.setattr(group_norm, "PROGRAMS", 6)
    monkeypatch.setattr(group_norm, "FOLD", 2)


ALL = {"has_mask": True, "has_residual": True, "relu": True}
FAST = [Case((3, 8, 5, 7), 4, **ALL), Case((2, 12, 3, 5), 4, relu=True), Case((9, 8, 2, 2), 4)]
SHARED = [Case((3, 8, 5, 7), 4, **ALL, readers=3), Case((2, 12, 3, 5), 4, readers=2)]


@pytest.mark.parametrize("case", [*FAST, *SHARED])
def test_chunked_kernels_agree_with_double_precision(case: Case, chunked: None, kernels_on) -> None:
    check(kernels_on(case), case.expected(), case.dtype)


@pytest.mark.parametrize(
    "case",
    [
        Case((3, 32, 3, 5), 8, **ALL, readers=3),
        Case((2, 64, 2, 2), 16, has_mask=True, has_residual=True),
        Case((2, 32, 1, 1), 8),
    ],
)
def test_small_maps_agree_with_double_precision(case: Case, kernels_on) -> None:
    check(kernels_on(case), case.expected(), case.dtype)


OPTIONS = [(mask, residual, relu) for mask in (False, True) for residual in (False, True) for relu in (False, True)]


@pytest.mark.slow
@pytest.mark.parametrize(("has_mask", "has_residual", "relu"), OPTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_options_agree_with_double_precision(
    has_mask: bool, has_residual: bool, relu: bool, dtype: torch.dtype, kernels_on
) -> None:
    for shape, num_groups in [
        ((1, 64, 17, 20), 32),  # chunked, two channels in a group
        ((2, 24, 7, 5), 8),  # three channels in a group, which the kernel of small maps cannot have
        ((3, 64, 7, 7), 32),
        ((2, 64, 1, 1), 1),
        ((2, 40, 2, 3), 8),  # small, five channels in a group
    ]:
        case = Case(shape, num_groups, has_mask, has_residual, relu, dtype)
        check(kernels_on(case), case.expected(), dtype)


@pytest.mark.parametrize("small", [False, True])
def test_a_mean_far_from_zero_costs_no_precision(small: bool, kernel_device: str, request) -> None:
    if not small:
        request.getfixturevalue("chunked")
    from maskfleet.ops.triton import group_norm as kernels

    # Multiples of 1/8 near 4096 are exact in float32; their squares are not, by about as much as the variance.
    numbers = torch.randint(-16, 16, (1, 8, 6, 6), generator=torch.Generator().manual_seed(0)) / 8
    far = (numbers + 4096).to(kernel_device)
    weight, bias = torch.ones(8, device=kernel_device), torch.zeros(8, device=kernel_device)
    outputs, _ = kernels.group_norm(far, weight, bias, None, None, 4, layer.EPSILON, False)
    expected = torch.nn.functional.group_norm(numbers.double(), 4, eps=layer.EPSILON)
    torch.testing.assert_close(outputs.double().cpu(), expected, rtol=0, atol=1e-3)


def test_values_outside_the_image_do_not_matter_even_if_not_finite(chunked: None, kernels_on) -> None:
    case = FAST[0]
    values, mask, gradient = case.inputs()
    assert mask is not None
    outside = mask.expand(case.shape) == 0
    spoilt = [value.masked_fill(outside, torch.nan) if value.dim() == 4 else value for value in values]
    spoilt_gradient = gradient.masked_fill(outside, torch.nan)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    actual = run([value.to(device) for value in spoilt], mask.to(device), spoilt_gradient.to(device), case)
    check(actual, case.expected(), case.dtype)
    assert not actual[0].cpu()[outside].any()


def test_no_maps_and_no_pixels_have_zero_gradients(kernels_on) -> None:
    for shape in [(0, 8, 3, 3), (2, 8, 0, 3)]:
        outputs, gradients = kernels_on(Case(shape, 4))
        assert outputs.shape == shape
        assert [tuple(gradient.shape) for gradient in gradients] == [shape, (8,), (8,)]
        assert not any(gradient.any() for gradient in gradients)


@pytest.mark.parametrize("shape", [(2, 8, 4, 3), (2, 8, 1, 1)])
def test_operators_describe_their_results_to_the_compiler(shape: tuple[int, int, int, int], kernels_on) -> None:
    case = Case(shape, 4, **ALL)
    values, mask, gradient = case.inputs()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    features, weight, bias, residual = (value.to(device) for value in values)
    mask = mask.to(device)
    inputs = (features, weight, bias, residual, mask, 4, True)
    tests = ("test_schema", "test_faketensor", "test_autograd_registration")
    torch.library.opcheck(layer._group_norm, inputs, test_utils=tests)
    outputs, statistics = layer._group_norm(*inputs)
    for separate in (False, True):
        saved = (features, weight, bias, statistics, mask, outputs, True, separate)
        torch.library.opcheck(layer._group_norm_backward, ([gradient.to(device)], *saved), test_utils=tests)


@pytest.mark.slow
def test_the_layer_compiles_into_one_graph_with_the_same_gradients(kernels_on, monkeypatch) -> None:
    case = FAST[1]
    expected = kernels_on(case)
    monkeypatch.setattr(layer, "group_norm", torch.compile(layer.group_norm, fullgraph=True, backend="aot_eager"))
    compiled = kernels_on(case)
    for one, other in zip([compiled[0], *compiled[1]], [expected[0], *expected[1]], strict=True):
        assert torch.equal(one, other)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("has_mask", "has_residual", "relu"), OPTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sizes_of_the_model_on_the_gpu_agree_with_double_precision_and_repeat(
    has_mask: bool, has_residual: bool, relu: bool, dtype: torch.dtype, kernels_on
) -> None:
    for shape in [(2, 64, 200, 336), (2, 256, 100, 168), (2, 2048, 25, 42), (64, 256, 14, 14), (256, 256, 7, 7)]:
        case = Case(shape, 32, has_mask, has_residual, relu, dtype)
        first, second = kernels_on(case), kernels_on(case)
        check(first, case.expected(), dtype, at_zero=2e-3 if relu else 0.0)
        for one, other in zip([first[0], *first[1]], [second[0], *second[1]], strict=True):
            assert torch.equal(one, other)
