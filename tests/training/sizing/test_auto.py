"""`train.images_per_gpu: auto`, with a model of speed and memory, and for real on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from maskfleet.config.base import replaced
from maskfleet.config.recipes import recipe
from maskfleet.config.run import RunConfig
from maskfleet.model.weights.checkpoint import CheckpointFolder, Snapshot
from maskfleet.training import run
from maskfleet.training.distributed import Ranks, Worker
from maskfleet.training.schedule import schedule_for
from maskfleet.training.sizing.auto import with_known_images
from maskfleet.training.sizing.choose import Trial, chosen_images, trials_of
from maskfleet.training.sizing.measure import StepTrials, example_batch
from maskfleet.training.step.precision import precision_for
from micro_run import MICRO

CPU = torch.device("cpu")
ALONE = Ranks(Worker(), None)


class TwoRanks(Ranks):
    """This rank, and another that has chosen `other`."""

    def __init__(self, other: int) -> None:
        super().__init__(Worker(0, 2), None, ("a", "a"))
        self.other = other

    def gather(self, value: int) -> list[int]:
        return [value, self.other]


def gpu(fixed_ms: float, image_ms: float, *, most: int = 64, full: int = 64) -> Callable[[int], Trial | None]:
    """A GPU whose steps take a fixed time and some per image; `full` images fill its memory, `most` run out of it."""

    def measure(images: int) -> Trial | None:
        if images > most:
            return None
        return Trial(images, 1000 * images / (fixed_ms + images * image_ms), images / full)

    return measure


@pytest.fixture
def auto() -> RunConfig:
    model = {name: value for name, value in MICRO.items() if name.startswith(("model.", "data."))}
    return replaced(recipe("demo"), {**model, "train.images_per_gpu": "auto", "train.base_lr_images": 8})


def test_the_smallest_number_within_three_percent_of_the_best_is_chosen() -> None:
    # 129, 219 and 269 images/s with 1, 4 and 16 images, and 1.6 % more with 32, as measured on an H200.
    speeds = {1: 129.0, 2: 180.0, 4: 219.0, 8: 250.0, 16: 269.0, 32: 273.0}
    trials = trials_of(lambda images: Trial(images, speeds[images], images / 100), most=1000)
    assert chosen_images(trials) == 16
    assert chosen_images([Trial(1, 100.0, 0.1), Trial(2, 97.0, 0.2)]) == 1


@pytest.mark.parametrize(
    ("measure", "most", "expected"),
    [
        (gpu(5, 3), 1000, 32),
        (gpu(5, 3, most=8), 1000, 8),  # 16 run out of memory
        (gpu(5, 3, full=16), 1000, 8),  # 16 leave no memory for more objects
        (gpu(5, 3), 5, 4),  # of 5 images in the set
        (gpu(0, 3), 1000, 1),  # no gain
        (gpu(5, 3, most=0), 1000, 1),  # the run will say what does not fit
    ],
)
def test_memory_and_data_limit_the_choice(measure: Callable[[int], Trial | None], most: int, expected: int) -> None:
    assert chosen_images(trials_of(measure, most=most)) == expected


def test_trials_end_when_more_images_bring_nothing() -> None:
    tried: list[int] = []
    trials_of(lambda images: tried.append(images) or Trial(images, 100.0, 0.1), most=1000)  # type: ignore[func-returns-value]
    assert tried == [1, 2]


def test_all_ranks_take_the_least_that_one_of_them_chose_and_the_learning_rate_follows(
    auto: RunConfig, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    chosen = with_known_images(auto, None, TwoRanks(other=4), CPU, num_images=1000, measure=gpu(5, 3))
    assert chosen.train.images_per_gpu == 4
    schedule = schedule_for(chosen.train, world_size=2, steps_per_pass=100)
    assert schedule.full_lr == pytest.approx(auto.train.base_lr * 4 * 2 / 8)
    assert f"train.images_per_gpu is 4 now; the learning rate for one step is {schedule.full_lr:.6g}" in caplog.text


def test_a_resumed_run_takes_the_number_of_its_checkpoint(auto: RunConfig) -> None:
    snapshot = Snapshot(7, {}, {"images_per_step": 12, "world_size": 2})
    resumed = with_known_images(auto, snapshot, ALONE, CPU, num_images=1000, measure=gpu(5, 3))
    assert resumed.train.images_per_gpu == 6


def test_a_number_is_left_alone_and_the_cpu_has_a_default(auto: RunConfig) -> None:
    fixed = replaced(auto, {"train.images_per_gpu": 3})
    assert with_known_images(fixed, None, ALONE, CPU, num_images=1000) is fixed
    assert with_known_images(auto, None, ALONE, CPU, num_images=1000).train.images_per_gpu == 2
    assert with_known_images(auto, None, ALONE, CPU, num_images=1).train.images_per_gpu == 1


@pytest.mark.slow
@pytest.mark.parametrize("masks", [True, False])
def test_real_steps_are_measured(auto: RunConfig, masks: bool) -> None:
    config = replaced(auto, {"model.num_categories": 2, "model.mask": masks}).model
    trials = trials_of(StepTrials.of(config, precision_for("fp32", CPU), (64, 96)), most=2)
    assert [trial.images for trial in trials][:1] == [1]
    assert all(trial.images_per_s > 0 for trial in trials)
    batch = example_batch(2, (64, 96), masks=masks)
    assert batch.targets.boxes[0, -1].tolist() == [84.0, 16.0, 96.0, 32.0]


def test_running_out_of_memory_ends_the_trials(auto: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    trials = StepTrials.of(replaced(auto, {"model.num_categories": 2}).model, precision_for("fp32", CPU), (64, 64))

    def full(batch: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(trials.model, "losses", full)
    assert trials(1) is None


@pytest.mark.slow
def test_a_run_with_auto_trains_and_keeps_its_number(tmp_path: Path, micro: RunConfig) -> None:
    config = replaced(micro, {"train.images_per_gpu": "auto", "eval.every_epochs": 0})
    run.train(config, tmp_path, device="cpu")
    newest = CheckpointFolder(tmp_path / "checkpoints").newest()
    assert newest is not None
    assert newest.numbers["images_per_step"] == 2
    assert newest.numbers["config"]["train"]["images_per_gpu"] == 2
