"""The training step, compiled and captured as a CUDA graph: one launch per step, with no synchronisation in between.

A graph holds forward, backward, the exchange of gradients and the update for one shape of images. Whatever changes
from step to step is in static buffers: the batch, the learning rate, and a flag that disables the update once a loss
is not finite. All graphs of a run are captured before its first step, and the ranks agree on whether that worked.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch._functorch.config
import torch.distributed as dist

from maskfleet.batch import Batch
from maskfleet.inference.device import keep_compiled_code
from maskfleet.model.mask_rcnn import MaskRCNN
from maskfleet.model.metrics import StepResults, training_metrics
from maskfleet.model.norm import learning_layers
from maskfleet.ops.layers.mean_over_ranks import without_communication
from maskfleet.ops.recorder import CudaGraphRecorder, Recorder, Recording
from maskfleet.ops.triton import TRITON_IS_INSTALLED
from maskfleet.training.distributed import Ranks
from maskfleet.training.ranks.per_host import first_on_host
from maskfleet.training.step.buffers import BatchShapes, Capacity, copy_into, static_batch
from maskfleet.training.step.eager import StepRunner, StepSettings, make_exchange
from maskfleet.training.step.exchange import Exchange, gradient_buckets
from maskfleet.training.step.finite import FiniteCheck, Scalars
from maskfleet.training.step.split import SplitLosses, regions_of
from maskfleet.training.step.update import Update

logger = logging.getLogger(__name__)

Compile = Callable[[Callable[..., Any]], Callable[..., Any]]
LossesAndResults = tuple[Scalars, StepResults]

MAX_SHAPES = 8  # of images; each is compiled separately
MAX_COMPILATIONS = 64  # per function; torch's default is 8
WARM_UPS = 2  # passes before the capture: the first compiles, in the second all kernels are loaded


@dataclass(frozen=True, slots=True)
class Toolchain:
    """How the step is compiled and recorded; tests on the CPU replace both."""

    compile: Compile
    recorder: Recorder


def gpu_toolchain() -> Toolchain:
    """torch.compile and CUDA graphs."""
    return Toolchain(partial(torch.compile, fullgraph=True, dynamic=False), CudaGraphRecorder())


def configure_compiler() -> None:
    """Settings of torch.compile: those that differ between two processes would keep them from sharing a cache."""
    keep_compiled_code(os.environ)
    torch._dynamo.config.recompile_limit = MAX_COMPILATIONS
    # The backward pass is compiled with the forward pass, so that a process can compile both and run neither.
    if hasattr(torch._functorch.config, "force_non_lazy_backward_lowering"):
        torch._functorch.config.force_non_lazy_backward_lowering = True


def compiled_losses(model: MaskRCNN, compile: Compile, *, split: bool) -> Callable[[Batch], LossesAndResults]:
    """The part of the step that is compiled: losses of a batch, and what its metrics are computed from."""
    return SplitLosses(model, compile) if split else compile(model.losses_and_results)


def make_step_runner(
    model: MaskRCNN,
    optimizer: torch.optim.Optimizer,
    settings: StepSettings,
    *,
    compile: bool,
    shapes: BatchShapes | None = None,
    ranks: Ranks | None = None,
    toolchain: Toolchain | None = None,
) -> StepRunner | CompiledStepRunner:
    """The compiled step if `compile` asks for it and all ranks can compile it for all `shapes`, else the eager one.

    Without `shapes`, which a single rank may leave out, the step is compiled when a batch of a new shape arrives.
    """
    if not compile:
        return StepRunner(model, optimizer, settings)
    needs_gpu, toolchain = toolchain is None, toolchain or gpu_toolchain()
    reason = why_not_compiled(model, settings, shapes, toolchain, needs_gpu=needs_gpu)
    reason = first_failure(ranks, reason)
    if reason:
        logger.warning("the step is not compiled: %s", reason)
        return StepRunner(model, optimizer, settings)
    runner = CompiledStepRunner(model, optimizer, settings, toolchain=toolchain)
    if shapes is not None and shapes.canvases:
        # The first rank of a host compiles, the others load its kernels from the cache.
        reason = runner.prepare(shapes, ranks=ranks, turn=first_on_host(ranks) if ranks is not None else None)
    if not reason:
        return runner
    logger.warning("the step cannot be compiled %s; the run is eager on all ranks, and slower", reason)
    return runner.as_eager()


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """The step for one shape of images."""

    batch: Batch  # static buffers from which the recordings read
    update: Recording[LossesAndResults]  # with the update, if it is recorded
    accumulate: Recording[LossesAndResults] | None  # leaves the gradients for later steps; None if all steps update


class CompiledStepRunner:
    """`StepRunner`, compiled. Only steps `with_metrics` and `expect_finite` read from the GPU and check the losses."""

    def __init__(
        self,
        model: MaskRCNN,
        optimizer: torch.optim.Optimizer,
        settings: StepSettings,
        *,
        toolchain: Toolchain | None = None,
        exchange: Exchange | None = None,
    ) -> None:
        """`exchange` is that of an eager runner of the same model, in whose place this one comes."""
        configure_compiler()
        toolchain = toolchain or gpu_toolchain()
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.model = model
        self.settings = settings
        self._recorder = toolchain.recorder
        self._check = FiniteCheck(settings.precision.device)
        self._update = Update(optimizer, self._check, gradient_clip=settings.gradient_clip)
        self._exchange = exchange or make_exchange(model, settings)
        self._buckets = self._exchange.buckets if self._exchange is not None else ()
        if self._accumulates and not self._buckets:
            self._buckets = gradient_buckets(regions_of(model))
        self._forward = compiled_losses(model, toolchain.compile, split=settings.exchanges)
        self._capacity = Capacity()
        self._recorded: dict[tuple[int, ...], RecordedStep] = {}
        self._orders: list[list[int]] = []  # in which the step for each shape asks for statistics of all ranks
        self._eager: StepRunner | None = None  # used once compiling for a new shape has failed
        self._check_due = False
        if self._exchange is not None and self._recorder.records_collectives:
            # Connections are made by the first collective of a kind, and cannot be made during a capture.
            self._exchange.start(self._check.blocked)
            self._exchange.finish()
            for layer in learning_layers(model):
                dist.all_reduce(torch.zeros(2, len(layer.weight), device=layer.weight.device))
        self._attach_buckets()

    def prepare(
        self,
        shapes: BatchShapes,
        *,
        ranks: Ranks | None = None,
        turn: AbstractContextManager[None] | None = None,
    ) -> str:
        """Compile and record the step for all `shapes`; returns why that failed, or "", the same on all `ranks`.

        No collective is in between: a rank that fails does not leave the others waiting. Inside of `turn` this rank
        compiles.
        """
        agree = partial(first_failure, ranks)
        if len(shapes.canvases) > MAX_SHAPES:
            return f"for more than {MAX_SHAPES} shapes of images; data.buckets=orientation reduces them to two"
        self._capacity = shapes.capacity
        examples = shapes.examples(self.settings.precision.device)
        static: list[Batch] = []
        with turn or nullcontext():
            failure = _failure(lambda: static.extend(self._compiled_for(example) for example in examples))
        failure = agree(failure) or agree(self._why_out_of_order(ranks))
        if failure:
            return failure
        return agree(_failure(lambda: self._record_all(static)))

    def as_eager(self) -> StepRunner:
        """An eager runner of the same model, in place of this one."""
        self._update.drop_gradients()
        if self._exchange is not None:
            self._exchange.cancel()  # a recording may have failed in the middle of it
        return StepRunner(self.model, self._update.optimizer, self.settings, exchange=self._exchange)

    def warm_up(self, batch: Batch) -> None:
        """Compile the step for batches like `batch` and run it, without changing weights, statistics or gradients."""
        with self._unchanged():
            for _ in range(WARM_UPS):
                with without_communication() as order:
                    self._recorder.warm_up(partial(self._warm_up_pass, batch))
        self._orders.append(order)

    def step(self, batch: Batch, *, lr: float, update: bool, with_metrics: bool) -> tuple[Scalars, Scalars]:
        """Losses and metrics of `batch`; with `update`, the weights are updated by all gradients since the last one."""
        if self._eager is None:
            self._capacity.check(batch)
        recorded = self._recorded_for(batch) if self._eager is None else None
        if recorded is None:
            assert self._eager is not None
            return self._eager.step(batch, lr=lr, update=update, with_metrics=with_metrics)
        copy_into(recorded.batch, batch)
        self._update.lr.fill_(lr)
        recording = recorded.update if update else recorded.accumulate
        assert recording is not None, "settings.steps_per_update is 1, so every step updates"
        losses, results = recording.replay()
        if update and not self._records_update:
            assert self._exchange is not None
            self._exchange.start(self._check.blocked)
            self._finish_update()
        losses = {name: value.clone() for name, value in losses.items()}
        self._check_due |= with_metrics
        if self._check_due and (update or self.settings.world_size == 1):  # only after an update do ranks agree
            self._check_due = False
            self.expect_finite()
        return losses, self._metrics(results) if with_metrics else {}

    def expect_finite(self) -> None:
        """Raise TrainingError if a loss or gradient was not finite, which since then has blocked updates.

        Waits for the device. With several ranks all must call this, after an update.
        """
        if self._check.is_blocked():
            raise self._check.error(world_size=self.settings.world_size)

    @property
    def is_compiled(self) -> bool:
        """Whether a step has been recorded, and none has failed to compile."""
        return self._eager is None and bool(self._recorded)

    @property
    def _accumulates(self) -> bool:
        return self.settings.steps_per_update > 1

    @property
    def _records_update(self) -> bool:
        """Whether the update is part of the recording, which it is unless collectives cannot be."""
        return self._exchange is None or self._recorder.records_collectives

    @property
    def _keeps_gradients(self) -> bool:
        """Whether gradients outlive a recording; backward passes then add to the buckets."""
        return self._accumulates or not self._records_update

    def _attach_buckets(self) -> None:
        self._update.drop_gradients()
        if self._keeps_gradients:
            for bucket in self._buckets:
                bucket.attach()

    @contextmanager
    def _unchanged(self) -> Iterator[None]:
        """Restore gradients, statistics and the check of losses after the block."""
        gradients = [bucket.buffer.clone() for bucket in self._buckets]
        statistics = {name: value.clone() for name, value in self.model.named_buffers()}
        state = self._check.state()
        try:
            yield
        finally:
            self._check.restore(state)
            for name, value in self.model.named_buffers():
                value.copy_(statistics[name])
            for bucket, gradient in zip(self._buckets, gradients, strict=True):
                bucket.buffer.copy_(gradient)
            self._attach_buckets()

    def _recorded_for(self, batch: Batch) -> RecordedStep | None:
        """The recorded step for batches of this shape; None if it cannot be compiled: from then on steps are eager."""
        key = tuple(batch.images.pixels.shape)
        if key in self._recorded:
            return self._recorded[key]
        assert self.settings.world_size == 1, f"images of shape {key} were not announced to `prepare`"
        failure = f"for more than {MAX_SHAPES} shapes of images; data.buckets=orientation reduces them to two"
        if len(self._recorded) < MAX_SHAPES:
            failure = _failure(lambda: self._record(self._compiled_for(batch)))
        if failure:
            self.expect_finite()  # the eager runner has a check of its own
            logger.warning("the step cannot be compiled %s; the run continues eagerly, and slower", failure)
            self._eager = StepRunner(self.model, self._update.optimizer, self.settings, exchange=self._exchange)
            return None
        return self._recorded[key]

    def _compiled_for(self, batch: Batch) -> Batch:
        """Compile the step for batches like `batch`; returns static buffers for them."""
        height, width = batch.images.pixels.shape[2:]
        started_at = time.monotonic()
        logger.info("compiling the step for images of %d x %d: a minute or two, less in later runs", height, width)
        static = static_batch(batch, self._capacity)
        copy_into(static, batch)
        self.warm_up(static)
        logger.info("compiled the step for images of %d x %d in %.0f s", height, width, time.monotonic() - started_at)
        return static

    def _why_out_of_order(self, ranks: Ranks | None) -> str:
        """Why this rank cannot take statistics over all `ranks` in what was compiled; empty if it can."""
        if ranks is None or self._orders == ranks.broadcast(self._orders):
            return ""
        return "its compiled step takes SyncBN's statistics in another order than that of rank 0"

    def _record_all(self, batches: Sequence[Batch]) -> None:
        for static in batches:
            self._record(static)

    def _record(self, static: Batch) -> None:
        """Record the step on the buffers `static`, which `_compiled_for` made."""
        accumulate = self._recorder.record(partial(self._work, static, update=False)) if self._accumulates else None
        update = self._recorder.record(partial(self._work, static, update=True))
        self._recorded[tuple(static.images.pixels.shape)] = RecordedStep(static, update, accumulate)

    def _work(self, batch: Batch, *, update: bool) -> LossesAndResults:
        """What is recorded: losses, gradients and, with `update` and if it can be recorded, exchange and update."""
        update = update and self._records_update
        if not self._keeps_gradients:
            self._update.drop_gradients()
        losses, results = self._losses(batch)
        if update and self._exchange is not None:
            self._exchange.start(self._check.blocked)
        self._backward(losses)
        if update:
            self._finish_update()
        return {name: value.detach() for name, value in losses.items()}, results

    def _warm_up_pass(self, batch: Batch) -> None:
        """All kernels of `_work`, without a collective."""
        self._update.drop_gradients()
        losses, _ = self._losses(batch)
        self._backward(losses)
        for bucket in self._buckets:
            bucket.collect()
        self._update.dry_run()

    def _losses(self, batch: Batch) -> LossesAndResults:
        with self.settings.precision.autocast():
            losses, results = self._forward(batch)
        self._check.record(losses, batch.image_ids)
        return losses, results

    def _metrics(self, results: StepResults) -> Scalars:
        with self.settings.precision.autocast():
            return training_metrics(results, self.model.config)

    def _backward(self, losses: Scalars) -> None:
        total = torch.stack(list(losses.values())).sum()
        (total / self.settings.steps_per_update).backward()  # type: ignore[no-untyped-call]

    def _finish_update(self) -> None:
        """Update the weights once the gradients of all ranks have arrived."""
        if self._exchange is not None:
            self._exchange.finish()
            self._check.blocked.copy_(self._exchange.blocked > 0)
        self._update.apply()
        if self._keeps_gradients:
            for bucket in self._buckets:
                bucket.buffer.zero_()
        else:
            self._update.drop_gradients()


def why_not_compiled(
    model: MaskRCNN, settings: StepSettings, shapes: BatchShapes | None, toolchain: Toolchain, *, needs_gpu: bool
) -> str:
    """Why this rank cannot compile the step; empty if it can."""
    if needs_gpu and settings.precision.device.type != "cuda":
        return "that needs a GPU"
    if needs_gpu and not TRITON_IS_INSTALLED:
        return "torch.compile needs Triton, which is not installed"
    if settings.precision.name == "fp16":
        return "fp16 adjusts its loss scale on the host; bf16 needs none"
    if settings.world_size > 1 and learning_layers(model) and not toolchain.recorder.records_collectives:
        return "SyncBN communicates with the other ranks in the middle of the step, and only NCCL can be recorded"
    if settings.world_size > 1 and (shapes is None or not shapes.canvases):
        return "several ranks must know the shapes of all images before the first step; set data.buckets=orientation"
    return ""


def first_failure(ranks: Ranks | None, reason: str) -> str:
    """The first `reason` of any rank that is not empty, with its rank; "" if all are."""
    if ranks is None:
        return reason
    reasons: list[str] = ranks.broadcast(ranks.gather(reason))
    failed = [(rank, reason) for rank, reason in enumerate(reasons) if reason]
    if not failed:
        return ""
    rank, reason = failed[0]
    return f"on rank {rank}: {reason}" if len(reasons) > 1 else reason


def _failure(work: Callable[[], object]) -> str:
    """Do `work`; returns the error it ended with, or ""."""
    try:
        work()
    except Exception as error:
        # Compilers fail in too many ways to list, and a slow run is better than none.
        return " ".join(f"{type(error).__name__}: {error}".split("\n")[:3])
    return ""
