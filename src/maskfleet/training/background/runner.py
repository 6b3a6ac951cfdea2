"""Steps that are eager at first, and compiled once child processes have filled the cache on all hosts.

Every decision is made after an update with the same number on all ranks, so all ranks change at the same step.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from maskfleet.batch import Batch
from maskfleet.model.mask_rcnn import MaskRCNN
from maskfleet.ops.layers.mean_over_ranks import without_communication
from maskfleet.training.background.child import CompileJob, compile_jobs
from maskfleet.training.background.children import Children, Compilation, Start, side_by_side
from maskfleet.training.background.compiled_before import all_compiled_before
from maskfleet.training.background.estimate import Estimate, compile_estimate, switch_estimate
from maskfleet.training.distributed import Ranks
from maskfleet.training.ranks.per_host import first_on_host
from maskfleet.training.step.buffers import BatchShapes
from maskfleet.training.step.compiled import (
    MAX_SHAPES,
    CompiledStepRunner,
    Toolchain,
    first_failure,
    gpu_toolchain,
    make_step_runner,
    why_not_compiled,
)
from maskfleet.training.step.eager import StepRunner, StepSettings
from maskfleet.training.step.finite import Scalars

logger = logging.getLogger(__name__)

MEASURED_UPDATES = 8  # eager ones, before the decision; the first ones load kernels
CHECK_EVERY_UPDATES = 10
MAX_MEMORY_SHARE = 0.45  # of the GPU, that an eager step may need: objects add to it, and children need some


@dataclass(frozen=True, slots=True)
class Tools:
    """What compiles in the background; tests on the CPU replace all of it."""

    toolchain: Toolchain | None = None  # None for that of the GPU
    start: Start = Children
    clock: Callable[[], float] = time.monotonic
    compiled_before: Callable[[Sequence[CompileJob]], bool] = all_compiled_before


DEFAULT_TOOLS = Tools()


class SwitchingRunner:
    """An eager runner that decides whether compiling pays, and becomes a compiled one when that is done.

    Whatever fails in the background is logged once, and the run stays eager.
    """

    def __init__(
        self,
        model: MaskRCNN,
        optimizer: torch.optim.Optimizer,
        settings: StepSettings,
        shapes: BatchShapes,
        ranks: Ranks,
        tools: Tools = DEFAULT_TOOLS,
    ) -> None:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.settings, self.shapes = settings, shapes
        self._ranks, self._tools = ranks, tools
        self._model, self._optimizer = model, optimizer
        self._runner: StepRunner | CompiledStepRunner = StepRunner(model, optimizer, settings)
        self._step_s: list[float] = []
        self._updates = 0
        self._decided = False
        self._children: Compilation | None = None  # on the first rank of each host, while it compiles
        self._waiting = False  # for the children of all hosts

    @property
    def is_compiled(self) -> bool:
        return self._runner.is_compiled

    def step(self, batch: Batch, *, lr: float, update: bool, with_metrics: bool) -> tuple[Scalars, Scalars]:
        """Losses and metrics of `batch`; with `update`, the weights are updated by all gradients since the last one."""
        if self._decided:
            return self._runner.step(batch, lr=lr, update=update, with_metrics=with_metrics)
        started_at = self._tools.clock()
        results = self._runner.step(batch, lr=lr, update=update, with_metrics=with_metrics)
        self._step_s.append(self._tools.clock() - started_at)
        return results

    def expect_finite(self) -> None:
        """Raise TrainingError if a loss or gradient was not finite."""
        self._runner.expect_finite()

    def after_update(self, steps_left: int) -> None:
        """Decide, look after the children, or switch, if it is time to; all ranks call this after every update."""
        self._updates += 1
        if not self._decided and self._updates == MEASURED_UPDATES:
            self._decide(steps_left)
        elif self._waiting and self._updates % CHECK_EVERY_UPDATES == 0:
            self._look_after_children(steps_left)

    def close(self) -> None:
        """End the children."""
        self._waiting = False
        if self._children is not None:
            self._children.stop()
            self._children = None

    @property
    def _eager_step_s(self) -> float:
        return statistics.median(self._step_s[len(self._step_s) // 2 :])

    def _decide(self, steps_left: int) -> None:
        self._decided = True
        jobs = compile_jobs(self._model.config, self.settings, self.shapes)
        if self._found_by_all(jobs):
            logger.info("the step was compiled before: switching to what the cache holds")
            self._switch(steps_left)
            return
        canvases = len(self.shapes.canvases)
        estimate = compile_estimate(
            canvases=canvases,
            side_by_side=side_by_side(canvases),
            steps_left=steps_left,
            eager_step_s=self._eager_step_s,
        )
        pays, text = self._agreed(estimate)
        if not pays:
            logger.info("the step is not compiled, because that would not pay: %s", text)
            return
        logger.info("compiling the step in the background: %s", text)
        self._waiting = True
        if self._ranks.of_host().worker.is_chief:
            try:
                self._children = self._tools.start(jobs)
            except Exception as error:  # no disk space for a file, say: the run does not depend on it
                self._children = _Failed(_described(error))

    def _found_by_all(self, jobs: Sequence[CompileJob]) -> bool:
        """Whether every host has compiled `jobs` before, so that no child is needed."""
        found = not self._ranks.of_host().worker.is_chief or self._tools.compiled_before(jobs)
        everywhere: list[bool] = self._ranks.broadcast(self._ranks.gather(found))
        return all(everywhere)

    def _agreed(self, estimate: Estimate) -> tuple[bool, str]:
        """What rank 0 thinks, on all ranks: each measures other times."""
        pays, text = self._ranks.broadcast([estimate.pays, str(estimate)])
        return bool(pays), str(text)

    def _look_after_children(self, steps_left: int) -> None:
        done, failure = self._poll()
        failure = first_failure(self._ranks, failure)
        everywhere: list[bool] = self._ranks.broadcast(self._ranks.gather(done))
        if failure:
            logger.warning("the step cannot be compiled %s; the run stays eager, and slower", failure)
            self.close()
        elif all(everywhere):
            self.close()
            self._switch(steps_left)

    def _switch(self, steps_left: int) -> None:
        """Compile from the cache that the children filled, unless the run has become too short for that."""
        canvases = len(self.shapes.canvases)
        estimate = switch_estimate(canvases=canvases, steps_left=steps_left, eager_step_s=self._eager_step_s)
        pays, text = self._agreed(estimate)
        if not pays:
            logger.info("the run stays eager to its end, because switching would not pay: %s", text)
            return
        assert isinstance(self._runner, StepRunner)
        started_at = self._tools.clock()
        if self.settings.precision.device.type == "cuda":
            torch.cuda.empty_cache()
        with self._ranks.compiling(), self._ranks.reporting_lost_ranks("switching to compiled steps"):
            compiled, failure = self._new_compiled(self._runner)
            failure = first_failure(self._ranks, failure)
            if compiled is None or failure:
                logger.warning("the step cannot be compiled %s; the run stays eager, and slower", failure)
                return
            failure = compiled.prepare(self.shapes, ranks=self._ranks, turn=first_on_host(self._ranks))
        if failure:
            logger.warning("the step cannot be compiled %s; the run stays eager, and slower", failure)
            self._runner = compiled.as_eager()
            return
        self._runner = compiled
        logger.info("the steps are compiled from now on; switching took %.0f s", self._tools.clock() - started_at)

    def _new_compiled(self, eager: StepRunner) -> tuple[CompiledStepRunner | None, str]:
        """A runner that takes over from `eager`, or why there is none."""
        try:
            return CompiledStepRunner(
                self._model,
                self._optimizer,
                self.settings,
                toolchain=self._tools.toolchain,
                exchange=eager.exchange,
            ), ""
        except Exception as error:  # as above
            return None, _described(error)

    def _poll(self) -> tuple[bool, str]:
        """Whether the children of this rank, if it has any, are done, and why they failed."""
        if self._children is None:
            return True, ""
        try:
            return self._children.poll()
        except Exception as error:  # as above
            return True, _described(error)


Runner = StepRunner | CompiledStepRunner | SwitchingRunner


@dataclass(frozen=True, slots=True)
class _Failed:
    """Children that could not be started."""

    reason: str

    def poll(self) -> tuple[bool, str]:
        return True, self.reason

    def stop(self) -> None:
        """Nothing runs."""


def _described(error: Exception) -> str:
    return f"because of {type(error).__name__}: {error}"


def make_switching_runner(
    model: MaskRCNN,
    optimizer: torch.optim.Optimizer,
    settings: StepSettings,
    shapes: BatchShapes,
    ranks: Ranks,
    tools: Tools = DEFAULT_TOOLS,
) -> Runner:
    """A runner that starts eagerly; one that is compiled first if eager steps could need too much memory."""
    needs_gpu, toolchain = tools.toolchain is None, tools.toolchain or gpu_toolchain()
    reason = first_failure(ranks, why_not_compiled(model, settings, shapes, toolchain, needs_gpu=needs_gpu))
    if reason:
        logger.warning("the step is not compiled: %s", reason)
        return StepRunner(model, optimizer, settings)
    few = len(shapes.canvases) <= MAX_SHAPES  # `make_step_runner` says what to do about more
    fits: list[bool] = ranks.broadcast(ranks.gather(_eager_step_fits(model, settings, shapes)))
    if not few or not all(fits):
        if few:
            logger.info("an eager step could need too much of the GPU's memory: compiling before the first step")
        return make_step_runner(
            model, optimizer, settings, compile=True, shapes=shapes, ranks=ranks, toolchain=tools.toolchain
        )
    return SwitchingRunner(model, optimizer, settings, shapes, ranks, tools)


def _eager_step_fits(model: MaskRCNN, settings: StepSettings, shapes: BatchShapes) -> bool:
    """Whether an eager step on the largest canvas leaves memory for children and for the objects of real images."""
    device = settings.precision.device
    if device.type != "cuda":
        return True
    statistics_before = {name: value.clone() for name, value in model.named_buffers()}
    torch.cuda.reset_peak_memory_stats(device)
    canvas = max(
        range(len(shapes.canvases)), key=lambda number: shapes.canvases[number][0] * shapes.canvases[number][1]
    )
    try:
        with without_communication(), settings.precision.autocast():
            losses = model.losses(shapes.examples(device)[canvas])
            torch.stack(list(losses.values())).sum().backward()  # type: ignore[no-untyped-call]
    except torch.OutOfMemoryError:
        return False
    finally:
        losses = {}  # what the graph of the losses holds
        model.zero_grad(set_to_none=True)
        for name, value in model.named_buffers():
            value.copy_(statistics_before[name])
        torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(device).total_memory
    return torch.cuda.max_memory_allocated(device) <= MAX_MEMORY_SHARE * total
