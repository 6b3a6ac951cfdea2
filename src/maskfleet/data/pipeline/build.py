"""Loaders from a run's configuration."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from typing import Literal

import torch

from maskfleet.config.run import RunConfig
from maskfleet.data.pipeline.augment import Augmentation, ColorJitter, Flip, ResizeShortEdge, ScaleJitter
from maskfleet.data.pipeline.buckets import choose_buckets, with_fallback
from maskfleet.data.pipeline.loader import (
    EvalLoader,
    EvaluationBatches,
    ResizeOn,
    TrainBatches,
    TrainLoader,
    WorkerPool,
)
from maskfleet.data.pipeline.sampler import RankStream, TrainOrder, cursor_from, evaluation_batches, order_group
from maskfleet.data.pipeline.samples import Preparation
from maskfleet.data.store.annotations import AnnotationStore
from maskfleet.data.store.dataset import evaluation_images, training_images

MAX_DEFAULT_WORKERS = 8
MAX_AUTO_BATCH = 16  # the batch that benchmarks/step.py measures
MEMORY_PER_IMAGE_BYTES = 2 * 2**30  # an estimate for 800 x 1344 without compiling, on the safe side


def augmentations(config: RunConfig) -> tuple[Augmentation, ...]:
    """The augmentations of a run, in the order in which they draw random numbers and are applied.

    Add new ones at the end: the random numbers of those before it, and so existing runs, stay the same.
    """
    data = config.data
    return (
        ResizeShortEdge(data.train_short_edge_px, config.model.canvas_max_px),
        Flip(data.flip_probability),
        ScaleJitter(data.scale_jitter),
        ColorJitter(data.color_jitter),
    )


def reads_crowds(config: RunConfig) -> bool:
    """Whether training needs the crowd regions."""
    return config.model.rpn.crowd_overlap <= 1


def build_train_loader(
    config: RunConfig,
    stores: Sequence[AnnotationStore],
    *,
    rank: int = 0,
    world_size: int = 1,
    device: torch.device | str = "cpu",
    resume: Mapping[str, int] | None = None,
    skip: Sequence[Collection[int]] = (),
    resize_on: ResizeOn | None = None,
) -> TrainLoader:
    """The training batches of one rank.

    `resume` is what `TrainLoader.state` wrote; `skip` lists, for each store, ids of images to leave out.
    `resize_on` None resizes on the device if that is a GPU, otherwise in the workers.
    """
    device = torch.device(device)
    data, model, train = config.data, config.model, config.train
    images = training_images(stores, filter_empty=data.filter_empty, masks=model.mask, skip=skip)
    buckets = choose_buckets(
        data.buckets,
        *images.sizes(),
        short_edge_px=data.train_short_edge_px[1],
        max_px=model.canvas_max_px,
        divisor=model.size_divisor,
        crops=data.scale_jitter is not None,
    )
    images.buckets = buckets.of(*images.sizes())
    dataset = TrainBatches(
        images,
        buckets,
        Preparation(
            augmentations(config),
            masks=model.mask,
            crowds=reads_crowds(config),
            # Large-scale jitter enlarges: how much of a photo is needed is only known after it.
            largest_px=(data.train_short_edge_px[1], model.canvas_max_px) if data.scale_jitter is None else None,
        ),
        seed=train.seed,
        resize_on=resize_on or _default_resize(device),
        skip_bad=data.on_bad == "skip",
    )
    num_workers = chosen_workers(data.num_workers, world_size, device)
    saved = cursor_from(resume) if resume is not None else None
    areas = {canvas[0] * canvas[1] for canvas in buckets.canvases if canvas is not None}
    group = order_group(areas, world_size, saved, train.batch_size)
    order = TrainOrder(images.buckets, images_per_batch=train.batch_size, seed=train.seed, group=group)
    stream = RankStream(order, rank=rank, world_size=world_size, start=saved)
    return TrainLoader(WorkerPool(dataset, num_workers=num_workers, device=device), stream, buckets)


def build_eval_loader(
    config: RunConfig,
    store: AnnotationStore,
    *,
    rank: int = 0,
    world_size: int = 1,
    device: torch.device | str = "cpu",
    skip: Collection[int] = (),
    resize_on: ResizeOn | None = None,
) -> EvalLoader:
    """One rank's share of one validation set; every image belongs to exactly one rank.

    On a GPU half of the rank's cores are left to the processes that encode detections.
    """
    device = torch.device(device)
    data, model = config.data, config.model
    images = evaluation_images(store, max_images=config.eval.max_images, skip=skip)
    sizes = images.sizes()
    buckets = with_fallback(
        choose_buckets(
            data.buckets,
            *sizes,
            short_edge_px=data.test_short_edge_px,
            max_px=model.canvas_max_px,
            divisor=model.size_divisor,
        )
    )
    images.buckets = buckets.of(*sizes)
    batch_size = eval_batch_size(config.eval.images_per_gpu, device)
    planned = evaluation_batches(images.buckets, images_per_batch=batch_size, rank=rank, world_size=world_size)
    dataset = EvaluationBatches(
        images, buckets, resize_on=resize_on or _default_resize(device), skip_bad=data.on_bad == "skip"
    )
    num_workers = chosen_workers(data.num_workers, world_size, device, share=0.5)
    return EvalLoader(WorkerPool(dataset, num_workers=num_workers, device=device), planned, buckets)


def eval_batch_size(configured: Literal["auto"] | int, device: torch.device) -> int:
    """What `eval.images_per_gpu` means on `device`: auto is one image on the CPU, on a GPU as memory allows."""
    if configured != "auto":
        return configured
    if device.type != "cuda":
        return 1
    half = torch.cuda.get_device_properties(device).total_memory // 2
    return max(1, min(MAX_AUTO_BATCH, half // MEMORY_PER_IMAGE_BYTES))


def chosen_workers(configured: int | None, world_size: int, device: torch.device, *, share: float = 1.0) -> int:
    """Processes per rank: as `configured`, else a `share` of the rank's CPU cores, at most half without a GPU."""
    if configured is not None:
        return configured
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if device.type == "cuda":
        ranks_here = min(world_size, torch.cuda.device_count())
        return max(1, min(MAX_DEFAULT_WORKERS, int(cores // ranks_here * share)))
    return max(1, min(MAX_DEFAULT_WORKERS, cores // world_size // 2))


def _default_resize(device: torch.device) -> ResizeOn:
    return "device" if device.type == "cuda" else "worker"
