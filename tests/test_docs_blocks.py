"""Every code block of the README and the docs parses: Python whose imports exist, YAML, JSON, shell lines."""

from __future__ import annotations

import ast
import importlib
import json
import re
import shlex
from pathlib import Path

import pytest
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
SHELL = ("", "console", "bash", "sh")
# Blocks without a language that are no commands: trees of files, formulas, log lines.
TEXT = "text"
KNOWN = {*SHELL, "python", "json", "yaml", "hcl", TEXT}


def blocks(page: Path) -> list[tuple[str, str]]:
    return BLOCK.findall(page.read_text(encoding="utf-8"))


def problems(language: str, code: str) -> list[str]:
    """What is wrong with a code block."""
    if language not in KNOWN:
        return [f"unknown language {language!r}"]
    try:
        if language == "python":
            return unresolved(ast.parse(code))
        if language == "json":
            json.loads(code)
        if language == "yaml":
            list(YAML(typ="safe").load_all(code))
        if language in SHELL:
            for line in code.replace("\\\n", " ").splitlines():
                shlex.split(line, comments=True)
    except (SyntaxError, ValueError, YAMLError) as error:
        return [str(error)]
    return []


def unresolved(tree: ast.AST) -> list[str]:
    """Names imported from maskfleet, or read from it as attributes, that are not there."""
    missing = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "maskfleet":
            module = importlib.import_module(node.module or "")
            missing += [f"{node.module}.{alias.name}" for alias in node.names if not hasattr(module, alias.name)]
        of_package = (
            isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "maskfleet"
        )
        if of_package and not hasattr(importlib.import_module("maskfleet"), node.attr):
            missing.append(f"maskfleet.{node.attr}")
    return missing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_code_block_parses(page: Path) -> None:
    assert [fault for language, code in blocks(page) for fault in problems(language, code)] == []


@pytest.mark.parametrize(
    ("language", "code"),
    [
        ("python", "from maskfleet.errors import NoSuchError"),
        ("python", "import maskfleet\nmaskfleet.no_such_function()"),
        ("python", "def f(:"),
        ("json", "{a: 1}"),
        ("yaml", "a: [1"),
        ("console", "maskfleet train 'runs/x"),
        ("fortran", "x"),
    ],
)
def test_a_broken_block_is_noticed(language: str, code: str) -> None:
    assert problems(language, code) != []
