"""Options shared by several commands."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from maskfleet.errors import ConfigError

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
DataOption = Annotated[
    str | None,
    typer.Option(
        "--data",
        "-d",
        help="Folder of the data, or s3://bucket/prefix; short for --set data.root=…",
        show_default=False,
    ),
]
DeviceOption = Annotated[
    str | None,
    typer.Option(
        "--device", help="cpu, cuda or cuda:N. Default: the first GPU, or the CPU without one.", show_default=False
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
CertOption = Annotated[
    Path | None,
    typer.Option("--cert", help="Certificate (PEM), with --key. Default: self-signed.", show_default=False),
]
KeyOption = Annotated[Path | None, typer.Option("--key", help="Private key of --cert (PEM).", show_default=False)]
NoBrowserOption = Annotated[bool, typer.Option("--no-browser", help="Only print the address.")]
BestOption = Annotated[
    bool, typer.Option("--best", help="Use the run's best checkpoint. Default: the best, or else the newest.")
]
LastOption = Annotated[bool, typer.Option("--last", help="Use the run's newest checkpoint.")]
StepOption = Annotated[
    int | None, typer.Option("--step", min=1, help="Use the run's checkpoint of this step.", show_default=False)
]


def chosen_checkpoint(*, best: bool, last: bool, step: int | None) -> Literal["best", "last"] | int | None:
    """What --best, --last and --step mean for `maskfleet.load`."""
    if best + last + (step is not None) > 1:
        raise ConfigError("--best, --last and --step exclude each other", remedy="give one of them")
    return step or ("last" if last else "best" if best else None)


def with_data(sets: list[str] | None, data: str | None) -> list[str]:
    """`sets` with the folder of `--data` added."""
    return [
        *(sets or []),
        *([f"data.root={json.dumps(data)}"] if data is not None else []),
    ]  # quoted: may look like YAML


def hide_types_of_flags(command: Any, parent: Any = None) -> None:
    """Remove `<bool>` from the help of `command` and its subcommands: a flag takes no value."""
    context = command.context_class(command, parent=parent, info_name=command.name, **command.context_settings)
    for parameter in command.get_params(context):
        if getattr(parameter, "is_bool_flag", False):
            parameter.metavar = ""
    for inner in getattr(command, "commands", {}).values():
        hide_types_of_flags(inner, context)


def suggest_fields(command: Any) -> None:
    """Let commands with --set answer `--batch-size 8` or `lr=0.1`, as other trainers take them, with what to write."""
    if any(parameter.name == "set_" for parameter in command.params):
        command.parse_args = partial(_parsed, command.parse_args)
    for inner in getattr(command, "commands", {}).values():
        suggest_fields(inner)


def _parsed(parse: Callable[[Any, list[str]], Any], context: Any, arguments: list[str]) -> Any:
    given = list(arguments)  # which parsing empties
    try:
        return parse(context, arguments)
    except Exception as error:  # of click, whose module depends on the version of typer
        message, option = getattr(error, "message", ""), getattr(error, "option_name", "")
        if type(error).__name__ == "NoSuchOption":
            advice = _instead_of(option.lstrip("-"), _value_after(option, given))
        else:
            extra = (one.partition("=") for one in given if "=" in one and not one.startswith("-") and one in message)
            advice = " ".join(filter(None, (_instead_of(name, value) for name, _, value in extra)))
        if advice:
            error.message, error.possibilities = f"{message}. Write {advice}", ()  # type: ignore[attr-defined]
        raise


def _value_after(option: str, arguments: list[str]) -> str:
    """What follows `option` or is joined to it by `=`, or else VALUE."""
    for one, following in zip(arguments, [*arguments[1:], "-"], strict=True):
        if one == option and not following.startswith("-"):
            return following
        if one.startswith(f"{option}="):
            return one.partition("=")[2]
    return "VALUE"


def _instead_of(name: str, value: str) -> str | None:
    from maskfleet.config.load import field_named

    name = name.replace("-", "_").lower()
    if name in ("device", "devices"):
        return f"--device {f'cuda:{value}' if value.isdigit() else value}"
    if name == "data":
        return f"--data {value}"
    field = field_named(name)
    return f"--set {field}={value}" if field is not None else None
