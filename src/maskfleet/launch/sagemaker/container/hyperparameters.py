"""Hyper-parameters of a training job as the configuration of a run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from maskfleet.config.base import replaced
from maskfleet.config.legacy.table import is_legacy
from maskfleet.config.load import resolve
from maskfleet.config.run import RunConfig
from maskfleet.config.yaml import parse_value

# The SDK and the tuner add these; they are not settings of the run.
_NOT_OURS = ("sagemaker_", "_tuning_objective_metric")
# Old names that only AWS Samples' trainer had: its recipe has their units.
_AWS_SAMPLES = ("lr_epoch_schedule", "batch_size_per_gpu")
_ORIGIN = "hyper-parameter"


def run_config(given: Mapping[str, str], data: Path) -> RunConfig:
    """The run that hyper-parameters with old or new names describe, on the data in the folder `data`.

    A `data.root` among them is a folder inside `data`. Every metric is logged, for the job's metric definitions.
    """
    settings = {name: value for name, value in given.items() if not name.startswith(_NOT_OURS)}
    recipe = settings.pop("recipe", None)
    name = str(parse_value(recipe, where=f"{_ORIGIN} recipe")) if recipe is not None else _recipe_for(settings)
    # SageMaker keeps no order; of the old names only this one must come after another.
    ordered = sorted(settings, key=lambda one: (one.endswith("PADDING_SHAPES"), one))
    sets = [f"{one}={settings[one]}" for one in ordered]
    resolved = resolve(recipe_name=name, sets=sets, sets_are=_ORIGIN)
    inside = resolved.config.data.root if resolved.origins["data.root"] == _ORIGIN else ""
    return replaced(resolved.config, {"data.root": str(data / inside), "log.all_metrics": True})


def _recipe_for(settings: Mapping[str, str]) -> str | None:
    """The recipe whose values the old notebooks started from, if their names are used; None is ours."""
    old = [name for name in settings if is_legacy(name) and "." not in name.removeprefix("config:")]
    if not old:
        return None
    return "optimized" if any(name in _AWS_SAMPLES for name in old) else "standard"
