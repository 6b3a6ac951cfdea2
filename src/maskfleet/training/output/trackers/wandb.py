"""Metrics for Weights & Biases."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Any

from maskfleet.config.run import RunConfig
from maskfleet.training.output.measurement import Measurement
from maskfleet.training.output.trackers.background import CLOSE_S

FLUSH, FLUSH_S = "x_transaction_log_flush_interval", 1.0  # W&B's own 15 s would be lost by a kill


class WandbTracker:
    """One run of a project. Key, entity, server and mode come from W&B's own variables and files."""

    name = "Weights & Biases"
    file_name = "wandb.json"

    def __init__(self, project: str, run_dir: Path, config: RunConfig) -> None:
        self._project = project
        self._run_dir = run_dir.resolve()
        self._config = config
        self._run: Any = None

    def open(self, run_id: str | None) -> str:
        import wandb

        # Without this, `init` would ask for a key on the terminal, below the live view.
        if wandb.setup().settings.mode == "online" and not wandb.login(prompt=False):
            raise PermissionError("there is no API key: run `wandb login`, or set WANDB_API_KEY or WANDB_MODE=offline")
        self._run = wandb.init(
            project=self._project,
            id=run_id or secrets.token_hex(8),
            name=self._run_dir.name,
            dir=str(self._run_dir),
            config=self._config.model_dump(mode="json"),
            resume="allow",
            settings=_settings(wandb),
        )
        # W&B's own step only grows, and a resumed run may evaluate again at its last step.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        return str(self._run.id)

    def send(self, measurement: Measurement) -> None:
        self._run.log({**measurement.values, "step": measurement.step, "time": measurement.time})

    def close(self) -> None:
        self._run.finish()


def _settings(wandb: Any) -> Any:
    """The log and the terminal are ours, the end of a run must not wait for a network, and a kill loses little."""
    settings = {"silent": True, "console": "off", "finish_timeout": CLOSE_S}
    if FLUSH in wandb.Settings.model_fields:
        settings[FLUSH] = FLUSH_S
    return wandb.Settings(**settings)
