"""Buckets are sent once their gradients are complete, always in the same order; nothing is sent before it is due."""

from __future__ import annotations

from typing import Any

import pytest
import small
import torch
from torch import Tensor, nn

from maskfleet.model.metrics import training_metrics
from maskfleet.training.step.exchange import Exchange, gradient_buckets
from maskfleet.training.step.split import SplitLosses, regions_of


class Arrived:
    def wait(self) -> None:
        pass


class OtherRank:
    """Stands in for a second rank: its gradients are ten times ours; notes the size of every bucket."""

    def __init__(self) -> None:
        self.sent: list[int] = []
        self.dtypes: set[torch.dtype] = set()

    def all_reduce(self, buffer: Tensor, **options: Any) -> Arrived:
        assert options["async_op"]
        self.sent.append(buffer.numel())
        self.dtypes.add(buffer.dtype)
        buffer[:-1] *= 11
        return Arrived()


@pytest.fixture
def other(monkeypatch: pytest.MonkeyPatch) -> OtherRank:
    other = OtherRank()
    monkeypatch.setattr("torch.distributed.all_reduce", other.all_reduce)
    return other


def layers() -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList([nn.Linear(40, 2, bias=False), nn.Linear(2, 2, bias=False), nn.Linear(2, 100, bias=False)])


def exchange_of(model: nn.ModuleList, dtype: torch.dtype = torch.float32) -> Exchange:
    return Exchange(
        gradient_buckets([list(layer.parameters()) for layer in reversed(model)]), world_size=2, dtype=dtype
    )


def loss(model: nn.ModuleList) -> Tensor:
    values = torch.ones(3, 40)
    for layer in model:
        values = layer(values)
    return values.square().sum()


FREE = torch.zeros(1)


def test_gradients_become_their_mean_over_the_ranks(other: OtherRank) -> None:
    model, twin = layers(), layers()
    exchange = exchange_of(model)
    exchange.start(FREE)
    loss(model).backward()
    assert other.sent == [225, 33, 97]  # the last layer's is complete first; padded to 32, and one for the flag
    exchange.finish()
    loss(twin).backward()
    for ours, local in zip(model.parameters(), twin.parameters(), strict=True):
        assert ours.grad is not None
        assert local.grad is not None
        torch.testing.assert_close(ours.grad, local.grad * 11 / 2)


def test_without_start_nothing_is_sent_and_gradients_add_up(other: OtherRank) -> None:
    model, twin = layers(), layers()
    exchange = exchange_of(model)
    loss(model).backward()
    assert other.sent == []
    exchange.start(FREE)
    loss(model).backward()
    exchange.finish()
    assert len(other.sent) == 3
    (2 * loss(twin)).backward()
    for ours, local in zip(model.parameters(), twin.parameters(), strict=True):
        assert ours.grad is not None
        assert local.grad is not None
        torch.testing.assert_close(ours.grad, local.grad * 11 / 2)


def test_the_order_is_fixed_and_a_weight_without_gradient_counts_as_zero(other: OtherRank) -> None:
    model = layers()
    exchange = exchange_of(model)
    exchange.start(FREE)
    (model[0].weight.sum() + model[1].weight.sum()).backward()  # the first bucket never completes
    assert other.sent == []
    exchange.finish()
    assert other.sent == [225, 33, 97]
    assert model[2].weight.grad is not None
    assert not model[2].weight.grad.any()
    assert model[0].weight.grad is not None
    assert model[0].weight.grad.unique().tolist() == [5.5]


@pytest.mark.parametrize("layout", ["as the weights", "another"])
def test_gradients_are_collected_from_any_memory_layout(layout: str) -> None:
    kernels = [nn.Parameter(torch.zeros(3, 2, size, size).to(memory_format=torch.channels_last)) for size in (1, 3)]
    [bucket] = gradient_buckets([kernels])
    values = [torch.arange(float(kernel.numel())).reshape(kernel.shape) for kernel in kernels]
    for kernel, value in zip(kernels, values, strict=True):
        kernel.grad = value.to(memory_format=torch.channels_last) if layout == "as the weights" else value
    bucket.collect()
    assert all(torch.equal(view, value) for view, value in zip(bucket.views, values, strict=True))


def test_bf16_is_sent_and_fp32_is_kept(other: OtherRank) -> None:
    model, twin = layers(), layers()
    exchange = exchange_of(model, torch.bfloat16)
    exchange.start(FREE)
    loss(model).backward()
    exchange.finish()
    assert other.dtypes == {torch.bfloat16}
    loss(twin).backward()
    for ours, local in zip(model.parameters(), twin.parameters(), strict=True):
        assert ours.grad is not None
        assert local.grad is not None
        assert ours.grad.dtype == torch.float32
        torch.testing.assert_close(ours.grad, local.grad * 11 / 2, rtol=0.02, atol=0.0)


@pytest.mark.parametrize("blocked", [0.0, 1.0])
def test_the_flag_travels_with_the_gradients(blocked: float, other: OtherRank) -> None:
    model = layers()
    exchange = exchange_of(model)
    exchange.start(torch.tensor([blocked]))
    loss(model).backward()
    exchange.finish()
    assert bool(exchange.blocked > 0) == bool(blocked)


def test_a_second_backward_without_start_sends_nothing(other: OtherRank) -> None:
    model = layers()
    exchange = exchange_of(model)
    exchange.start(FREE)
    loss(model).backward()
    exchange.finish()
    loss(model).backward()
    assert len(other.sent) == 3


@pytest.mark.parametrize("variant", ["fpn", "c4", "sync"])
def test_regions_have_every_weight_once_and_complete_in_their_order(variant: str, other: OtherRank) -> None:
    model = small.small_model(variant).train()
    regions = regions_of(model)
    listed = [parameter for region in regions for parameter in region]
    assert len(listed) == len(set(listed)) == len(list(model.parameters()))
    buckets = gradient_buckets(regions)
    exchange = Exchange(buckets, world_size=2)
    batch = small.small_batch([(64, 96)] * 2)
    exchange.start(FREE)
    losses, _ = SplitLosses(model, lambda function: function)(batch)
    torch.stack(list(losses.values())).sum().backward()
    assert other.sent == [bucket.buffer.numel() for bucket in buckets]  # before finish: all were complete


@pytest.mark.parametrize("variant", ["fpn", "c4"])
def test_the_split_losses_are_those_of_the_model(variant: str) -> None:
    model = small.small_model(variant).train()
    batch = small.small_batch([(64, 96), (80, 64)])
    losses, results = SplitLosses(model, lambda function: function)(batch)
    metrics = training_metrics(results, model.config)
    expected_losses, expected_metrics = model.losses_and_metrics(batch)
    assert {name: value.item() for name, value in losses.items()} == {
        name: value.item() for name, value in expected_losses.items()
    }
    assert metrics.keys() == expected_metrics.keys()
    assert all(torch.equal(metrics[name], value) for name, value in expected_metrics.items())
