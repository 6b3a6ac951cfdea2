"""Who may import whom. `a <- b`: b may import a, never the reverse."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import maskfleet

PACKAGE = Path(maskfleet.__file__).parent

# Each room with the rooms it may import; itself is always allowed.
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "log": {"errors"},
    "system": {"errors", "log"},
    "html": {"errors", "log"},
    "config": {"errors", "log", "system"},
    "batch": {"errors"},
    "ops": {"errors", "log", "batch"},
    "viz": {"errors"},
    "rle": {"errors"},
    "model": {"errors", "log", "system", "config", "batch", "ops"},
    "data": {"errors", "log", "system", "html", "config", "batch", "ops", "rle", "viz"},
    "inference": {
        "errors",
        "log",
        "system",
        "config",
        "batch",
        "ops",
        "rle",
        "viz",
        "model",
        "data",
    },
    "evaluation": {
        "errors",
        "log",
        "system",
        "html",
        "config",
        "batch",
        "ops",
        "rle",
        "viz",
        "model",
        "data",
        "inference",
    },
    "training": {
        "errors",
        "log",
        "system",
        "config",
        "batch",
        "ops",
        "rle",
        "viz",
        "model",
        "data",
        "inference",
        "evaluation",
    },
    "bench": {"errors", "log", "system", "config", "batch", "ops", "model", "data", "inference", "training"},
    "launch": {"errors", "log", "system", "config"},
    "infra": {"errors", "log", "system", "config"},
}
# Only `system` may import these packages and make these calls, which rename a file into place or start a process.
MACHINE_PACKAGES = {"subprocess", "fcntl", "filelock", "kr8s", "boto3", "botocore"}
MACHINE_CALLS = {
    "os": {"replace", "rename", "renames", "link", "fsync", "system", "popen", "fork", "posix_spawn"},
    "shutil": {"move"},
    "asyncio": {"create_subprocess_exec", "create_subprocess_shell"},
}
# Sent to another host, where they run alone, without maskfleet; their docstrings say so.
HOST_SCRIPTS = {"launch/ssh/environment.py", "launch/ssh/probe.py", "launch/files/agent.py"}
NO_TORCH = {"__init__", "__main__", "errors", "log", "system", "config", "launch", "infra", "cli"}


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(path: Path) -> list[tuple[str, bool]]:
    """(module, whether it is imported as soon as the file is) for every import in the file."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    inside = {
        id(node) for function in ast.walk(tree) if isinstance(function, ast.FunctionDef) for node in ast.walk(function)
    }
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(alias.name, id(node) not in inside) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            home = ["maskfleet", *path.relative_to(PACKAGE).parts[: -node.level]] if node.level else []
            source = ".".join([*home, node.module or ""]).strip(".")
            found += [(f"{source}.{alias.name}", id(node) not in inside) for alias in node.names]
    return found


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_follow_the_layers(path: Path) -> None:
    room = room_of(path)
    for module, at_once in imports(path):
        parts = module.split(".")
        if (
            parts[0] == "maskfleet"
            and room not in ("cli", "__main__", "__init__")
            and len(parts) > 1
            and parts[1] != "__version__"
        ):
            allowed = MAY_IMPORT.get(room, set()) | {room}
            assert parts[1] in allowed, f"{room} must not import {module}"
        if at_once and room in NO_TORCH:
            assert parts[0] not in ("torch", "cv2", "boto3", "numpy"), f"{path.name} imports {module} at once"


def test_the_rule_can_fail(tmp_path: Path) -> None:
    file = tmp_path / "bad.py"
    file.write_text("import torch\ndef f():\n    import cv2\n")
    assert imports(file) == [("torch", True), ("cv2", False)]


def machine_uses(path: Path) -> list[str]:
    """What a file does that only `system` may do, as the text of the code.

    Path.replace is a `.replace` with one positional argument and nothing else: that of a string has two, those of
    dataclasses and datetimes have keywords.
    """
    found = [f"import {module}" for module, _ in imports(path) if module.split(".")[0] in MACHINE_PACKAGES]
    found += [f"import {module}" for module, _ in imports(path) if _is_machine_call(*module.rpartition(".")[::2])]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            is_move = node.func.attr in ("rename", "hardlink_to") or (
                node.func.attr == "replace" and len(node.args) == 1 and not node.keywords
            )
            if is_move or _is_machine_call(ast.unparse(node.func.value), node.func.attr):
                found.append(ast.unparse(node))
    return found


def _is_machine_call(module: str, name: str) -> bool:
    return name in MACHINE_CALLS.get(module, set())


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_only_system_touches_the_machine(path: Path) -> None:
    name = path.relative_to(PACKAGE).as_posix()
    if name in HOST_SCRIPTS:
        docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
        assert "runs there alone" in str(docstring)
        assert not [module for module, _ in imports(path) if module.split(".")[0] == "maskfleet"]
    elif room_of(path) != "system":
        assert machine_uses(path) == [], f"use maskfleet.system in {name}"


@pytest.mark.parametrize(
    "code",
    [
        "import subprocess",
        "def f():\n    from botocore.exceptions import ClientError",
        "from subprocess import run",
        "from os import replace",
        "import os\nos.replace(a, b)",
        "import os\nos.fsync(file)",
        "import shutil\nshutil.move(a, b)",
        "temporary.replace(path)",
        "Path(a).rename(b)",
        "import asyncio\nasyncio.create_subprocess_exec(a)",
    ],
)
def test_the_rule_about_the_machine_can_fail(code: str, tmp_path: Path) -> None:
    file = tmp_path / "bad.py"
    file.write_text(code)
    assert machine_uses(file)


def test_text_and_dataclasses_may_be_replaced(tmp_path: Path) -> None:
    file = tmp_path / "good.py"
    file.write_text("text.replace('a', 'b')\ndataclasses.replace(batch, ids=ids)\nmoment.replace(hour=0)\n")
    assert machine_uses(file) == []
