"""The gradient of the RPN's head at a few anchors against that of the dense head."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from maskfleet.ops.layers import sparse_gradient
from maskfleet.ops.layers.sparse_gradient import with_sparse_gradient

SIZES = [(4, 5), (2, 3), (1, 1)]
PER_CELL = 2
CELLS = sum(height * width for height, width in SIZES)
ANCHORS = PER_CELL * CELLS


class Head:
    """Random maps and layers, and the dense head on them."""

    def __init__(self, *, batch: int = 2, channels: int = 3, dtype: torch.dtype = torch.float64) -> None:
        generator = torch.Generator().manual_seed(0)

        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

        self.maps = [random(batch, channels, *size) for size in SIZES]
        self.hidden = (random(6, channels, 3, 3), random(6))
        self.outputs = (random(5 * PER_CELL, 6), random(5 * PER_CELL))
        self.inputs = [*self.maps, *self.hidden, *self.outputs]

    def dense(self) -> tuple[Tensor, Tensor]:
        kernel, bias = self.outputs
        logits, deltas = [], []
        for one in self.maps:
            hidden = F.relu(F.conv2d(one, *self.hidden, padding=1))
            both = F.conv2d(hidden, kernel[:, :, None, None], bias).permute(0, 2, 3, 1)
            logits.append(both[..., :PER_CELL].flatten(1))
            deltas.append(both[..., PER_CELL:].reshape(len(both), -1, 4))
        return torch.cat(logits, dim=1), torch.cat(deltas, dim=1)

    def sparse(self, max_anchors: int) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            logits, deltas = self.dense()
        return with_sparse_gradient(logits, deltas, self.maps, self.hidden, self.outputs, max_anchors=max_anchors)

    def gradients(self, outputs: tuple[Tensor, Tensor], chosen: Tensor) -> list[Tensor]:
        """Gradients of all inputs if the anchors `chosen` [B, N] have a loss, and each third of them one of deltas."""
        logits, deltas = outputs
        every_third = chosen & (torch.arange(chosen.shape[1]) % 3 == 0)
        loss = torch.where(chosen, logits.sin(), 0).sum() + torch.where(every_third[..., None], deltas.cos(), 0).sum()
        return list(torch.autograd.grad(loss, self.inputs))


def chosen_anchors(*places: int, batch: int = 2) -> Tensor:
    chosen = torch.zeros(batch, ANCHORS, dtype=torch.bool)
    for place in places:
        chosen.view(-1)[place] = True
    return chosen


LAST = 2 * ANCHORS - 1
CASES = {
    "none": [],
    "the corners of the largest map": [0, 9, 30, 39],
    "both anchors of a cell": [14, 15],
    "overlapping neighbourhoods": [12, 14, 16, 22, 24],
    "the same anchor of two images": [13, 13 + ANCHORS],
    "every map, the last of one pixel": [3, 41, 51, 52, 53, LAST],
    "as many as there may be": list(range(0, 2 * ANCHORS, 12)),
}
MAX_ANCHORS = 9


@pytest.mark.parametrize("case", CASES)
def test_gradients_are_those_of_the_dense_head(case: str) -> None:
    head, chosen = Head(), chosen_anchors(*CASES[case])
    assert int(chosen.sum()) <= MAX_ANCHORS
    dense, sparse = head.dense(), head.sparse(MAX_ANCHORS)
    for one, other in zip(dense, sparse, strict=True):
        assert torch.equal(one, other)
    for one, other in zip(head.gradients(dense, chosen), head.gradients(sparse, chosen), strict=True):
        torch.testing.assert_close(other, one, rtol=1e-12, atol=1e-12)


def test_float32_differs_by_rounding_only() -> None:
    head, chosen = Head(channels=32, dtype=torch.float32), chosen_anchors(*range(0, 2 * ANCHORS, 5))
    expected = head.gradients(head.dense(), chosen)
    for one, other in zip(head.gradients(head.sparse(64), chosen), expected, strict=True):
        assert (one - other).norm() <= 1e-6 * other.norm()


def test_more_anchors_than_announced_give_nan_and_not_a_wrong_gradient() -> None:
    head, chosen = Head(), chosen_anchors(*range(MAX_ANCHORS + 1))
    *_, kernel, bias, out_kernel, out_bias = head.gradients(head.sparse(MAX_ANCHORS), chosen)
    assert all(gradient.isnan().any() for gradient in (kernel, bias, out_kernel, out_bias))


def test_half_precision_sums_in_float32_and_the_same_bits_come_out_twice() -> None:
    # 256 + 1 is 256 in bfloat16: added one by one, the ones would be lost.
    gradient = torch.tensor([[256.0]] + [[1.0]] * 8 + [[5.0]]).to(torch.bfloat16)
    row = torch.tensor([2] * 9 + [-1])
    table = sparse_gradient._spread(gradient, row, 4)
    assert table.flatten().tolist() == [0.0, 0.0, 264.0, 0.0]


@pytest.mark.slow
def test_operators_describe_their_results_to_the_compiler() -> None:
    maps = [torch.randn(2, 3, 4, 5), torch.randn(2, 3, 1, 1)]
    row = torch.tensor([-1, 0, 39, 40, 41])
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(sparse_gradient._first_true, (torch.tensor([True, False, True]), 4), test_utils=tests)
    torch.library.opcheck(sparse_gradient._gathered, (maps, row), test_utils=tests)
    torch.library.opcheck(sparse_gradient._spread, (torch.randn(5, 3), row, 42), test_utils=tests)


@pytest.mark.slow
def test_the_backward_pass_compiles_into_one_graph() -> None:
    head, chosen = Head(dtype=torch.float32), chosen_anchors(*CASES["overlapping neighbourhoods"])
    expected = head.gradients(head.sparse(MAX_ANCHORS), chosen)
    compiled = torch.compile(lambda: head.sparse(MAX_ANCHORS), fullgraph=True, backend="aot_eager")
    for one, other in zip(head.gradients(compiled(), chosen), expected, strict=True):
        torch.testing.assert_close(one, other)
