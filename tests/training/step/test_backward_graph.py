"""What the compiler gets as the backward pass on a GPU: no pass over memory only for ReLU, or to add up gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import pytest
import torch
from small import small_config, small_model
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from maskfleet.model.canvas import canvas_of
from maskfleet.ops.layers import conv, group_norm
from maskfleet.training.background.child import CompileJob, compile_only

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning"),  # torch 2.11 imports it while compiling
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),  # Dynamo looks at it
]
RELU, GROUP_NORM = "maskfleet.relu_backward.default", "maskfleet.group_norm_backward.default"
PASSES = ("aten.threshold_backward.default", "aten.clone.default", "aten.zeros_like.default", "aten.add.Tensor")


@pytest.fixture(autouse=True)
def _operators_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is computed, so a CPU can trace them."""
    monkeypatch.setattr(conv, "kernels_for", lambda _: True)
    monkeypatch.setattr(group_norm, "kernels_for", lambda _: True)


class Traced:
    """A compiler that keeps the forward and backward pass as they come out of autograd."""

    def __init__(self) -> None:
        self.graphs: list[fx.Graph] = []

    def __call__(self, graph: fx.GraphModule, inputs: list[Tensor]) -> Any:
        from torch._dynamo.backends.common import aot_autograd

        return aot_autograd(fw_compiler=_unchanged, bw_compiler=_unchanged, partition_fn=self._partition)(graph, inputs)

    def _partition(self, joint: fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Any:
        from torch._functorch.partitioners import default_partition

        self.graphs.append(joint.graph)
        return default_partition(joint, inputs, **options)


def _unchanged(graph: fx.GraphModule, inputs: list[Tensor]) -> fx.GraphModule:
    return graph


def gradients_of(graph: fx.Graph, operator: str) -> list[int]:
    """How many gradients each call of `operator` adds up."""
    return [len(cast(list[fx.Node], node.args[0])) for node in graph.nodes if str(node.target) == operator]


def passes(graph: fx.Graph, channels: int) -> list[str]:
    """Calls of `PASSES` for maps of at least so many channels."""
    called = [(str(node.target), node.meta["val"].shape) for node in graph.nodes if str(node.target) in PASSES]
    return [f"{name} {list(shape)}" for name, shape in called if len(shape) == 4 and shape[1] >= channels]


@pytest.mark.parametrize(
    ("variant", "operator", "expected"),
    [("fpn", RELU, [1, 1, 1, 3, 1, 1, 3, 1, 1, 2, 1, 1]), ("gn", GROUP_NORM, [3, 3, 2])],
)
def test_one_pass_adds_up_the_gradients_of_a_block(variant: str, operator: str, expected: list[int]) -> None:
    backbone = small_model(variant).backbone.train()
    trained = [parameter for parameter in backbone.parameters() if parameter.requires_grad]

    canvas = canvas_of(torch.tensor([[64, 96], [32, 64]]), height=64, width=96, divisor=32, learning=True)

    def gradients(pixels: Tensor) -> tuple[Tensor, ...]:
        with torch.autocast("cpu", torch.bfloat16):
            maps = backbone(pixels, canvas)
        return torch.autograd.grad(torch.stack([one.float().sum() for one in maps[1:]]).sum(), trained)

    pixels = torch.zeros(2, 3, 64, 96).contiguous(memory_format=torch.channels_last)
    graph = make_fx(gradients, tracing_mode="fake", _allow_non_fake_inputs=True)(pixels).graph
    added = gradients_of(graph, operator)
    assert (added if variant == "fpn" else [count for count in added if count > 1]) == expected
    assert passes(graph, channels=16) == []


@pytest.mark.slow
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize(("variant", "operator"), [("fpn", RELU), ("gn", GROUP_NORM)])
def test_the_whole_step_has_no_other_passes_over_the_maps_of_the_backbone(
    variant: str, operator: str, split: bool
) -> None:
    job = CompileJob(
        model=small_config(variant).model_dump(mode="json"),
        num_images=2,
        canvas=(64, 96),
        capacity={"objects": 4, "edges": 16},
        masks=True,
        precision="bf16",
        device="cpu",
        split=split,
    )
    traced = Traced()
    compile_only(job, traced)
    # Between regions autograd adds up what the readers of a map return.
    added = [count for graph in traced.graphs for count in gradients_of(graph, operator) if count > 1]
    assert added == ([3, 2] if split else [3, 3, 2])
    assert passes(traced.graphs[0], channels=64) == []  # of the backbone, or of all
