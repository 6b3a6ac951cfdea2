"""`maskfleet infra` for the stacks of CloudFormation."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from maskfleet.cli.console import err, out, print_raw
from maskfleet.errors import ConfigError

if TYPE_CHECKING:
    from maskfleet.infra.cloudformation.kinds.kind import StackKind
    from maskfleet.infra.cloudformation.session import StackSession

KINDS = ("ec2", "sagemaker")
_OPTIONS_OF_STACKS = {"config", "prices", "force", "stack_wait"}
_OPTIONS = {*_OPTIONS_OF_STACKS, "stack", "yes", "delete_data", "wait", "as_json", "detailed_exitcode"}


@dataclass(frozen=True, slots=True)
class StackOptions:
    """The options of a stack command."""

    kind: str
    config: Path | None = None
    prices: Path | None = None
    yes: bool = False


def is_stack(kind: str, context: typer.Context) -> bool:
    """Whether `kind` is a stack of CloudFormation; an option that does not belong to it is an error."""
    given = {
        parameter.name: max(parameter.opts, key=len)
        for parameter in context.command.params
        if parameter.name and getattr(context.get_parameter_source(parameter.name), "name", "") == "COMMANDLINE"
    }
    foreign = given.keys() - _OPTIONS if kind in KINDS else given.keys() & _OPTIONS_OF_STACKS
    if foreign:
        name = sorted(given[one] for one in foreign)[0]
        how = "write its settings into the file of --config" if kind in KINDS else "use --var and --var-file instead"
        raise ConfigError(f"{name} is no option of {kind}", remedy=how)
    return kind in KINDS


def plan_stack(options: StackOptions, *, detailed_exitcode: bool) -> None:
    from maskfleet.infra.cloudformation.plan import plan

    changes = plan(_session(options))
    if detailed_exitcode and changes:
        raise typer.Exit(2)


def up_stack(options: StackOptions, *, delete_data: bool, wait_s: float | None) -> None:
    from maskfleet.infra.cloudformation.up import WAIT_S, up

    session = _session(options)
    up(session, delete_data=delete_data, wait_s=WAIT_S if wait_s is None else wait_s)
    err.print(f"{session.command('outputs')} shows what was created", markup=False)


def show_status(options: StackOptions, *, as_json: bool) -> None:
    from maskfleet.infra.cloudformation.status import stack_status

    found = stack_status(_session(options))
    if as_json:
        print_raw(json.dumps(dataclasses.asdict(found), indent=2))
    else:
        out.print(f"{found.stack} in {found.region}: {found.status or 'no stack'}", markup=False)
        if found.status:
            out.print(f"{found.resources} resources", markup=False)
        for text in found.failed:
            out.print(f"  failed: {text}", markup=False)
        if found.detail:
            out.print(found.detail, markup=False)
    raise typer.Exit(0 if found.is_well else 1)


def show_outputs(options: StackOptions, *, as_json: bool) -> None:
    from maskfleet.infra.cloudformation.status import stack_outputs

    found = stack_outputs(_session(options))
    if as_json:
        print_raw(json.dumps(found, indent=2))
        return
    width = max(map(len, found))
    for name, value in found.items():
        out.print(f"{name:{width}}  {value}", markup=False)


def down_stack(options: StackOptions, *, delete_data: bool, force: bool, wait_s: float | None) -> None:
    from maskfleet.infra.cloudformation.down import StackDownOptions, down
    from maskfleet.infra.cloudformation.up import WAIT_S

    wait_s = WAIT_S if wait_s is None else wait_s
    down(_session(options), StackDownOptions(delete_data=delete_data, force=force, wait_s=wait_s))


def _session(options: StackOptions) -> StackSession:
    from maskfleet.cli.infra_view import TerminalView
    from maskfleet.infra.cloudformation.client import Aws
    from maskfleet.infra.cloudformation.session import StackSession, read_settings
    from maskfleet.infra.costs import read_prices

    if options.config is None:
        raise ConfigError(
            f"{options.kind} needs a file with its settings",
            remedy="give --config cluster.yaml; docs/run-anywhere/infra.md shows one",
        )
    kind = _kind(options.kind)
    config = read_settings(options.config, kind)
    prices = read_prices(options.prices)
    return StackSession(kind, config, Aws(config.region), TerminalView(yes=options.yes), prices, options.config)


def _kind(name: str) -> StackKind:
    match name:
        case "ec2":
            from maskfleet.infra.cloudformation.kinds.ec2 import EC2

            return EC2
        case "sagemaker":
            from maskfleet.infra.cloudformation.kinds.sagemaker import SAGEMAKER

            return SAGEMAKER
        case _:
            raise AssertionError(name)
