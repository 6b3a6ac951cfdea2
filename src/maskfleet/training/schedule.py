"""The learning rate of every step, as a pure function. A step is one forward and backward pass on all ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass

from maskfleet.config.base import replaced
from maskfleet.config.run import TrainConfig
from maskfleet.errors import ConfigError

AUTO_IMAGES, MIN_AUTO_EPOCHS, MAX_AUTO_EPOCHS = 120_000, 12, 200
REFERENCE_BATCH = 8  # images per step that step schedules are written for


@dataclass(frozen=True, slots=True)
class Schedule:
    """The learning rate at each step, and when training ends."""

    images_per_step: int
    steps_per_update: int  # steps whose gradients are accumulated before the weights are updated
    steps_per_epoch: int
    total_steps: int
    full_lr: float
    warmup_start_lr: float
    warmup_steps: int
    drops: tuple[tuple[int, float], ...]  # (first step, factor on the full rate), in ascending order
    cosine: bool = False  # instead of the drops, the rate falls along half a cosine wave

    def lr_at(self, step: int) -> float:
        """Learning rate of step `step`, counted from 0."""
        if step < self.warmup_steps:
            return self.warmup_start_lr + step / self.warmup_steps * (self.full_lr - self.warmup_start_lr)
        if self.cosine:
            share = (step - self.warmup_steps) / (self.total_steps - self.warmup_steps)
            return self.full_lr * (1 + math.cos(math.pi * min(share, 1.0))) / 2
        return self.full_lr * next((factor for first_step, factor in reversed(self.drops) if step >= first_step), 1.0)

    def updates_after(self, step: int) -> bool:
        """Whether the weights are updated at the end of step `step`; after the last step they always are."""
        return (step + 1) % self.steps_per_update == 0 or step + 1 == self.total_steps

    def epochs_done(self, steps_done: int) -> int:
        """Complete epochs after `steps_done` steps."""
        return steps_done // self.steps_per_epoch


def schedule_for(train: TrainConfig, *, world_size: int, steps_per_pass: int) -> Schedule:
    """The schedule of `train` on `world_size` ranks, where one pass over the data takes `steps_per_pass` steps."""
    if train.epoch_schedule == "auto":
        train = replaced(train, {"epoch_schedule": auto_epochs(steps_per_pass * world_size * train.batch_size)})
    images_per_step = world_size * train.batch_size
    steps_per_update = math.ceil(train.accumulate_to_images / images_per_step)
    steps_per_epoch = _steps_per_epoch(train, images_per_step, steps_per_pass)
    drops, total_steps = _scaled(train, steps_per_epoch, *_drops(train, images_per_step, steps_per_epoch))
    return Schedule(
        images_per_step=images_per_step,
        steps_per_update=steps_per_update,
        steps_per_epoch=steps_per_epoch,
        total_steps=total_steps,
        full_lr=train.base_lr * images_per_step * steps_per_update / train.base_lr_images,
        warmup_start_lr=train.warmup_init_lr * REFERENCE_BATCH / train.base_lr_images,
        warmup_steps=min(train.warmup_steps, total_steps // 2),
        drops=drops,
        cosine=train.decay == "cosine",
    )


def auto_epochs(num_images: int) -> tuple[tuple[float, float | None], ...]:
    """A schedule for a set of `num_images`: many epochs for small sets, those of COCO's 1x schedule for large ones."""
    epochs = min(max(round(AUTO_IMAGES / num_images), MIN_AUTO_EPOCHS), MAX_AUTO_EPOCHS)
    return (0.75 * epochs, 0.1), (0.92 * epochs, 0.01), (float(epochs), None)


def _steps_per_epoch(train: TrainConfig, images_per_step: int, steps_per_pass: int) -> int:
    if train.steps_per_epoch is not None:
        return train.steps_per_epoch
    if train.images_per_epoch is not None:
        return max(1, train.images_per_epoch // images_per_step)
    return steps_per_pass


def _drops(train: TrainConfig, images_per_step: int, steps_per_epoch: int) -> tuple[tuple[tuple[int, float], ...], int]:
    if train.step_schedule is not None:
        steps = [_real_step(train, step, images_per_step, steps_per_epoch) for step in train.step_schedule]
        drops = tuple((step, 0.1 ** (index + 1)) for index, step in enumerate(steps[:-1]))
        total = steps[-1]
    else:
        assert train.epoch_schedule is not None
        assert train.epoch_schedule != "auto"
        drops = tuple((int(epoch * steps_per_epoch), factor) for epoch, factor in train.epoch_schedule if factor)
        total = math.ceil(train.epoch_schedule[-1][0] * steps_per_epoch)
    if total < 1:
        raise ConfigError(
            f"the schedule ends before the first step: an epoch is {steps_per_epoch} steps of {images_per_step} images",
            remedy="lengthen train.step_schedule or train.epoch_schedule, or use fewer images per update",
        )
    return drops, total


def _scaled(
    train: TrainConfig, steps_per_epoch: int, drops: tuple[tuple[int, float], ...], total_steps: int
) -> tuple[tuple[tuple[int, float], ...], int]:
    """The schedule, stretched or shortened to `train.epochs` or `train.steps` if one of them is set."""
    if train.epochs is not None:
        length = math.ceil(train.epochs * steps_per_epoch)
    elif train.steps is not None:
        length = train.steps
    else:
        return drops, total_steps
    return tuple((step * length // total_steps, factor) for step, factor in drops), length


def _real_step(train: TrainConfig, step: int, images_per_step: int, steps_per_epoch: int) -> int:
    """A step of 8 images in steps of this run; as in TensorPack, in whole epochs if the epoch's length is set."""
    scaled = step * REFERENCE_BATCH / images_per_step
    if train.steps_per_epoch is None and train.images_per_epoch is None:
        return round(scaled)
    return int(scaled // steps_per_epoch) * steps_per_epoch
