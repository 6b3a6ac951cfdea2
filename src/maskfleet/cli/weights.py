"""`maskfleet weights`: see what a weights file is, and turn it into another format."""

from __future__ import annotations

import enum
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from maskfleet.cli.console import out, print_raw
from maskfleet.cli.options import JsonOption, RecipeOption, SetOption

if TYPE_CHECKING:
    from maskfleet.config.model import ModelConfig
    from maskfleet.model.weights import LoadReport, WeightsFile
    from maskfleet.model.weights import content as weights_content

app = typer.Typer(help="See what a weights file is, and turn it into another format.", no_args_is_help=True)


class Source(enum.StrEnum):
    """Whose weights a file holds; only AWS Samples' cannot be told from the file."""

    auto = enum.auto()
    tensorpack = enum.auto()
    aws = enum.auto()
    torchvision = enum.auto()
    maskfleet = enum.auto()

    @property
    def as_literal(self) -> weights_content.Source:
        """The word as the model's functions take it."""
        return cast("weights_content.Source", self.value)


FileArgument = Annotated[
    Path, typer.Argument(metavar="FILE", help="TensorPack .npz, torchvision .pth or .safetensors.")
]
FromOption = Annotated[
    Source, typer.Option("--from", help="Where the file is from; say aws for AWS Samples, whose files look alike.")
]
LegacyOption = Annotated[
    bool, typer.Option("--legacy-2018", help="It is from TensorPack before May 2019: rounded anchors, Huber loss.")
]


@app.command()
def inspect(
    file: FileArgument,
    source: FromOption = Source.auto,
    legacy_2018: LegacyOption = False,
    every: Annotated[bool, typer.Option("--all", help="List every name, however many.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Say what a weights file is: which network, how many classes, what fits and what does not."""
    from maskfleet.model.weights import compare, file_config, file_content, read_file

    opened = read_file(file)
    config = file_config(opened, source=source.as_literal, legacy_2018=legacy_2018)
    content = file_content(opened, source=source.as_literal, num_categories=config.num_categories if config else None)
    report = None
    if config is not None:
        report = compare(opened, content, config, scope="backbone" if config.num_categories is None else "all").report
    facts = _facts(opened, config, report)
    if as_json:
        facts["config"] = config.model_dump(mode="json") if config else None
        facts["report"] = asdict(report) if report else None
        print_raw(json.dumps(facts, indent=2))
        return
    width = max(map(len, facts))
    for name, value in facts.items():
        print_raw(f"{name:<{width}}  {', '.join(value) if isinstance(value, list) else value}")
    if report is not None:
        print_raw("\n" + report.render(limit=len(opened.tensors) if every else 8))


@app.command()
def convert(
    file: FileArgument,
    to: Annotated[Path, typer.Argument(metavar="OUT", help="File to write: .safetensors (ours) or .npz (TensorPack).")],
    recipe: RecipeOption = None,
    set_: SetOption = None,
    source: FromOption = Source.auto,
    reinit_heads: Annotated[
        bool, typer.Option("--reinit-heads", help="Start the layers afresh that another number of classes leaves over.")
    ] = False,
    num_classes: Annotated[
        int | None, typer.Option(min=1, help="Object classes of the result, without background.", show_default=False)
    ] = None,
    legacy_2018: LegacyOption = False,
) -> None:
    """Write a weights file in another format; the network is told from the file unless you name it."""
    from maskfleet.config.base import replaced
    from maskfleet.model.weights import describe, file_config, read_file, save_tensorpack, save_weights
    from maskfleet.model.weights.files import check_suffix
    from maskfleet.model.weights.load import whole_state

    check_suffix(to)
    opened = read_file(file)
    config = _target(opened, file_config(opened, source=source.as_literal, legacy_2018=legacy_2018), recipe, set_ or [])
    if num_classes is not None:
        config = replaced(config, {"num_categories": num_classes})
    state, report = whole_state(opened, config, source=source.as_literal, reinit_heads=reinit_heads)
    categories = opened.categories if len(opened.categories) == config.num_categories else ()
    if to.suffix == ".npz":
        save_tensorpack(to, state, config)
    else:
        save_weights(to, state, config, categories)
    print_raw(report.render())
    out.print(f"\nwrote {to}: {describe(config)}", markup=False)
    if to.suffix == ".npz" and (source is Source.aws or legacy_2018):
        out.print("an .npz holds no configuration: say again on loading that the model is AWS Samples' or of 2018")


def _facts(file: WeightsFile, config: ModelConfig | None, report: LoadReport | None) -> dict[str, Any]:
    from maskfleet.model.weights import describe

    facts: dict[str, Any] = {"file": str(file.path), "kind": report.kind if report else file.container}
    facts["network"] = describe(config) if config else "none that maskfleet can build"
    if config is not None:
        facts |= {
            "blocks": ",".join(map(str, config.backbone.blocks)),
            "norm": "FreezeBN or SyncBN" if config.backbone.norm in ("FreezeBN", "SyncBN") else config.backbone.norm,
        }
    if config is not None and config.num_categories is not None:
        facts |= {
            "architecture": config.architecture,
            "mask": config.mask,
            "cascade": config.cascade,
            "classes": config.num_categories,
        }
    if file.categories:
        facts["categories"] = list(file.categories)
    facts["tensors"] = len(file.tensors)
    facts["parameters"] = sum(tensor.numel() for tensor in file.tensors.values())
    return facts


def _target(file: WeightsFile, of_file: ModelConfig | None, recipe: str | None, sets: list[str]) -> ModelConfig:
    """The network to write: the recipe's, or else the file's, changed by `--set`; the classes are the file's."""
    from maskfleet.config.base import replaced
    from maskfleet.config.load import resolve
    from maskfleet.errors import WeightsError

    if recipe is None and not sets:
        if of_file is None:
            raise WeightsError(
                f"{file.path} does not tell by its names and shapes which network it is for",
                remedy="name the network: --recipe, or --set model.…",
            )
        return of_file
    resolved = resolve(recipe_name=recipe, sets=sets)
    if recipe is None and of_file is not None:
        given = [path for path, origin in resolved.origins.items() if origin == "--set" and path.startswith("model.")]
        model = resolved.config.model_dump()
        return replaced(of_file, {path.removeprefix("model."): _at(model, path) for path in given})
    config = resolved.config.model
    if config.num_categories is None and of_file is not None:
        return replaced(config, {"num_categories": of_file.num_categories})
    return config


def _at(data: dict[str, Any], path: str) -> Any:
    for name in path.split("."):
        data = data[name]
    return data
