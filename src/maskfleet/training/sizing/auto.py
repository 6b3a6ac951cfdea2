"""A number in place of `train.images_per_gpu: auto`, the same on all ranks and in all processes of a run."""

from __future__ import annotations

import torch

from maskfleet.config.base import replaced
from maskfleet.config.run import RunConfig
from maskfleet.log import logger
from maskfleet.model.weights.checkpoint import Snapshot
from maskfleet.training.distributed import Ranks
from maskfleet.training.sizing.choose import Measure, chosen_images, trials_of
from maskfleet.training.sizing.measure import StepTrials
from maskfleet.training.step.precision import precision_for

CPU_IMAGES = 2  # a CPU gains nothing from larger batches


def with_known_images(
    config: RunConfig,
    snapshot: Snapshot | None,
    ranks: Ranks,
    device: torch.device,
    *,
    num_images: int,
    measure: Measure | None = None,
) -> RunConfig:
    """`config` with a number of images per GPU: that of the checkpoint, else what is measured; 2 on the CPU.

    `num_images` is the size of the training set, `measure` replaces the steps of the model in tests.
    """
    if config.train.images_per_gpu != "auto":
        return config
    if snapshot is not None:
        images = int(snapshot.numbers["images_per_step"]) // int(snapshot.numbers["world_size"])
        return replaced(config, {"train.images_per_gpu": images})
    most = max(1, num_images // ranks.worker.world_size)
    if device.type == "cpu" and measure is None:
        images = min(CPU_IMAGES, most)
    else:
        images = _measured(config, ranks, device, measure, most)
    lr = config.train.base_lr * images * ranks.worker.world_size / config.train.base_lr_images
    logger.info("train.images_per_gpu is %d now; the learning rate for one step is %.6g", images, lr)
    return replaced(config, {"train.images_per_gpu": images})


def _measured(config: RunConfig, ranks: Ranks, device: torch.device, measure: Measure | None, most: int) -> int:
    """The choice of the rank that chooses least; GPUs of a run may differ, batches may not."""
    if measure is None:
        largest = config.model.canvas_max_px
        short = largest if config.data.scale_jitter is not None else config.data.train_short_edge_px[1]
        canvas = (min(short, largest), largest)
        measure = StepTrials.of(config.model, precision_for(config.train.precision, device), canvas)
    trials = trials_of(measure, most=most)
    for trial in trials:
        share = f", {trial.memory_share:.0%} of the memory" if trial.memory_share else ""
        logger.info("%d images per GPU: %.1f images/s in eager steps%s", trial.images, trial.images_per_s, share)
    choices: list[int] = ranks.broadcast(ranks.gather(chosen_images(trials)))
    if device.type == "cuda":
        del measure
        torch.cuda.empty_cache()
    return min(choices)
