"""`maskfleet doctor`: is this machine, or a cluster, fit to train?"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from maskfleet.cli.console import out, print_raw
from maskfleet.cli.options import ConfigOption, JsonOption
from maskfleet.errors import ConfigError


def doctor(
    folder: Annotated[Path, typer.Option(help="Folder whose disk is checked for room.")] = Path(),
    on: Annotated[
        str, typer.Option("--on", help="local for this machine, ssh for hosts, eks for Kubernetes.")
    ] = "local",
    config: ConfigOption = None,
    hosts: Annotated[
        str | None, typer.Option(help="ssh: hosts with commas between, each with =SLOTS if you like.")
    ] = None,
    hosts_file: Annotated[Path | None, typer.Option(help="ssh: file with `host slots=8` lines.")] = None,
    stack: Annotated[str | None, typer.Option(help="ssh: CloudFormation stack whose instances are the hosts.")] = None,
    launch_set: Annotated[
        list[str] | None,
        typer.Option("--launch-set", metavar="FIELD=VALUE", help="ssh, eks: change a field of the launch section."),
    ] = None,
    accept_new: Annotated[bool, typer.Option("--accept-new", help="ssh: trust hosts never seen before.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Check this machine, or with --on ssh or eks a whole cluster: what fits, what does not, and what to do."""
    if on == "ssh":
        changes: dict[str, Any] = {"hosts": tuple(hosts.split(",")) if hosts else None}
        changes |= {"stack": stack}
        changes |= {"hosts_file": str(hosts_file) if hosts_file else None, "accept_new_host_keys": accept_new or None}
        _cluster(
            config, {name: value for name, value in changes.items() if value is not None}, launch_set or [], as_json
        )
    if on == "eks":
        _cluster(config, {}, launch_set or [], as_json, on="eks")
    if on != "local":
        raise ConfigError(f"there is no doctor for {on!r}", remedy="use --on local, --on ssh or --on eks")
    _machine(folder, as_json)


def _machine(folder: Path, as_json: bool) -> None:
    from maskfleet.doctor import Verdict, examine

    findings = examine(folder)
    rows = [(finding.verdict.value, finding.name, finding.found, finding.remedy) for finding in findings]
    failed = any(finding.verdict is Verdict.FAIL for finding in findings)
    if as_json:
        print_raw(json.dumps([dataclasses.asdict(finding) for finding in findings], indent=2))
    else:
        _print_table(("", "what", "found", "remedy"), rows)
        out.print(
            "\nThis machine cannot train yet: see the lines that fail." if failed else "\nThis machine can train."
        )
    raise typer.Exit(1 if failed else 0)


def _cluster(config: Path | None, changes: dict[str, Any], sets: list[str], as_json: bool, *, on: str = "ssh") -> None:
    from maskfleet.cli.launch import launch_config
    from maskfleet.config.launch import EksLaunch, SshLaunch
    from maskfleet.config.load import resolve
    from maskfleet.launch.doctor import Verdict, examine_cluster

    resolved = resolve(file=config) if config is not None else None
    target = launch_config(resolved.launch if resolved else None, on, changes, sets)
    if isinstance(target, EksLaunch):
        from maskfleet.launch.eks_doctor import examine_eks

        findings = examine_eks(target)
    else:
        assert isinstance(target, SshLaunch)
        findings = examine_cluster(target, data=resolved.config.data.root if resolved else None)
    failed = any(finding.verdict is Verdict.FAIL for finding in findings)
    if as_json:
        print_raw(json.dumps([finding.as_json() for finding in findings], indent=2))
    else:
        rows = [(one.verdict.value, one.host, one.name, one.found, one.remedy) for one in findings]
        _print_table(("", "host", "what", "found", "remedy"), rows)
        out.print(
            "\nThis cluster cannot train yet: see the lines that fail." if failed else "\nThis cluster can train."
        )
    raise typer.Exit(1 if failed else 0)


def _print_table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> None:
    from rich.markup import escape
    from rich.table import Table

    marks = {"ok": "[green]ok[/]", "warn": "[yellow]warn[/]", "fail": "[bold red]fail[/]"}
    table = Table(*head, box=None, pad_edge=False, header_style="bold")
    for verdict, *cells in rows:
        table.add_row(marks[verdict], *(escape(cell) for cell in cells))
    out.print(table)
