"""What help and remedies tell people to type exists."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from maskfleet.cli.main import app

PACKAGE = Path(__file__).parent.parent / "src" / "maskfleet"
ROOT: Any = typer.main.get_command(app)
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]+")
COMMAND = re.compile(r"`maskfleet ([a-z]+)")


def options(command: Any) -> set[str]:
    found = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
    for below in getattr(command, "commands", {}).values():
        found |= options(below)
    return found


def advice(path: Path) -> Iterator[tuple[int, str]]:
    """(line, text) of every `remedy=` and `help=` in the file."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call):
            for keyword in node.keywords:
                if keyword.arg in ("remedy", "help"):
                    for part in ast.walk(keyword.value):
                        if isinstance(part, ast.Constant) and isinstance(part.value, str):
                            yield part.lineno, part.value


def wrong(path: Path) -> list[str]:
    known = options(ROOT) | {"--help"}
    faults = []
    for line, text in advice(path):
        faults += [f"{path.name}:{line}: {name}" for name in OPTION.findall(text) if name not in known]
        faults += [f"{path.name}:{line}: {name}" for name in COMMAND.findall(text) if name not in ROOT.commands]
    return faults


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_options_and_commands_that_are_advised_exist(path: Path) -> None:
    assert wrong(path) == []


def test_the_rule_can_fail(tmp_path: Path) -> None:
    file = tmp_path / "bad.py"
    file.write_text("f(remedy='use --no-such-thing')\nf(help=f'see `maskfleet dance {1}` and --set')\n")
    assert wrong(file) == ["bad.py:1: --no-such-thing", "bad.py:2: dance"]
