"""Run as a script by every rank: steps of the eager and of the compiled runner on this rank's share of each batch.

Arguments: the folder of the run file, and where to save. Results are saved by rank 0: the weights after each case, and
a JSON file with what all ranks report about it.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from one_step import share
from safetensors.torch import save_file

from maskfleet.batch import Batch
from maskfleet.config.base import replaced
from maskfleet.config.load import load
from maskfleet.config.run import RunConfig
from maskfleet.data.pipeline.build import build_train_loader
from maskfleet.data.store.dataset import open_stores
from maskfleet.errors import TrainingError
from maskfleet.model.build import build_mask_rcnn
from maskfleet.ops.layers.mean_over_ranks import mean_over_ranks
from maskfleet.ops.recorder import RerunRecorder
from maskfleet.training.distributed import Ranks, Worker, joined, worker_from_env
from maskfleet.training.optim import build_optimizer
from maskfleet.training.step.buffers import BatchShapes, Capacity
from maskfleet.training.step.compiled import CompiledStepRunner, Toolchain, make_step_runner
from maskfleet.training.step.eager import StepRunner, StepSettings
from maskfleet.training.step.precision import precision_for

CPU = torch.device("cpu")
STEPS, BAD_STEP = 4, 2
CAPACITY = Capacity(objects=16, edges=256, parts=2)


class FailingRecorder(RerunRecorder):
    def record(self, work: Callable[[], Any]) -> Any:
        raise RuntimeError("no memory for the graph")


def failing_compiler(function: Callable[..., Any]) -> Callable[..., Any]:
    def compiled(*inputs: Any) -> Any:
        raise RuntimeError("the compiler crashed")

    return compiled


def reordering_compiler(function: Callable[..., Any]) -> Callable[..., Any]:
    def compiled(*inputs: Any) -> Any:
        mean_over_ranks(torch.zeros(2, 3), layer=1)  # which comes later in what the others compiled
        return function(*inputs)

    return compiled


def unchanged(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


WHOLE = Toolchain(unchanged, RerunRecorder())
IN_PARTS = Toolchain(unchanged, RerunRecorder(records_collectives=False))
SYNC = {"model.backbone.norm": "SyncBN", "model.backbone.freeze_at": 0}


@dataclass(frozen=True)
class Case:
    """One run of `STEPS` steps."""

    toolchain: Toolchain | None = None  # None for eager
    steps_per_update: int = 1
    exchange_dtype: torch.dtype = torch.float32
    bad_rank: int = -1  # its loss at BAD_STEP is not finite
    only_on_rank: tuple[int, Toolchain] | None = None  # a rank with another toolchain
    changes: Mapping[str, Any] = field(default_factory=dict)  # of the configuration


CASES = {
    "eager": Case(),
    "whole": Case(WHOLE),
    "in_parts": Case(IN_PARTS),
    "eager_accumulated": Case(steps_per_update=2),
    "whole_accumulated": Case(WHOLE, steps_per_update=2),
    "in_parts_accumulated": Case(IN_PARTS, steps_per_update=2),
    "whole_bf16": Case(WHOLE, exchange_dtype=torch.bfloat16),
    "one_rank_cannot_compile": Case(WHOLE, only_on_rank=(1, Toolchain(failing_compiler, RerunRecorder()))),
    "one_rank_cannot_record": Case(WHOLE, only_on_rank=(1, Toolchain(unchanged, FailingRecorder()))),
    "eager_sync": Case(changes=SYNC),
    "whole_sync": Case(WHOLE, changes=SYNC),
    "in_parts_sync": Case(IN_PARTS, changes=SYNC),
    "eager_sync_accumulated": Case(changes=SYNC, steps_per_update=2),
    "whole_sync_accumulated": Case(WHOLE, changes=SYNC, steps_per_update=2),
    "one_rank_has_another_order": Case(
        WHOLE, only_on_rank=(1, Toolchain(reordering_compiler, RerunRecorder())), changes=SYNC
    ),
    "eager_nan": Case(bad_rank=1),
    "eager_nan_accumulated": Case(bad_rank=1, steps_per_update=2),
    "whole_nan": Case(WHOLE, bad_rank=1),
    "whole_nan_accumulated": Case(WHOLE, bad_rank=1, steps_per_update=2),
    "in_parts_nan": Case(IN_PARTS, bad_rank=1),
    "in_parts_nan_accumulated": Case(IN_PARTS, bad_rank=1, steps_per_update=2),
}
ALONE = [f"{how}{rest}" for how in ("eager", "whole") for rest in ("", "_accumulated", "_sync", "_sync_accumulated")]


def run_case(case: Case, config: RunConfig, batches: list[Batch], ranks: Ranks) -> tuple[dict[str, Any], Any]:
    """What this rank saw, and the model."""
    worker = ranks.worker
    config = replaced(config, dict(case.changes))
    torch.manual_seed(worker.rank)  # the ranks begin with different weights, which the runner makes equal
    model = build_mask_rcnn(config.model).train().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    toolchain = case.toolchain
    if case.only_on_rank is not None and case.only_on_rank[0] == worker.rank:
        toolchain = case.only_on_rank[1]
    settings = StepSettings(
        precision_for("fp32", CPU),
        gradient_clip=1.0,
        steps_per_update=case.steps_per_update,
        world_size=worker.world_size,
        exchange_dtype=case.exchange_dtype,
    )
    height, width = batches[0].images.pixels.shape[2:]
    shapes = BatchShapes(batches[0].num_images // worker.world_size, ((height, width),), CAPACITY, masks=True)
    runner = make_step_runner(
        model,
        build_optimizer(model, config.train),
        settings,
        compile=toolchain is not None,
        shapes=shapes,
        ranks=ranks,
        toolchain=toolchain,
    )
    report: dict[str, Any] = {"runner": type(runner).__name__, "losses": [], "error": ""}
    for number, batch in enumerate(batches):
        mine = share(batch, worker.rank, worker.world_size)
        if number == BAD_STEP:
            report["bad_images"] = mine.image_ids.tolist()
        if number == BAD_STEP and case.bad_rank == worker.rank:
            mine = replace(mine, targets=replace(mine.targets, boxes=mine.targets.boxes + torch.nan))
        before = [parameter.detach().clone() for parameter in model.parameters()]
        try:
            losses = _step(runner, mine, update=(number + 1) % case.steps_per_update == 0)
        except TrainingError as error:
            report |= {"error": error.what, "failed_at": number}
            report["unchanged"] = all(map(torch.equal, before, model.parameters()))
            break
        report["losses"].append(losses)
    return report, model


def _step(runner: StepRunner | CompiledStepRunner, batch: Batch, *, update: bool) -> float:
    losses, _ = runner.step(batch, lr=0.05, update=update, with_metrics=True)
    return float(sum(loss.detach() for loss in losses.values()))


def main(folder: Path, target: Path) -> None:
    torch.set_num_threads(1)
    worker = worker_from_env(os.environ)
    config = replaced(load(folder / "run.yaml"), {"model.num_categories": 2, "train.images_per_gpu": 4})
    batches = list(build_train_loader(config, open_stores(config.data, config.data.train)).batches(0, STEPS))
    with joined(worker, CPU, os.environ, folder) as ranks:
        results = {}
        for name, case in CASES.items():
            if worker.world_size == 1 and name not in ALONE:
                continue
            report, model = run_case(case, config, batches, ranks)
            report["same_weights"] = _same_on_all_ranks(model, worker)
            results[name] = ranks.gather(report)
            if worker.is_chief:
                weights = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
                save_file(weights, target / f"{name}.safetensors")
        if worker.is_chief:
            (target / "reports.json").write_text(json.dumps(results))


def _same_on_all_ranks(model: torch.nn.Module, worker: Worker) -> bool:
    if worker.world_size == 1:
        return True
    weights = torch.cat([value.detach().flatten() for value in (*model.parameters(), *model.buffers())])
    of_rank_0 = weights.clone()
    dist.broadcast(of_rank_0, src=0)
    return torch.equal(weights, of_rank_0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
