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
    "config": {"errors", "log"},
    "deploy_files": {"errors"},
    "aws": {"errors"},
    "batch": {"errors"},
    "ops": {"errors", "log", "batch"},
    "viz": {"errors"},
    "doctor": {"errors"},
    "rle": {"errors"},
    "model": {"errors", "log", "config", "batch", "ops"},
    "data": {"errors", "aws", "log", "config", "batch", "ops", "rle", "viz"},
    "evaluation": {"errors", "log", "config", "batch", "ops", "rle", "model", "data", "viz"},
    "training": {"errors", "log", "config", "batch", "ops", "rle", "model", "data", "evaluation", "viz"},
    "serve": {"errors", "log", "config", "batch", "ops", "rle", "model", "data", "evaluation", "viz"},
    "launch": {"errors", "aws", "doctor", "log", "config", "deploy_files"},
    "infra": {"errors", "log", "config", "deploy_files"},
}
NO_TORCH = {
    "__init__",
    "__main__",
    "errors",
    "log",
    "config",
    "launch",
    "infra",
    "cli",
    "doctor",
    "deploy_files",
    "aws",
}


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
