"""The compiled step of several ranks, checked and measured on one GPU; takes about five minutes.

    python benchmarks/many_ranks.py [--out benchmarks/results/many_ranks.json]
    python benchmarks/many_ranks.py --only syncbn [--out benchmarks/results/syncbn.json]

Ranks: two ranks of two images share the GPU and exchange gradients with gloo. Their losses and weights, compiled and
recorded, are compared with those of two eager ranks and of one rank of four images, in fp32, on a small network.

Split: the step of R50-FPN Mask R-CNN, batch 16, bf16, once as one graph and once with its backward pass split by region
and NCCL's collectives recorded, as it is with many ranks; the single rank of this machine has nobody to send to. So
the ratio is the cost of the split alone. The two are measured in turns, several times.

SyncBN: as "ranks", with statistics of all ranks. gloo cannot be recorded, so the two ranks run compiled code without
CUDA graphs; the one rank of four images records graphs with NCCL's collectives in the middle of the step.

Everything compiles in parallel; while one part measures, the others wait. Without a GPU, `--only syncbn` runs the
same code uncompiled on the CPU: a check of this script.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import logging
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from machine import machine_facts
from maskfleet.batch import Batch, map_tensors
from maskfleet.bench.noise_batch import noise_batch
from maskfleet.config.model import ModelConfig
from maskfleet.config.run import TrainConfig
from maskfleet.model.build import build_mask_rcnn
from maskfleet.ops.recorder import CudaGraphRecorder, RerunRecorder
from maskfleet.training.distributed import Ranks, Worker
from maskfleet.training.optim import build_optimizer
from maskfleet.training.step.buffers import BatchShapes, Capacity
from maskfleet.training.step.compiled import CompiledStepRunner, Toolchain, gpu_toolchain
from maskfleet.training.step.eager import StepRunner, StepSettings
from maskfleet.training.step.precision import precision_for
from step import FULL_SLOTS_IOU, in_static_buffers, join_alone, median_ms

ROUNDS = 5  # of each of the two measured in turns
SMALL = {
    "num_categories": 5,
    "backbone": {"blocks": (1, 2, 1, 1), "stem_channels": 16},
    "fpn": {"channels": 32},
    "rpn": {
        "samples_per_image": 64,
        "train_per_level_pre_nms": 100,
        "train_per_level_post_nms": 100,
        "train_per_image": 100,
    },
    "box_head": {"fc_channels": 64, "samples_per_image": 48},
    "mask_head": {"channels": 32},
}
SMALL_SYNC = SMALL | {"backbone": {"blocks": (1, 2, 1, 1), "stem_channels": 16, "norm": "SyncBN", "freeze_at": 0}}
CANVAS = (128, 192)
NUM_IMAGES, STEPS = 4, 4
PARTS = {
    "ranks": ("rank0", "rank1", "alone"),
    "split": ("whole", "split"),
    "syncbn": ("sync_rank0", "sync_rank1", "sync_alone"),
}
LIMIT_S = 540


def main() -> None:
    options = _options()
    logging.basicConfig(level=logging.INFO, format=f"%(relativeCreated)7d ms {options.part}: %(message)s")
    match options.part:
        case "all":
            run_all(options)
        case "whole" | "split":
            measure(options)
        case _:
            compare_cases(options)


def run_all(options: argparse.Namespace) -> None:
    """Start the parts, wait for them, and write what they found."""
    with tempfile.TemporaryDirectory() as folder_name:
        folder = Path(folder_name)
        ports = {only: _free_port() for only in options.only}
        jobs = {part: _start(part, folder, ports[only]) for only in options.only for part in PARTS[only]}
        try:
            with _turn(folder / "turn"):
                _wait({part: jobs[part] for part in (*PARTS["ranks"], *PARTS["syncbn"]) if part in jobs})
            _wait(jobs)
        finally:
            for job in jobs.values():
                job.kill()
                job.wait()
        record: dict[str, Any] = {"what": "many_ranks"}
        if "ranks" in options.only:
            record["ranks"] = compared(folder, PARTS["ranks"], SMALL)
        if "split" in options.only:
            record["split"] = ratio(folder)
        if "syncbn" in options.only:
            record["syncbn"] = compared(folder, PARTS["syncbn"], SMALL_SYNC)
    record |= machine_facts()
    print(json.dumps(record, indent=1), flush=True)
    if options.out is not None:
        options.out.write_text(json.dumps(record, indent=1) + "\n")


def measure(options: argparse.Namespace) -> None:
    """Step times of the one-graph step or of the split one, in turns with the other."""
    torch.manual_seed(0)
    device = torch.device("cuda", 0)
    join_alone(device)
    config = ModelConfig.model_validate({"num_categories": 80, "box_head": {"foreground_iou": FULL_SLOTS_IOU}})
    model = build_mask_rcnn(config).to(device).train()
    batches = [noise_batch(16, seed=seed).to(device) for seed in range(3)]
    settings = StepSettings(precision_for("bf16", device), split=options.part == "split")
    runner = CompiledStepRunner(model, build_optimizer(model, TrainConfig()), settings)
    started_at = time.monotonic()
    runner.warm_up(in_static_buffers(batches[0]))
    torch.cuda.synchronize()
    found: dict[str, Any] = {"compile_s": round(time.monotonic() - started_at, 1), "round_ms": []}
    turn = options.folder / "turn"
    with _turn(turn):
        losses, _ = runner.step(batches[0], lr=0.0, update=True, with_metrics=True)
        found["losses"] = {name: value.item() for name, value in losses.items()}
        assert runner.is_compiled, "compiling failed"
    for _ in range(ROUNDS):
        time.sleep(1)  # long enough for the other one to take its turn
        with _turn(turn):
            found["round_ms"].append(
                median_ms(lambda batch: runner.step(batch, lr=1e-5, update=True, with_metrics=False), batches)
            )
    found["peak_gib"] = round(torch.cuda.max_memory_reserved() / 2**30, 1)
    (options.folder / f"{options.part}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def ratio(folder: Path) -> dict[str, Any]:
    """Step time of the split step relative to that of the one-graph step."""
    whole, split = (json.loads((folder / f"{part}.json").read_text()) for part in ("whole", "split"))
    medians = [statistics.median(part["round_ms"]) for part in (whole, split)]
    differences = [abs(split["losses"][name] / value - 1) for name, value in whole["losses"].items()]
    return {
        "model": "r50_fpn_mask",
        "batch": 16,
        "whole_ms": round(medians[0], 3),
        "split_ms": round(medians[1], 3),
        "ratio": round(medians[1] / medians[0], 4),
        "whole": whole,
        "split": split,
        "largest_relative_difference_of_losses": max(differences),
    }


def compare_cases(options: argparse.Namespace) -> None:
    """Train a small network eagerly, compiled, and compiled with gradient accumulation; save losses and weights."""
    torch.backends.cudnn.allow_tf32 = False
    is_sync, is_alone = options.part.startswith("sync"), options.part.endswith("alone")
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    ranks = _joined(options, device, is_alone=is_alone, is_sync=is_sync)
    rank, world_size = ranks.worker.rank, ranks.worker.world_size
    results: dict[str, Any] = {}
    for name, compile, steps_per_update in (("eager", False, 1), ("compiled", True, 1), ("accumulated", True, 2)):
        torch.manual_seed(0)
        config = ModelConfig.model_validate(SMALL_SYNC if is_sync else SMALL)
        model = build_mask_rcnn(config).to(device).train()
        settings = StepSettings(
            precision_for("fp32", device),
            gradient_clip=5.0,
            steps_per_update=steps_per_update,
            world_size=world_size,
            split=is_sync,
        )
        runner = _runner(model, settings, ranks, compile=compile)
        losses = []
        for step in range(STEPS):
            # With SyncBN, rounding decides which regions of batch 0 are sampled.
            seed = step + 1 if is_sync else step
            batch = noise_batch(NUM_IMAGES, canvas=CANVAS, size=CANVAS, num_categories=5, seed=seed)
            mine = _share(batch, rank, world_size).to(device)
            update = (step + 1) % steps_per_update == 0
            terms, _ = runner.step(mine, lr=1e-3, update=update, with_metrics=True)
            losses.append({term: value.item() for term, value in terms.items()})
        weights = {key: value.detach().cpu() for key, value in model.named_parameters() if value.requires_grad}
        results[name] = {"losses": losses, "weights": weights, "compiled": isinstance(runner, CompiledStepRunner)}
    results["records"] = isinstance(_toolchain(settings).recorder, CudaGraphRecorder)
    torch.save(results, options.folder / f"{options.part}.pt")
    if dist.is_initialized():
        dist.destroy_process_group()


def _joined(options: argparse.Namespace, device: torch.device, *, is_alone: bool, is_sync: bool) -> Ranks:
    """This rank, connected to the other one; one alone has a group only if its statistics need one."""
    if is_alone:
        if is_sync and device.type == "cuda":
            join_alone(device)
        elif is_sync:
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        return Ranks(Worker(), None)
    worker = Worker(rank=int(options.part[-1]), world_size=2)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{options.port}", rank=worker.rank, world_size=2)
    return Ranks(worker, dist.new_group(backend="gloo"), ["localhost"] * 2)


def _toolchain(settings: StepSettings) -> Toolchain:
    """torch.compile and CUDA graphs; no graphs where gloo would have to be in the middle of one."""
    if settings.precision.device.type == "cpu":
        return Toolchain(lambda function: function, RerunRecorder())
    if settings.split and dist.get_backend() == "gloo":
        return Toolchain(gpu_toolchain().compile, RerunRecorder())
    return gpu_toolchain()


def _runner(model: Any, settings: StepSettings, ranks: Ranks, *, compile: bool) -> StepRunner | CompiledStepRunner:
    optimizer = build_optimizer(model, TrainConfig())
    if not compile:
        return StepRunner(model, optimizer, settings)
    runner = CompiledStepRunner(model, optimizer, settings, toolchain=_toolchain(settings))
    shapes = BatchShapes(NUM_IMAGES // settings.world_size, (CANVAS,), Capacity(), masks=True)
    failure = runner.prepare(shapes, ranks=ranks)
    assert not failure, failure
    return runner


def compared(folder: Path, parts: Sequence[str], model: dict[str, Any]) -> dict[str, Any]:
    """Largest differences between two ranks of two images and others, relative to the movement of the weights."""
    first, second, alone = (torch.load(folder / f"{part}.pt") for part in parts)
    recorded = {part: results.pop("records") for part, results in zip(parts, (first, second, alone), strict=True)}
    torch.manual_seed(0)
    start = dict(build_mask_rcnn(ModelConfig.model_validate(model)).named_parameters())
    assert all(first[name]["compiled"] == (name != "eager") for name in first), "compiling failed"

    def moved_apart(one: dict[str, Any], other: dict[str, Any]) -> float:
        """Difference of all weights together, relative to how far they moved."""
        apart = sum((value - other["weights"][name]).square().sum() for name, value in one["weights"].items())
        moved = sum((value - start[name].detach()).square().sum() for name, value in other["weights"].items())
        return float((apart / moved).sqrt())

    def losses_apart(one: dict[str, Any], other: dict[str, Any]) -> float:
        pairs = [(a[term], b[term]) for a, b in zip(one["losses"], other["losses"], strict=True) for term in a]
        return max(abs(a - b) / max(abs(b), 1e-6) for a, b in pairs)

    result: dict[str, Any] = {
        "images": f"2 ranks of {NUM_IMAGES // 2}",
        "recorded_as_cuda_graphs": recorded,
        "ranks_have_equal_weights": all(
            torch.equal(value, second[name]["weights"][key])
            for name in first
            for key, value in first[name]["weights"].items()
        ),
        "compiled_losses_against_eager": max(losses_apart(of["compiled"], of["eager"]) for of in (first, second)),
        "compiled_weights_against_eager": moved_apart(first["compiled"], first["eager"]),
        "compiled_weights_of_one_rank_against_eager": moved_apart(alone["compiled"], alone["eager"]),
        "compiled_weights_against_one_rank_of_4": moved_apart(first["compiled"], alone["compiled"]),
        "eager_weights_against_one_rank_of_4": moved_apart(first["eager"], alone["eager"]),
        "accumulated_weights_against_one_rank_of_4": moved_apart(first["accumulated"], alone["accumulated"]),
    }
    worst = max(value for key, value in result.items() if "against" in key)
    return result | {"tolerance": 1e-2, "passed": worst < 1e-2 and result["ranks_have_equal_weights"]}


def _share(batch: Batch, rank: int, world_size: int) -> Batch:
    """The images of `rank`."""
    size = batch.num_images // world_size
    return map_tensors(batch, lambda tensor: tensor[rank * size : (rank + 1) * size])


def _start(part: str, folder: Path, port: int) -> subprocess.Popen[bytes]:
    argv = [sys.executable, __file__, "--part", part, "--folder", str(folder), "--port", str(port)]
    # The loopback interface: the name of a container's host need not resolve to an address it has.
    env = {"GLOO_SOCKET_IFNAME": "lo", **os.environ, "PYTHONUNBUFFERED": "1"}
    return subprocess.Popen(argv, env=env)


def _wait(jobs: dict[str, subprocess.Popen[bytes]]) -> None:
    """Wait for the parts `jobs`; exit if one of them fails."""
    deadline = time.monotonic() + LIMIT_S
    while True:
        states = {part: job.poll() for part, job in jobs.items()}
        failed = [part for part, state in states.items() if state not in (None, 0)]
        if failed or time.monotonic() > deadline:
            sys.exit(f"{', '.join(failed)} failed" if failed else f"not finished after {LIMIT_S} s: {states}")
        if None not in states.values():
            return
        time.sleep(0.5)


@contextmanager
def _turn(path: Path) -> Iterator[None]:
    """Hold the lock on `path` inside the block."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=tuple(PARTS), default=["ranks", "split"])
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--part", default="all", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, default=None, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, default=0, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
