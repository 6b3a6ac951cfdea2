"""Every command, sub-command and option that a message, a help text, a page or a chart advises exists."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from maskfleet.cli.main import app

REPOSITORY = Path(__file__).parent.parent
PACKAGE = REPOSITORY / "src" / "maskfleet"
PAGES = sorted([*REPOSITORY.glob("*.md"), *(REPOSITORY / "docs").rglob("*.md"), *PACKAGE.rglob("*.toml")])
DEPLOY = sorted(
    path
    for path in (REPOSITORY / "deploy").rglob("*")
    if path.is_file() and path.suffix in (".txt", ".md", ".yaml", ".tpl", ".tf", ".json", ".py", ".sh", "")
)
ROOT: Any = typer.main.get_command(app)
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]+")
WORDS = r"maskfleet((?: [a-z][a-z-]*)+)"
QUOTED = re.compile(f"`{WORDS}")
BARE = re.compile(rf"(?:^[\s#]*|: | or ){WORDS}", re.MULTILINE)


def by_path(path: Path) -> str:
    return str(path.relative_to(REPOSITORY))


def options(command: Any) -> set[str]:
    found = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
    for below in getattr(command, "commands", {}).values():
        found |= options(below)
    return found


def unknown_commands(text: str, *, bare: bool) -> list[str]:
    """Commands in backticks, and with `bare` also those at the start of a line, that do not exist."""
    found = QUOTED.findall(text) + (BARE.findall(text) if bare else [])
    return [words.strip() for words in found if not exists(words.split())]


def exists(words: list[str]) -> bool:
    command = ROOT
    for word in words:
        below = getattr(command, "commands", None)
        if below is None:
            return True  # the rest are arguments
        if word not in below:
            return False
        command = below[word]
    return True


def advice(path: Path) -> Iterator[tuple[int, str, bool]]:
    """(line, text, whether it is a `remedy=` or `help=`) of every string in the file."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    advised = {
        id(part)
        for node in ast.walk(tree)
        if isinstance(node, ast.keyword) and node.arg in ("remedy", "help")
        for part in ast.walk(node.value)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value, id(node) in advised


def wrong(path: Path) -> list[str]:
    known = options(ROOT) | {"--help"}
    faults = []
    for line, text, is_advice in advice(path):
        names = [name for name in OPTION.findall(text) if is_advice and name not in known]
        names += unknown_commands(text, bare=is_advice)
        faults += [f"{path.name}:{line}: {name}" for name in names]
    return sorted(faults)


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=by_path)
def test_options_and_commands_that_are_advised_exist(path: Path) -> None:
    assert wrong(path) == []


@pytest.mark.parametrize("path", [*PAGES, *DEPLOY], ids=by_path)
def test_commands_that_pages_and_charts_advise_exist(path: Path) -> None:
    assert unknown_commands(path.read_text(encoding="utf-8"), bare=path.name == "NOTES.txt") == []


def test_the_rule_can_fail(tmp_path: Path) -> None:
    file = tmp_path / "bad.py"
    file.write_text(
        "f(remedy='use --no-such-thing')\n"
        "f(help=f'see `maskfleet dance {1}` and --set')\n"
        "cause('run `maskfleet data check`')\n"
        "f(remedy='maskfleet data dance, or wait')\n"
        "g('maskfleet dances')\n"
    )
    assert wrong(file) == [
        "bad.py:1: --no-such-thing",
        "bad.py:2: dance",
        "bad.py:3: data check",
        "bad.py:4: data dance",
    ]


def test_the_rule_for_pages_can_fail() -> None:
    text = (
        "maskfleet trains; `maskfleet data check ROOT`, `maskfleet infra`, `maskfleet logs -f`\n maskfleet infra dance"
    )
    assert unknown_commands(text, bare=False) == ["data check"]
    assert unknown_commands(text, bare=True) == ["data check", "trains", "infra dance"]
