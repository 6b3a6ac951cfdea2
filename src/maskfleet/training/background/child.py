"""Run as a module by a child process: compiles the step for one canvas into the cache, and trains nothing.

Arguments: a JSON file with a `CompileJob`, and a file to which the compiled code is written. The graphs are the ones
that the run will ask for, so it finds them in the cache. Nothing is computed: on the GPU are only the weights, one
batch and what lies between the regions of the network.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree

from maskfleet.config.model import ModelConfig
from maskfleet.inference.device import chosen_device
from maskfleet.model.build import build_mask_rcnn
from maskfleet.model.norm import share_statistics
from maskfleet.training.step.buffers import BatchShapes, Capacity, static_batch
from maskfleet.training.step.compiled import compiled_losses, configure_compiler
from maskfleet.training.step.eager import StepSettings
from maskfleet.training.step.precision import precision_for

Backend = Callable[[torch.fx.GraphModule, list[Tensor]], Callable[..., Any]]


@dataclass(frozen=True, slots=True)
class CompileJob:
    """What a child process compiles; all of it is JSON."""

    model: dict[str, Any]
    num_images: int
    canvas: tuple[int, int]
    capacity: dict[str, int]
    masks: bool
    precision: str
    device: str
    split: bool  # by region, as several ranks need it

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> CompileJob:
        return cls.from_fields(json.loads(path.read_text(encoding="utf-8")))

    @classmethod
    def from_fields(cls, fields: dict[str, Any]) -> CompileJob:
        height, width = map(int, fields["canvas"])
        return cls(**fields | {"canvas": (height, width)})


def compile_jobs(config: ModelConfig, settings: StepSettings, shapes: BatchShapes) -> list[CompileJob]:
    """One job for each canvas of a run."""
    return [
        CompileJob(
            model=config.model_dump(mode="json"),
            num_images=shapes.num_images,
            canvas=canvas,
            capacity=asdict(shapes.capacity),
            masks=shapes.masks,
            precision=settings.precision.name,
            device=str(settings.precision.device),
            split=settings.exchanges,
        )
        for canvas in shapes.canvases
    ]


def compile_only(job: CompileJob, backend: Backend | None = None) -> None:
    """Compile the forward and backward pass of `job` with `backend`, which is Inductor unless a test replaces it."""
    configure_compiler()
    device = chosen_device(job.device)
    model = build_mask_rcnn(ModelConfig.model_validate(job.model)).to(device).train()
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    share_statistics(model, over_ranks=job.split)
    shapes = BatchShapes(job.num_images, (job.canvas,), Capacity(**job.capacity), job.masks)
    [example] = shapes.examples(device)
    losses = compiled_losses(model, _compiler(backend or _inductor), split=job.split)
    with precision_for(job.precision, device).autocast():
        losses(static_batch(example, shapes.capacity))


def _inductor(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
    from torch._inductor.compile_fx import compile_fx

    compiled = compile_fx(graph, inputs)
    assert callable(compiled)
    return compiled


def _compiler(backend: Backend) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """`torch.compile`, except that calls of what it returns compute nothing."""

    def compiled_then_skipped(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        backend(graph, inputs)
        return lambda *values: _outputs_of(graph, values)

    return lambda function: torch.compile(function, fullgraph=True, dynamic=False, backend=compiled_then_skipped)


def _outputs_of(graph: torch.fx.GraphModule, inputs: tuple[Any, ...]) -> Any:
    """Tensors without values, of the shapes and memory layouts that `graph` returns, which Inductor keeps too."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    mode = FakeTensorMode(allow_non_fake_inputs=True)

    def without_values(value: Any) -> Any:
        return mode.from_tensor(value) if isinstance(value, Tensor) else value

    with mode:
        outputs = graph(*_pytree.tree_map(without_values, inputs))
    return _pytree.tree_map(_allocated, outputs)


def _allocated(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    real = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
    return real.requires_grad_(value.requires_grad)


def main(job: Path, artifacts: Path) -> None:
    """Compile `job`, and write what was compiled to `artifacts`."""
    compile_only(CompileJob.load(job))
    saved = torch.compiler.save_cache_artifacts()
    artifacts.write_bytes(saved[0] if saved is not None else b"")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
