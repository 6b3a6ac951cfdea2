"""Run as a script by every rank: one step on this rank's share of a batch of four; the chief saves the weights.

Arguments: the run file's folder, and where to save.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

from maskfleet.batch import Batch, Outlines
from maskfleet.config.base import replaced
from maskfleet.config.load import load
from maskfleet.data.pipeline.build import build_train_loader
from maskfleet.data.store.dataset import open_stores
from maskfleet.model.build import build_mask_rcnn
from maskfleet.training.distributed import joined, worker_from_env
from maskfleet.training.optim import build_optimizer
from maskfleet.training.step.eager import StepRunner, StepSettings
from maskfleet.training.step.precision import precision_for


def share(batch: Batch, rank: int, world_size: int) -> Batch:
    """The images of `rank` when the batch is dealt out in equal runs."""
    size = batch.num_images // world_size
    mine = slice(rank * size, (rank + 1) * size)

    def cut(record: object) -> object:
        if isinstance(record, torch.Tensor):
            return record[mine]
        if dataclasses.is_dataclass(record):
            values = {field.name: cut(getattr(record, field.name)) for field in dataclasses.fields(record)}
            return type(record)(**values)
        return record

    assert isinstance(batch.targets.outlines, Outlines)
    return cut(batch)  # type: ignore[return-value]


def main(folder: Path, target: Path) -> None:
    worker, device = worker_from_env(os.environ), torch.device("cpu")
    config = replaced(load(folder / "run.yaml"), {"model.num_categories": 2, "train.images_per_gpu": 4})
    [batch] = build_train_loader(config, open_stores(config.data, config.data.train)).batches(0, 1)
    torch.manual_seed(0)
    model = build_mask_rcnn(config.model).train()
    plain = replaced(config, {"train.momentum": 0.0, "train.weight_decay": 0.0})
    with joined(worker, device, os.environ, folder):
        runner = StepRunner(
            model,
            build_optimizer(model, plain.train),
            StepSettings(precision_for("fp32", device), world_size=worker.world_size),
        )
        runner.step(share(batch, worker.rank, worker.world_size), lr=1.0, update=True, with_metrics=False)
    if worker.is_chief:
        save_file({name: tensor.contiguous() for name, tensor in model.state_dict().items()}, target)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
