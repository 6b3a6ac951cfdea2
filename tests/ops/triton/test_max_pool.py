"""The kernels of the stem's pooling against torch's max_pool2d, to the last bit, forward and gradient."""

import functools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from maskfleet.ops.layers import max_pool as layer

Result = tuple[Tensor, Tensor]  # maxima, and gradient of the features


@pytest.fixture
def pool(kernel_device: str, monkeypatch: pytest.MonkeyPatch) -> Callable[[Tensor, Tensor, bool], Result]:
    """The public function by the kernels: on a GPU, or on the CPU in Triton's interpreter."""
    _interpret_on_cpu()
    monkeypatch.setattr(layer, "kernels_for", lambda _: True)

    def run(features: Tensor, gradient: Tensor, pads_first: bool) -> Result:
        features = features.to(kernel_device).requires_grad_()
        maxima = layer.max_pool(features, pads_first=pads_first)
        assert "max_pool" in type(maxima.grad_fn).__name__, "torch's pooling ran instead of the kernel"
        (to_features,) = torch.autograd.grad(maxima, [features], gradient.to(kernel_device))
        assert to_features.is_contiguous(memory_format=torch.channels_last)
        return maxima.detach().cpu(), to_features.cpu()

    return run


@functools.cache
def _interpret_on_cpu() -> None:
    """Give the operators, which exist for CUDA only, a version for the CPU."""
    from maskfleet.ops.triton import max_pool as kernels

    layer._max_pool.register_kernel("cpu")(lambda *inputs: kernels.max_pool(*inputs))
    layer._max_pool_backward.register_kernel("cpu")(lambda *inputs: kernels.max_pool_backward(*inputs))


def torch_pool(features: Tensor, gradient: Tensor, pads_first: bool) -> Result:
    """The same by torch."""
    features = features.clone().requires_grad_()
    height, width = (side // 2 for side in features.shape[2:])
    padded = features if pads_first else F.pad(features, (0, 1, 0, 1), value=-torch.inf)
    maxima = F.max_pool2d(padded, 3, stride=2, padding=int(pads_first))[:, :, :height, :width]
    return maxima.detach(), *torch.autograd.grad(maxima, [features], gradient)


def check(pool, features: Tensor, pads_first: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    shape = (*features.shape[:2], *(side // 2 for side in features.shape[2:]))
    # Whole numbers: their sums are exact in half precision, which the interpreter does not round to nearest.
    gradient = torch.randint(-16, 16, shape, generator=generator).to(features.dtype)
    for one, other in zip(
        pool(features, gradient, pads_first), torch_pool(features, gradient, pads_first), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


def few_values(shape: tuple[int, ...]) -> Tensor:
    """Numbers with many ties, of both signs, infinities and NaN among them."""
    values = torch.tensor([-torch.inf, -2.0, -0.0, 0.0, 1.0, 1.5, torch.inf, torch.nan])
    generator = torch.Generator().manual_seed(0)
    return values[torch.randint(len(values), shape, generator=generator)]


@pytest.mark.parametrize("pads_first", [True, False])
@pytest.mark.parametrize("shape", [(1, 8, 7, 5), (2, 3, 2, 4)])
def test_maxima_and_gradients_are_those_of_torch(shape: tuple[int, ...], pads_first: bool, pool) -> None:
    check(pool, torch.randn(shape, generator=torch.Generator().manual_seed(0)), pads_first)
    check(pool, few_values(shape), pads_first)


@pytest.mark.parametrize("pads_first", [True, False])
def test_the_first_pixel_of_the_map_wins_where_all_are_equal(pads_first: bool, pool) -> None:
    for value in (-torch.inf, 0.0):
        check(pool, torch.full((1, 8, 5, 6), value), pads_first)


@pytest.mark.slow
@pytest.mark.parametrize("pads_first", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 72, 5, 4), (2, 64, 19, 37), (1, 16, 34, 68)])
def test_several_programs_agree_with_torch(shape: tuple[int, ...], dtype: torch.dtype, pads_first: bool, pool) -> None:
    """Several strips of rows, tiles of columns and blocks of channels, all with an incomplete last one."""
    check(pool, torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype), pads_first)
    check(pool, few_values(shape).to(dtype), pads_first)


def test_no_maps_and_maps_of_one_pixel_have_no_maxima(pool) -> None:
    for shape in [(0, 8, 4, 4), (1, 8, 1, 1), (2, 8, 1, 6)]:
        size = (*shape[:2], shape[2] // 2, shape[3] // 2)
        maxima, to_features = pool(torch.ones(shape), torch.ones(size), True)
        assert maxima.shape == size
        assert to_features.shape == shape
        assert not to_features.any()


@pytest.mark.slow
def test_operators_describe_their_results_to_the_compiler(pool, kernel_device: str) -> None:
    features = torch.randn(2, 8, 5, 6, device=kernel_device, requires_grad=True)
    tests = ("test_schema", "test_faketensor", "test_autograd_registration")
    torch.library.opcheck(layer._max_pool, (features, True), test_utils=tests)
    maxima, positions = layer._max_pool(features.detach(), True)
    torch.library.opcheck(layer._max_pool_backward, (maxima, positions, 5, 6, True), test_utils=tests)


def test_without_a_gradient_torch_pools(pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer, "_max_pool", None)
    features = torch.randn(1, 8, 6, 6, requires_grad=True)
    with torch.no_grad():
        layer.max_pool(features, pads_first=True)
    layer.max_pool(features.detach(), pads_first=True)


@pytest.mark.slow
def test_the_pooling_compiles_into_one_graph_with_the_kernels(pool) -> None:
    operators = []

    def backend(graph, inputs):
        operators.extend(str(node.target) for node in graph.graph.nodes)
        return graph

    features = torch.randn(1, 8, 6, 6, requires_grad=True)
    compiled = torch.compile(lambda x: layer.max_pool(x * 2, pads_first=True), fullgraph=True, backend=backend)
    assert torch.equal(compiled(features), layer.max_pool(features * 2, pads_first=True))
    assert any("maskfleet.max_pool" in name for name in operators)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("pads_first", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sizes_of_the_model_on_the_gpu_are_those_of_torch(dtype: torch.dtype, pads_first: bool, pool) -> None:
    check(pool, torch.randn(2, 64, 400, 672, generator=torch.Generator().manual_seed(0)).relu().to(dtype), pads_first)
    check(pool, few_values((1, 64, 213, 331)).to(dtype), pads_first)
