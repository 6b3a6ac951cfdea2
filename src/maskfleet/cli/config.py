"""`maskfleet config`: show, explain and check the configuration of a run."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from maskfleet.cli.console import out, print_raw
from maskfleet.cli.options import ConfigOption, DataOption, JsonOption, RecipeOption, SetOption, with_data

app = typer.Typer(help="Show, explain and check the configuration of a run.", no_args_is_help=True)


@app.command()
def show(
    recipe: RecipeOption = None,
    config: ConfigOption = None,
    set_: SetOption = None,
    data: DataOption = None,
    origin: Annotated[bool, typer.Option(help="Show where each changed value came from.")] = True,
    as_json: JsonOption = False,
) -> None:
    """Print the whole configuration, resolved: recipe, then file, then --set."""
    from maskfleet.config.load import dump, resolve

    resolved = resolve(recipe_name=recipe, file=config, sets=with_data(set_, data))
    if as_json:
        print_raw(json.dumps(resolved.config.model_dump(mode="json"), indent=2))
        return
    text = dump(resolved.config, resolved.origins if origin else None)
    if out.is_terminal:
        from rich.syntax import Syntax

        out.print(Syntax(text, "yaml", background_color="default"))
    else:
        print_raw(text)


@app.command()
def explain(
    field: Annotated[str, typer.Argument(help="Field such as train.base_lr, or an old name such as MODE_MASK.")],
) -> None:
    """Explain one field: its meaning, accepted values, default and old names."""
    from maskfleet.cli.explain_field import explanation

    print_raw(explanation(field))


@app.command()
def schema() -> None:
    """Print the JSON Schema of run.yaml, for completion and validation in editors."""
    from maskfleet.config.run import RunConfig

    document = {"$schema": "https://json-schema.org/draft/2020-12/schema"} | RunConfig.model_json_schema()
    print_raw(json.dumps(document, indent=2))


@app.command()
def recipes(as_json: JsonOption = False) -> None:
    """List the recipes."""
    from maskfleet.config.recipes import RECIPES

    rows = [
        {"name": name, "summary": recipe.summary, "published_ap": recipe.published_ap}
        for name, recipe in RECIPES.items()
    ]
    if as_json:
        print_raw(json.dumps(rows, indent=2))
        return
    from rich.table import Table

    table = Table("recipe", "what it trains", "published AP", box=None, pad_edge=False, header_style="bold")
    for row in rows:
        table.add_row(*row.values())
    out.print(table)
    out.print(
        "\nPublished AP: box;mask on COCO val2017 as TensorPack and AWS Samples report it for their code, in percent."
    )
