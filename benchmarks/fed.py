"""Does the loader keep a GPU busy? Steps fed from JPEG files by the real loader, compared with steps on one batch.

    python benchmarks/fed.py [--batch 16] [--images 640] [--steps 120] [--out benchmarks/results/fed.json]

Generated pictures of COCO's usual size (480 x 640, about 60 KiB as JPEG, up to 15 objects) go through everything that
training does: read, decode, flip, copy, resize on the GPU to 800 x 1067 on a canvas of 800 x 1344, step with optimizer,
metrics read every 20 steps. Both figures come from one process, with the same compiled step. `all_step_ms` has every
fed step, which shows how much steps vary.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from machine import machine_facts
from maskfleet.bench.speed import median_ms
from maskfleet.config.base import replaced
from maskfleet.config.recipes import recipe
from maskfleet.config.run import RunConfig
from maskfleet.data.pipeline.build import build_train_loader
from maskfleet.data.store.dataset import open_stores
from maskfleet.data.synthetic.dataset import make_shapes
from maskfleet.model.build import build_mask_rcnn
from maskfleet.training.optim import build_optimizer
from maskfleet.training.step.compiled import CompiledStepRunner, make_step_runner
from maskfleet.training.step.eager import StepSettings
from maskfleet.training.step.precision import precision_for

HEIGHT_PX, WIDTH_PX = 480, 640
LOG_EVERY_STEPS = 20
WARM_UPS = 20  # the queues of the workers fill up while the first step compiles; these steps empty them


def configured(root: Path, batch: int, workers: int) -> RunConfig:
    return replaced(
        recipe("r50_fpn_1x"),
        {
            "data.root": str(root),
            "data.train": ("train",),
            "data.val": (),
            "data.train_short_edge_px": (800, 800),
            "data.num_workers": workers,
            "model.num_categories": 80,
            "model.backbone.weights": None,
            "train.images_per_gpu": batch,
        },
    )


def measured(config: RunConfig, device: torch.device, steps: int) -> dict[str, Any]:
    """Speed of steps with the loader and of steps without it."""
    model = build_mask_rcnn(config.model).to(device).train()
    runner = make_step_runner(
        model,
        build_optimizer(model, config.train),
        StepSettings(precision_for("auto", device)),
        compile=device.type == "cuda",
    )
    loader = build_train_loader(config, open_stores(config.data, config.data.train), device=device)
    try:
        batches = loader.batches(0, WARM_UPS + steps)
        for _ in range(WARM_UPS):
            batch = next(batches).to(device)
            runner.step(batch, lr=0.0, update=True, with_metrics=True)
        _wait(device)
        started_at, waited_s = time.perf_counter(), 0.0
        ends = [_moment(device)]
        for number in range(steps):
            asked_at = time.perf_counter()
            batch = next(batches).to(device)
            waited_s += time.perf_counter() - asked_at
            runner.step(batch, lr=0.0, update=True, with_metrics=number % LOG_EVERY_STEPS == 0)
            ends.append(_moment(device))
        _wait(device)
        fed_ms = 1000 * (time.perf_counter() - started_at) / steps
    finally:
        loader.close()
    alone_ms = median_ms(
        lambda one: runner.step(one, lr=0.0, update=True, with_metrics=False), [batch], device, steps=30
    )
    count = config.train.images_per_gpu
    return {
        "fed_images_per_s": round(1000 * count / fed_ms, 1),
        "alone_images_per_s": round(1000 * count / alone_ms, 1),
        "fed_of_alone": round(alone_ms / fed_ms, 3),
        "data_wait_ms_a_step": round(1000 * waited_s / steps, 2),
        "canvas": list(batch.images.pixels.shape[-2:]),
        "compiled": isinstance(runner, CompiledStepRunner) and runner.is_compiled,
        "all_step_ms": [round(_ms_between(*pair), 2) for pair in pairwise(ends)],
    }


def _moment(device: torch.device) -> Any:
    """Now: on a GPU when it gets there, so that the host does not wait for it."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _ms_between(start: Any, end: Any) -> float:
    return 1000 * (end - start) if isinstance(start, float) else float(start.elapsed_time(end))


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--images", type=int, default=640)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 2))
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "shapes"
        make_shapes(
            root, num_train=options.images, num_val=1, height=HEIGHT_PX, width=WIDTH_PX, num_categories=10,
            max_objects=15, workers=os.cpu_count() or 1,
        )  # fmt: skip
        result = measured(configured(root, options.batch, options.workers), device, options.steps)
    result = {"batch": options.batch, "workers": options.workers, "steps": options.steps, **result, **machine_facts()}
    print(json.dumps(result), flush=True)
    if options.out is not None:
        options.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
