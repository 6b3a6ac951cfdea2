"""Options shared by several commands."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

RecipeOption = Annotated[
    str | None,
    typer.Option(
        "--recipe", "-r", help="Recipe to start from; `maskfleet config recipes` lists them.", show_default=False
    ),
]
ConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--config", "-c", help="YAML file with fields to change, such as another run's run.yaml.", show_default=False
    ),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        "-s",
        metavar="FIELD=VALUE",
        help="Change one field; may be repeated. TensorPack and AWS Samples names work too.",
        show_default=False,
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
