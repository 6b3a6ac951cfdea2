"""The training loop: step, log, evaluate, save. No hooks."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from maskfleet.batch import Batch
from maskfleet.config.run import RunConfig
from maskfleet.errors import MaskfleetError
from maskfleet.log import logger
from maskfleet.system.signals import StopRequest, stop_request
from maskfleet.training.checkpoint import CheckpointStore
from maskfleet.training.distributed import Ranks
from maskfleet.training.output.live_view import LiveView
from maskfleet.training.output.metrics import RANKS, Interval, Metrics, host_metrics
from maskfleet.training.output.report import BOARD_PICTURES, sample_pictures
from maskfleet.training.schedule import Schedule
from maskfleet.training.state import Parts, Progress, snapshot_of
from maskfleet.training.step.compiled import CompiledStepRunner
from maskfleet.training.step.eager import StepRunner
from maskfleet.training.validate import Scores, Validator


class StoppedError(MaskfleetError):
    """The run stopped on request and saved a checkpoint to resume from; the exit code is that of the signal."""

    def __init__(self, number: int, step: int) -> None:
        name = signal.Signals(number).name
        super().__init__(
            f"stopped by {name} after step {step}; everything is saved",
            remedy="start the same command again to continue",
        )
        self.exit_code = 128 + number


@dataclass(frozen=True, slots=True)
class Run:
    """Everything a run works with, built once by `run.train`."""

    config: RunConfig
    device: torch.device
    ranks: Ranks
    parts: Parts
    runner: StepRunner | CompiledStepRunner
    schedule: Schedule
    metrics: Metrics
    checkpoints: CheckpointStore
    validator: Validator
    categories: list[dict[str, Any]]
    view: LiveView


@dataclass(slots=True)
class Clock:
    """Time and steps since the last log line or evaluation, and how much of it was waiting for data."""

    since: float = field(default_factory=time.monotonic)
    steps: int = 0
    waited_s: float = 0.0
    saved_at: float = field(default_factory=time.monotonic)

    def timed(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """`batches`, with the waiting time for each one counted."""
        while True:
            asked_at = time.monotonic()
            batch = next(batches, None)
            if batch is None:
                return
            self.waited_s += time.monotonic() - asked_at
            self.steps += 1
            yield batch

    def restart(self) -> None:
        self.since, self.steps, self.waited_s = time.monotonic(), 0, 0.0


def fit(run: Run, progress: Progress) -> list[Scores]:
    """Train from `progress` to the end of the schedule or to the target AP; returns the last evaluation."""
    clock, scores = Clock(), list[Scores]()
    total_steps = run.schedule.total_steps
    with stop_request() as request:
        saver = _Saver(run, clock, request)
        for batch in clock.timed(run.parts.loader.batches(progress.step, total_steps)):
            update = _step(run, progress, clock, batch)
            is_last = progress.step == total_steps
            is_best = False
            if _due(run.config.eval.every_epochs, run.schedule, progress, is_last):
                scores = _evaluate(run, progress)
                is_best = _record_best(progress, scores)
                is_last = is_last or _reached_targets(run.config, scores)
                clock.restart()
            saver.after_step(progress, update=update, is_best=is_best, is_last=is_last)
            if is_last:
                break
    run.checkpoints.wait()
    return scores


def _step(run: Run, progress: Progress, clock: Clock, batch: Batch) -> bool:
    """Train on `batch` and log if it is time to; returns whether the weights were updated."""
    schedule, step = run.schedule, progress.step
    progress.step += 1
    update, lr = schedule.updates_after(step), schedule.lr_at(step)
    log_due = progress.step == schedule.total_steps or progress.step % run.config.train.log_every_steps == 0
    with run.ranks.reporting_lost_ranks("in a step"):
        losses, metrics = run.runner.step(batch.to(run.device), lr=lr, update=update, with_metrics=log_due)
    run.metrics.add(losses)
    if update and run.parts.ema is not None:
        run.parts.ema.update(run.parts.model)
    run.view.step(progress.done)
    if log_due:
        _log(run, progress, clock, lr, metrics)
    return update


def _log(run: Run, progress: Progress, clock: Clock, lr: float, metrics: dict[str, torch.Tensor]) -> None:
    elapsed_s = max(time.monotonic() - clock.since, 1e-9)
    images = clock.steps * run.schedule.images_per_step
    values = run.metrics.write(
        progress.done,
        epoch=run.schedule.epochs_done(progress.step),
        host=host_metrics(Interval(lr, clock.steps, images, elapsed_s, clock.waited_s, run.device)),
        network=metrics,
        extra={RANKS: run.ranks.worker.world_size},
    )
    run.view.metrics(values)
    clock.restart()


def _due(every_epochs: int, schedule: Schedule, progress: Progress, is_last: bool) -> bool:
    """Whether something done every so many epochs (0: never) is due now; at the last step it always is."""
    epoch, step_in_epoch = divmod(progress.step, schedule.steps_per_epoch)
    return every_epochs > 0 and (is_last or (step_in_epoch == 0 and epoch % every_epochs == 0))


def _evaluate(run: Run, progress: Progress) -> list[Scores]:
    if not run.validator.stores:
        return []
    started_at = time.monotonic()
    run.view.doing("evaluating")
    scores = run.validator.scores(run.parts.model, run.parts.ema)
    values = run.validator.named(scores)
    run.metrics.write_eval(progress.done, run.schedule.epochs_done(progress.step), values)
    run.view.evaluation(values)
    if run.ranks.worker.is_chief:
        store, parts = run.validator.stores[0], run.parts
        for title, picture in sample_pictures(
            parts.model, parts.ema, store, run.config, run.device, count=BOARD_PICTURES
        ):
            run.metrics.write_picture(progress.done, f"predictions/{title}", picture)
    run.view.doing("")
    logger.info("evaluation took %.1f s", time.monotonic() - started_at)
    return scores


def _record_best(progress: Progress, scores: list[Scores]) -> bool:
    """Whether the AP on the first validation set (of masks if there are any) is the best so far; if so, keep it."""
    if not scores:
        return False
    ap = scores[0]["segm" if "segm" in scores[0] else "bbox"].ap
    if progress.best_ap is not None and ap <= progress.best_ap:
        return False
    progress.best_ap, progress.best_step = ap, progress.done
    return True


def _reached_targets(config: RunConfig, scores: list[Scores]) -> bool:
    by_kind = {"bbox": config.train.target_box_ap, "segm": config.train.target_mask_ap}
    targets = {kind: target for kind, target in by_kind.items() if target is not None}
    if not targets or not scores:
        return False
    reached = all(scores[0][kind].ap >= target for kind, target in targets.items())
    if reached:
        logger.info("the target AP is reached: training ends early")
    return reached


@dataclass(slots=True)
class _Saver:
    """Decides together with the other ranks when to save, and stops the run once a requested stop is saved."""

    run: Run
    clock: Clock
    request: StopRequest
    stop_signal: int = 0
    save_due: bool = False

    def after_step(self, progress: Progress, *, update: bool, is_best: bool, is_last: bool) -> None:
        run, settings = self.run, self.run.config.checkpoint
        signal_seen, time_seen = run.ranks.agree([self.request.number, self._minutes_passed()])
        self.stop_signal = self.stop_signal or signal_seen
        epoch_due = _due(settings.every_epochs, run.schedule, progress, is_last)
        self.save_due |= bool(time_seen or self.stop_signal) or is_best or epoch_due
        if not is_last and not (self.save_due and update):  # between updates the gradients are only partly summed
            return
        _save(run, progress, best=is_best and settings.keep_best)
        self.save_due, self.clock.saved_at = False, time.monotonic()
        if self.stop_signal and not is_last:
            run.checkpoints.wait()
            raise StoppedError(self.stop_signal, progress.done)

    def _minutes_passed(self) -> bool:
        minutes = self.run.config.checkpoint.every_minutes
        return minutes is not None and time.monotonic() - self.clock.saved_at >= 60 * minutes


def _save(run: Run, progress: Progress, *, best: bool) -> None:
    sums_of_ranks = run.ranks.gather(run.metrics.state_dict())
    if sums_of_ranks is None:
        return
    started_at = time.monotonic()
    snapshot = snapshot_of(run.parts, progress, config=run.config, categories=run.categories, metrics=sums_of_ranks)
    run.checkpoints.save(snapshot, best=best)
    run.view.saved(progress.done)
    logger.debug("step %d waited %.3f s for the checkpoint", progress.done, time.monotonic() - started_at)
