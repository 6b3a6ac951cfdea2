"""The configurations in a report, as differences from their recipes and from each other."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from maskfleet.config.load import differences, dump
from maskfleet.config.recipes import recipe
from maskfleet.evaluation.report.record import ReportedRun

# Which data set it is, and where: not part of a recipe.
PATHS = ("data.root", "data.cache_dir")


@dataclass(frozen=True, slots=True)
class SettingsTable:
    """Fields that differ, with the recipe's value, if the runs share a recipe, and the value of each run."""

    recipe: str | None  # None if the runs have different recipes
    rows: list[tuple[str, str, list[str]]]  # field, value of the recipe, values of the runs
    texts: list[tuple[str, str]]  # name and run.yaml of each run


def settings_table(runs: Sequence[ReportedRun]) -> SettingsTable:
    """The fields in which a run differs from its recipe or from the first run."""
    names = list(dict.fromkeys(run.config.recipe for run in runs))
    changed: dict[str, None] = {}
    for run in runs:
        changed |= dict.fromkeys(differences(recipe(run.config.recipe), run.config))
        changed |= dict.fromkeys(differences(runs[0].config, run.config))
    shared = recipe(names[0]) if len(names) == 1 else None
    rows = [
        (
            path,
            _text(_value(shared, path)) if shared is not None else "",
            [_text(_value(run.config, path)) for run in runs],
        )
        for path in changed
        if path not in PATHS and path != "recipe"
    ]
    if len(names) > 1:
        rows.insert(0, ("recipe", "", [run.config.recipe for run in runs]))
    return SettingsTable(names[0] if len(names) == 1 else None, rows, [(run.name, dump(run.config)) for run in runs])


def _value(config: Any, path: str) -> Any:
    value: Any = config.model_dump(mode="json")
    for name in path.split("."):
        value = value[name]
    return value


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
