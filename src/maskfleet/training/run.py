"""`train(config, run_dir)`: builds the parts of a run, in order, and runs the loop."""

from __future__ import annotations

import os
import random
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import astuple
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from maskfleet.config.base import replaced
from maskfleet.config.load import CHECKPOINTS
from maskfleet.config.run import RunConfig
from maskfleet.data.pipeline.build import build_train_loader, reads_crowds
from maskfleet.data.pipeline.loader import TrainLoader
from maskfleet.data.pipeline.preload import start_fork_server
from maskfleet.data.store.largest import GroundTruthSize, largest_ground_truth
from maskfleet.errors import ConfigError, TrainingError
from maskfleet.evaluation.report.record import IMAGES_PER_GPU
from maskfleet.inference.device import chosen_device, keep_compiled_code, local_device
from maskfleet.inference.runner import detection_runner
from maskfleet.log import close_logging, count_text, errors_in_file, logger, setup_logging
from maskfleet.model.build import build_mask_rcnn
from maskfleet.model.mask_rcnn import MaskRCNN
from maskfleet.model.weights import labels_of, load_weights, save_weights
from maskfleet.model.weights.checkpoint import Snapshot, weights_of
from maskfleet.training.background.child import CompileJob, compile_jobs
from maskfleet.training.background.children import Children
from maskfleet.training.background.compiled_before import mark_compiled
from maskfleet.training.background.runner import Runner, SwitchingRunner, Tools, make_switching_runner
from maskfleet.training.background.save import record_jobs
from maskfleet.training.background.shared import files_to_write, load_compiled
from maskfleet.training.checkpoint import CheckpointStore
from maskfleet.training.distributed import Ranks, Timeouts, Worker, joined, worker_from_env
from maskfleet.training.loop import Run, fit
from maskfleet.training.optim import build_optimizer
from maskfleet.training.output.live_view import LiveView
from maskfleet.training.output.metrics import Metrics
from maskfleet.training.output.record import write_environment
from maskfleet.training.output.report import REPORT_PICTURES, machine_facts, sample_pictures, write_run_report
from maskfleet.training.output.sinks import MetricLog, ShortLog, Sink, open_sinks
from maskfleet.training.output.trackers import check_packages, open_trackers
from maskfleet.training.preflight import RunData, check_backbone_weights, fetch_weights, found_weights, open_data
from maskfleet.training.ranks.agreement import (
    expect_same_canvases,
    expect_same_software,
    warn_if_gpus_differ,
)
from maskfleet.training.ranks.per_host import newest_snapshot
from maskfleet.training.ranks.transport import recorded_nccl_log, report_transport
from maskfleet.training.run_lock import claimed, refused_paths
from maskfleet.training.schedule import Schedule, schedule_for
from maskfleet.training.sizing.auto import with_known_images
from maskfleet.training.state import Parts, Progress, position_of, restore, tensors_to_save
from maskfleet.training.step.buffers import BatchShapes, Capacity
from maskfleet.training.step.compiled import make_step_runner
from maskfleet.training.step.eager import StepSettings
from maskfleet.training.step.ema import Ema
from maskfleet.training.step.memory import explaining_full_memory
from maskfleet.training.step.precision import precision_for
from maskfleet.training.validate import Scores, Validator

WEIGHTS_FILE = "model.safetensors"
When = Literal["never", "first", "later"]  # the step is compiled: before the first one, or in the background
EXCHANGE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def train(
    config: RunConfig,
    run_dir: Path,
    *,
    wait_s: float = 0,
    device: str | None = None,
    env: Mapping[str, str] = os.environ,
) -> list[Scores]:
    """Train `config` in `run_dir`, resuming where an earlier process stopped; returns the last evaluation.

    If another process trains there, wait up to `wait_s` for it to finish. Without `device`, each rank uses its own GPU.
    """
    start_fork_server(config.data.num_workers)
    worker = worker_from_env(env)
    if worker.is_chief:
        check_packages(config)
    chosen = local_device(worker.local_rank) if device is None else _only_device(device, worker)
    timeouts = Timeouts(join_s=config.train.join_timeout_s, peer_s=config.train.peer_timeout_s)
    with recorded_nccl_log(os.environ, chosen), joined(worker, chosen, env, run_dir, timeouts) as ranks:
        expect_same_software(ranks, config)
        with claimed(run_dir, config, ranks, wait_s=wait_s):
            setup_logging(run_dir, worker.rank)
            try:
                with errors_in_file(), refused_paths(), ExitStack() as stack:
                    return _train(config, run_dir, ranks, chosen, stack)
            finally:
                close_logging()


def _only_device(device: str, worker: Worker) -> torch.device:
    chosen = chosen_device(device)
    if chosen.type == "cuda" and worker.world_size > 1:
        raise ConfigError(
            f"{worker.world_size} ranks cannot all train on {device}", remedy="leave the device out: each takes its own"
        )
    return chosen


def _train(config: RunConfig, run_dir: Path, ranks: Ranks, device: torch.device, stack: ExitStack) -> list[Scores]:
    worker = ranks.worker
    data = open_data(config, ranks)
    config = _with_categories(config, len(data.categories))
    checkpoints = CheckpointStore(run_dir / CHECKPOINTS, keep_last=config.checkpoint.keep_last)
    snapshot = newest_snapshot(checkpoints.saved, ranks)
    if worker.is_chief:
        checkpoints.clean_up(snapshot.step if snapshot is not None else None)
    if snapshot is None:
        fetch_weights(config, ranks)
    num_images = sum(len(store) for store in data.train_stores)
    config = with_known_images(config, snapshot, ranks, device, num_images=num_images)
    stack.enter_context(explaining_full_memory(config, device))
    loader = stack.enter_context(closing(_loader(config, data, worker, device, snapshot)))
    schedule = schedule_for(config.train, world_size=worker.world_size, steps_per_pass=loader.steps_per_pass)
    first = _own_steps(snapshot, loader.images_per_step) if snapshot is not None else 0
    loader.start(first, max(first, schedule.total_steps))  # it works while this process builds the model
    parts = _parts(config, loader, device, fresh=snapshot is None)
    expect_same_canvases(ranks, loader.buckets.canvases)
    warn_if_gpus_differ(ranks, device)
    report_transport(ranks, device, os.environ)
    if worker.is_chief:
        write_environment(run_dir, machine_facts(device) | {IMAGES_PER_GPU: str(config.train.batch_size)})
        checkpoints.reserve(tensors_to_save(parts))
    progress = _resumed(parts, snapshot, worker) if snapshot is not None else Progress()
    total_steps = schedule.total_steps + progress.shift
    log = MetricLog() if config.log.all_metrics else ShortLog(total_steps, schedule.images_per_step)
    metrics = _metrics(run_dir, config, log, parts, ranks, snapshot)
    when = _when_compiled(
        config, device, resumes_compiled=snapshot is not None and snapshot.numbers.get("compiled", False)
    )
    runner = _runner(config, data, parts, schedule, ranks, run_dir, when)
    validator = _validator(config, data, parts, schedule, ranks, run_dir)
    _log_setup(schedule, parts, worker, device, steps_left=total_steps - progress.done)
    try:
        with LiveView(total_steps, progress.done, enabled=None if worker.is_chief else False) as view:
            run = Run(
                config, device, ranks, parts, runner, schedule, metrics, checkpoints, validator, data.categories, view
            )
            ranks.expect_steps()
            scores = fit(run, progress)
            if worker.is_chief and (scores or not (run_dir / "report.html").exists()):
                _report(run, progress, run_dir)
    finally:
        if isinstance(runner, SwitchingRunner):
            runner.close()
        loader.close()
        metrics.close()
    if worker.is_chief:
        _save_weights(run, progress, run_dir)
    return scores


def _loader(
    config: RunConfig, data: RunData, worker: Worker, device: torch.device, snapshot: Snapshot | None
) -> TrainLoader:
    return build_train_loader(
        config,
        data.train_stores,
        rank=worker.rank,
        world_size=worker.world_size,
        device=device,
        resume=_loader_state(snapshot, worker.world_size * config.train.batch_size),
        skip=data.train_skip,
    )


def _parts(config: RunConfig, loader: TrainLoader, device: torch.device, *, fresh: bool) -> Parts:
    """Model and optimizer as they start, with `loader`; `restore` puts the rest of a snapshot into them."""
    _seed_everything(config.train.seed)
    model = _model(config, device, fresh=fresh)
    precision = precision_for(config.train.precision, device)
    ema = Ema(model, config.train.ema_decay) if config.train.ema_decay is not None else None
    return Parts(model, build_optimizer(model, config.train), precision, ema, loader)


def _runner(
    config: RunConfig, data: RunData, parts: Parts, schedule: Schedule, ranks: Ranks, run_dir: Path, when: When
) -> Runner:
    """The runner of the steps; if they are compiled, for all shapes of batches."""
    settings = StepSettings(
        parts.precision,
        gradient_clip=config.train.gradient_clip,
        steps_per_update=schedule.steps_per_update,
        world_size=ranks.worker.world_size,
        exchange_dtype=EXCHANGE_DTYPES[config.train.exchange_dtype],
    )
    shapes, jobs = None, list[CompileJob]()
    if when != "never":
        largest = GroundTruthSize()
        if ranks.worker.is_chief:
            largest = largest_ground_truth(data.train_stores, masks=config.model.mask)
        largest = GroundTruthSize(*ranks.broadcast(list(astuple(largest))))
        shapes = BatchShapes(
            num_images=config.train.batch_size,
            canvases=parts.loader.canvases,
            capacity=Capacity().grown_for(largest, crowds=reads_crowds(config)),
            masks=config.model.mask,
        )
        jobs = compile_jobs(parts.model.config, settings, shapes)
        _exchange_compiled_code(run_dir, jobs, ranks)
    with ranks.reporting_lost_ranks("preparing the first step"):
        if shapes is not None and when == "later":
            saving = files_to_write(jobs, run_dir) if ranks.worker.is_chief else []
            tools = Tools(start=partial(Children, save_to=saving))
            return make_switching_runner(parts.model, parts.optimizer, settings, shapes, ranks, tools)
        compile = when == "first"
        runner = make_step_runner(parts.model, parts.optimizer, settings, compile=compile, shapes=shapes, ranks=ranks)
    if runner.is_compiled and ranks.of_host().worker.is_chief:
        mark_compiled(jobs)
    return runner


def _validator(
    config: RunConfig, data: RunData, parts: Parts, schedule: Schedule, ranks: Ranks, run_dir: Path
) -> Validator:
    detection = detection_runner(parts.model, config, parts.precision.device)
    evaluations = schedule.total_steps // (schedule.steps_per_epoch * max(1, config.eval.every_epochs))
    return Validator(config, data.val_stores, data.val_skip, ranks, detection, max(1, evaluations), run_dir)


def _exchange_compiled_code(run_dir: Path, jobs: Sequence[CompileJob], ranks: Ranks) -> None:
    """Load what another process compiled, perhaps on another host, and say what this one compiles."""
    keep_compiled_code(os.environ)
    if jobs and ranks.of_host().worker.is_chief:
        load_compiled(jobs, run_dir)
    if jobs and ranks.worker.is_chief:
        record_jobs(run_dir, jobs)


def _report(run: Run, progress: Progress, run_dir: Path) -> None:
    stores, parts = run.validator.stores, run.parts
    pictures = []
    if stores and run.config.eval.every_epochs == 0:  # without an evaluation there are no detections to draw
        pictures = sample_pictures(parts.model, parts.ema, stores[0], run.config, run.device, count=REPORT_PICTURES)
    store = stores[0] if stores else None
    images_per_step = run.schedule.images_per_step
    write_run_report(run_dir, run.config, progress, store, pictures, device=run.device, images_per_step=images_per_step)


def _save_weights(run: Run, progress: Progress, run_dir: Path) -> None:
    newest = run.checkpoints.saved.newest()
    if newest is None or newest.step != progress.done:
        raise TrainingError(
            f"the checkpoint of step {progress.done}, the last one, was damaged after it was written",
            remedy="check the disk, then run the same command again: it repeats the last steps",
        )
    labels = labels_of(run.config, [(int(one["id"]), str(one["name"])) for one in run.categories])
    save_weights(run_dir / WEIGHTS_FILE, weights_of(newest), run.config.model, labels)
    logger.info("training is done after %s", count_text(progress.done, "step"))
    logger.info("the weights are in %s, the report is %s", run_dir / WEIGHTS_FILE, run_dir / "report.html")


def _with_categories(config: RunConfig, count: int) -> RunConfig:
    configured = config.model.num_categories
    if configured is not None and configured != count:
        raise ConfigError(
            f"model.num_categories is {configured}, but the training data has {count} categories",
            remedy="leave out model.num_categories: it is taken from the data",
        )
    return replaced(config, {"model.num_categories": count})


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


def _when_compiled(config: RunConfig, device: torch.device, *, resumes_compiled: bool) -> When:
    """Whether to compile the step before the first one, or in the background if it pays.

    By default in the background on a GPU, unless every batch has a shape of its own. A run that resumes after compiled
    steps compiles first, so that its next step is computed like the last one.
    """
    if isinstance(config.train.compile, bool):
        return "first" if config.train.compile else "never"
    if device.type != "cuda" or config.data.buckets == "none":
        return "never"
    return "first" if resumes_compiled else "later"


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


def _metrics(
    run_dir: Path, config: RunConfig, log: Sink, parts: Parts, ranks: Ranks, snapshot: Snapshot | None
) -> Metrics:
    """The metrics of this rank, with the sums that the checkpoint had not yet written."""
    worker = ranks.worker
    step = snapshot.step if snapshot is not None else 0
    due = snapshot is not None and snapshot.numbers.get("evaluation_due", False)
    sinks: tuple[Sink, ...] = ()
    if worker.is_chief:
        sinks = open_sinks(run_dir, log, after_step=step, evaluation_due=due)
        sinks += open_trackers(run_dir, config)  # after the others: they read metrics.jsonl
    metrics = Metrics(sinks, mean_over_ranks=ranks.mean)
    if snapshot is not None and _has_same_size(snapshot, parts, worker):
        metrics.load_state_dict(snapshot.numbers["metrics"][worker.rank])
    return metrics


def _log_setup(schedule: Schedule, parts: Parts, worker: Worker, device: torch.device, *, steps_left: int) -> None:
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
    if steps_left <= 0:
        logger.info("all steps are done: train longer with --set train.epochs=N or --set train.steps=N")
