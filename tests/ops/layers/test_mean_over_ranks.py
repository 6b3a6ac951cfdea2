"""Means over ranks in the middle of a network, eager and compiled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # before any group: see maskfleet.training.distributed
import torch.multiprocessing as mp
from torch import Tensor, nn

from maskfleet.model.canvas import Area
from maskfleet.model.norm import BatchNorm, Conv, ConvNorm, learning_layers, share_statistics
from maskfleet.ops.layers.mean_over_ranks import _mean_over_ranks, mean_over_ranks, without_communication

AREA = Area(mask=None, weight=None, num_images=2, learning=True)


@pytest.fixture
def other_rank(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A rank that always contributes 10; returns the sizes of what was sent to it."""
    sent: list[int] = []

    def all_reduce(tensor: Tensor, **options: Any) -> None:
        assert tensor.is_contiguous()
        assert options == {"op": dist.ReduceOp.SUM}  # gloo has no mean
        sent.append(tensor.numel())
        tensor.add_(10)

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    return sent


def test_the_mean_and_its_gradient_are_those_of_all_ranks(other_rank: list[int]) -> None:
    value = torch.tensor([[1.0, 2.0], [3.0, 4.0]]).T.requires_grad_()
    mean = mean_over_ranks(value, layer=0)
    mean.backward(torch.tensor([[2.0, 0.0], [0.0, 4.0]]))
    assert mean.tolist() == [[5.5, 6.5], [6.0, 7.0]]
    assert value.grad is not None
    assert value.grad.tolist() == [[6.0, 5.0], [5.0, 7.0]]
    assert other_rank == [4, 4]


def test_without_communication_a_rank_sends_nothing_and_lists_the_calls(other_rank: list[int]) -> None:
    value = torch.tensor([1.0, 2.0], requires_grad=True)
    with without_communication() as order:
        first, second = mean_over_ranks(value, layer=0), mean_over_ranks(2 * value, layer=1)
        (first + second).sum().backward()
    assert first.tolist() == [1.0, 2.0]
    assert other_rank == []
    assert order == [1, 2, -2, -1]
    mean_over_ranks(value, layer=0)
    assert other_rank == [2]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_compiler_may_rely_on_the_operator() -> None:
    with without_communication():
        torch.library.opcheck(_mean_over_ranks, (torch.randn(3, 2).T.requires_grad_(), 1))


class Block(nn.Module):
    """Two normalised convolutions next to each other: neither needs the result of the other one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.left, self.right = Conv(3, 4, 3), Conv(3, 4, 1)
        self.left_norm, self.right_norm = (BatchNorm(4, learns_statistics=True) for _ in range(2))
        share_statistics(self, over_ranks=True)

    def forward(self, features: Tensor) -> Tensor:
        left = ConvNorm(self.left, self.left_norm)(features, AREA, relu=True)
        return ConvNorm(self.right, self.right_norm)(features, AREA, residual=left).square().mean()


def compare_on(rank: int, folder: str) -> None:
    """What an eager and a compiled block compute on this rank's images, to a file."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    features = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(rank))
    found = []
    for compiler in (lambda block: block, lambda block: torch.compile(block, fullgraph=True, dynamic=False)):
        block = Block()
        step = compiler(block)
        order: list[int] = []
        if rank == 0:  # alone: the other rank does not take part
            with without_communication() as order:
                step(features).backward()
        block.zero_grad()
        for layer in learning_layers(block):
            layer.running_mean.zero_()
            layer.running_var.fill_(1)
        loss = step(features)
        loss.backward()
        gradients = {name: parameter.grad for name, parameter in block.named_parameters()}
        found.append({"loss": loss.detach(), "order": order, **dict(block.named_buffers()), **gradients})
    torch.save(found, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.timeout(3600)  # inductor runs a C++ compiler, slowly on a busy machine
def test_compiled_layers_take_the_statistics_of_all_ranks(tmp_path: Path) -> None:
    mp.start_processes(compare_on, args=(str(tmp_path),), nprocs=2, start_method="spawn")
    of_ranks = [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2)]
    for eager, compiled in of_ranks:
        assert eager.keys() == compiled.keys()
        for name in eager.keys() - {"order"}:
            torch.testing.assert_close(compiled[name], eager[name], msg=lambda text, name=name: f"{name}: {text}")
    for one, other in zip(*of_ranks, strict=True):
        assert torch.equal(one["left_norm.running_var"], other["left_norm.running_var"])
        assert not torch.equal(one["left.weight"], other["left.weight"])  # their images differ
    assert [sorted(found["order"]) for found in of_ranks[0]] == [[-2, -1, 1, 2]] * 2
