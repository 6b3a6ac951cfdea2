"""`maskfleet runs`: all runs below a folder or an S3 prefix."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from maskfleet.cli.console import out, print_raw
from maskfleet.cli.options import JsonOption

if TYPE_CHECKING:
    from maskfleet.launch.overview.summary import RunSummary


def runs(
    place: Annotated[str, typer.Argument(metavar="DIR_OR_S3", help="Folder of runs, or s3://bucket/prefix.")] = "runs",
    as_json: JsonOption = False,
) -> None:
    """List the runs below a folder or an S3 prefix: recipe, step, best AP, images/s, state and age."""
    from rich.table import Table

    from maskfleet.launch.overview.sources import DEPTH, summaries

    found = summaries(place)
    if as_json:
        print_raw(json.dumps([asdict(one) for one in found], indent=2))
        return
    if not found:
        out.print(f"no runs in {place}, {DEPTH} folders deep", markup=False)
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("run", "recipe", "step", "AP", "images/s", "state", "age"):
        table.add_column(name, justify="right" if name in ("step", "AP", "images/s", "age") else "left", no_wrap=True)
    for one in found:
        table.add_row(*_cells(one, place))
    out.print(table, markup=False)


def _cells(one: RunSummary, place: str) -> tuple[str, ...]:
    from rich.markup import escape

    from maskfleet.log import duration_text

    name = one.run.removeprefix(f"{place.rstrip('/')}/")
    return (
        escape(name),
        escape(one.recipe or "–"),
        f"{one.step}/{one.total_steps or '?'}",
        f"{100 * one.ap:.1f}" if one.ap is not None else "–",
        f"{one.images_per_s:.4g}" if one.images_per_s is not None else "–",
        one.state,
        duration_text(one.age_s) if one.age_s is not None else "–",
    )
