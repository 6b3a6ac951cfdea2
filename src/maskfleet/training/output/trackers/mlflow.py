"""Metrics for MLflow."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from maskfleet.config.run import RunConfig
from maskfleet.training.output.measurement import Measurement

MAX_PARAMETERS = 100  # of one request
MAX_TEXT = 500  # characters of a parameter, which older servers allow
NOT_ALLOWED = re.compile(r"[^\w. /-]+", re.ASCII)  # in the name of a metric


class MlflowTracker:
    """One run of an experiment. Server and credentials come from MLflow's own variables and files."""

    name = "MLflow"
    file_name = "mlflow.json"

    def __init__(self, experiment: str, run_dir: Path, config: RunConfig) -> None:
        self._experiment = experiment
        self._run_dir = run_dir.resolve()
        self._config = config
        self._client: Any = None
        self._run_id = ""

    def open(self, run_id: str | None) -> str:
        from mlflow.tracking import MlflowClient

        self._client = MlflowClient()
        if run_id is not None:
            self._client.update_run(run_id, status="RUNNING")
            self._run_id = run_id
            return run_id
        experiment = self._client.get_experiment_by_name(self._experiment)
        number = self._client.create_experiment(self._experiment) if experiment is None else experiment.experiment_id
        self._run_id = str(self._client.create_run(number, run_name=self._run_dir.name).info.run_id)
        self._log_parameters()
        return self._run_id

    def send(self, measurement: Measurement) -> None:
        from mlflow.entities import Metric

        milliseconds = int(measurement.time * 1000)
        metrics = [
            Metric(metric_name(name), value, milliseconds, measurement.step)
            for name, value in measurement.values.items()
        ]
        self._client.log_batch(self._run_id, metrics=metrics)

    def close(self) -> None:
        self._client.set_terminated(self._run_id)

    def _log_parameters(self) -> None:
        from mlflow.entities import Param

        parameters = [
            Param(name, str(value)[:MAX_TEXT]) for name, value in flattened(self._config.model_dump(mode="json"))
        ]
        for start in range(0, len(parameters), MAX_PARAMETERS):
            self._client.log_batch(self._run_id, params=parameters[start : start + MAX_PARAMETERS])


def metric_name(name: str) -> str:
    """`name` with the characters that MLflow allows: mAP(bbox)/IoU=0.5:0.95 is mAP_bbox/IoU_0.5_0.95."""
    return "/".join(NOT_ALLOWED.sub("_", part).strip("_") for part in name.split("/"))


def flattened(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Names with dots and values of nested mappings."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from flattened(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
