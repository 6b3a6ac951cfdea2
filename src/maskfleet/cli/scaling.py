"""`maskfleet bench --scaling`: the predicted efficiency on many GPUs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from maskfleet.cli.console import err, out, print_raw
from maskfleet.errors import ConfigError

if TYPE_CHECKING:
    from rich.table import Table

    from maskfleet.bench.scaling.predict import Prediction, Scaling, Setting

MAX_GPUS = 4096
SCALINGS: tuple[Scaling, ...] = ("weak", "strong")


def predict_scaling(
    instances: Sequence[str], gpus: str | None, setting: Setting, *, as_json: bool, html: Path | None
) -> None:
    """Print the predictions for `instances`, or for one type per family."""
    from maskfleet.bench.scaling.page import write_page
    from maskfleet.bench.scaling.predict import GPU_COUNTS, check_setting, predictions
    from maskfleet.bench.scaling.table import USUAL_INSTANCES, as_record
    from maskfleet.bench.scaling.topology import node_named

    counts = GPU_COUNTS if gpus is None else parse_gpus(gpus)
    nodes = dict.fromkeys(node_named(name) for name in instances or USUAL_INSTANCES)
    check_setting(setting)
    found = [one for node in nodes for one in predictions(node, counts, setting)]
    if html is not None:
        write_page(found, setting, html)
        err.print(f"wrote {html}", markup=False)
    if as_json:
        print_raw(json.dumps(as_record(found, setting), indent=1))
    else:
        _print(found, detailed=bool(instances))


def parse_gpus(text: str) -> list[int]:
    """The numbers in `1,8,64`, ascending, each once."""
    try:
        numbers = sorted({int(part) for part in text.split(",")})
    except ValueError as error:
        raise ConfigError(
            f"--gpus {text}: not whole numbers separated by commas", remedy="pass numbers of GPUs, as in --gpus 1,8,64"
        ) from error
    if numbers[0] < 1:
        raise ConfigError(f"--gpus {text}: a run needs at least one GPU", remedy="pass --gpus 1,8,64")
    if numbers[-1] > MAX_GPUS:
        raise ConfigError(
            f"--gpus {text}: the model is meant for up to {MAX_GPUS:,} GPUs", remedy=f"pass at most {MAX_GPUS}"
        )
    return numbers


def _print(predictions: Sequence[Prediction], *, detailed: bool) -> None:
    from maskfleet.bench.scaling.table import MODEL_NOTE, SGD_NOTE, all_parameters
    from maskfleet.bench.scaling.topology import NODES

    instances = list(dict.fromkeys(one.instance for one in predictions))
    if detailed:
        for name in instances:
            out.print(f"{name}\n", style="bold")
            out.print(_details([one for one in predictions if one.instance == name]))
            out.print()
    else:
        out.print(_overview(predictions, instances))
        out.print()
    origins = _table("parameter", "value", "unit", "origin", "source")
    for one in all_parameters([NODES[name] for name in instances]):
        origins.add_row(one.name, f"{one.value:.4g}", one.unit, one.origin, one.source)
    out.print(origins)
    out.print(f"\n{SGD_NOTE}\n{MODEL_NOTE}", markup=False)


def _overview(predictions: Sequence[Prediction], instances: Sequence[str]) -> Table:
    """Step efficiency of each instance type, by the number of GPUs."""
    counts = sorted({one.gpus for one in predictions})
    table = _table("", "GPUs", *(f"{count:,}" for count in counts), "limited by")
    for name in instances:
        for scaling in SCALINGS:
            row = _by_gpus(predictions, name, scaling)
            cells = [f"{row[count].efficiency:.0%}{'*' if row[count].beyond_sgd else ''}" for count in counts]
            table.add_row(name if scaling == "weak" else "", scaling, *cells, row[counts[-1]].limit)
    return table


def _by_gpus(predictions: Sequence[Prediction], instance: str, scaling: Scaling) -> dict[int, Prediction]:
    """Strong scaling is weak scaling as long as the images per step allow it."""
    # The strong prediction for a number of GPUs follows the weak one, and replaces it.
    return {one.gpus: one for one in predictions if one.instance == instance and one.scaling in ("weak", scaling)}


def _details(predictions: Sequence[Prediction]) -> Table:
    """Step and whole run of one instance type."""
    step = ("images per step", "ms per step", "images per s", "of 1 GPU", "limited by")
    table = _table("GPUs", "", *step, "1x run", "of 1 GPU", "limited by")
    for one in predictions:
        table.add_row(
            f"{one.gpus:,}",
            one.scaling,
            f"{one.images_per_step:,}{'*' if one.beyond_sgd else ''}",
            f"{1000 * one.step.total_s:.1f}",
            f"{one.images_per_s:,.0f}",
            f"{one.efficiency:.1%}",
            one.limit,
            f"{one.run.total_s / 60:.0f} min",
            f"{one.run_efficiency:.0%}",
            one.run_limit,
        )
    return table


def _table(*columns: str) -> Table:
    """A table for terminals of 80 columns: text is folded, never cut off."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    for name in columns:
        table.add_column(name, overflow="fold", no_wrap=name == "limited by")
    return table
