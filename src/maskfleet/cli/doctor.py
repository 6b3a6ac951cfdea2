"""`maskfleet doctor`: is this machine fit to train?"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated

import typer

from maskfleet.cli.console import out, print_raw
from maskfleet.cli.options import JsonOption


def doctor(
    folder: Annotated[Path, typer.Option(help="Folder whose disk is checked for room.")] = Path(),
    as_json: JsonOption = False,
) -> None:
    """Check this machine: Python, torch, GPU, disk, memory and optional tools, each with a remedy."""
    from rich.markup import escape
    from rich.table import Table

    from maskfleet.doctor import Verdict, examine

    findings = examine(folder)
    failed = any(finding.verdict is Verdict.FAIL for finding in findings)
    if as_json:
        print_raw(json.dumps([dataclasses.asdict(finding) for finding in findings], indent=2))
    else:
        marks = {Verdict.OK: "[green]ok[/]", Verdict.WARN: "[yellow]warn[/]", Verdict.FAIL: "[bold red]fail[/]"}
        table = Table("", "what", "found", "remedy", box=None, pad_edge=False, header_style="bold")
        for finding in findings:
            table.add_row(marks[finding.verdict], finding.name, escape(finding.found), escape(finding.remedy))
        out.print(table)
        out.print(
            "\nThis machine cannot train yet: see the lines that fail." if failed else "\nThis machine can train."
        )
    raise typer.Exit(1 if failed else 0)
