"""Services that collect the metrics of runs: Weights & Biases, MLflow.

To add one: a class with the methods of `background.Tracker`, a field in `LogConfig`, a line in `open_trackers`, a test.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

from maskfleet.config.run import RunConfig
from maskfleet.errors import ConfigError
from maskfleet.training.output.trackers.background import TrackerSink
from maskfleet.training.output.trackers.mlflow import MlflowTracker
from maskfleet.training.output.trackers.wandb import WandbTracker


def check_packages(config: RunConfig) -> None:
    """Refuse a run whose trackers have no package here."""
    for field, wanted in (("wandb", config.log.wandb), ("mlflow", config.log.mlflow)):
        if wanted is not None and importlib.util.find_spec(field) is None:
            raise ConfigError(
                f"log.{field} needs the Python package {field}",
                remedy=f"pip install 'maskfleet[{field}]', or turn it off: --set log.{field}=null",
            )


def open_trackers(run_dir: Path, config: RunConfig) -> tuple[TrackerSink, ...]:
    """The trackers that `config.log` names, each behind a thread of its own."""
    check_packages(config)
    sinks = []
    if config.log.wandb is not None:
        sinks.append(TrackerSink(WandbTracker(config.log.wandb, run_dir, config), run_dir))
    if config.log.mlflow is not None:
        sinks.append(TrackerSink(MlflowTracker(config.log.mlflow, run_dir, config), run_dir))
    return tuple(sinks)
