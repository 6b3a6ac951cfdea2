"""What a child process compiles: the same graphs, for the same inputs, as the run asks for later."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from maskfleet.config.base import replaced
from maskfleet.config.model import ModelConfig
from maskfleet.config.recipes import recipe
from maskfleet.config.run import TrainConfig
from maskfleet.model.build import build_mask_rcnn
from maskfleet.ops.recorder import RerunRecorder
from maskfleet.training.background.child import CompileJob, compile_only
from maskfleet.training.optim import build_optimizer
from maskfleet.training.step.buffers import BatchShapes, Capacity
from maskfleet.training.step.compiled import CompiledStepRunner, Toolchain
from maskfleet.training.step.eager import StepSettings
from maskfleet.training.step.precision import precision_for
from micro_run import MICRO

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning"),  # torch 2.11 imports it while compiling
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),  # Dynamo looks at it
]
CPU = torch.device("cpu")
SHAPES = BatchShapes(2, ((64, 96),), Capacity(objects=16, edges=64, parts=2), masks=True)


class Recorded:
    """A compiler that returns what it was given, and keeps the code of each graph and the layout of its inputs."""

    def __init__(self) -> None:
        self.graphs: list[tuple[str, list[Any]]] = []

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        layouts = [
            (value.shape, value.stride(), value.dtype, value.requires_grad) if isinstance(value, Tensor) else value
            for value in inputs
        ]
        self.graphs.append((graph.code, layouts))
        return graph


def micro_model() -> ModelConfig:
    changes = {name: value for name, value in MICRO.items() if name.startswith("model.")}
    return replaced(recipe("demo"), {**changes, "model.num_categories": 5}).model


@pytest.mark.parametrize(("split", "precision"), [(False, "bf16"), (True, "fp32")])
def test_a_child_compiles_the_graphs_that_the_run_asks_for_later(split: bool, precision: str) -> None:
    job = CompileJob(
        model=micro_model().model_dump(mode="json"),
        num_images=SHAPES.num_images,
        canvas=SHAPES.canvases[0],
        capacity=asdict(SHAPES.capacity),
        masks=True,
        precision=precision,
        device="cpu",
        split=split,
    )
    of_child, of_run = Recorded(), Recorded()
    compile_only(job, of_child)
    torch._dynamo.reset()
    model = build_mask_rcnn(micro_model()).train()
    compiler = partial(torch.compile, fullgraph=True, dynamic=False, backend=of_run)
    if split:
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        runner = CompiledStepRunner(
            model,
            build_optimizer(model, TrainConfig()),
            StepSettings(precision_for(precision, CPU), split=split),
            toolchain=Toolchain(compiler, RerunRecorder()),
        )
        assert runner.prepare(SHAPES) == ""
    finally:
        if split:
            torch.distributed.destroy_process_group()
    assert len(of_child.graphs) == (4 if split else 1)
    assert of_child.graphs == of_run.graphs
