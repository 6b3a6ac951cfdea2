"""`train(config, run_dir)`: builds everything, in order, and runs the loop."""

from __future__ import annotations

import os
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from maskfleet.config.base import replaced
from maskfleet.config.run import RunConfig
from maskfleet.data.pipeline.build import build_train_loader
from maskfleet.errors import ConfigError, TrainingError
from maskfleet.log import close_logging, logger, setup_logging
from maskfleet.model.build import build_mask_rcnn
from maskfleet.model.mask_rcnn import MaskRCNN
from maskfleet.model.weights import load_weights, save_weights
from maskfleet.training.checkpoint import CheckpointStore, Snapshot
from maskfleet.training.distributed import Ranks, Worker, joined, worker_from_env
from maskfleet.training.loop import Run, fit
from maskfleet.training.optim import build_optimizer
from maskfleet.training.output.live_view import View
from maskfleet.training.output.metrics import Metrics
from maskfleet.training.output.report import REPORT_PICTURES, sample_pictures, write_run_report
from maskfleet.training.preflight import broken_images, expect_weights, found_weights, open_sets, shared_categories
from maskfleet.training.run_lock import claimed
from maskfleet.training.schedule import Schedule, schedule_for
from maskfleet.training.state import Parts, Progress, position_of, restore, room_needed, weights_of
from maskfleet.training.step.compiled import make_step_runner
from maskfleet.training.step.ema import Ema
from maskfleet.training.step.precision import precision_for
from maskfleet.training.validate import Scores, Validator

WEIGHTS_FILE = "model.safetensors"


def train(config: RunConfig, run_dir: Path, *, wait_s: float = 0, env: Mapping[str, str] = os.environ) -> list[Scores]:
    """Train `config` in `run_dir`, going on where an earlier process stopped; the answer is the last evaluation.

    Where another process trains there, its end is waited for up to `wait_s`.
    """
    worker = worker_from_env(env)
    device = device_for(worker)
    with joined(worker, device, env) as ranks, claimed(run_dir, config, ranks, wait_s=wait_s):
        setup_logging(run_dir, worker.rank)
        try:
            return _train(config, run_dir, ranks, device)
        finally:
            close_logging()


def device_for(worker: Worker) -> torch.device:
    """The rank's own GPU, or the CPU where there is none."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if worker.local_rank >= count:
        raise TrainingError(
            f"rank {worker.rank} is number {worker.local_rank} on this machine, which has {count} GPUs",
            remedy="start as many ranks a machine as it has GPUs",
        )
    device = torch.device("cuda", worker.local_rank)
    torch.cuda.set_device(device)
    return device


def _train(config: RunConfig, run_dir: Path, ranks: Ranks, device: torch.device) -> list[Scores]:
    worker = ranks.worker
    train_stores, val_stores = open_sets(config, ranks)
    skip = broken_images(config, [*train_stores, *val_stores], ranks)
    categories = shared_categories([*train_stores, *val_stores])
    settled = _with_categories(config, len(categories))
    checkpoints = CheckpointStore(run_dir / "checkpoints", keep_last=config.checkpoint.keep_last)
    snapshot = _newest_on_all(checkpoints, ranks)
    _seed_everything(config.train.seed)
    model = _model(settled, device, fresh=snapshot is None)
    images_per_step = worker.world_size * config.train.images_per_gpu
    loader = build_train_loader(
        settled,
        train_stores,
        rank=worker.rank,
        world_size=worker.world_size,
        device=device,
        resume=_cursor(snapshot, images_per_step),
        skip=skip[: len(train_stores)],
    )
    schedule = schedule_for(config.train, world_size=worker.world_size, steps_per_pass=loader.steps_per_pass)
    precision = precision_for(config.train.precision, device)
    ema = Ema(model, config.train.ema_decay) if config.train.ema_decay is not None else None
    parts = Parts(model, build_optimizer(model, config.train), precision, ema, loader)
    if worker.is_chief:
        checkpoints.reserve(room_needed(parts))
    metrics = Metrics(run_dir, is_chief=worker.is_chief, mean_over_ranks=_mean_over(ranks, device))
    progress = _resumed(parts, snapshot, metrics, images_per_step, worker) if snapshot is not None else Progress()
    if snapshot is None:
        metrics.truncate_after(0)
    runner = make_step_runner(
        model,
        parts.optimizer,
        precision=precision,
        compile=_wants_compiled(config, device),
        gradient_clip=config.train.gradient_clip,
        steps_per_update=schedule.steps_per_update,
        world_size=worker.world_size,
    )
    validator = Validator(settled, val_stores, skip[len(train_stores) :], ranks, device)
    _announce(schedule, loader.num_images, worker, device, precision.name)
    try:
        with View(
            schedule.total_steps + progress.shift, progress.done, enabled=None if worker.is_chief else False
        ) as view:
            run = Run(
                settled, device, ranks, parts, runner, schedule, metrics, checkpoints, validator, categories, view
            )
            scores = fit(run, progress)
            if worker.is_chief and (scores or not (run_dir / "report.html").exists()):
                _report(run, progress, scores, run_dir)
    finally:
        loader.close()
        metrics.close()
    if worker.is_chief:
        newest = checkpoints.newest()
        assert newest is not None
        names = [str(category["name"]) for category in categories]
        save_weights(run_dir / WEIGHTS_FILE, weights_of(newest), settled.model, names)
        logger.info("training is done after %d steps", progress.done)
        logger.info("the weights are in %s, the report is %s", run_dir / WEIGHTS_FILE, run_dir / "report.html")
    return scores


def _report(run: Run, progress: Progress, scores: list[Scores], run_dir: Path) -> None:
    stores, parts = run.validator.stores, run.parts
    pictures = []
    if stores:
        pictures = sample_pictures(parts.model, parts.ema, stores[0], run.config, run.device, count=REPORT_PICTURES)
    images_per_step = run.schedule.images_per_step
    write_run_report(
        run_dir, run.config, progress, scores, pictures, device=run.device, images_per_step=images_per_step
    )


def _with_categories(config: RunConfig, count: int) -> RunConfig:
    wanted = config.model.num_categories
    if wanted is not None and wanted != count:
        raise ConfigError(
            f"model.num_categories is {wanted}, but the training data has {count} categories",
            remedy="leave model.num_categories out: it is taken from the data",
        )
    return replaced(config, {"model.num_categories": count})


def _newest_on_all(checkpoints: CheckpointStore, ranks: Ranks) -> Snapshot | None:
    """The newest whole checkpoint, which every rank must see."""
    snapshot = checkpoints.newest()
    steps = ranks.gather(snapshot.step if snapshot is not None else None)
    steps = ranks.broadcast(steps)
    if len(set(steps)) > 1:
        raise TrainingError(
            f"the ranks see different checkpoints (steps {steps})",
            remedy="put the run directory on a folder that all machines share",
        )
    return snapshot


def _seed_everything(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def _model(config: RunConfig, device: torch.device, *, fresh: bool) -> MaskRCNN:
    """The model with the weights it starts from; those of a resumed run come from its checkpoint."""
    model = build_mask_rcnn(config.model)
    if fresh:
        expect_weights(config)
    if fresh and config.train.weights is not None:
        path = found_weights(config.train.weights, config)
        report = load_weights(model, config.model, path, on_class_mismatch="reinit")
        logger.info("weights from %s\n%s", path, report.render())
    elif fresh and config.model.backbone.weights is not None:
        path = found_weights(config.model.backbone.weights, config)
        report = load_weights(model, config.model, path, scope="backbone")
        logger.info("backbone weights from %s\n%s", path, report.render())
    model = model.to(device).train()
    if device.type == "cuda":
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return model


def _wants_compiled(config: RunConfig, device: torch.device) -> bool:
    """Whether to compile the step: on a GPU, unless every batch has a shape of its own."""
    if config.train.compile == "auto":
        return device.type == "cuda" and config.data.buckets != "none"
    return config.train.compile


def _cursor(snapshot: Snapshot | None, images_per_step: int) -> dict[str, int] | None:
    """Where the loader goes on, in steps of this run's size."""
    if snapshot is None:
        return None
    return dict(snapshot.numbers["loader"]) | {"step": _own_steps(snapshot, images_per_step)}


def _own_steps(snapshot: Snapshot, images_per_step: int) -> int:
    """Steps done, counted in this run's steps, which may have another number of images than the checkpoint's."""
    return position_of(snapshot) * int(snapshot.numbers["images_per_step"]) // images_per_step


def _resumed(parts: Parts, snapshot: Snapshot, metrics: Metrics, images_per_step: int, worker: Worker) -> Progress:
    progress = restore(parts, snapshot)
    metrics.truncate_after(snapshot.step)
    windows, before = snapshot.numbers["metrics"], snapshot.numbers["images_per_step"]
    logger.info("going on after step %d", snapshot.step)
    if before == images_per_step and len(windows) == worker.world_size:
        window = windows[worker.rank]
        metrics.load_state_dict(window | {"sums": torch.tensor(window["sums"], dtype=torch.float64)})
        return progress
    progress.step = _own_steps(snapshot, images_per_step)
    progress.shift = snapshot.step - progress.step
    logger.warning(
        "the run goes on with %d ranks and %d images a step instead of %d ranks and %d images: that is step %d now; "
        "learning rate and schedule follow the new size, and results will not be bit-equal to an unchanged run",
        worker.world_size,
        images_per_step,
        len(windows),
        before,
        progress.step,
    )
    return progress


def _mean_over(ranks: Ranks, device: torch.device) -> Any:
    if ranks.worker.world_size == 1:
        return None
    return lambda values: ranks.mean(values.cpu()).to(device)


def _announce(schedule: Schedule, num_images: int, worker: Worker, device: torch.device, precision: str) -> None:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, threads: {torch.get_num_threads()}"
    logger.info("%d rank%s on %s, %s", worker.world_size, "s"[: worker.world_size != 1], name, precision)
    logger.info(
        "%d images; %d steps of %d images, %d steps an epoch; learning rate %.6g after %d steps of warm-up",
        num_images,
        schedule.total_steps,
        schedule.images_per_step,
        schedule.steps_per_epoch,
        schedule.full_lr,
        schedule.warmup_steps,
    )


__all__: Sequence[str] = ["device_for", "train"]
