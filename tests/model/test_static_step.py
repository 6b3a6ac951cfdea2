"""The training step has static shapes: no operation asks the device what to do next, and it compiles as one graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from small import VARIANTS, small_batch, small_model
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from maskfleet.config.model import ModelConfig
from maskfleet.model import canvas
from maskfleet.model.build import build_mask_rcnn
from maskfleet.model.norm import share_statistics
from maskfleet.ops import roi_align
from maskfleet.ops.layers.mean_over_ranks import without_communication

SIZES = [(97, 130), (64, 96)]
# torch warns about itself while it compiles.
QUIET = pytest.mark.filterwarnings(
    "ignore:.*should not be instantiated:DeprecationWarning", "ignore:.*script_method:DeprecationWarning"
)
DYNAMIC = {
    "aten.nonzero.default",
    "aten.nonzero_numpy.default",
    "aten._local_scalar_dense.default",
    "aten.masked_select.default",
    "aten.item.default",
    "aten._unique2.default",
    "aten.equal.default",
    "aten.is_nonzero.default",
}


class DynamicOps(TorchDispatchMode):
    """Notes each operation whose result's shape, or the program's next step, depends on values."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        if name in DYNAMIC or (name.startswith("aten.index") and _has_bool_index(args)):
            self.seen.add(name)
        return func(*args, **(kwargs or {}))


def _has_bool_index(args: Any) -> bool:
    indices = args[1] if len(args) > 1 and isinstance(args[1], list | tuple) else ()
    return any(isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8) for index in indices)


def dynamic_ops(call: Callable[[], Any]) -> set[str]:
    with DynamicOps() as watch:
        call()
    return watch.seen


def nodes_of(graph: torch.fx.Graph, name: str) -> list[torch.fx.Node]:
    return [node for node in graph.nodes if str(node.target) == f"maskfleet.{name}.default"]


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one door through which a CPU may read values is shut, as it is on a GPU."""
    monkeypatch.setattr(canvas, "host_value", lambda value: None)


@pytest.mark.parametrize(
    "call",
    [
        lambda x: torch.nonzero(x > 0),
        lambda x: x[x > 0],
        lambda x: x.masked_select(x > 0),
        lambda x: x.sum().item(),
        lambda x: 1 if x.sum() > 0 else 0,
        lambda x: x.index_put_((x > 0,), torch.tensor(1.0)),
    ],
    ids=["nonzero", "boolean index", "masked_select", "item", "if", "boolean assignment"],
)
def test_the_watch_sees_what_it_is_meant_to_see(call):
    assert dynamic_ops(lambda: call(torch.tensor([-1.0, 1.0])))


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("variant", sorted(VARIANTS))
def test_no_step_depends_on_values(variant):
    model = small_model(variant)
    batch = small_batch(SIZES)

    def step() -> None:
        torch.stack(list(model.losses(batch).values())).sum().backward()

    assert dynamic_ops(step) == set()


@pytest.mark.parametrize("variant", sorted(VARIANTS))
def test_skipping_padding_on_a_cpu_does_not_change_the_numbers(variant, monkeypatch):
    model = small_model(variant).eval()
    batch = small_batch([(96, 128), (96, 128)])
    quick = model.losses(batch)
    found = model.detect(batch.images)
    monkeypatch.setattr(canvas, "host_value", lambda value: None)
    whole = model.losses(batch)
    all_found = model.detect(batch.images)
    for name, loss in quick.items():
        torch.testing.assert_close(whole[name], loss, rtol=1e-5, atol=1e-7)
    assert torch.equal(found.valid, all_found.valid)
    assert torch.equal(found.labels, all_found.labels)
    torch.testing.assert_close(all_found.boxes, found.boxes, rtol=0, atol=1e-3)


@pytest.mark.slow
@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize(
    ("variant", "lists"), [("fpn", [2]), ("gn", [2]), ("faster", [1]), ("cascade", [1, 1, 1, 1]), ("c4", [1])]
)
def test_box_and_mask_head_share_one_crop_operator_where_they_read_the_same_regions(variant, lists, monkeypatch):
    monkeypatch.setattr(roi_align, "kernels_for", lambda tensor: True)
    model = small_model(variant).to(memory_format=torch.channels_last)
    batch = small_batch(SIZES, canvas=(160, 192))
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]

    def gradients() -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            losses = model.losses(batch)
        return torch.autograd.grad(torch.stack(list(losses.values())).sum(), parameters)

    graph = make_fx(gradients, tracing_mode="fake", _allow_non_fake_inputs=True)().graph
    for name in ("roi_align", "roi_align_backward"):
        assert [len(node.args[1]) for node in nodes_of(graph, name)] == lists
    # What the operator reads is laid out as its kernel reads it, so it copies no map.
    maps = [one.meta["val"] for node in nodes_of(graph, "roi_align") for one in node.args[0]]
    assert all(one.is_contiguous(memory_format=torch.channels_last) for one in maps)
    assert all(one.dtype == torch.bfloat16 for one in maps)


@QUIET
@pytest.mark.slow
@pytest.mark.parametrize("variant", ["fpn", "c4", "cascade", "gn", "sync", "joint", "aws"])
def test_losses_of_a_small_model_compile_as_one_graph(variant):
    torch.compiler.reset()
    model = small_model(variant)
    share_statistics(model, over_ranks=True)  # as SyncBN has it on several ranks
    batch = small_batch(SIZES)
    compiled = torch.compile(model.losses, fullgraph=True, backend="aot_eager")
    with without_communication() as compiled_order:
        ours = compiled(batch)
        torch.stack(list(ours.values())).sum().backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    with without_communication() as order:
        plain = model.losses(batch)
        torch.stack(list(plain.values())).sum().backward()
    assert sorted(compiled_order) == sorted(order)
    assert bool(order) == (variant == "sync")
    for name, loss in plain.items():
        torch.testing.assert_close(ours[name], loss, rtol=1e-5, atol=1e-7)
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            assert (gradients[name] - parameter.grad).norm() <= 1e-3 * parameter.grad.norm() + 1e-7, name


@QUIET
@pytest.mark.slow
@pytest.mark.timeout(3600)  # inductor runs a C++ compiler, slowly on a busy machine
def test_losses_of_a_small_model_compile_with_inductor():
    torch.compiler.reset()
    model = small_model("fpn", backbone={"blocks": (1, 1, 1, 1)})
    batch = small_batch(SIZES)
    compiled = torch.compile(model.losses, fullgraph=True, dynamic=False)
    ours, plain = compiled(batch), model.losses(batch)
    torch.stack(list(ours.values())).sum().backward()
    for name, loss in plain.items():
        torch.testing.assert_close(ours[name], loss, rtol=1e-4, atol=1e-6)


@QUIET
@pytest.mark.slow
def test_losses_of_the_full_model_compile_as_one_graph():
    torch.compiler.reset()
    model = build_mask_rcnn(ModelConfig(num_categories=80))
    compiled = torch.compile(model.losses, fullgraph=True, backend="eager")
    losses = compiled(small_batch(SIZES))
    assert all(bool(loss.isfinite()) for loss in losses.values())
