"""How fast this machine trains, detects and loads data, to show which of them is the bottleneck."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

import torch

from maskfleet.batch import Batch, Images
from maskfleet.bench.noise_batch import noise_batch
from maskfleet.bench.roofline import KNOWN, images_per_s
from maskfleet.config.base import replaced
from maskfleet.config.run import RunConfig
from maskfleet.data.pipeline.build import build_train_loader
from maskfleet.data.store.annotations import AnnotationStore
from maskfleet.inference.recorded import RecordedDetector
from maskfleet.model.build import build_mask_rcnn
from maskfleet.training.optim import build_optimizer
from maskfleet.training.step.compiled import CompiledStepRunner, make_step_runner
from maskfleet.training.step.eager import StepSettings
from maskfleet.training.step.precision import precision_for

NUM_BATCHES = 3  # different ones, so that no cache holds the answer
WARM_UPS = 3
DEFAULT_CATEGORIES = 80


@dataclass(frozen=True, slots=True)
class Speed:
    """One line of the table."""

    what: str
    batch: int
    images_per_s: float
    step_ms: float
    first_step_s: float  # with compiling
    peak_gib: float | None  # of GPU memory
    roofline_images_per_s: float | None = None  # None where the GPU is not known, and for detection
    compiled: bool = False

    @property
    def share_of_roofline(self) -> float | None:
        return None if self.roofline_images_per_s is None else self.images_per_s / self.roofline_images_per_s


def train_speed(config: RunConfig, device: torch.device, *, batch: int, steps: int) -> Speed:
    """Speed of whole training steps, optimizer included, on `batch` images of noise of the run's size."""
    config = _with_categories(config)
    precision = precision_for(config.train.precision, device)
    model = build_mask_rcnn(config.model).to(device).train()
    runner = make_step_runner(
        model,
        build_optimizer(model, config.train),
        StepSettings(precision, config.train.gradient_clip),
        compile=config.train.compile if isinstance(config.train.compile, bool) else device.type == "cuda",
    )

    def step(noise: Batch) -> None:
        # A learning rate of 0 keeps the random weights unchanged and costs the same.
        runner.step(noise, lr=0.0, update=True, with_metrics=False)

    speed = _speed("train", step, _batches(config, device, batch), device, steps=steps)
    gpu = KNOWN.get(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    canvas = _canvas(config)
    return replace(
        speed,
        roofline_images_per_s=None if gpu is None else images_per_s(config.model, gpu, batch=batch, canvas=canvas),
        compiled=isinstance(runner, CompiledStepRunner) and runner.is_compiled,
    )


def detect_speed(config: RunConfig, device: torch.device, *, batch: int, steps: int) -> Speed:
    """Speed of detection with masks; random weights and no score threshold give the most detections."""
    config = replaced(_with_categories(config), {"model.inference.score_threshold": 0.0})
    model = build_mask_rcnn(config.model).to(device).eval()
    dtype = torch.bfloat16 if device.type == "cuda" and torch.cuda.is_bf16_supported() else None
    detector: Callable[[Images], object] = model.detect
    if device.type == "cuda":
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        detector = RecordedDetector(model, dtype=dtype)
    batches = _batches(config, device, batch)
    speed = _speed("detect", lambda given: detector(given.images), batches, device, steps=steps)
    return replace(speed, compiled=device.type == "cuda")


def loader_speed(
    config: RunConfig, stores: Sequence[AnnotationStore], device: torch.device, *, batch: int, steps: int
) -> float:
    """Training images per second that the loader delivers to `device` when nothing else uses them."""
    config = replaced(config, {"train.images_per_gpu": batch})
    loader = build_train_loader(config, stores, device=device)
    try:
        batches = loader.batches(0, WARM_UPS + steps)
        for _ in range(WARM_UPS):  # workers start, and fill their queues
            next(batches)
        return batch * steps / _seconds(lambda: [None for _ in batches], device)
    finally:
        loader.close()


def median_ms(step: Callable[[Batch], object], batches: Sequence[Batch], device: torch.device, *, steps: int) -> float:
    """Median time of a step, each on the next of `batches`, after a few to warm up."""
    for number in range(WARM_UPS):
        step(batches[number % len(batches)])
    if device.type != "cuda":
        turns = (batches[number % len(batches)] for number in range(steps))
        return 1000 * statistics.median(_seconds(partial(step, batch), device) for batch in turns)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]  # type: ignore[no-untyped-call]
    events[0].record()
    for number, event in enumerate(events[1:]):
        step(batches[number % len(batches)])
        event.record()
    torch.cuda.synchronize()
    return statistics.median(float(before.elapsed_time(after)) for before, after in pairwise(events))


def _speed(
    what: str, step: Callable[[Batch], object], batches: Sequence[Batch], device: torch.device, *, steps: int
) -> Speed:
    first_step_s = _seconds(lambda: step(batches[0]), device)
    step_ms = median_ms(step, batches, device, steps=steps)
    return Speed(
        what=what,
        batch=batches[0].num_images,
        images_per_s=1000 * batches[0].num_images / step_ms,
        step_ms=step_ms,
        first_step_s=first_step_s,
        peak_gib=torch.cuda.max_memory_reserved(device) / 2**30 if device.type == "cuda" else None,
    )


def _with_categories(config: RunConfig) -> RunConfig:
    return replaced(config, {"model.num_categories": config.model.num_categories or DEFAULT_CATEGORIES})


def _canvas(config: RunConfig) -> tuple[int, int]:
    divisor = config.model.size_divisor
    height = -(-config.data.train_short_edge_px[1] // divisor) * divisor
    return height, max(height, config.model.canvas_max_px)


def _batches(config: RunConfig, device: torch.device, batch: int) -> list[Batch]:
    canvas, num_categories = _canvas(config), config.model.num_categories
    assert num_categories is not None
    return [
        noise_batch(batch, canvas=canvas, size=canvas, num_categories=num_categories, seed=seed).to(device)
        for seed in range(NUM_BATCHES)
    ]


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    started_at = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started_at
