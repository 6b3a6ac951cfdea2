"""The smallest batch that is nearly as fast as any: `train.images_per_gpu: auto`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

CANDIDATES = (1, 2, 4, 8, 16, 32)
NEARLY = 0.97  # of the best speed
MAX_MEMORY_SHARE = 0.8  # of the GPU's memory: real images have more objects than those that are measured


@dataclass(frozen=True, slots=True)
class Trial:
    """Eager steps with some number of images."""

    images: int
    images_per_s: float
    memory_share: float  # of the device, at its peak; 0 on the CPU


Measure = Callable[[int], Trial | None]  # None if the memory is too small for this many images


def trials_of(measure: Measure, *, most: int) -> list[Trial]:
    """Trials with more and more images, up to `most`, until the memory is full or more images bring nothing."""
    trials: list[Trial] = []
    for images in CANDIDATES:
        if images > max(1, most):
            break
        trial = measure(images)
        if trial is None or trial.memory_share > MAX_MEMORY_SHARE:
            break
        trials.append(trial)
        if len(trials) > 1 and trial.images_per_s * NEARLY < trials[-2].images_per_s:
            break
    return trials


def chosen_images(trials: Iterable[Trial]) -> int:
    """The smallest number of images within 3 % of the best speed; 1 if not even that could be measured."""
    speeds = {trial.images: trial.images_per_s for trial in trials}
    best = max(speeds.values(), default=0.0)
    return min((images for images, speed in speeds.items() if speed >= NEARLY * best), default=1)
