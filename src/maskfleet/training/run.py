"""`train(config, run_dir)`: builds the parts of a run, in order, and runs the loop."""

from __future__ import annotations

import os
import random
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch

from maskfleet.config.base import replaced
from maskfleet.config.run import RunConfig
from maskfleet.data.pipeline.build import build_train_loader
from maskfleet.errors import ConfigError, TrainingError
from maskfleet.inference.device import local_device
from maskfleet.log import close_logging, logger, setup_logging
from maskfleet.model.build import build_mask_rcnn
from maskfleet.model.mask_rcnn import MaskRCNN
from maskfleet.model.weights import load_weights, save_weights
from maskfleet.model.weights.checkpoint import Snapshot, weights_of
from maskfleet.training.checkpoint import CheckpointStore
from maskfleet.training.distributed import Ranks, Worker, joined, worker_from_env
from maskfleet.training.loop import Run, fit
from maskfleet.training.optim import build_optimizer
from maskfleet.training.output.live_view import LiveView
from maskfleet.training.output.metrics import Metrics
from maskfleet.training.output.report import REPORT_PICTURES, sample_pictures, write_run_report
from maskfleet.training.output.sinks import open_sinks
from maskfleet.training.preflight import RunData, check_backbone_weights, found_weights, open_data
from maskfleet.training.run_lock import claimed
from maskfleet.training.schedule import Schedule, schedule_for
from maskfleet.training.state import Parts, Progress, position_of, restore, tensors_to_save
from maskfleet.training.step.compiled import make_step_runner
from maskfleet.training.step.eager import StepSettings
from maskfleet.training.step.ema import Ema
from maskfleet.training.step.precision import precision_for
from maskfleet.training.validate import Scores, Validator

WEIGHTS_FILE = "model.safetensors"


def train(config: RunConfig, run_dir: Path, *, wait_s: float = 0, env: Mapping[str, str] = os.environ) -> list[Scores]:
    """Train `config` in `run_dir`, resuming where an earlier process stopped; returns the last evaluation.

    If another process trains there, wait up to `wait_s` for it to finish.
    """
    worker = worker_from_env(env)
    device = local_device(worker.local_rank)
    with joined(worker, device, env) as ranks, claimed(run_dir, config, ranks, wait_s=wait_s):
        setup_logging(run_dir, worker.rank)
        try:
            return _train(config, run_dir, ranks, device)
        finally:
            close_logging()


def _train(config: RunConfig, run_dir: Path, ranks: Ranks, device: torch.device) -> list[Scores]:
    worker = ranks.worker
    data = open_data(config, ranks)
    config = _with_categories(config, len(data.categories))
    checkpoints = CheckpointStore(run_dir / "checkpoints", keep_last=config.checkpoint.keep_last)
    snapshot = _newest_on_all(checkpoints, ranks)
    parts = _parts(config, data, worker, device, snapshot)
    schedule = schedule_for(config.train, world_size=worker.world_size, steps_per_pass=parts.loader.steps_per_pass)
    if worker.is_chief:
        checkpoints.reserve(tensors_to_save(parts))
    progress = _resumed(parts, snapshot, worker) if snapshot is not None else Progress()
    metrics = _metrics(run_dir, parts, ranks, snapshot)
    settings = StepSettings(parts.precision, config.train.gradient_clip, schedule.steps_per_update, worker.world_size)
    runner = make_step_runner(parts.model, parts.optimizer, settings, compile=_wants_compiled(config, device))
    validator = Validator(config, data.val_stores, data.val_skip, ranks, device)
    _log_setup(schedule, parts, worker, device)
    try:
        total_steps = schedule.total_steps + progress.shift
        with LiveView(total_steps, progress.done, enabled=None if worker.is_chief else False) as view:
            run = Run(
                config, device, ranks, parts, runner, schedule, metrics, checkpoints, validator, data.categories, view
            )
            scores = fit(run, progress)
            if worker.is_chief and (scores or not (run_dir / "report.html").exists()):
                _report(run, progress, scores, run_dir)
    finally:
        parts.loader.close()
        metrics.close()
    if worker.is_chief:
        _save_weights(run, progress, run_dir)
    return scores


def _parts(config: RunConfig, data: RunData, worker: Worker, device: torch.device, snapshot: Snapshot | None) -> Parts:
    """Model, optimizer and loader, as they start; `restore` puts the rest of a snapshot into them."""
    _seed_everything(config.train.seed)
    model = _model(config, device, fresh=snapshot is None)
    loader = build_train_loader(
        config,
        data.train_stores,
        rank=worker.rank,
        world_size=worker.world_size,
        device=device,
        resume=_loader_state(snapshot, worker.world_size * config.train.images_per_gpu),
        skip=data.train_skip,
    )
    precision = precision_for(config.train.precision, device)
    ema = Ema(model, config.train.ema_decay) if config.train.ema_decay is not None else None
    return Parts(model, build_optimizer(model, config.train), precision, ema, loader)


def _report(run: Run, progress: Progress, scores: list[Scores], run_dir: Path) -> None:
    stores, parts = run.validator.stores, run.parts
    pictures = []
    if stores:
        pictures = sample_pictures(parts.model, parts.ema, stores[0], run.config, run.device, count=REPORT_PICTURES)
    images_per_step = run.schedule.images_per_step
    write_run_report(
        run_dir, run.config, progress, scores, pictures, device=run.device, images_per_step=images_per_step
    )


def _save_weights(run: Run, progress: Progress, run_dir: Path) -> None:
    newest = run.checkpoints.saved.newest()
    assert newest is not None
    names = [str(category["name"]) for category in run.categories]
    save_weights(run_dir / WEIGHTS_FILE, weights_of(newest), run.config.model, names)
    logger.info("training is done after %d steps", progress.done)
    logger.info("the weights are in %s, the report is %s", run_dir / WEIGHTS_FILE, run_dir / "report.html")


def _with_categories(config: RunConfig, count: int) -> RunConfig:
    configured = config.model.num_categories
    if configured is not None and configured != count:
        raise ConfigError(
            f"model.num_categories is {configured}, but the training data has {count} categories",
            remedy="leave out model.num_categories: it is taken from the data",
        )
    return replaced(config, {"model.num_categories": count})


def _newest_on_all(checkpoints: CheckpointStore, ranks: Ranks) -> Snapshot | None:
    """The newest undamaged checkpoint; all ranks must see the same one."""
    snapshot = checkpoints.saved.newest()
    steps = ranks.gather(snapshot.step if snapshot is not None else None)
    steps = ranks.broadcast(steps)
    if len(set(steps)) > 1:
        raise TrainingError(
            f"the ranks see different checkpoints (steps {steps})",
            remedy="use a run directory on a file system that all machines share",
        )
    return snapshot


def _seed_everything(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def _model(config: RunConfig, device: torch.device, *, fresh: bool) -> MaskRCNN:
    """The model with its initial weights; a resumed run loads its own from the checkpoint."""
    model = build_mask_rcnn(config.model)
    if fresh:
        check_backbone_weights(config)
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


def _loader_state(snapshot: Snapshot | None, images_per_step: int) -> dict[str, int] | None:
    """Where the loader resumes, in steps of this run's size."""
    if snapshot is None:
        return None
    return dict(snapshot.numbers["loader"]) | {"step": _own_steps(snapshot, images_per_step)}


def _own_steps(snapshot: Snapshot, images_per_step: int) -> int:
    """Steps done, in steps of this run, whose number of images may differ from that of the checkpoint's steps."""
    return position_of(snapshot) * int(snapshot.numbers["images_per_step"]) // images_per_step


def _has_same_size(snapshot: Snapshot, parts: Parts, worker: Worker) -> bool:
    """Whether the checkpoint was written with this run's number of ranks and of images per step."""
    numbers = snapshot.numbers
    return bool(
        numbers["images_per_step"] == parts.loader.images_per_step and len(numbers["metrics"]) == worker.world_size
    )


def _resumed(parts: Parts, snapshot: Snapshot, worker: Worker) -> Progress:
    """Restore `parts`; returns the progress in steps of this run's size."""
    progress = restore(parts, snapshot)
    logger.info("resuming after step %d", snapshot.step)
    if _has_same_size(snapshot, parts, worker):
        return progress
    images_per_step = parts.loader.images_per_step
    progress.step = _own_steps(snapshot, images_per_step)
    progress.shift = snapshot.step - progress.step
    logger.warning(
        "the run resumes with %d ranks and %d images per step instead of %d ranks and %d images: that is step %d now; "
        "learning rate and schedule follow the new size, and results will not be bit-equal to an unchanged run",
        worker.world_size,
        images_per_step,
        len(snapshot.numbers["metrics"]),
        snapshot.numbers["images_per_step"],
        progress.step,
    )
    return progress


def _metrics(run_dir: Path, parts: Parts, ranks: Ranks, snapshot: Snapshot | None) -> Metrics:
    """The metrics of this rank, with the sums that the checkpoint had not yet written."""
    worker = ranks.worker
    sinks = open_sinks(run_dir, after_step=snapshot.step if snapshot is not None else 0) if worker.is_chief else ()
    metrics = Metrics(sinks, mean_over_ranks=ranks.mean)
    if snapshot is not None and _has_same_size(snapshot, parts, worker):
        metrics.load_state_dict(snapshot.numbers["metrics"][worker.rank])
    return metrics


def _log_setup(schedule: Schedule, parts: Parts, worker: Worker, device: torch.device) -> None:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, threads: {torch.get_num_threads()}"
    logger.info("%d rank%s on %s, %s", worker.world_size, "s"[: worker.world_size != 1], name, parts.precision.name)
    logger.info(
        "%d images; %d steps of %d images, %d steps per epoch; learning rate %.6g after %d steps of warm-up",
        parts.loader.num_images,
        schedule.total_steps,
        schedule.images_per_step,
        schedule.steps_per_epoch,
        schedule.full_lr,
        schedule.warmup_steps,
    )
