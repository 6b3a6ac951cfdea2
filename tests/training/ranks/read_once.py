"""Run as a script by every rank: find the newest checkpoint of a run, and print who read it and what all got.

Arguments: the run directory.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path

import torch

from maskfleet.model.weights import checkpoint
from maskfleet.training.distributed import joined, worker_from_env
from maskfleet.training.ranks.per_host import first_on_host, newest_snapshot


def main(run_dir: Path) -> None:
    reads, read = [], checkpoint.read_checkpoint

    def counted(path: Path) -> checkpoint.Snapshot:
        reads.append(path.name)
        return read(path)

    checkpoint.read_checkpoint = counted
    worker = worker_from_env(os.environ)
    with joined(worker, torch.device("cpu"), os.environ, run_dir) as ranks:
        with first_on_host(ranks), (run_dir / "order").open("a") as order:
            order.write(f"{worker.rank}\n")
        snapshot = newest_snapshot(checkpoint.CheckpointFolder(run_dir / "checkpoints"), ranks)
        assert snapshot is not None
        parts = [tensor.reshape(-1).view(torch.uint8).numpy().tobytes() for tensor in snapshot.tensors.values()]
        digest = hashlib.sha256(b"".join(parts)).hexdigest()
        gathered = ranks.gather([len(reads), snapshot.step, snapshot.numbers, digest])
        if gathered is not None:
            (run_dir / "gathered.json").write_text(json.dumps(gathered))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
