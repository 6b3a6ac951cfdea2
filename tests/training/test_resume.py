"""A run that is killed anywhere ends as if nothing had happened."""

from __future__ import annotations

import random
import shutil
import signal
from pathlib import Path

import pytest
import torch
from processes import (
    LONG_S,
    copy_of_first_checkpoint,
    ends_like_one_left_alone,
    finish,
    kill_group,
    losses,
    prepared,
    same_weights,
    start,
    wait_for_checkpoints,
    wait_for_step,
)

from maskfleet.config.base import replaced
from maskfleet.config.run import RunConfig
from maskfleet.model.weights.checkpoint import CheckpointFolder
from maskfleet.training.output.metrics import read_metrics
from maskfleet.training.run import train

TOTAL_STEPS = 18


@pytest.fixture(scope="module")
def unharmed(tmp_path_factory: pytest.TempPathFactory, micro: RunConfig) -> Path:
    run_dir = prepared(tmp_path_factory.mktemp("unharmed"), micro)
    finish(run_dir)
    return run_dir


def test_a_run_logs_every_step_evaluates_and_saves(unharmed: Path) -> None:
    records = read_metrics(unharmed)
    steps = [record["step"] for record in records if "total_cost" in record]
    assert steps == list(range(1, TOTAL_STEPS + 1))
    evaluated = [record["step"] for record in records if "mAP(bbox)/IoU=0.5:0.95" in record]
    assert evaluated == [12, 18]
    assert CheckpointFolder(unharmed / "checkpoints").steps()[-1] == TOTAL_STEPS
    assert (unharmed / "model.safetensors").exists()
    assert list((unharmed / "tensorboard").glob("events*"))


def test_the_same_seed_gives_the_same_bits(unharmed: Path, tmp_path: Path, micro: RunConfig) -> None:
    finish(prepared(tmp_path, micro))
    assert losses(tmp_path) == losses(unharmed)
    assert same_weights(tmp_path, unharmed)


@pytest.mark.slow
def test_kill_9_at_random_steps_changes_nothing(unharmed: Path, tmp_path: Path, micro: RunConfig) -> None:
    run_dir = prepared(tmp_path, micro)
    chance = random.Random(5)
    for kill_at in sorted(chance.sample(range(2, TOTAL_STEPS - 1), 3)):
        process = start(run_dir)
        wait_for_step(process, run_dir, kill_at)
        kill_group(process)
    output = finish(run_dir)
    assert "resuming after step" in output
    assert losses(run_dir) == losses(unharmed)
    assert same_weights(run_dir, unharmed)


@pytest.mark.slow
def test_kill_9_of_two_ranks_changes_nothing(tmp_path: Path, micro: RunConfig) -> None:
    config = replaced(micro, {"train.epoch_schedule": ((4, 0.1), (6, None)), "train.images_per_gpu": 1})
    whole, killed = prepared(tmp_path / "whole", config), prepared(tmp_path / "killed", config)
    finish(whole, ranks=2)
    for kill_at in (9, 20):
        process = start(killed, ranks=2)
        wait_for_step(process, killed, kill_at)
        kill_group(process)
    finish(killed, ranks=2)
    assert losses(killed) == losses(whole)
    assert same_weights(killed, whole)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "changes"), [(3, {}), (5, {"train.accumulate_to_images": 10, "train.ema_decay": 0.9})]
)
def test_an_odd_number_of_ranks_resumes_with_the_same_bits(
    ranks: int, changes: dict[str, object], tmp_path: Path, micro: RunConfig
) -> None:
    """Sums of three numbers depend on their order: the exchange must add in the same one after a resume."""
    whole = prepared(tmp_path / "whole", replaced(micro, {"train.images_per_gpu": 1, "eval.every_epochs": 0} | changes))
    finish(whole, ranks=ranks)
    resumed = copy_of_first_checkpoint(whole, tmp_path / "resumed")
    assert "resuming after step 4" in finish(resumed, ranks=ranks)
    assert losses(resumed) == losses(whole)
    assert same_weights(resumed, whole)


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_saves_and_exits_with_its_own_code(
    number: signal.Signals, code: int, tmp_path: Path, micro: RunConfig
) -> None:
    config = replaced(micro, {"train.epoch_schedule": ((4000, None),), "train.warmup_steps": 2})
    run_dir = prepared(tmp_path / "stopped", config)
    process = start(run_dir)
    wait_for_step(process, run_dir, 3)
    process.send_signal(number)
    output, _ = process.communicate(timeout=LONG_S)
    assert process.returncode == code, output
    assert "everything is saved" in output
    assert "Traceback" not in output
    assert CheckpointFolder(run_dir / "checkpoints").steps()[-1] == read_metrics(run_dir)[-1]["step"]
    ends_like_one_left_alone(run_dir, config, tmp_path / "left alone")


def test_a_damaged_newest_checkpoint_costs_steps_but_not_bits(unharmed: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(unharmed, run_dir)
    (run_dir / "model.safetensors").unlink()
    store = CheckpointFolder(run_dir / "checkpoints")
    newest = store.path(store.steps()[-1])
    newest.write_bytes(newest.read_bytes()[:-1])
    output = finish(run_dir)
    assert "is damaged" in output
    assert f"resuming after step {store.steps()[-2]}" in output
    assert losses(run_dir) == losses(unharmed)
    assert same_weights(run_dir, unharmed)


def test_a_finished_run_stays_as_it_is(unharmed: Path) -> None:
    before = losses(unharmed)
    output = finish(unharmed)
    assert "training is done" in output
    assert losses(unharmed) == before


@pytest.mark.slow
def test_a_finished_run_is_extended_and_a_longer_one_has_the_same_bits(tmp_path: Path, micro: RunConfig) -> None:
    changes = {"train.epoch_schedule": ((9, None),), "train.epochs": 1, "train.warmup_steps": 2, "eval.every_epochs": 0}
    short = replaced(micro, changes)
    long = replaced(short, {"train.epochs": 2})
    train(short, tmp_path / "extended")
    train(long, tmp_path / "extended")
    train(long, tmp_path / "whole")
    assert losses(tmp_path / "extended") == losses(tmp_path / "whole")
    assert same_weights(tmp_path / "extended", tmp_path / "whole")


@pytest.mark.slow
def test_adamw_with_a_cosine_resumes_with_the_same_bits(tmp_path: Path, micro: RunConfig) -> None:
    changes = {"train.optimizer": "adamw", "train.base_lr": 1e-3, "train.decay": "cosine", "eval.every_epochs": 0}
    config = replaced(micro, changes)
    train(config, tmp_path / "whole")
    train(config, tmp_path / "resumed")
    for path in sorted((tmp_path / "resumed" / "checkpoints").glob("*.json"))[1:]:
        path.unlink()  # as if the process had been killed after its first epochs
    train(config, tmp_path / "resumed")
    assert losses(tmp_path / "resumed") == losses(tmp_path / "whole")
    assert same_weights(tmp_path / "resumed", tmp_path / "whole")
    kept = CheckpointFolder(tmp_path / "resumed" / "checkpoints").newest().under("adam_step/")
    assert {float(steps) for steps in kept.values()} == {float(TOTAL_STEPS)}


@pytest.mark.slow
def test_momentum_averages_and_gradients_in_the_middle_of_an_update_come_back(tmp_path: Path, micro: RunConfig) -> None:
    config = replaced(micro, {"train.accumulate_to_images": 6, "train.ema_decay": 0.9})
    whole, killed = prepared(tmp_path / "whole", config), prepared(tmp_path / "killed", config)
    finish(whole)
    process = start(killed)
    wait_for_step(process, killed, 8)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=LONG_S)
    finish(killed)
    assert losses(killed) == losses(whole)
    assert same_weights(killed, whole)


@pytest.mark.slow
def test_another_number_of_ranks_resumes_and_says_so(tmp_path: Path, micro: RunConfig) -> None:
    run_dir = prepared(tmp_path, replaced(micro, {"train.epoch_schedule": ((12, None),)}))
    process = start(run_dir)
    wait_for_step(process, run_dir, 8)
    wait_for_checkpoints(process, run_dir, 1)
    kill_group(process)
    store = CheckpointFolder(run_dir / "checkpoints")
    saved = store.steps()[-1]  # 6, or more where the kill took its time
    output = finish(run_dir, ranks=2)
    assert f"2 ranks and 4 images per step instead of 1 ranks and 2 images: that is step {saved // 2} now" in output
    assert store.steps()[-1] >= 4 * TOTAL_STEPS // 2


@pytest.mark.slow
def test_two_processes_do_not_train_in_one_directory(tmp_path: Path, micro: RunConfig) -> None:
    endless = replaced(micro, {"train.epoch_schedule": ((10_000, None),)})  # the second begins when it has loaded torch
    run_dir = prepared(tmp_path, endless)
    first = start(run_dir)
    try:
        wait_for_step(first, run_dir, 1)
        second = start(run_dir)
        output, _ = second.communicate(timeout=LONG_S)
    finally:
        kill_group(first)
    assert second.returncode == 2
    assert "another process is training" in output


def test_weights_of_a_run_are_finite(unharmed: Path) -> None:
    newest = CheckpointFolder(unharmed / "checkpoints").newest()
    assert newest is not None
    assert all(bool(torch.isfinite(t).all()) for t in newest.tensors.values() if t.is_floating_point())
