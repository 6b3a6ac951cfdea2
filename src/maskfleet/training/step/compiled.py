"""The training step, compiled and recorded as a CUDA graph: one launch a step, and no word from the GPU in between.

A graph holds forward, backward and update for one shape of images. Whatever changes from step to step lies in fixed
places: the batch, the learning rate, and a flag that turns the update off once a loss is not finite.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import time
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from maskfleet.batch import Batch
from maskfleet.model.mask_rcnn import MaskRCNN
from maskfleet.ops.triton import TRITON_IS_INSTALLED
from maskfleet.training.step.buffers import Capacity, empty_batch, fill
from maskfleet.training.step.eager import Scalars, StepRunner, _refuse_nonfinite
from maskfleet.training.step.precision import Precision
from maskfleet.training.step.update import Update

logger = logging.getLogger(__name__)

MAX_SHAPES = 8  # of images; each is compiled by itself
MAX_COMPILATIONS = 64  # torch's own limit, of 8, is also used up by ground truth that outgrows its room
WARM_UPS = 2  # passes before recording: the first compiles, the second finds everything loaded
CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


def make_step_runner(
    model: MaskRCNN,
    optimizer: torch.optim.SGD,
    *,
    precision: Precision,
    compile: bool,
    gradient_clip: float,
    steps_per_update: int,
    world_size: int,
) -> StepRunner | CompiledStepRunner:
    """The compiled step if `compile` asks for it and it can be had here, else the eager one."""
    reason = _obstacle(model, precision, world_size) if compile else ""
    if reason:
        logger.warning("the step is not compiled: %s", reason)
    runner = CompiledStepRunner if compile and not reason else StepRunner
    return runner(
        model,
        optimizer,
        precision=precision,
        gradient_clip=gradient_clip,
        steps_per_update=steps_per_update,
        world_size=world_size,
    )


@dataclass(frozen=True, slots=True)
class Recording:
    """The step for one shape of images."""

    places: Batch  # where the graph reads the batch
    graph: torch.cuda.CUDAGraph  # forward and backward; and the update, where nothing comes between
    losses: Scalars  # where the graph leaves the losses
    metrics: Scalars


class CompiledStepRunner:
    """As `StepRunner`, compiled. It reads from the GPU only in steps `with_metrics`, and there refuses a bad loss."""

    def __init__(
        self,
        model: MaskRCNN,
        optimizer: torch.optim.SGD,
        *,
        precision: Precision,
        gradient_clip: float,
        steps_per_update: int,
        world_size: int,
    ) -> None:
        keep_compiled_code(os.environ)
        torch._dynamo.config.recompile_limit = MAX_COMPILATIONS
        if world_size > 1:
            for tensor in (*model.parameters(), *model.buffers()):
                dist.broadcast(tensor.detach(), src=0)
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.model = model
        self.precision = precision
        self.steps_per_update = steps_per_update
        self.world_size = world_size
        self._eager: StepRunner | None = None  # what takes over when compiling fails
        self._make_eager = partial(
            StepRunner,
            model,
            optimizer,
            precision=precision,
            gradient_clip=gradient_clip,
            steps_per_update=steps_per_update,
            world_size=world_size,
        )
        self._update = Update(optimizer, gradient_clip=gradient_clip)
        self._compiled: Callable[[Batch], tuple[Scalars, Scalars]] = torch.compile(
            model.losses_and_metrics, fullgraph=True, dynamic=False
        )
        self._capacity = Capacity()
        self._recordings: dict[tuple[int, ...], Recording] = {}
        self._pool: Any = None  # of memory, shared by all recordings

    def step(self, batch: Batch, *, lr: float, update: bool, with_metrics: bool) -> tuple[Scalars, Scalars]:
        """Losses and metrics of `batch`; with `update`, the weights move by all gradients since the last update."""
        recording = self._recording(batch) if self._eager is None else None
        if recording is None:
            assert self._eager is not None
            return self._eager.step(batch, lr=lr, update=update, with_metrics=with_metrics)
        fill(recording.places, batch)
        self._update.lr.fill_(lr)
        recording.graph.replay()
        if update and self._updates_apart:
            self._update_apart()
        losses = {name: value.clone() for name, value in recording.losses.items()}
        if not with_metrics:
            return losses, {}
        if self._update.is_stuck():
            assert self._update.image_ids is not None
            # A gradient may overflow where the loss does not.
            total = self._update.total if not self._update.total.isfinite() else torch.tensor(torch.nan)
            _refuse_nonfinite(total, losses, dataclasses.replace(batch, image_ids=self._update.image_ids))
        return losses, {name: value.clone() for name, value in recording.metrics.items()}

    @property
    def is_compiled(self) -> bool:
        """Whether a recorded step has been used, and none has failed to compile."""
        return self._eager is None and bool(self._recordings)

    @property
    def _updates_apart(self) -> bool:
        """Whether gradients are added up or exchanged first, so that the update is not in the graph of a step."""
        return self.steps_per_update > 1 or self.world_size > 1

    def _update_apart(self) -> None:
        if self.world_size > 1:
            dist.all_reduce(self._update.gradient_sum, op=dist.ReduceOp.AVG)
        self._update.apply()
        self._update.gradient_sum.zero_()

    def _recording(self, batch: Batch) -> Recording | None:
        """The recorded step for batches like this one; None, and from now on the eager step, if there can be none."""
        capacity = self._capacity.with_room_for(batch.targets)
        if capacity != self._capacity:
            self._capacity = capacity
            self._recordings.clear()
            self._pool = None
        key = tuple(batch.images.pixels.shape)
        if key in self._recordings:
            return self._recordings[key]
        if len(self._recordings) == MAX_SHAPES:
            self._give_up(f"images come in more than {MAX_SHAPES} shapes; data.buckets=orientation makes it two")
            return None
        started_at = time.monotonic()
        logger.info("compiling the step for images of %d x %d: a minute or two, less from the second run on", *key[2:])
        try:
            with _searching_algorithms():
                self._recordings[key] = self._recorded(batch)
        except Exception as error:
            # Compilers fail in too many ways to name, and a run that is slow is worth more than none.
            self._give_up(_first_lines(error))
            return None
        logger.info("the step is compiled and recorded, after %.0f s", time.monotonic() - started_at)
        return self._recordings[key]

    def _give_up(self, reason: str) -> None:
        logger.warning("the step cannot be compiled, the run goes on eagerly and slower: %s", reason)
        self._update.drop_gradients()
        if self._updates_apart:
            self._update.add_up_gradients()  # go on from what earlier steps added up
        self._eager = self._make_eager()

    def _recorded(self, batch: Batch) -> Recording:
        places = empty_batch(batch, self._capacity)
        fill(places, batch)
        buffers = {name: value.clone() for name, value in self.model.named_buffers()}
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        gradients, noted = self._gradients_apart(), self._update.noted()
        with torch.cuda.stream(stream):
            for _ in range(WARM_UPS):
                self._update.drop_gradients()
                self._learn(places)
                self._update.rehearse()
        torch.cuda.current_stream().wait_stream(stream)
        self._update.note(noted)
        for name, value in self.model.named_buffers():
            value.copy_(buffers[name])
        self._update.drop_gradients()
        if self._updates_apart:
            self._update.add_up_gradients()
            self._update.gradient_sum.copy_(gradients)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            losses, metrics = self._learn(places)
            if not self._updates_apart:
                self._update.apply()
        self._pool = graph.pool()
        if not self._updates_apart:
            self._update.drop_gradients()
        return Recording(places, graph, losses, metrics)

    def _gradients_apart(self) -> Tensor:
        """What earlier steps added up towards the next update, which warming up must not disturb."""
        if not self._updates_apart:
            return torch.zeros(())
        self._update.add_up_gradients()
        return self._update.gradient_sum.clone()

    def _learn(self, places: Batch) -> tuple[Scalars, Scalars]:
        """Losses, metrics, and gradients of `places`."""
        with self.precision.autocast():
            losses, metrics = self._compiled(places)
        total = torch.stack(list(losses.values())).sum()
        (total / self.steps_per_update).backward()  # type: ignore[no-untyped-call]
        self._update.watch(total.detach(), places.image_ids)
        return {name: value.detach() for name, value in losses.items()}, metrics


@contextmanager
def _searching_algorithms() -> Iterator[None]:
    """Inside the block cuDNN tries its algorithms and keeps the fastest; elsewhere shapes change too often for that."""
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = True
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before


def keep_compiled_code(env: MutableMapping[str, str]) -> None:
    """Have compiled kernels outlive this process, in the user's cache unless the environment names a place."""
    cache = Path(env.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    env.setdefault(CACHE_VARIABLE, str(cache / "maskfleet" / "compiled"))


def _obstacle(model: MaskRCNN, precision: Precision, world_size: int) -> str:
    """Why the step cannot be compiled here; empty if it can."""
    if precision.device.type != "cuda":
        return "that needs a GPU"
    if not TRITON_IS_INSTALLED:
        return "torch.compile needs Triton, which is not installed"
    if precision.name == "fp16":
        return "fp16 adjusts its loss scale on the host; bf16 needs none"
    if world_size > 1 and model.config.backbone.norm == "SyncBN":
        return "SyncBN talks to the other ranks in the middle of the step"
    return ""


def _first_lines(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split("\n")[:3])
