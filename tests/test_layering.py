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
    "config": {"errors", "log"},
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
        "evaluation",
        "training",
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
        if parts[0] == "maskfleet" and room not in ("cli", "__main__") and len(parts) > 1 and parts[1] != "__version__":
            allowed = MAY_IMPORT.get(room, set()) | {room}
            assert parts[1] in allowed, f"{room} must not import {module}"
        if at_once and room in NO_TORCH:
            assert parts[0] not in ("torch", "cv2", "boto3", "numpy"), f"{path.name} imports {module} at once"


def test_the_rule_can_fail(tmp_path: Path) -> None:
    file = tmp_path / "bad.py"
    file.write_text("import torch\ndef f():\n    import cv2\n")
    assert imports(file) == [("torch", True), ("cv2", False)]
