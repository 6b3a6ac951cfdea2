"""How long a checkpoint blocks training, and how long it takes until it is on the disk.

    python benchmarks/checkpoint.py --device cuda

R50-FPN Mask R-CNN with momentum, as a run saves it. A step waits for the copy to pinned memory only; hashing, writing
and syncing overlap with training.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import torch

from machine import machine_facts
from maskfleet.config.base import replaced
from maskfleet.config.recipes import recipe
from maskfleet.model.build import build_mask_rcnn
from maskfleet.model.weights.checkpoint import Snapshot
from maskfleet.training.checkpoint import CheckpointStore
from maskfleet.training.optim import build_optimizer, optimizer_state

REPEATS = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/checkpoint.json"))
    arguments = parser.parse_args()
    config = replaced(recipe("r50_fpn_1x"), {"model.num_categories": 80})
    model = build_mask_rcnn(config.model).to(arguments.device)
    optimizer = build_optimizer(model, config.train)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    tensors = {f"model/{name}": tensor for name, tensor in model.state_dict().items()}
    tensors |= optimizer_state(model, optimizer)
    megabytes = sum(tensor.nbytes for tensor in tensors.values()) / 1e6
    waits, writes = [], []
    with tempfile.TemporaryDirectory() as folder:
        store = CheckpointStore(Path(folder), keep_last=2)
        store.reserve(tensors)
        for step in range(REPEATS):
            if arguments.device == "cuda":
                torch.cuda.synchronize()
            started_at = time.perf_counter()
            store.save(Snapshot(step, tensors, {}))
            waits.append(time.perf_counter() - started_at)
            store.wait()
            writes.append(time.perf_counter() - started_at)
    result = {
        "megabytes": round(megabytes, 1),
        "blocked_ms": {
            "first": _ms(waits[0]),
            "median_of_rest": _ms(statistics.median(waits[1:])),
            "max_of_rest": _ms(max(waits[1:])),
        },
        "on_disk_ms": {"median": _ms(statistics.median(writes))},
        "device": arguments.device,
        **machine_facts(),
    }
    arguments.out.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))


def _ms(seconds: float) -> float:
    return round(1000 * seconds, 1)


if __name__ == "__main__":
    main()
