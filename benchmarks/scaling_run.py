"""A real run of several processes and its parts, measured separately, to check the scaling model.

    python benchmarks/scaling_run.py [--ranks 4] [--rounds 60] [--out FILE]

Each rank is a process with one thread; gloo exchanges the gradients. Every round measures three things, one after the
other, each started together on all ranks:

  compute   a training step of every rank, without an exchange
  exchange  an all-reduce of as many bytes as the gradients have
  run       a training step with DDP

The model predicts the last from the first two (`maskfleet.bench.scaling.checks`). The ranks share the cores, so an
exchange cannot run beside the computing; the prediction adds it. All rounds count: what other processes do to the
machine changes slowly enough to hit the three parts of a round alike. `others` is their share of the cores' time.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing

from machine import machine_facts
from maskfleet.bench.noise_batch import noise_batch
from maskfleet.bench.scaling.checks import check_rounds
from maskfleet.config.base import replaced
from maskfleet.config.recipes import recipe
from maskfleet.config.run import RunConfig
from maskfleet.model.build import build_mask_rcnn
from maskfleet.training.optim import build_optimizer
from maskfleet.training.step.eager import StepRunner, StepSettings
from maskfleet.training.step.precision import precision_for

CPU = torch.device("cpu")
SIDE_PX, IMAGES = 128, 2
CHANGES = {
    "model.num_categories": 10,
    "model.max_size_px": SIDE_PX,
    "model.backbone.weights": None,
    "model.backbone.stem_channels": 32,
    "model.fpn.channels": 128,
    "model.box_head.fc_channels": 512,
    "model.box_head.samples_per_image": 32,
    "model.mask_head.channels": 64,
}
WARM_UPS = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "scaling_run.json")
    options = parser.parse_args()
    facts = machine_facts(("torch", "numpy"))
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(run_rank, args=(options.ranks, options.rounds, folder), nprocs=options.ranks)
        parts = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(options.ranks)]
    rounds = [merged([part["rounds"][number] for part in parts]) for number in range(options.rounds)]
    record = {
        "what": f"{options.ranks} processes with one thread each and gloo, R50-FPN Mask R-CNN of half the width, "
        f"{IMAGES} images of {SIDE_PX} x {SIDE_PX}",
        "ranks": options.ranks,
        "gradient_bytes": parts[0]["gradient_bytes"],
        "rounds": rounds,
    }
    if options.out.exists() and "earlier" in (before := json.loads(options.out.read_text())):
        record["earlier"] = before["earlier"]
    options.out.write_text(with_lines(record | facts))
    print(check_rounds(rounds))


def merged(parts: list[dict[str, float]]) -> dict[str, Any]:
    """One round of all ranks."""
    first = parts[0]
    others_s = first["busy_s"] - sum(part["cpu_s"] for part in parts)
    return {
        "compute_ms": [part["compute_ms"] for part in parts],
        "exchange_ms": first["exchange_ms"],
        "run_ms": first["run_ms"],
        "others": round(max(0.0, others_s / first["wall_s"] / (os.cpu_count() or 1)), 3),
    }


def with_lines(record: dict[str, Any]) -> str:
    """JSON with one line per round."""
    lines = ",\n  ".join(json.dumps(one) for one in record["rounds"])
    return json.dumps(record | {"rounds": "ROUNDS"}, indent=1).replace('"ROUNDS"', f"[\n  {lines}\n ]") + "\n"


def run_rank(rank: int, ranks: int, rounds: int, folder: str) -> None:
    """One process: measure all parts in turns and write them into `folder`."""
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = dist.FileStore(f"{folder}/store", ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    config = replaced(recipe("r50_fpn_1x"), CHANGES)
    batch = noise_batch(IMAGES, canvas=(SIDE_PX, SIDE_PX), size=(SIDE_PX, SIDE_PX), num_categories=10, seed=rank)
    alone, together = (runner(config, world_size) for world_size in (1, ranks))
    groups = together.optimizer.param_groups
    flat = torch.zeros(sum(parameter.numel() for group in groups for parameter in group["params"]))
    work: dict[str, Callable[[], object]] = {
        "compute_ms": lambda: alone.step(batch, lr=0.0, update=True, with_metrics=False),
        "exchange_ms": lambda: dist.all_reduce(flat),
        "run_ms": lambda: together.step(batch, lr=0.0, update=True, with_metrics=False),
    }
    measured = []
    for _ in range(WARM_UPS + rounds):
        started_s, cpu_s, busy_s = time.perf_counter(), time.process_time(), busy_seconds()
        times = {name: milliseconds(call) for name, call in work.items()}
        times |= {"wall_s": time.perf_counter() - started_s, "cpu_s": time.process_time() - cpu_s}
        measured.append(times | {"busy_s": busy_seconds() - busy_s})
    data = {"rounds": measured[WARM_UPS:], "gradient_bytes": 4 * flat.numel()}
    (Path(folder) / f"{rank}.json").write_text(json.dumps(data))
    dist.destroy_process_group()


def runner(config: RunConfig, world_size: int) -> StepRunner:
    torch.manual_seed(0)
    model = build_mask_rcnn(config.model).train()
    settings = StepSettings(precision_for("fp32", CPU), world_size=world_size)
    return StepRunner(model, build_optimizer(model, config.train), settings)


def busy_seconds() -> float:
    """Seconds that all cores together have worked since the machine started."""
    user, nice, system, _, _, *interrupts = (int(word) for word in Path("/proc/stat").read_text().split()[1:8])
    return (user + nice + system + sum(interrupts)) / os.sysconf("SC_CLK_TCK")


def milliseconds(call: Callable[[], object]) -> float:
    dist.barrier()
    started_at = time.perf_counter()
    call()
    return round(1000 * (time.perf_counter() - started_at), 2)


if __name__ == "__main__":
    main()
