"""Compare runs from the metrics that they wrote."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from maskfleet.config.load import CHECKPOINTS
from maskfleet.errors import TrainingError
from maskfleet.evaluation.comparison import Comparison
from maskfleet.training.output.metrics import read_metrics


def compare(runs: Mapping[str, str | Path]) -> Comparison:
    """The results and curves of runs: names, and their run directories or what `fetch` copied of them."""
    found = {}
    for name, folder in runs.items():
        # A job that is not done has only its synchronised run directory, which `fetch` puts into this folder.
        records = read_metrics(Path(folder)) or read_metrics(Path(folder) / CHECKPOINTS)
        if not records:
            raise TrainingError(
                f"{folder} has no metrics of {name}",
                remedy="give the directory of a run that has trained; a job's files are copied by `maskfleet fetch`",
            )
        found[name] = records
    return Comparison(found)
