"""When a run saves, evaluates and stops."""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from processes import losses, same_weights

from maskfleet.batch import Batch
from maskfleet.config.base import replaced
from maskfleet.config.run import RunConfig
from maskfleet.errors import TrainingError
from maskfleet.model.weights.checkpoint import CheckpointFolder, read_checkpoint
from maskfleet.ops.recorder import RerunRecorder
from maskfleet.system.signals import StopRequest
from maskfleet.training import checkpoint, loop, run, validate
from maskfleet.training.checkpoint import CheckpointStore
from maskfleet.training.loop import Saver, StoppedError
from maskfleet.training.output.metrics import read_metrics
from maskfleet.training.run import train
from maskfleet.training.state import Progress
from maskfleet.training.step.compiled import CompiledStepRunner, Toolchain, make_step_runner
from maskfleet.training.validate import EvaluationStoppedError, Validator

EVALUATED = 12  # the step of the first evaluation of the micro run


@dataclass
class Network:
    """What ranks in one process exchange: each round's answer comes at the next round, as `Ranks.agree` gives it."""

    world_size: int
    rounds: list[list[Sequence[int]]] = field(default_factory=lambda: [[]])

    def agree(self, flags: Sequence[int]) -> list[int]:
        if len(self.rounds[-1]) == self.world_size:
            self.rounds.append([])
        self.rounds[-1].append(flags)
        before = self.rounds[-2] if len(self.rounds) > 1 else [[0] * len(flags)]
        return [max(column) for column in zip(*before, strict=True)]


@pytest.mark.parametrize("clock_offsets_s", [(0.0, 0.0), (0.0, 0.6), (1.4, 0.0)])
@pytest.mark.parametrize("steps_per_update", [1, 4])
def test_a_timed_save_happens_once_on_all_ranks_at_the_same_step(
    micro: RunConfig, monkeypatch: pytest.MonkeyPatch, clock_offsets_s: tuple[float, float], steps_per_update: int
) -> None:
    saves: list[list[int]] = [[], []]
    now = 0.0
    config = replaced(micro, {"checkpoint.every_minutes": 1.5, "checkpoint.every_epochs": 0, "eval.every_epochs": 0})
    schedule = SimpleNamespace(total_steps=10**6, steps_per_epoch=10**6)
    monkeypatch.setattr(loop, "_save", lambda run, progress: saves[run.rank].append(progress.step))
    network = Network(world_size=2)

    def saver(rank: int) -> Saver:
        run: Any = SimpleNamespace(config=config, schedule=schedule, ranks=network, rank=rank)
        run.validator = SimpleNamespace(stores=[])
        return Saver(run, StopRequest(), saved_step=0, clock=lambda: now * (1 + clock_offsets_s[rank] / 90))

    savers = [saver(0), saver(1)]
    for step in range(1, 400):
        now = float(step)  # a step takes a second
        for one in savers:
            one.after_step(Progress(step=step), update=step % steps_per_update == 0)
    assert saves[0] == saves[1]
    assert len(saves[0]) == 4
    assert all(later - earlier >= 80 for earlier, later in zip(saves[0], saves[0][1:], strict=False))


@pytest.mark.parametrize("own_batches", [0, 2, 5])
def test_ranks_with_fewer_batches_ask_for_a_stop_as_often(own_batches: int) -> None:
    ranks: Any = SimpleNamespace(gather=lambda value: [value, 5], broadcast=lambda value: value)
    validator = Validator(None, [], [], ranks, None)  # type: ignore[arg-type]
    asked = []

    def stop_requested() -> bool:
        asked.append(1)
        return False

    loader: Any = list(range(own_batches))
    assert list(validator._until_stopped(loader, stop_requested)) == loader
    assert len(asked) == 5
    with pytest.raises(EvaluationStoppedError):
        list(validator._until_stopped(loader, lambda: True))


@pytest.fixture(scope="module")
def unharmed(tmp_path_factory: pytest.TempPathFactory, micro: RunConfig) -> Path:
    run_dir = tmp_path_factory.mktemp("unharmed")
    train(micro, run_dir)
    return run_dir


def before_batch(number: int, act: Callable[[], None]) -> Callable[..., Any]:
    """`predict_batches` that calls `act` before batch `number` of every evaluation."""
    original = validate.predict_batches

    def predict(model: Any, batches: Any, **options: Any) -> Any:
        def watched() -> Iterator[Any]:
            for index, batch in enumerate(batches):
                if index == number:
                    act()
                yield batch

        return original(model, watched(), **options)

    return predict


@pytest.mark.slow
def test_a_stop_in_an_evaluation_abandons_it_and_the_next_process_does_it(
    unharmed: Path, tmp_path: Path, micro: RunConfig
) -> None:
    batches_seen = []

    def stop() -> None:
        batches_seen.append(1)
        os.kill(os.getpid(), signal.SIGTERM)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(validate, "predict_batches", before_batch(0, stop))
        with pytest.raises(StoppedError) as caught:
            train(micro, tmp_path)
    assert caught.value.exit_code == 143
    assert len(batches_seen) == 1
    assert [record["step"] for record in read_metrics(tmp_path)] == list(range(1, EVALUATED + 1))
    saved = CheckpointFolder(tmp_path / "checkpoints")
    assert saved.steps()[-1] == EVALUATED
    assert read_checkpoint(saved.path(EVALUATED)).numbers["evaluation_due"]
    train(micro, tmp_path)
    assert losses(tmp_path) == losses(unharmed)
    assert same_weights(tmp_path, unharmed)
    assert saved.best_step() == CheckpointFolder(unharmed / "checkpoints").best_step()


class KilledError(Exception):
    """Stands for kill -9."""


@pytest.mark.slow
def test_a_kill_between_the_result_and_its_mark_repeats_the_evaluation_without_a_second_line(
    unharmed: Path, tmp_path: Path, micro: RunConfig
) -> None:
    def killed(*arguments: object, **options: object) -> None:
        raise KilledError

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CheckpointStore, "update", killed)
        with pytest.raises(KilledError):
            train(micro, tmp_path)
    assert [record["step"] for record in read_metrics(tmp_path)][-2:] == [EVALUATED, EVALUATED]
    train(micro, tmp_path)
    assert losses(tmp_path) == losses(unharmed)
    assert same_weights(tmp_path, unharmed)


@pytest.mark.slow
def test_an_evaluation_due_between_two_updates_comes_after_the_next_one_and_marks_the_best(
    tmp_path: Path, micro: RunConfig
) -> None:
    config = replaced(micro, {"train.accumulate_to_images": 10, "eval.every_epochs": 1})  # updates every fifth step
    train(config, tmp_path)
    evaluated = [record["step"] for record in read_metrics(tmp_path) if "mAP(bbox)/IoU=0.5:0.95" in record]
    assert evaluated == [10, 15, 18]  # epochs end after steps 6, 12 and 18
    saved = CheckpointFolder(tmp_path / "checkpoints")
    best = saved.best_step()
    assert best is not None
    assert read_checkpoint(saved.path(best)).numbers["best_step"] == best
    newest = saved.newest()
    assert newest is not None
    assert newest.numbers["best_step"] == best
    assert not newest.numbers["evaluation_due"]


@pytest.mark.slow
def test_a_run_that_reached_its_target_is_over_for_the_next_process_as_well(tmp_path: Path, micro: RunConfig) -> None:
    config = replaced(micro, {"train.target_box_ap": 0.0001, "train.epoch_schedule": ((40, None),)})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "_reached_targets", lambda config, scores: True)
        train(config, tmp_path)
    before = losses(tmp_path)
    assert before[-1]["step"] == EVALUATED
    train(config, tmp_path)
    assert losses(tmp_path) == before


@pytest.mark.slow
def test_patience_ends_a_run_without_a_better_ap_and_more_of_it_continues(
    tmp_path: Path, micro: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    aps = iter([0.2, 0.3, 0.3, 0.1, 0.2, 0.4])
    real = loop._record_best
    monkeypatch.setattr(
        loop, "_record_best", lambda progress, scores: real(progress, [{"bbox": SimpleNamespace(ap=next(aps))}])
    )
    config = replaced(micro, {"train.epochs": 6, "train.patience": 2, "eval.every_epochs": 1})
    train(config, tmp_path)
    assert max(record["step"] for record in read_metrics(tmp_path)) == 4 * 6  # the second one was the best
    assert CheckpointFolder(tmp_path / "checkpoints").best_step() == 12
    train(config, tmp_path)
    assert max(record["step"] for record in read_metrics(tmp_path)) == 4 * 6, "it is over for the next process as well"
    train(replaced(config, {"train.patience": None}), tmp_path)
    assert max(record["step"] for record in read_metrics(tmp_path)) == 6 * 6


@pytest.mark.slow
def test_nothing_is_saved_after_a_loss_that_is_not_finite(
    tmp_path: Path, micro: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = {"train.compile": True, "train.log_every_steps": 1000, "eval.every_epochs": 0}
    config = replaced(micro, {**changes, "checkpoint.every_minutes": 1e-9})  # saves after every step
    toolchain = Toolchain(lambda function: function, RerunRecorder())
    monkeypatch.setattr(run, "make_step_runner", partial(make_step_runner, toolchain=toolchain))
    steps, real = itertools.count(1), CompiledStepRunner.step

    def step(self: CompiledStepRunner, batch: Batch, **options: Any) -> Any:
        if next(steps) == 3:
            batch = dataclasses.replace(
                batch, targets=dataclasses.replace(batch.targets, boxes=batch.targets.boxes + math.nan)
            )
        return real(self, batch, **options)

    monkeypatch.setattr(CompiledStepRunner, "step", step)
    with pytest.raises(TrainingError, match="not a finite number"):
        train(config, tmp_path)
    assert CheckpointFolder(tmp_path / "checkpoints").steps() == [1, 2]


@pytest.mark.slow
def test_a_stop_whose_save_fails_is_not_reported_as_saved(tmp_path: Path, micro: RunConfig) -> None:
    def fail(*arguments: object, **options: object) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        raise OSError(28, "No space left on device")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "save_file", fail)
        with pytest.raises(TrainingError, match=r"No space left on device .*; there is no older checkpoint"):
            train(micro, tmp_path)
