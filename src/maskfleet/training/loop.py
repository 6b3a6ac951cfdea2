"""The training loop: step, log, save, evaluate. No hooks.

Saves and evaluations come after a step that updates the weights; between updates the gradients are only partly summed.
Every evaluation is preceded by a save, so that a stop in the middle of it loses nothing; its result goes into the
manifest of that checkpoint. A process that resumes from a checkpoint without the result evaluates first.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch

from maskfleet.batch import Batch
from maskfleet.config.run import RunConfig
from maskfleet.errors import MaskfleetError
from maskfleet.log import logger
from maskfleet.system.signals import StopRequest, stop_request
from maskfleet.training.background.runner import Runner, SwitchingRunner
from maskfleet.training.checkpoint import CheckpointStore
from maskfleet.training.distributed import Ranks
from maskfleet.training.output.live_view import LiveView
from maskfleet.training.output.metrics import Interval, Metrics, host_metrics
from maskfleet.training.output.names import CHECKPOINT_S, EVALUATION_S, RANKS
from maskfleet.training.output.report import BOARD_PICTURES, sample_pictures
from maskfleet.training.schedule import Schedule
from maskfleet.training.state import Parts, Progress, numbers_after_evaluation, snapshot_of
from maskfleet.training.validate import EvaluationStoppedError, Scores, Validator


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
    runner: Runner
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
    saved_s: float = 0.0  # waiting for checkpoints

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
        self.since, self.steps, self.waited_s, self.saved_s = time.monotonic(), 0, 0.0, 0.0


def fit(run: Run, progress: Progress) -> list[Scores]:
    """Train from `progress` to the end of the schedule or to the target AP; returns the last evaluation."""
    clock, scores = Clock(), list[Scores]()
    total_steps = run.schedule.total_steps
    with stop_request() as request:
        saver = Saver(run, request, saved_step=progress.step)
        progress.evaluation_due &= _evaluates(run)  # the run may have resumed without a validation set
        if progress.evaluation_due:  # an earlier process ended before it, or in the middle of it
            scores = _evaluate(run, progress, saver)
            clock.restart()
        last_step = progress.step if _ends_early(run.config, progress) else max(progress.step, total_steps)
        for batch in clock.timed(run.parts.loader.batches(progress.step, last_step)):
            update = _step(run, progress, clock, batch)
            saver.after_step(progress, update=update)
            clock.saved_s += saver.spent_s
            if update and progress.evaluation_due:
                scores = _evaluate(run, progress, saver)
                clock.restart()
            if _ends_early(run.config, progress):
                break
            if update and isinstance(run.runner, SwitchingRunner):
                run.runner.after_update(last_step - progress.step)
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
        host=host_metrics(Interval(lr, clock.steps, images, elapsed_s, clock.waited_s, run.device, clock.saved_s)),
        network=metrics,
        extra={RANKS: run.ranks.worker.world_size},
    )
    run.view.metrics(values)
    clock.restart()


def _due(every_epochs: int, schedule: Schedule, progress: Progress, is_last: bool) -> bool:
    """Whether something done every so many epochs (0: never) is due now; at the last step it always is."""
    epoch, step_in_epoch = divmod(progress.step, schedule.steps_per_epoch)
    return every_epochs > 0 and (is_last or (step_in_epoch == 0 and epoch % every_epochs == 0))


def _evaluates(run: Run) -> bool:
    return bool(run.validator.stores) and run.config.eval.every_epochs > 0


def _evaluate(run: Run, progress: Progress, saver: Saver) -> list[Scores]:
    """Evaluate the weights that `saver` has just saved, and add the result to that checkpoint."""
    started_at = time.monotonic()
    run.view.doing("evaluating")
    try:
        scores = run.validator.scores(
            run.parts.model,
            run.parts.ema,
            step=progress.done,
            stop_requested=lambda: saver.stop_requested(progress),
        )
    except EvaluationStoppedError:
        saver.stop(progress)
    values = run.validator.named(scores)
    taken = {EVALUATION_S: time.monotonic() - started_at, CHECKPOINT_S: saver.spent_s, **run.validator.seconds}
    seconds = {name: round(value, 3) for name, value in taken.items()}
    run.metrics.write_eval(progress.done, run.schedule.epochs_done(progress.step), values | seconds)
    run.view.evaluation(values)
    is_best = _record_best(progress, scores)
    if _ran_out_of_patience(run.config, progress):
        logger.info(
            "no better AP in %d evaluations: training ends early; the best is that of step %s",
            progress.evaluations_since_best,
            progress.best_step,
        )
    progress.reached_targets = _reached_targets(run.config, scores)
    progress.evaluation_due = False
    if run.ranks.worker.is_chief:
        best = is_best and run.config.checkpoint.keep_best
        run.checkpoints.update(progress.done, numbers_after_evaluation(progress), best=best)
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
        progress.evaluations_since_best += 1
        return False
    progress.best_ap, progress.best_step, progress.evaluations_since_best = ap, progress.done, 0
    return True


def _ends_early(config: RunConfig, progress: Progress) -> bool:
    return progress.reached_targets or _ran_out_of_patience(config, progress)


def _ran_out_of_patience(config: RunConfig, progress: Progress) -> bool:
    return config.train.patience is not None and progress.evaluations_since_best >= config.train.patience


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
class Saver:
    """Decides together with the other ranks when to save, and stops the run once a requested stop is saved."""

    run: Run
    request: StopRequest
    saved_step: int  # position of the newest save
    clock: Callable[[], float] = time.monotonic
    saved_at: float = 0.0
    spent_s: float = 0.0  # in the save after the newest step; 0 if there was none
    stop_signal: int = 0  # once all ranks know of it
    save_due: bool = False

    def __post_init__(self) -> None:
        self.saved_at = self.clock()

    def after_step(self, progress: Progress, *, update: bool) -> None:
        """Save if it is due and the step has updated the weights; then stop if that was requested."""
        run = self.run
        self.spent_s = 0.0
        is_last = progress.step == run.schedule.total_steps
        self._exchange(progress)
        if _evaluates(run):
            progress.evaluation_due |= _due(run.config.eval.every_epochs, run.schedule, progress, is_last)
        epoch_due = _due(run.config.checkpoint.every_epochs, run.schedule, progress, is_last)
        self.save_due |= epoch_due or is_last or progress.evaluation_due or bool(self.stop_signal)
        if not (self.save_due and update):
            return
        started_at = time.monotonic()
        _save(run, progress)
        self.spent_s = time.monotonic() - started_at
        self.save_due, self.saved_step, self.saved_at = False, progress.step, self.clock()
        if self.stop_signal and (progress.evaluation_due or not is_last):
            self.stop(progress)

    def stop_requested(self, progress: Progress) -> bool:
        """Whether to stop, between two steps; all ranks call this together and get the same answer."""
        self._exchange(progress)
        return bool(self.stop_signal)

    def stop(self, progress: Progress) -> NoReturn:
        """End the run, which is saved; if it turns out that it is not, all ranks fail."""
        self.run.checkpoints.wait()
        self.run.ranks.barrier()
        raise StoppedError(self.stop_signal, progress.done)

    def _exchange(self, progress: Progress) -> None:
        """Tell the other ranks of a stop request and of a save that is due by time, and learn of theirs.

        Ranks learn of it one call late, when a save may have happened. So a rank asks for a save by the number of the
        step after which it asks, and a request from before the newest save is out of date.
        """
        asks_after = progress.step if self._minutes_passed() else 0
        stop_signal, asked_after = self.run.ranks.agree([self.request.number, asks_after])
        self.stop_signal = self.stop_signal or stop_signal
        self.save_due |= asked_after > self.saved_step

    def _minutes_passed(self) -> bool:
        minutes = self.run.config.checkpoint.every_minutes
        return minutes is not None and self.clock() - self.saved_at >= 60 * minutes


def _save(run: Run, progress: Progress) -> None:
    """Save after an update, unless a loss was not finite: steps since then had no update, and statistics may be NaN."""
    with run.ranks.reporting_lost_ranks("before a checkpoint"):
        run.runner.expect_finite()
    sums_of_ranks = run.ranks.gather(run.metrics.state_dict())
    if sums_of_ranks is None:
        return
    started_at = time.monotonic()
    snapshot = snapshot_of(
        run.parts,
        progress,
        config=run.config,
        categories=run.categories,
        metrics=sums_of_ranks,
        compiled=run.runner.is_compiled,
    )
    run.checkpoints.save(snapshot)
    run.view.saved(progress.done)
    logger.debug("step %d waited %.3f s for the checkpoint", progress.done, time.monotonic() - started_at)
