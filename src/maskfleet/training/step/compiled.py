"""The training step, compiled and captured as a CUDA graph: one launch per step, with no synchronisation in between.

A graph holds forward, backward and update for one shape of images. Whatever changes from step to step is in static
buffers: the batch, the learning rate, and a flag that disables the update once a loss is not finite.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import time
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from maskfleet.batch import Batch
from maskfleet.model.mask_rcnn import MaskRCNN
from maskfleet.ops.triton import TRITON_IS_INSTALLED
from maskfleet.training.step.buffers import Capacity, copy_into, static_batch
from maskfleet.training.step.eager import Scalars, StepRunner, StepSettings, raise_if_nonfinite
from maskfleet.training.step.update import Update

logger = logging.getLogger(__name__)

MAX_SHAPES = 8  # of images; each is compiled separately
MAX_COMPILATIONS = 64  # torch's default of 8 also counts recompilations for larger ground truth
WARM_UPS = 2  # passes before the capture: the first compiles, in the second all kernels are loaded
CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


def make_step_runner(
    model: MaskRCNN, optimizer: torch.optim.SGD, settings: StepSettings, *, compile: bool
) -> StepRunner | CompiledStepRunner:
    """The compiled step if `compile` asks for it and this machine and model support it, else the eager one."""
    reason = _why_not_compiled(model, settings) if compile else ""
    if reason:
        logger.warning("the step is not compiled: %s", reason)
    return (CompiledStepRunner if compile and not reason else StepRunner)(model, optimizer, settings)


@dataclass(frozen=True, slots=True)
class CapturedStep:
    """The step for one shape of images."""

    batch: Batch  # static buffers from which the graph reads
    graph: torch.cuda.CUDAGraph  # forward and backward, and the update unless it is separate
    losses: Scalars  # static buffers to which the graph writes
    metrics: Scalars


class CompiledStepRunner:
    """`StepRunner`, compiled. It reads from the GPU only in steps `with_metrics`, and only these check the losses."""

    def __init__(self, model: MaskRCNN, optimizer: torch.optim.SGD, settings: StepSettings) -> None:
        keep_compiled_code(os.environ)
        torch._dynamo.config.recompile_limit = MAX_COMPILATIONS
        if settings.world_size > 1:
            for tensor in (*model.parameters(), *model.buffers()):
                dist.broadcast(tensor.detach(), src=0)
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.model = model
        self.settings = settings
        self._eager: StepRunner | None = None  # used once compiling has failed
        self._update = Update(optimizer, gradient_clip=settings.gradient_clip)
        self._compiled: Callable[[Batch], tuple[Scalars, Scalars]] = torch.compile(
            model.losses_and_metrics, fullgraph=True, dynamic=False
        )
        self._capacity = Capacity()
        self._captured: dict[tuple[int, ...], CapturedStep] = {}
        self._pool: Any = None  # of memory, shared by all graphs

    def step(self, batch: Batch, *, lr: float, update: bool, with_metrics: bool) -> tuple[Scalars, Scalars]:
        """Losses and metrics of `batch`; with `update`, the weights are updated by all gradients since the last one."""
        captured = self._captured_step(batch) if self._eager is None else None
        if captured is None:
            assert self._eager is not None
            return self._eager.step(batch, lr=lr, update=update, with_metrics=with_metrics)
        copy_into(captured.batch, batch)
        self._update.lr.fill_(lr)
        captured.graph.replay()
        if update and self._has_separate_update:
            self._separate_update()
        losses = {name: value.clone() for name, value in captured.losses.items()}
        if not with_metrics:
            return losses, {}
        if self._update.is_blocked():
            assert self._update.image_ids is not None
            # A gradient may overflow where the loss does not.
            total = self._update.total if not self._update.total.isfinite() else torch.tensor(torch.nan)
            raise_if_nonfinite(total, losses, dataclasses.replace(batch, image_ids=self._update.image_ids))
        return losses, {name: value.clone() for name, value in captured.metrics.items()}

    @property
    def is_compiled(self) -> bool:
        """Whether a captured step has been used, and none has failed to compile."""
        return self._eager is None and bool(self._captured)

    @property
    def _has_separate_update(self) -> bool:
        """Whether gradients are accumulated or reduced first, so that the update is not in the graph of a step."""
        return self.settings.steps_per_update > 1 or self.settings.world_size > 1

    def _separate_update(self) -> None:
        if self.settings.world_size > 1:
            dist.all_reduce(self._update.gradient_sum, op=dist.ReduceOp.AVG)
        self._update.apply()
        self._update.gradient_sum.zero_()

    def _captured_step(self, batch: Batch) -> CapturedStep | None:
        """The captured step for batches of this shape; None if it cannot be compiled: from then on steps are eager."""
        capacity = self._capacity.grown_for(batch.targets)
        if capacity != self._capacity:
            self._capacity = capacity
            self._captured.clear()
            self._pool = None
        key = tuple(batch.images.pixels.shape)
        if key in self._captured:
            return self._captured[key]
        if len(self._captured) == MAX_SHAPES:
            self._give_up(f"images have more than {MAX_SHAPES} shapes; data.buckets=orientation reduces them to two")
            return None
        started_at = time.monotonic()
        logger.info("compiling the step for images of %d x %d: a minute or two, less in later runs", *key[2:])
        try:
            with _cudnn_benchmark():
                self._captured[key] = self._capture(batch)
        except Exception as error:
            # Compilers fail in too many ways to list, and a slow run is better than none.
            self._give_up(_first_lines(error))
            return None
        logger.info("compiled and captured the step in %.0f s", time.monotonic() - started_at)
        return self._captured[key]

    def _give_up(self, reason: str) -> None:
        logger.warning("the step cannot be compiled, the run continues eagerly and slower: %s", reason)
        self._update.drop_gradients()
        if self._has_separate_update:
            self._update.accumulate_gradients()  # continue with what earlier steps accumulated
        self._eager = StepRunner(self.model, self._update.optimizer, self.settings)

    def _capture(self, batch: Batch) -> CapturedStep:
        static = static_batch(batch, self._capacity)
        copy_into(static, batch)
        buffers = {name: value.clone() for name, value in self.model.named_buffers()}
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        gradients, state = self._accumulated_gradients(), self._update.state()
        with torch.cuda.stream(stream):
            for _ in range(WARM_UPS):
                self._update.drop_gradients()
                self._forward_backward(static)
                self._update.dry_run()
        torch.cuda.current_stream().wait_stream(stream)
        self._update.restore(state)
        for name, value in self.model.named_buffers():
            value.copy_(buffers[name])
        self._update.drop_gradients()
        if self._has_separate_update:
            self._update.accumulate_gradients()
            self._update.gradient_sum.copy_(gradients)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            losses, metrics = self._forward_backward(static)
            if not self._has_separate_update:
                self._update.apply()
        self._pool = graph.pool()
        if not self._has_separate_update:
            self._update.drop_gradients()
        return CapturedStep(static, graph, losses, metrics)

    def _accumulated_gradients(self) -> Tensor:
        """A copy of what earlier steps accumulated for the next update; the warm-up must not change it."""
        if not self._has_separate_update:
            return torch.zeros(())
        self._update.accumulate_gradients()
        return self._update.gradient_sum.clone()

    def _forward_backward(self, batch: Batch) -> tuple[Scalars, Scalars]:
        """Losses and metrics of `batch`; its gradients are left in the parameters."""
        with self.settings.precision.autocast():
            losses, metrics = self._compiled(batch)
        total = torch.stack(list(losses.values())).sum()
        (total / self.settings.steps_per_update).backward()  # type: ignore[no-untyped-call]
        self._update.check_loss(total.detach(), batch.image_ids)
        return {name: value.detach() for name, value in losses.items()}, metrics


@contextmanager
def _cudnn_benchmark() -> Iterator[None]:
    """Let cuDNN try its algorithms and keep the fastest; elsewhere shapes change too often for that."""
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = True
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before


def keep_compiled_code(env: MutableMapping[str, str]) -> None:
    """Store compiled kernels for later processes, in the user's cache unless the environment names a folder."""
    cache = Path(env.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    env.setdefault(CACHE_VARIABLE, str(cache / "maskfleet" / "compiled"))


def _why_not_compiled(model: MaskRCNN, settings: StepSettings) -> str:
    """Why the step cannot be compiled; empty if it can."""
    if settings.precision.device.type != "cuda":
        return "that needs a GPU"
    if not TRITON_IS_INSTALLED:
        return "torch.compile needs Triton, which is not installed"
    if settings.precision.name == "fp16":
        return "fp16 adjusts its loss scale on the host; bf16 needs none"
    if settings.world_size > 1 and model.config.backbone.norm == "SyncBN":
        return "SyncBN communicates with the other ranks in the middle of the step"
    return ""


def _first_lines(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split("\n")[:3])
