"""Start or resume a run in this process: what `maskfleet train` and `maskfleet.train` do."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from maskfleet.config.load import RUN_FILE
from maskfleet.config.load import load as load_run_file
from maskfleet.config.run import RunConfig
from maskfleet.data.store.dataset import with_found_splits
from maskfleet.errors import ConfigError
from maskfleet.training import run
from maskfleet.training.output.metrics import read_metrics


@dataclass(frozen=True, slots=True)
class TrainingResult:
    """How a training ended."""

    run_dir: Path  # give it to `maskfleet.load` or `maskfleet.evaluate`
    best_ap: float | None  # highest AP of masks, or of boxes without a mask head; None without validation
    metrics: dict[str, float]  # last value of every metric in metrics.jsonl


def train(
    config: RunConfig | None, run_dir: str | Path, *, wait_s: float = 0, device: str | None = None
) -> TrainingResult:
    """Train `config` in `run_dir`, or resume the run that is there from its newest checkpoint.

    None takes the configuration of the run in `run_dir`. If another process trains there, wait up to `wait_s` seconds
    for it to finish. `device` is `cpu`, `cuda` or `cuda:1`; None is the first GPU, or the CPU if there is none.

        config = maskfleet.recipe("scratch", {"data.root": "/data/mine"})
        result = maskfleet.train(config, "runs/mine")
        print(result.best_ap, result.metrics["total_cost"])
    """
    folder = Path(run_dir).expanduser()
    if config is None and (folder / RUN_FILE).is_file():
        config = load_run_file(folder / RUN_FILE)
    if not isinstance(config, RunConfig):
        raise ConfigError(
            f"{folder} holds no run to resume" if config is None else f"config is a {type(config).__name__}",
            remedy='give a configuration: maskfleet.recipe("scratch", {"data.root": …})',
        )
    config = with_found_splits(config)
    run.train(config, folder, wait_s=wait_s, device=device)
    records = read_metrics(folder)
    ap = f"mAP({'segm' if config.model.mask else 'bbox'})/IoU=0.5:0.95"
    values = [record[ap] for record in records if math.isfinite(record.get(ap, math.nan))]
    last = {name: value for record in records for name, value in record.items()}
    return TrainingResult(folder, max(values, default=None), last)
