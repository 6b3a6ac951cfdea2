"""How fast a GPU trains and detects, compared with torchvision in the same run and with the roofline.

    python benchmarks/step.py --what train --batch 16 [--model r50_fpn_mask] [--peer torchvision] [--out FILE]

Images of 800 x 1333 on a canvas of 800 x 1344, 8 objects each; bf16; the whole step with the optimizer. Weights are
random, so `foreground_iou` is lowered until all 128 foreground and 384 background samples of an image are used, which
in real training is not always so: the heads get their full load. The time of a step is the median of CUDA events
between steps, each on another batch. Results are appended to FILE, one record per run. Runs that share a `--turn` file
compile in parallel and measure one at a time, from the choice of cuDNN's algorithms on.
"""

from __future__ import annotations

import argparse
import fcntl
import itertools
import json
import logging
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

STARTED_AT = time.time()

import torch  # noqa: E402 - the clock starts before the imports, as it does for a user

from machine import machine_facts  # noqa: E402
from maskfleet.batch import Batch  # noqa: E402
from maskfleet.bench.noise_batch import noise_batch  # noqa: E402
from maskfleet.bench.roofline import KNOWN, images_per_s  # noqa: E402
from maskfleet.config.model import R101_BLOCKS, ModelConfig  # noqa: E402
from maskfleet.config.run import TrainConfig  # noqa: E402
from maskfleet.inference.recorded import RecordedDetector  # noqa: E402
from maskfleet.model.build import build_mask_rcnn  # noqa: E402
from maskfleet.model.mask_rcnn import MaskRCNN  # noqa: E402
from maskfleet.training.optim import build_optimizer  # noqa: E402
from maskfleet.training.step.buffers import Capacity, copy_into, static_batch  # noqa: E402
from maskfleet.training.step.compiled import CompiledStepRunner  # noqa: E402
from maskfleet.training.step.eager import StepSettings  # noqa: E402
from maskfleet.training.step.precision import precision_for  # noqa: E402

MODELS: dict[str, dict[str, Any]] = {
    "r50_fpn_mask": {},
    "r50_fpn_faster": {"mask": False},
    "r101_fpn_mask": {"backbone": {"blocks": R101_BLOCKS}},
    "r50_c4_mask": {"architecture": "c4"},
    # What the recipe `scratch`, the default, trains: group normalisation everywhere, nothing frozen.
    "r50_fpn_gn_mask": {
        "backbone": {"norm": "GN", "freeze_at": 0},
        "fpn": {"norm": "GN"},
        "box_head": {"kind": "4conv1fc_gn"},
        "mask_head": {"kind": "up4conv_gn"},
    },
}
FULL_SLOTS_IOU = 0.05
STEPS = 30


def main() -> None:
    options = _options()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.manual_seed(0)
    settings = MODELS[options.model]
    box_head = settings.get("box_head", {}) | {"foreground_iou": FULL_SLOTS_IOU}
    config = ModelConfig.model_validate({"num_categories": 80, **settings, "box_head": box_head})
    measure = {"train": train, "detect": detect}[options.what]
    record = {"what": options.what, "model": options.model, "batch": options.batch, "split": options.split}
    record |= measure(config, options)
    record |= machine_facts()
    print(json.dumps(record), flush=True)
    if options.out is not None:
        with options.out.open("a") as file:
            file.write(json.dumps(record) + "\n")


def train(config: ModelConfig, options: argparse.Namespace) -> dict[str, Any]:
    """Speed, memory and start-up of a training step, and its losses compared with the same model, eager in fp32."""
    device = torch.device("cuda", 0)
    model = build_mask_rcnn(config).to(device).train()
    batches = [noise_batch(options.batch, seed=seed).to(device) for seed in range(3)]
    if options.split:
        join_alone(device)
    runner = CompiledStepRunner(
        model,
        build_optimizer(model, TrainConfig()),
        StepSettings(precision_for("bf16", device), split=options.split),
    )
    if options.turn is not None:
        runner.warm_up(in_static_buffers(batches[0]))
    waited_s = _wait_for_turn(options.turn)
    losses, metrics = runner.step(batches[0], lr=0.0, update=True, with_metrics=True)
    compiled = {name: value.item() for name, value in losses.items()}
    start_s = time.time() - STARTED_AT - waited_s
    assert runner.is_compiled, "compiling failed"
    step_ms = median_ms(lambda batch: runner.step(batch, lr=1e-5, update=True, with_metrics=False), batches)
    result = {
        "images_per_s": round(1000 * options.batch / step_ms, 1),
        "step_ms": round(step_ms, 3),
        "peak_gib": round(torch.cuda.max_memory_reserved() / 2**30, 1),
        "start_to_first_step_s": round(start_s, 1),
        "foreground_an_image": round(metrics["sample_fast_rcnn_targets/num_fg"].item(), 1),
        "losses": {name: round(value, 4) for name, value in compiled.items()},
    }
    result |= _bound(config, options.batch, result["images_per_s"])
    if options.peer == "torchvision":
        result["peer"] = torchvision_train(options.batch)
        result["times_peer"] = round(result["images_per_s"] / result["peer"]["images_per_s"], 2)
    if options.profile is not None:
        _write_profile(lambda: runner.step(batches[0], lr=1e-5, update=True, with_metrics=False), options.profile)
    return result


def detect(config: ModelConfig, options: argparse.Namespace) -> dict[str, Any]:
    """Speed of detection with masks; random weights and a score threshold of 0 give 100 detections per image."""
    config = config.model_copy(update={"inference": config.inference.model_copy(update={"score_threshold": 0.0})})
    device = torch.device("cuda")
    model: MaskRCNN = build_mask_rcnn(config).to(device).eval()
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    torch.backends.cudnn.benchmark = True
    batches = [noise_batch(options.batch, seed=seed).to(device) for seed in range(3)]
    detector = RecordedDetector(model, dtype=torch.bfloat16)
    if options.turn is not None:
        torch.backends.cudnn.benchmark = False
        detector._detect(batches[0].images)
        torch.backends.cudnn.benchmark = True
    waited_s = _wait_for_turn(options.turn)
    found = detector(batches[0].images)
    count = found.valid.sum(dim=1).float().mean().item()
    start_s = time.time() - STARTED_AT - waited_s
    step_ms = median_ms(lambda batch: detector(batch.images), batches)
    result = {
        "images_per_s": round(1000 * options.batch / step_ms, 1),
        "step_ms": round(step_ms, 3),
        "detections_an_image": count,
        "peak_gib": round(torch.cuda.max_memory_reserved() / 2**30, 1),
        "start_to_first_step_s": round(start_s, 1),
    }
    if options.profile is not None:
        _write_profile(lambda: detector(batches[0].images), options.profile)
    return result


def torchvision_train(batch: int, *, steps: int = 12) -> dict[str, Any]:
    """torchvision's `maskrcnn_resnet50_fpn` on the same images in bf16, in the faster memory layout."""
    from torchvision.models.detection import maskrcnn_resnet50_fpn

    torch.cuda.empty_cache()
    torch.manual_seed(0)
    model = maskrcnn_resnet50_fpn(weights=None, weights_backbone=None, num_classes=81).cuda().train()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-5, momentum=0.9, fused=True)
    made = noise_batch(batch)
    images = [pixels[:, :800, :1333].float().div(255).cuda() for pixels in made.images.pixels]
    targets = []
    for boxes, labels in zip(made.targets.boxes, made.targets.labels, strict=True):
        masks = torch.zeros(len(boxes), 800, 1333, dtype=torch.uint8)
        for mask, (left, top, right, bottom) in zip(masks, boxes.int().tolist(), strict=True):
            mask[top:bottom, left:right] = 1
        targets.append({"boxes": boxes.cuda(), "labels": labels.cuda(), "masks": masks.cuda()})

    def step(_: Batch) -> None:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            losses = model(images, targets)
        optimizer.zero_grad(set_to_none=True)
        sum(losses.values()).backward()
        optimizer.step()

    step_ms = median_ms(step, [made], steps=steps)
    return {"name": "torchvision bf16", "images_per_s": round(1000 * batch / step_ms, 1), "step_ms": round(step_ms, 1)}


def median_ms(step: Callable[[Batch], object], batches: list[Batch], *, steps: int = STEPS) -> float:
    """Median time of a step, by CUDA events between steps, after some warm-up steps."""
    for number in range(5):
        step(batches[number % len(batches)])
    events = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    events[0].record()
    for number, event in enumerate(events[1:]):
        step(batches[number % len(batches)])
        event.record()
    torch.cuda.synchronize()
    return statistics.median(before.elapsed_time(after) for before, after in itertools.pairwise(events))


def join_alone(device: torch.device) -> None:
    """A process group of this process alone: its collectives are recorded like those of many, but send nothing."""
    torch.distributed.init_process_group(
        "nccl", store=torch.distributed.HashStore(), rank=0, world_size=1, device_id=device
    )


def in_static_buffers(batch: Batch) -> Batch:
    """`batch` in buffers of the size that the runner will use, so that one compilation serves both."""
    static = static_batch(batch, Capacity())
    copy_into(static, batch)
    return static


def _wait_for_turn(path: Path | None) -> float:
    """Hold the lock on `path` until this process exits; returns the seconds it took to get it."""
    if path is None:
        return 0.0
    torch.cuda.synchronize()
    started_at = time.time()
    fcntl.flock(os.open(path, os.O_CREAT | os.O_RDWR), fcntl.LOCK_EX)
    return time.time() - started_at


def _bound(config: ModelConfig, batch: int, speed: float) -> dict[str, Any]:
    gpu = KNOWN.get(torch.cuda.get_device_name())
    if gpu is None:
        return {}
    bound = images_per_s(config, gpu, batch=batch)
    return {"roofline_images_per_s": round(bound), "share_of_roofline": round(speed / bound, 3)}


def _write_profile(step: Callable[[], object], path: Path) -> None:
    """Time of each kernel in one step."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(2):
            step()
        torch.cuda.synchronize()
    rows: dict[str, list[float]] = {}
    for event in profiler.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            rows.setdefault(event.name, []).append(event.device_time)
    ordered = sorted(rows.items(), key=lambda row: -sum(row[1]))
    lines = [f"{sum(times) / 2000:9.3f} ms  {len(times) / 2:6.1f} x  {name[:160]}" for name, times in ordered]
    path.write_text("\n".join(lines) + "\n")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--what", choices=("train", "detect"), default="train")
    parser.add_argument("--model", choices=tuple(MODELS), default="r50_fpn_mask")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--peer", choices=("torchvision", "none"), default="none")
    parser.add_argument("--split", action="store_true", help="exchange gradients by region, as with many ranks")
    parser.add_argument("--turn", type=Path, default=None)
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--profile", type=Path, default=None)
    return parser.parse_args()


if __name__ == "__main__":
    main()
