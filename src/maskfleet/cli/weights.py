"""`maskfleet weights`: get published weights, see what a weights file is, and turn it into another format."""

from __future__ import annotations

import json
import operator
from dataclasses import asdict
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from maskfleet.cli.console import byte_progress, out, print_raw
from maskfleet.cli.options import JsonOption, RecipeOption, SetOption
from maskfleet.cli.outputs import expect_writable

if TYPE_CHECKING:
    from maskfleet.config.model import ModelConfig
    from maskfleet.model.weights import LoadReport, WeightsFile

app = typer.Typer(help="Get published weights, see what a file is, and convert it.", no_args_is_help=True)


# As in model.weights.content, whose import would load torch.
Source = Literal["auto", "tensorpack", "aws", "torchvision", "detectron2", "maskfleet"]
FileArgument = Annotated[
    Path, typer.Argument(metavar="FILE", help="TensorPack .npz, torchvision .pth, Detectron2 .pkl or .safetensors.")
]
FromOption = Annotated[
    Source, typer.Option("--from", help="Where the file is from; say aws for AWS Samples, whose files look alike.")
]
LegacyOption = Annotated[
    bool, typer.Option("--legacy-2018", help="It is from TensorPack before May 2019: rounded anchors, Huber loss.")
]


@app.command("list")
def list_(as_json: JsonOption = False) -> None:
    """List the published weights that `get` knows, and which of them are in the cache."""
    from maskfleet.model.weights.zoo.cache import cached
    from maskfleet.model.weights.zoo.catalogue import ZOO

    found = {name: cached(file) for name, file in ZOO.items()}
    if as_json:
        facts = [
            {"name": name, "what": ZOO[name].what, "file": str(path) if path else None} for name, path in found.items()
        ]
        print_raw(json.dumps(facts, indent=2))
        return
    width = max(map(len, ZOO))
    for name, path in found.items():
        print_raw(f"{name:<{width}}  {ZOO[name].what}{f'  (in {path.parent})' if path else ''}")


@app.command()
def get(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A name that `maskfleet weights list` shows.")],
    from_file: Annotated[
        Path | None,
        typer.Option("--from", metavar="FILE", help="Take this file; nothing is downloaded.", show_default=False),
    ] = None,
    mirror: Annotated[
        str | None, typer.Option(metavar="URL", help="Address that has the same files.", show_default=False)
    ] = None,
    repin: Annotated[
        bool, typer.Option("--repin", help="Accept a file that differs from the one that was fetched first.")
    ] = False,
) -> None:
    """Fetch published weights to the cache, where recipes find them, and print the path."""
    from maskfleet.model.weights.zoo.cache import fetch
    from maskfleet.model.weights.zoo.catalogue import expect_zoo_file

    file = expect_zoo_file(name)
    with byte_progress(file.name) as report_progress:
        path = fetch(file, mirror=mirror, from_file=from_file, repin=repin, progress=report_progress)
    print_raw(str(path))


@app.command()
def inspect(
    file: FileArgument,
    source: FromOption = "auto",
    legacy_2018: LegacyOption = False,
    every: Annotated[bool, typer.Option("--all", help="List every name, however many.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Say what a weights file is: which network, how many classes, what fits and what does not."""
    from maskfleet.model.weights import compare, file_config, file_content, read_file

    opened = read_file(file)
    config = file_config(opened, source=source, legacy_2018=legacy_2018)
    content = file_content(opened, source=source, num_categories=config.num_categories if config else None)
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
    source: FromOption = "auto",
    reinit_heads: Annotated[
        bool, typer.Option("--reinit-heads", help="Initialise the layers that another number of classes does not fit.")
    ] = False,
    num_classes: Annotated[
        int | None, typer.Option(min=1, help="Object classes of the result, without background.", show_default=False)
    ] = None,
    legacy_2018: LegacyOption = False,
) -> None:
    """Write a weights file in another format; the network is detected from the file unless you name it."""
    from maskfleet.config.base import replaced
    from maskfleet.model.weights import Labels, describe, file_config, read_file, save_tensorpack, save_weights
    from maskfleet.model.weights.files import check_suffix
    from maskfleet.model.weights.load import whole_state

    check_suffix(to)
    expect_writable(to, option="OUT")
    opened = read_file(file)
    config = _target(opened, file_config(opened, source=source, legacy_2018=legacy_2018), recipe, set_ or [])
    if num_classes is not None:
        config = replaced(config, {"num_categories": num_classes})
    state, report = whole_state(opened, config, source=source, reinit_heads=reinit_heads)
    labels = opened.labels.of(config.num_categories)
    if to.suffix == ".npz":
        # TensorPack's own file where its names and shapes say everything.
        says_more = labels != Labels() or source == "aws" or legacy_2018
        save_tensorpack(to, state, config, labels if says_more else None)
    else:
        save_weights(to, state, config, labels)
    print_raw(report.render())
    out.print(f"\nwrote {to}: {describe(config)}", markup=False)


def _facts(file: WeightsFile, config: ModelConfig | None, report: LoadReport | None) -> dict[str, Any]:
    from maskfleet.model.weights import describe

    facts: dict[str, Any] = {"file": str(file.path), "kind": report.kind if report else file.container}
    facts["network"] = describe(config) if config else "none that maskfleet can build"
    if config is not None:
        norm = config.backbone.norm
        facts["blocks"] = ",".join(map(str, config.backbone.blocks))
        facts["norm"] = "FreezeBN or SyncBN" if norm in ("FreezeBN", "SyncBN") else norm
    if config is not None and config.num_categories is not None:
        facts |= {
            "architecture": config.architecture,
            "mask": config.mask,
            "cascade": config.cascade,
            "classes": config.num_categories,
        }
    if file.labels.names:
        facts["categories"] = list(file.labels.names)
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
        changed = {path: reduce(operator.getitem, path.split("."), resolved.config.model_dump()) for path in given}
        return replaced(of_file, {path.removeprefix("model."): value for path, value in changed.items()})
    config = resolved.config.model
    if config.num_categories is None and of_file is not None:
        return replaced(config, {"num_categories": of_file.num_categories})
    return config
