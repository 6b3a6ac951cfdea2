"""The loop: step, log, evaluate, save. No hooks."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from maskfleet.batch import Batch
from maskfleet.config.run import RunConfig
from maskfleet.log import logger
from maskfleet.training.checkpoint import CheckpointStore
from maskfleet.training.distributed import Ranks
from maskfleet.training.output.live_view import View
from maskfleet.training.output.metrics import Metrics
from maskfleet.training.output.report import BOARD_PICTURES, sample_pictures
from maskfleet.training.schedule import Schedule
from maskfleet.training.signals import StoppedError, stop_wish
from maskfleet.training.state import Parts, Progress, snapshot_of
from maskfleet.training.step.compiled import CompiledStepRunner
from maskfleet.training.step.eager import StepRunner
from maskfleet.training.validate import Scores, Validator

MIB = 2**20


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
    view: View


@dataclass(slots=True)
class Clock:
    """Time and steps since the last log line or evaluation, and the part spent waiting for data."""

    since: float = field(default_factory=time.monotonic)
    steps: int = 0
    waited_s: float = 0.0
    saved_at: float = field(default_factory=time.monotonic)

    def timed(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """`batches`, with the wait for each one counted."""
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
    """Train from `progress` to the end of the schedule, or to its targets; the answer is the last evaluation."""
    schedule, every, clock = run.schedule, run.config.checkpoint, Clock()
    scores: list[Scores] = []
    stop_signal, save_due = 0, False
    with stop_wish() as wish:
        for batch in clock.timed(run.parts.loader.batches(progress.step, schedule.total_steps)):
            step, progress.step = progress.step, progress.step + 1
            is_last = progress.step == schedule.total_steps
            update = schedule.updates_after(step)
            log_due = is_last or progress.step % run.config.train.log_every_steps == 0
            lr = schedule.lr_at(step)
            with run.ranks.naming_the_dead("in a step"):
                losses, metrics = run.runner.step(batch.to(run.device), lr=lr, update=update, with_metrics=log_due)
            run.metrics.add(losses)
            if update and run.parts.ema is not None:
                run.parts.ema.update(run.parts.model)
            run.view.step(progress.done)
            if log_due:
                _log(run, progress, clock, lr, metrics)
            epoch, inside_epoch = divmod(progress.step, schedule.steps_per_epoch)
            is_best = False
            if _due(run.config.eval.every_epochs, epoch, inside_epoch, is_last):
                scores = _evaluate(run, progress, epoch)
                is_best = _note_best(progress, scores)
                is_last = is_last or _reached_targets(run.config, scores)
                clock.restart()
            signal_seen, time_seen = run.ranks.agree([wish.number, _minutes_are_up(every.every_minutes, clock)])
            stop_signal = stop_signal or signal_seen
            save_due |= (
                bool(time_seen or stop_signal) or is_best or _due(every.every_epochs, epoch, inside_epoch, is_last)
            )
            if (save_due and update) or is_last:  # between updates the gradients are only half added up
                _save(run, progress, best=is_best and every.keep_best)
                save_due, clock.saved_at = False, time.monotonic()
                if stop_signal and not is_last:
                    run.checkpoints.wait()
                    raise StoppedError(stop_signal, progress.done)
            if is_last:
                break
    run.checkpoints.wait()
    return scores


def _due(every_epochs: int, epoch: int, inside_epoch: int, is_last: bool) -> bool:
    """Whether something done every so many epochs is due now; the end always counts, unless it is never done."""
    return every_epochs > 0 and (is_last or (inside_epoch == 0 and epoch % every_epochs == 0))


def _minutes_are_up(minutes: float | None, clock: Clock) -> bool:
    return minutes is not None and time.monotonic() - clock.saved_at >= 60 * minutes


def _log(run: Run, progress: Progress, clock: Clock, lr: float, metrics: dict[str, torch.Tensor]) -> None:
    seconds = max(time.monotonic() - clock.since, 1e-9)
    values = run.metrics.write(
        progress.done,
        epoch=int(run.schedule.epoch_after(progress.step - 1)),
        lr=lr,
        images_per_s=clock.steps * run.schedule.images_per_step / seconds,
        data_wait_s=clock.waited_s / clock.steps,
        memory_mib=_memory_mib(run.device),
        extra={"ranks": run.ranks.worker.world_size},
        metrics=metrics,
    )
    run.view.metrics(values)
    clock.restart()


def _memory_mib(device: torch.device) -> float:
    """Most memory in use so far: the GPU's, or this process's on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / MIB
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024  # Linux counts in KiB


def _evaluate(run: Run, progress: Progress, epoch: int) -> list[Scores]:
    if not run.validator.stores:
        return []
    started_at = time.monotonic()
    run.view.doing("evaluating")
    scores = run.validator.scores(run.parts.model, run.parts.ema)
    values = run.validator.named(scores)
    run.metrics.write_eval(progress.done, epoch, values)
    run.view.evaluation(values)
    if run.ranks.worker.is_chief:
        store, parts = run.validator.stores[0], run.parts
        for title, picture in sample_pictures(
            parts.model, parts.ema, store, run.config, run.device, count=BOARD_PICTURES
        ):
            run.metrics.write_images(progress.done, f"predictions/{title}", picture)
    run.view.doing("")
    logger.info("evaluation took %.1f s", time.monotonic() - started_at)
    return scores


def _note_best(progress: Progress, scores: list[Scores]) -> bool:
    """Whether the first validation set's AP (masks if there are any) is the best so far."""
    if not scores:
        return False
    ap = scores[0]["segm" if "segm" in scores[0] else "bbox"].ap
    if progress.best_ap is not None and ap <= progress.best_ap:
        return False
    progress.best_ap, progress.best_step = ap, progress.done
    return True


def _reached_targets(config: RunConfig, scores: list[Scores]) -> bool:
    targets = {"bbox": config.train.target_box_ap, "segm": config.train.target_mask_ap}
    wanted = {kind: target for kind, target in targets.items() if target is not None}
    if not wanted or not scores:
        return False
    reached = all(scores[0][kind].ap >= target for kind, target in wanted.items())
    if reached:
        logger.info("the target AP is reached: training ends early")
    return reached


def _save(run: Run, progress: Progress, *, best: bool) -> None:
    state = run.metrics.state_dict()
    window = {"names": state["names"], "sums": state["sums"].tolist(), "count": state["count"]}
    windows = run.ranks.gather(window)
    if windows is None:
        return
    started_at = time.monotonic()
    snapshot = snapshot_of(run.parts, progress, config=run.config, categories=run.categories, windows=windows)
    run.checkpoints.save(snapshot, best=best)
    run.view.saved(progress.done)
    logger.debug("the checkpoint kept step %d waiting for %.3f s", progress.done, time.monotonic() - started_at)
