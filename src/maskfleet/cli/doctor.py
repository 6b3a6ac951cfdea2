"""`maskfleet doctor`: can this machine, or a cluster, train?"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from maskfleet.cli.console import err, out, print_raw
from maskfleet.cli.launch import STACK_HELP, launch_config
from maskfleet.cli.options import ConfigOption, JsonOption

if TYPE_CHECKING:
    from maskfleet.launch.findings import Finding


def doctor(
    folder: Annotated[Path, typer.Option(help="Folder whose disk is checked for free space.")] = Path(),
    on: Annotated[
        str, typer.Option("--on", help="local for this machine, ssh for hosts, eks for Kubernetes, sagemaker.")
    ] = "local",
    config: ConfigOption = None,
    hosts: Annotated[
        str | None, typer.Option(help="ssh: hosts separated by commas, each optionally with =SLOTS.")
    ] = None,
    hosts_file: Annotated[Path | None, typer.Option(help="ssh: file with `host slots=8` lines.")] = None,
    stack: Annotated[str | None, typer.Option(help=STACK_HELP)] = None,
    nodes: Annotated[int | None, typer.Option(min=1, help="eks, sagemaker: machines of the launch.")] = None,
    instance: Annotated[str | None, typer.Option(help="eks, sagemaker: instance type of the machines.")] = None,
    namespace: Annotated[str | None, typer.Option(help="eks: Kubernetes namespace. Default: kubeflow.")] = None,
    image: Annotated[str | None, typer.Option(help="Training image; eks: for --fabric.")] = None,
    context: Annotated[str | None, typer.Option(help="eks: kubectl context. Default: the current one.")] = None,
    launch_set: Annotated[
        list[str] | None,
        typer.Option("--launch-set", metavar="FIELD=VALUE", help="Change a field of the launch section."),
    ] = None,
    accept_new: Annotated[bool, typer.Option("--accept-new", help="ssh: trust hosts whose key is unknown.")] = False,
    fabric: Annotated[
        bool,
        typer.Option("--fabric", help="eks: instead, run an all-reduce on the nodes of the launch and show its speed."),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Check whether this machine, or with --on another target, can train, and what to do about problems."""
    from maskfleet.config.load import resolve
    from maskfleet.launch.backend import BACKENDS, backend_for, no_doctor

    if on not in BACKENDS:
        raise no_doctor(on)
    changes: dict[str, Any] = {
        "hosts": tuple(hosts.split(",")) if hosts else None,
        "hosts_file": str(hosts_file) if hosts_file else None,
        "stack": stack,
        "accept_new_host_keys": accept_new or None,
        "nodes": nodes,
        "instance": instance,
        "namespace": namespace,
        "context": context,
        "image": image,
    }
    given = {name: value for name, value in changes.items() if value is not None}
    resolved = resolve(file=config) if config is not None else None
    target = launch_config(resolved.launch if resolved else None, on, given, launch_set or [])
    if fabric:
        _report(backend_for(target).fabric(_say), as_json=as_json, concludes=False)
    data = resolved.config.data.root if resolved else None
    if data is not None and data.startswith("s3://"):
        data = None  # no host needs a copy
    _report(backend_for(target).doctor(folder=folder, data=data), as_json=as_json)


def _say(line: str) -> None:
    err.print(line, markup=False, highlight=False)


def _report(findings: list[Finding], *, as_json: bool, concludes: bool = True) -> NoReturn:
    """Print the findings, and whether one can train if it `concludes`; exit with 1 if one of them is a failure."""
    from maskfleet.launch.findings import Verdict

    failed = any(one.verdict is Verdict.FAIL for one in findings)
    if as_json:
        print_raw(json.dumps([one.as_json() for one in findings], indent=2))
    else:
        many = any(one.host for one in findings)
        rows = [(one.verdict.value, *([one.host] if many else []), one.name, one.found, one.remedy) for one in findings]
        _print_table(("", *(["host"] if many else []), "what", "found", "remedy"), rows)
        what = "cluster" if many else "machine"
        end = f"\nThis {what} cannot train yet: see the lines that fail." if failed else f"\nThis {what} can train."
        if concludes:
            out.print(end)
    raise typer.Exit(1 if failed else 0)


def _print_table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> None:
    from rich.markup import escape
    from rich.table import Table

    marks = {"ok": "[green]ok[/]", "warn": "[yellow]warn[/]", "fail": "[bold red]fail[/]"}
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in head:
        table.add_column(title, overflow="fold")  # a path that is cut cannot be copied
    for verdict, *cells in rows:
        table.add_row(marks[verdict], *(escape(cell) for cell in cells))
    out.print(table)
